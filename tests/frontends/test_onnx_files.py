"""ONNX files as files: where their bytes are, what is wrong with them, how commands take them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import irc
from irc.backends.reference import evaluate
from irc.cli.main import main
from irc.errors import Error
from irc.frontends.onnx import import_onnx
from irc.weights import BytesRef
from tests.fresh import fresh
from tests.frontends.onnx_models import compared, model, on_ort, read, saved

X = {"x": ("f32", ("batch", 8))}
RANGES = {"batch_size": (1, 1, 2), "seq": (1, 4, 8), "past": (0, 4, 8)}


def draw(*shape: int) -> np.ndarray[Any, Any]:
    return fresh(23).standard_normal(shape).astype(np.float32)


def two_products(weight: np.ndarray[Any, Any], **more: Any) -> onnx.ModelProto:
    """x times a weight, plus a bias."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"], name="/layer/0/MatMul"),
        helper.make_node("Add", ["y", "b"], ["out"], name="/layer/0/Add"),
    ]
    return model(nodes, X, ["out"], {"w": weight, "b": draw(weight.shape[1])}, **more)


def test_weights_inside_the_file_are_referred_to(tmp_path: Path) -> None:
    weight = draw(8, 40)
    path = saved(two_products(weight), tmp_path)
    module = compared(path, {"x": draw(3, 8)})
    ref = module.weights["w"].ref
    assert isinstance(ref, BytesRef)
    data = path.read_bytes()[ref.offset : ref.offset + weight.nbytes]
    assert data == weight.tobytes()
    assert [op.loc.scope for op in module.ops() if op.loc is not None] == ["layer.0", "layer.0"]


def test_a_model_in_memory_is_written_first() -> None:
    given: Any = two_products(draw(8, 40))
    with pytest.raises(Error, match=r"given a ModelProto; write a model .* with onnx.save"):
        import_onnx(given)


@pytest.mark.parametrize("kind", [TensorProto.FLOAT, TensorProto.DOUBLE])
def test_typed_data_is_referred_to(kind: int, tmp_path: Path) -> None:
    made = two_products(draw(8, 40))
    weight = draw(8, 40)
    made.graph.initializer[0].CopyFrom(helper.make_tensor("w", kind, [8, 40], weight.reshape(-1)))
    if kind == TensorProto.DOUBLE:
        made.graph.initializer[1].CopyFrom(numpy_helper.from_array(np.zeros(40), "b"))
        made.graph.input[0].type.tensor_type.elem_type = kind
    path = saved(made, tmp_path)
    given = draw(3, 8).astype(np.float32 if kind == TensorProto.FLOAT else np.float64)
    module = compared(path, {"x": given})
    assert "bytes(@model" in str(module.weights["w"].ref)


def test_external_data_is_referred_to(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save_model(
        two_products(draw(8, 40)),
        str(path),
        save_as_external_data=True,
        location="model.data",
        size_threshold=0,
    )
    module = compared(path, {"x": draw(3, 8)})
    assert module.files == {"model": str(tmp_path / "model.data")}
    (tmp_path / "model.data").rename(tmp_path / "elsewhere")
    with pytest.raises(Error, match=r"'w' of .*model\.onnx should be in .*model\.data: No such"):
        import_onnx(path)
    (tmp_path / "model.data").write_bytes(b"short")
    with pytest.raises(Error, match=r"ends at byte 1280 of .*model\.data, which has 5"):
        import_onnx(path)


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("../secret", "outside the model's folder"),
        ("/etc/passwd", "outside the model's folder"),
        ("a\0b", "which is not a path"),
    ],
)
def test_external_data_stays_below_the_model(location: str, message: str, tmp_path: Path) -> None:
    made = two_products(draw(8, 40))
    tensor = made.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    with pytest.raises(Error, match=message):
        import_onnx(saved(made, tmp_path))


def test_no_weight_is_held_in_memory(tmp_path: Path) -> None:
    import tracemalloc

    path = saved(two_products(draw(8, 1 << 19)), tmp_path)  # 16 MB
    import_onnx(saved(two_products(draw(8, 40)), tmp_path, "small.onnx"))
    tracemalloc.start()
    module = import_onnx(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20
    assert module.weights["w"].type.shape == (8, 1 << 19)


@pytest.mark.parametrize("linear", [True, False])
def test_sparse_initializers(linear: bool, tmp_path: Path) -> None:
    places = np.sort(fresh(2).choice(8 * 30, 17, replace=False)).astype(np.int64)
    columns = np.stack(np.unravel_index(places, (8, 30)), 1).astype(np.int64)
    values = numpy_helper.from_array(draw(17), "w")
    indices = numpy_helper.from_array(places if linear else columns, "at")
    product = model([helper.make_node("MatMul", ["x", "w"], ["y"])], X, ["y"])
    product.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [8, 30]))
    compared(saved(product, tmp_path), {"x": draw(3, 8)})


