"""Dtypes of ONNX files: the quantized ones of other tools, and those of `--dtype`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime import quantization

import irc
from irc.backends.reference import evaluate
from irc.driver.sources import find_source
from irc.frontends.onnx import import_onnx
from irc.ir.verify import verify
from irc.text import parse_module
from irc.weights import BytesRef
from tests.cli.runner import refused, works
from tests.fresh import fresh
from tests.frontends.onnx_models import model, on_ort, saved

KINDS = {
    "i8": (np.int8, -128, 128),
    "u8": (np.uint8, 0, 256),
    "i4": (ml_dtypes.int4, -8, 8),
    "u4": (ml_dtypes.uint4, 0, 16),
}


def drawn(kind: str, shape: tuple[int, ...], least: int = -128) -> np.ndarray[Any, Any]:
    dtype, low, high = KINDS[kind]
    return fresh(sum(shape)).integers(max(low, least), high, shape).astype(dtype)


def product(
    kind: str, shape: tuple[int, ...], scales: tuple[int, ...], zero: Any, **words: Any
) -> Any:
    """x · (W dequantized), with W, scales and zero points in the file."""
    scale = fresh(3).uniform(0.1, 2, scales).astype(np.float32)
    given = {"w": drawn(kind, shape), "s": scale}
    if zero is not None:
        given["z"] = np.zeros(scales, KINDS[kind][0]) if zero == 0 else drawn(kind, scales, 1)
    nodes = [
        helper.make_node("DequantizeLinear", [*given], ["d"], **words),
        helper.make_node("MatMul", ["x", "d"], ["y"]),
    ]
    return model(nodes, {"x": ("f32", ("B", shape[0]))}, ["y"], given)


def as_written(path: Path) -> onnxruntime.InferenceSession:
    """Without the optimizations of ONNX Runtime, which may quantize x as well."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(path, options)


CASES = [
    ("i8", (12, 10), (), 0, {}),
    ("u8", (12, 10), (), 7, {}),
    ("u8", (12, 10), (12,), 7, {"axis": 0}),
    ("i8", (12, 10), (12,), 7, {"axis": -2}),
    ("i8", (12, 10), (4, 10), 7, {"axis": 0, "block_size": 3}),
    ("i4", (64, 10), (2, 10), 0, {"axis": 0, "block_size": 32}),
    ("u4", (64, 10), (2, 10), 7, {"axis": 0, "block_size": 32}),
]


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
@pytest.mark.parametrize(("kind", "shape", "scales", "zero", "words"), CASES)
def test_a_product_with_quantized_weights(
    kind: str,
    shape: tuple[int, ...],
    scales: tuple[int, ...],
    zero: Any,
    words: dict[str, Any],
    inside: bool,
    tmp_path: Path,
) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(
        product(kind, shape, scales, zero, **words),
        path,
        save_as_external_data=not inside,
        size_threshold=0,
        location="weights.bin",
    )
    module = import_onnx(path)
    (dequantize,) = [op for op in module.ops() if op.opname == "dequantize"]
    assert ("zero" in dequantize.present) == (zero == 7)
    stored = dequantize.operands[0]
    assert stored.type.dtype == kind
    if not inside:
        assert isinstance(stored, irc.Weight) and isinstance(stored.ref, BytesRef)
    x = fresh(9).standard_normal((3, shape[0])).astype(np.float32)
    wanted: Any = as_written(path).run(None, {"x": x})[0]
    found = evaluate(module, {"x": x}, base=tmp_path)["y"]
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-3)
    artifact = irc.compile(path, tmp_path / "out")
    np.testing.assert_allclose(artifact.run({"x": x})["y"], wanted, rtol=1e-4, atol=1e-3)


def test_a_wider_result_is_rounded_once(tmp_path: Path) -> None:
    x = np.arange(-8, 8, dtype=np.int8)
    node = helper.make_node("DequantizeLinear", ["x", "s"], ["y"], output_dtype=TensorProto.FLOAT)
    path = saved(model([node], {"x": ("i8", (16,)), "s": ("f16", ())}, ["y"]), tmp_path)
    scale = fresh(2).uniform(0.5, 2, ()).astype(np.float16)
    found = evaluate(import_onnx(path), {"x": x, "s": scale})["y"]
    np.testing.assert_array_equal(found, x * scale.astype(np.float32))