def bad_files() -> dict[str, tuple[bytes, str]]:
    whole = two_products(draw(8, 40)).SerializeToString()
    new = model([helper.make_node("Neg", ["x"], ["y"])], X, ["y"], opset=29)
    return {
        "empty": (b"", "it is empty"),
        "text": (b"module @m {\n}\n", "is not an ONNX model"),
        "zeros": (bytes(100), "is not an ONNX model"),
        "truncated": (whole[: len(whole) // 2], "it is truncated"),
        "a checkpoint": ((8).to_bytes(8, "little") + b"{}      ", "is not an ONNX model"),
        "new": (new.SerializeToString(), "is of opset 29; irc reads 13 to 28"),
    }


@pytest.mark.parametrize("name", list(bad_files()))
def test_a_bad_file_gives_an_error(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, message = bad_files()[name]
    path = tmp_path / "bad.onnx"
    path.write_bytes(data)
    assert main(["show", str(path)]) == 1
    text = capsys.readouterr().err
    assert message in text and "Traceback" not in text


def test_damaged_files_are_errors(tmp_path: Path) -> None:
    """Random bytes in a file give a module or an Error."""
    rng, whole = fresh(31), two_products(draw(8, 12)).SerializeToString()
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(int(rng.integers(1, 4))):
            data[int(rng.integers(len(data)))] = int(rng.integers(256))
        path = tmp_path / "m.onnx"
        path.write_bytes(bytes(data))
        try:
            import_onnx(path)
        except Error:
            continue


def test_nodes_out_of_order_are_sorted(tmp_path: Path) -> None:
    made = two_products(draw(8, 40))
    made.graph.node[0].metadata_props.add(key="loc", value="net.py:7")
    nodes = [onnx.NodeProto.FromString(n.SerializeToString()) for n in made.graph.node]
    wanted = on_ort(saved(made, tmp_path), {"x": draw(3, 8)})
    del made.graph.node[:]
    made.graph.node.extend(reversed(nodes))
    module = read(saved(made, tmp_path))
    (found,) = evaluate(module, {"x": draw(3, 8)}).values()
    np.testing.assert_allclose(found, wanted[0], rtol=1e-5, atol=1e-5)
    first = next(iter(module.ops()))
    assert first.loc is not None and (first.loc.file, first.loc.line) == ("net.py", 7)


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        (["Add x lost a"], "nothing computes 'lost', the operand"),
        (["Add x b a", "Add x a b"], r"model\.onnx: the values .* depend on each other in a cycle"),
        (["Neg x a", "Abs x a"], r"model\.onnx: two values of the graph are called 'a'"),
    ],
)
def test_values_that_nothing_makes(
    nodes: list[str], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [each.split() for each in nodes]
    made = [helper.make_node(kind, operands, [out]) for kind, *operands, out in words]
    with pytest.raises(Error, match=message):
        import_onnx(saved(model(made, X, ["a"]), tmp_path))
    assert capfd.readouterr() == ("", "")


def test_functions_of_the_model_are_inlined(tmp_path: Path) -> None:
    body = [helper.make_node("Sigmoid", ["a"], ["s"]), helper.make_node("Mul", ["a", "s"], ["b"])]
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("local", 1)]
    function = helper.make_function("local", "Swish2", ["a"], ["b"], body, opsets[:1])
    made = model([helper.make_node("Swish2", ["x"], ["out"], domain="local")], X, ["out"])
    del made.opset_import[:]
    made.opset_import.extend(opsets)
    made.functions.append(function)
    module = compared(saved(made, tmp_path), {"x": draw(3, 8)})
    assert [op.opname for op in module.ops()] == ["silu", "return"]


def test_shapes_are_followed_through_the_graph(tmp_path: Path) -> None:
    """As exporters write x.view(B, S, heads, -1): Shape, Gather, Unsqueeze, Concat, Reshape."""
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Gather", ["shape", "zero"], ["b"]),
        helper.make_node("Gather", ["shape", "one"], ["s"]),
        helper.make_node("Unsqueeze", ["b", "first"], ["b1"]),
        helper.make_node("Mul", ["s", "two"], ["s2"]),
        helper.make_node("Unsqueeze", ["s2", "first"], ["s1"]),
        helper.make_node("Concat", ["b1", "s1", "rest"], ["to"], axis=0),
        helper.make_node("Reshape", ["x", "to"], ["y"]),
        helper.make_node("Range", ["zero", "s", "one"], ["places"]),
        helper.make_node("Cast", ["s"], ["length"], to=1),
        helper.make_node("Div", ["y", "length"], ["out"]),
    ]
    numbers = {"zero": 0, "one": 1, "two": 2, "first": [0], "rest": [4]}
    initial = {name: np.array(value, np.int64) for name, value in numbers.items()}
    made = model(nodes, {"x": ("f32", ("B", "S", 8))}, ["out", "places"], initial)
    module = compared(saved(made, tmp_path), {"x": draw(2, 3, 8)})
    assert [str(value.type) for value in module.main.returned] == ["f32[B, 2*S, 4]", "i64[S]"]