def with_other_zeros() -> Any:
    made = product("i8", (12, 10), (10,), 7)
    made.graph.initializer[2].CopyFrom(numpy_helper.from_array(np.ones(3, np.int8), "z"))
    return made


class Inputs(quantization.CalibrationDataReader):
    """Five inputs [2, 3, 6, 6] of a model."""

    def __init__(self) -> None:
        self.left = [fresh(n).standard_normal((2, 3, 6, 6)).astype(np.float32) for n in range(5)]

    def get_next(self) -> Any:
        return {"x": self.left.pop()} if self.left else None


def network() -> Any:
    """Conv, Relu, mean, Gemm with a bias, MatMul and Add."""
    nodes = [
        helper.make_node("Conv", ["x", "cw", "cb"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("GlobalAveragePool", ["r"], ["m"]),
        helper.make_node("Flatten", ["m"], ["f"]),
        helper.make_node("Gemm", ["f", "gw", "gb"], ["g"], transB=1),
        helper.make_node("MatMul", ["g", "mw"], ["p"]),
        helper.make_node("Add", ["p", "g"], ["y"]),
    ]
    shapes = {"cw": (8, 3, 3, 3), "cb": (8,), "gw": (5, 8), "gb": (5,), "mw": (5, 5)}
    given = {n: fresh(7).standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    network = model(nodes, {"x": ("f32", (2, 3, 6, 6))}, ["y"], given, opset=20)
    network.graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT
    return network


KIND = quantization.QuantType
FORM = quantization.QuantFormat
# Without VNNI a processor adds pairs of u8 * i8 in 16 bits; weights of 7 bits do not overflow them.
SAFE: dict[str, Any] = {"reduce_range": True}
WRITTEN: dict[str, dict[str, Any]] = {
    "default QDQ": {},
    "i8 QDQ": {"activation_type": KIND.QInt8, "per_channel": True},
    "symmetric": {"activation_type": KIND.QInt8, "extra_options": {"ActivationSymmetric": True}},
    "i16 QDQ": {"activation_type": KIND.QInt16, "weight_type": KIND.QInt16},
    "QOperator": {"quant_format": FORM.QOperator, **SAFE},
    "QOperator per channel": {"quant_format": FORM.QOperator, "per_channel": True, **SAFE},
    "dynamic": dict(SAFE),
    "dynamic u8": {"weight_type": KIND.QUInt8},
}


@pytest.mark.parametrize("written", WRITTEN)
def test_files_of_the_quantization_of_onnx_runtime(written: str, tmp_path: Path) -> None:
    source, path = saved(network(), tmp_path, "float.onnx"), tmp_path / "model.onnx"
    if written.startswith("dynamic"):
        quantization.quantize_dynamic(source, path, **WRITTEN[written])
    else:
        quantization.quantize_static(source, path, Inputs(), **WRITTEN[written])
    x = fresh(9).standard_normal((2, 3, 6, 6)).astype(np.float32)
    wanted: Any = as_written(path).run(None, {"x": x})[0]
    step = (wanted.max() - wanted.min()) / 100  # of the codes, where a tie may be rounded otherwise
    y = evaluate(import_onnx(path), {"x": x}, base=tmp_path)["y"]
    np.testing.assert_allclose(y, wanted, rtol=0, atol=step)
    artifact = irc.compile(path, tmp_path / "out")
    np.testing.assert_allclose(artifact.run({"x": x})["y"], wanted, rtol=0, atol=step)


@pytest.mark.parametrize("zeros", [(), (10,)])
def test_a_product_of_integers_is_exact(zeros: tuple[int, ...], tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMulInteger", ["x", "w", "a", "z"], ["y"])]
    given = {"w": drawn("i8", (900, 10)), "a": drawn("u8", ()), "z": drawn("i8", zeros)}
    path = saved(model(nodes, {"x": ("u8", (3, 900))}, ["y"], given), tmp_path)
    x = drawn("u8", (3, 900))
    wanted = (x.astype(int) - given["a"]) @ (given["w"].astype(int) - given["z"])
    np.testing.assert_array_equal(evaluate(import_onnx(path), {"x": x}, base=tmp_path)["y"], wanted)
    artifact = irc.compile(path, tmp_path / "out")
    np.testing.assert_array_equal(artifact.run({"x": x})["y"], wanted)


def with_words(kind: str, *inputs: str, **words: Any) -> Any:
    made = product("i8", (12, 10), (), None)
    made.graph.node.append(helper.make_node(kind, ["y", *inputs], ["q"], **words))
    made.graph.output[0].name = "q"
    return made


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (with_other_zeros, "zero points"),
        (lambda: with_words("MatMulNBits", "x"), "no operation for it; quantize in the form"),
        (
            lambda: with_words("QuantizeLinear", "s", output_dtype=TensorProto.FLOAT8E8M0),
            "makes f8e8m0; there is i4, u4",
        ),
        (lambda: with_words("QuantizeLinear", "s", saturate=0), "saturate=0 is not supported"),
        (
            lambda: product("i8", (10, 4), (4, 4), None, axis=0, block_size=3),
            "blocks must divide the axis",
        ),
    ],
)
def test_what_is_refused(make: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(irc.Error, match=message):
        import_onnx(saved(make(), tmp_path))


@pytest.mark.parametrize("mode", ["up", "down", "nearest"])
def test_casts_to_powers_of_two_round_as_the_file_says(tmp_path: Path, mode: str) -> None:
    powers = np.array([2.0**n for n in (-120, -3, -1, 0, 1, 7, 126)], np.float32)
    around = [
        np.nextafter(each, side, dtype=np.float32)
        for each in (powers, 1.5 * powers)
        for side in (np.float32(0), np.float32(np.inf))
    ]
    x = np.concatenate([powers, *around, 10 ** fresh(6).uniform(-30, 30, 50)]).astype(np.float32)
    attributes = {"round_mode": mode, "saturate": 1, "to": TensorProto.FLOAT8E8M0}
    nodes = [
        helper.make_node("Cast", ["x"], ["e"], **attributes),
        helper.make_node("Cast", ["e"], ["y"], to=TensorProto.FLOAT),
    ]
    made = model(nodes, {"x": ("f32", x.shape)}, ["y"], {})
    (found,) = evaluate(import_onnx(saved(made, tmp_path)), {"x": x}).values()
    wanted = numpy_helper.to_float8e8m0(x, saturate=True, round_mode=mode).astype(np.float32)
    np.testing.assert_array_equal(found, wanted)


LOWEST = np.finfo(np.float32).min
CLOSE = {"f16": 1e-2, "bf16": 6e-2}
node = helper.make_node


def converted(path: Path, dtype: str) -> irc.Module:
    """The module of a file in a dtype, verified, whose text reads back as itself."""
    module = find_source(path, dtype=dtype).module
    verify(module)
    assert str(parse_module(str(module))) == str(module)
    return module


def close(path: Path, dtype: str, inputs: dict[str, Any]) -> irc.Module:
    """The converted module of a file, which gives about what ONNX Runtime gives for the file."""
    module = converted(path, dtype)
    for got, want in zip(evaluate(module, inputs).values(), on_ort(path, inputs), strict=True):
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        scale = max(1.0, float(np.abs(want).max()))
        np.testing.assert_allclose(got, want, atol=CLOSE[dtype] * scale)
    return module


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_a_block_with_a_mask(dtype: str, rng: np.random.Generator, tmp_path: Path) -> None:
    """A row that is masked whole by the lowest f32 has the mean of the values, not NaN."""
    nodes = [
        node("MatMul", ["x", "w"], ["y"]),
        node("MatMul", ["y", "z"], ["scores"]),
        node("Cast", ["mask"], ["ones"], to=1),
        node("Sub", ["one", "ones"], ["hidden"]),
        node("Mul", ["hidden", "lowest"], ["added"]),
        node("Add", ["scores", "added"], ["masked"]),
        node("Softmax", ["masked"], ["weights"]),
        node("MatMul", ["weights", "x"], ["out"]),
    ]
    small = (rng.standard_normal((8, 8)) / 8).astype(np.float32)
    initial = {"w": small, "z": small.T.copy(), "one": np.float32(1), "lowest": LOWEST}
    initial = {name: np.asarray(array) for name, array in initial.items()}
    inputs = {"x": ("f32", (8, 8)), "mask": ("i64", (8, 8))}
    path = saved(model(nodes, inputs, ["out", "y"], initial), tmp_path)
    mask = rng.integers(0, 2, (8, 8))
    mask[3] = 0
    given = {"x": rng.standard_normal((8, 8)).astype(np.float32), "mask": mask}
    module = close(path, dtype, given)
    assert {weight.type.dtype for weight in module.weights.values()} == {dtype}
    products = [op for op in module.main if op.opname == "matmul"]
    assert {op.result.type.dtype for op in products} == {dtype}


def test_norms_of_large_numbers(rng: np.random.Generator, tmp_path: Path) -> None:
    """The square of 1000 is no f16, and 1e-8 is 0 in f16."""
    nodes = [
        node("Mul", ["x", "x"], ["squares"]),
        node("ReduceMean", ["squares", "last"], ["mean"]),
        node("Add", ["mean", "eps"], ["sum"]),
        node("Sqrt", ["sum"], ["root"]),
        node("Div", ["x", "root"], ["normed"]),
        node("Mul", ["normed", "w"], ["out"]),
    ]
    initial = {"last": np.array([-1]), "eps": np.array(1e-8, np.float32)}
    initial["w"] = np.ones(32, np.float32)
    path = saved(model(nodes, {"x": ("f32", ("n", 32))}, ["out"], initial), tmp_path)
    x = rng.uniform(0.5, 1, (3, 32)).astype(np.float32) * np.array([[1e3], [1], [1e-3]], np.float32)
    close(path, "f16", {"x": x})


def test_angles_of_late_positions(rng: np.random.Generator, tmp_path: Path) -> None:
    """Position 5001 is no f16, and its angle is more than a turn off in bf16."""
    nodes = [
        node("Cast", ["positions"], ["floats"], to=1),
        node("Mul", ["floats", "turns"], ["angles"]),
        node("Cos", ["angles"], ["cos"]),
        node("Mul", ["x", "cos"], ["turned"]),
        node("MatMul", ["turned", "w"], ["out"]),
    ]
    initial = {"turns": rng.uniform(0.1, 1, 32).astype(np.float32)}
    initial["w"] = np.eye(32, dtype=np.float32)
    inputs = {"x": ("f32", ("n", 32)), "positions": ("i64", ("n", 1))}
    path = saved(model(nodes, inputs, ["out"], initial), tmp_path)
    x = rng.standard_normal((2, 32)).astype(np.float32)
    close(path, "bf16", {"x": x, "positions": np.array([[5001], [4003]])})


def test_the_command_takes_a_dtype(rng: np.random.Generator, tmp_path: Path) -> None:
    weight = rng.standard_normal((8, 8)).astype(np.float32)
    made = model(
        [node("MatMul", ["x", "w"], ["out"])], {"x": ("f32", ("n", 8))}, ["out"], {"w": weight}
    )
    path, out = saved(made, tmp_path), tmp_path / "built"
    works("compile", path, "-o", out, "--dtype", "f16")
    x = rng.standard_normal((3, 8)).astype(np.float32)
    (found,) = irc.load(out).run({"x": x}).values()
    assert found.dtype == np.float32
    halves = x.astype(np.float16).astype(np.float32) @ weight.astype(np.float16).astype(np.float32)
    np.testing.assert_allclose(found, halves, atol=2e-2)
    assert (np.abs(found - x @ weight) > 0).any()
    assert "an artifact states its dtypes" in refused("compile", out, "-o", out, "--dtype", "f16")