def test_another_opset_is_converted(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Unsqueeze", ["x"], ["a"], axes=[0]),
        helper.make_node("Squeeze", ["a"], ["out"], axes=[0], name="/layer/Squeeze"),
    ]
    nodes[1].metadata_props.add(key="loc", value="net.py:12")
    made = model(nodes, X, ["out"], opset=11)
    made.graph.output[0].CopyFrom(helper.make_tensor_value_info("out", 1, ["batch", 8]))
    module = compared(saved(made, tmp_path), {"x": draw(3, 8)})
    assert [str(op.loc) for op in module.ops()][1] == 'loc("net.py":12 "layer")'


OF_OPSET_6: dict[str, Any] = {
    "Add": np.add, "Mul": np.multiply, "Sub": np.subtract, "Div": np.divide,
    "PRelu": lambda x, slope: np.where(x < 0, x * slope, x),  # per channel, the second dimension
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "x", "b", "axis"),
    [
        *((kind, (2, 3, 3), (3,), 1) for kind in OF_OPSET_6),
        *((kind, (1, 3, 4, 5), (3,), 1) for kind in ("Add", "PRelu")),
        ("Mul", (2, 3, 4, 5), (3, 4), 1),
        ("Sub", (2, 3), (3,), -1),
        ("PRelu", (2, 3), (3,), 1),
    ],
)
def test_operands_of_opset_6_broadcast_along_an_axis(
    kind: str, x: tuple[int, ...], b: tuple[int, ...], axis: int, tmp_path: Path
) -> None:
    """What ONNX's text of opset 6 says, in numpy."""
    words: Any = {} if kind == "PRelu" else {"broadcast": 1, "axis": axis}
    nodes = [helper.make_node(kind, ["x", "b"], ["out"], **words)]
    data, second = draw(*x), draw(*b)
    path = saved(model(nodes, {"x": ("f32", x)}, ["out"], {"b": second}, opset=6), tmp_path)
    wanted = OF_OPSET_6[kind](data, second.reshape(*b, *[1] * (len(x) - axis % len(x) - len(b))))
    out = evaluate(import_onnx(path), {"x": data})["out"]
    np.testing.assert_allclose(out, wanted, rtol=1e-6)


@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize(
    ("kind", "opset", "scale"),
    [("Upsample", 9, 1.7), ("Upsample", 7, 2.0), ("Resize", 10, 2.3), ("Resize", 10, 0.6)],
)
def test_places_of_opset_10(kind: str, opset: int, scale: float, mode: str, tmp_path: Path) -> None:
    """Where an element begins, not its center, is at a multiple of the scale."""
    scales = np.array([1, 1, scale, scale], np.float32)
    words: Any = {"mode": mode} | ({"scales": scales} if opset < 9 else {})
    node = helper.make_node(kind, ["x", "s"] if opset >= 9 else ["x"], ["out"], **words)
    initial = {"s": scales} if opset >= 9 else {}
    path = saved(model([node], {"x": ("f32", (1, 2, 5, 7))}, ["out"], initial, opset), tmp_path)
    compared(path, {"x": draw(1, 2, 5, 7)})


def test_a_default_place_of_data_is_no_damage(tmp_path: Path) -> None:
    """As other tools write it behind raw data that was external before."""
    products = two_products(draw(8, 8))
    for tensor in products.graph.initializer:
        tensor.data_location = TensorProto.DEFAULT
    compared(saved(products, tmp_path), {"x": draw(3, 8)})


def test_empty_sets_and_no_copies(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Tile", ["x", "none"], ["tiled"]),
        helper.make_node("Less", ["x", "x"], ["less"]),
        helper.make_node("ReduceMax", ["less", "first"], ["any"], keepdims=0),
        helper.make_node("ReduceMin", ["less", "first"], ["all"], keepdims=0),
    ]
    values = {"none": np.array([0, 2], np.int64), "first": np.array([0], np.int64)}
    names = ["tiled", "any", "all"]
    path = saved(model(nodes, {"x": ("f32", ("B", 3))}, names, values, opset=20), tmp_path)
    artifact = irc.compile(import_onnx(path, {"B": (0, 1, 4)}), tmp_path / "a")
    for rows in (0, 2):
        outputs = artifact.run({"x": draw(rows, 3)})
        assert outputs["tiled"].shape == (0, 6)
        assert outputs["any"].tolist() == [False] * 3 and outputs["all"].tolist() == [not rows] * 3


def test_symbols_of_the_inputs(tmp_path: Path) -> None:
    nodes = [helper.make_node("Concat", ["p", "x"], ["out"], axis=1)]
    inputs = {"x": ("f32", ("batch size", "seq", 4)), "p": ("f32", ("batch size", "past", 4))}
    path = saved(model(nodes, inputs, ["out"]), tmp_path)
    module = read(path, dims=RANGES)
    assert [str(arg.type) for arg in module.main.args] == [
        "f32[batch_size, seq, 4]",
        "f32[batch_size, past, 4]",
    ]
    assert str(module.main.returned[0].type) == "f32[batch_size, past + seq, 4]"
    assert module.dims == RANGES
    nodes = [helper.make_node("Add", ["p", "x"], ["out"])]
    inputs = {"x": ("f32", ("a", 4)), "p": ("f32", ("b", 4))}
    path = saved(model(nodes, inputs, ["out"]), tmp_path)
    with pytest.raises(Error, match="equal=") as caught:
        read(path)
    assert "do not broadcast" in str(caught.value)
    assert str(read(path, equal={"b": "a"}).main.returned[0].type) == "f32[a, 4]"


def test_inputs_and_results_keep_their_names(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Relu", ["Input:0"], ["Output:0"]),
        helper.make_node("Add", ["Input:0", "Input_0"], ["Output_0"]),
        helper.make_node("Abs", ["past.0.key"], ["\u00e9"]),
        helper.make_node("Neg", ["\u00e9"], ["present/0 'key'"]),
    ]
    inputs = dict.fromkeys(["Input:0", "Input_0", "past.0.key"], ("f32", (3, 8)))
    given = {name: draw(3, 8) for name in inputs}
    path = saved(model(nodes, inputs, ["Output:0", "Output_0", "present/0 'key'"]), tmp_path)
    compared(path, given)
    for source, folder in ((path, "first"), (tmp_path / "first" / "module.irc", "again")):
        artifact = irc.compile(source, tmp_path / folder)
        outputs = artifact.run(given)
        np.testing.assert_array_equal(outputs["Output:0"], np.maximum(given["Input:0"], 0))
        np.testing.assert_array_equal(outputs["Output_0"], given["Input:0"] + given["Input_0"])
        np.testing.assert_array_equal(outputs["present/0 'key'"], -np.abs(given["past.0.key"]))
        graph = onnx.load(tmp_path / folder / "rank0.onnx").graph
        assert [value.name for value in graph.input] == list(inputs)
        assert [value.name for value in graph.output] == list(outputs)


def test_commands_take_onnx_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(two_products(draw(8, 40)), tmp_path)
    assert main(["show", str(path)]) == 0
    assert "matmul %x, @w" in capsys.readouterr().out
    assert main(["show", str(path), "--scope", "layer.0", "--locs"]) == 0
    assert main(["opt", str(path), "--passes", "canonicalize, cse, dce"]) == 0
    capsys.readouterr()
    assert main(["compile", str(path), "-o", str(tmp_path / "a"), "--dims", "batch=1:2:4"]) == 0
    given = draw(4, 8)
    (want,) = on_ort(path, {"x": given})
    (found,) = irc.load(tmp_path / "a").run({"x": given}).values()
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5)
    assert main(["forecast", str(path), "--dims", "batch=1:2:4"]) == 0
    assert main(["compile", str(tmp_path / "none.onnx"), "-o", str(tmp_path / "b")]) == 1
    assert "there is no" in capsys.readouterr().err
