"""The written ONNX model: where weights lie, names, determinism, the report of what is missing."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest

from irc.backends.onnx import TABLE, backend, storage
from irc.backends.onnx.graph import IR_VERSION, OPSET
from irc.backends.onnx.storage import ALIGNMENT
from irc.backends.reference import evaluate
from irc.core import Module
from irc.declare import op_class
from irc.errors import Error
from irc.source import Loc
from irc.text import parse_module
from tests.backends.decoder import Shape, build, save, write
from tests.layout import ROOT

X = {"x": np.random.default_rng(3).standard_normal((3, 4)).astype(np.float32)}


def module(weights: str, body: str, result: str, files: dict[str, str] | None = None) -> Module:
    """A module of one argument %x: f32[S, 4]."""
    given = {"f": "m.safetensors"} if files is None else files
    head = "".join(f'  file @{k} = "{v}"\n' for k, v in given.items())
    return parse_module(
        f"module @m dims(S=1:3:9) {{\n{head}{weights}\n"
        f"  func @forward(%x: f32[S, 4]) -> ({result}) {{\n{body}\n  }}\n}}"
    )


def linear(ref: str, dtype: str = "f32") -> Module:
    """x times the weight that `ref` says, computed in f32."""
    cast = '%w = cast @w {dtype="f32"} : f32[5, 4]\n' if dtype != "f32" else ""
    used = "%w" if cast else "@w"
    return module(
        f"weight @w : {dtype}[5, 4] = {ref}",
        f"{cast}%y = linear %x, {used} : f32[S, 5]\nreturn %y",
        "f32[S, 5]",
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint folder; the artifact goes below it."""
    rng = np.random.default_rng(0)
    wide = rng.standard_normal((6, 5)).astype(np.float32)
    arrays = {
        "a": rng.standard_normal((5, 4)).astype(np.float32),
        "b": wide[:5, :4].astype(ml_dtypes.bfloat16),
        "c": wide,
        "half": wide[:5, :4].astype(np.float16),
    }
    write(tmp_path / "m.safetensors", arrays)
    (tmp_path / "out").mkdir()
    return tmp_path


def emitted(m: Module, folder: Path, **options: Any) -> tuple[dict[str, Any], onnx.ModelProto]:
    """(facts, model), after the results were compared with the reference."""
    out = folder / "out"
    facts = dict(backend.emit(m, out, {"base": folder, "check": True, **options}))
    found = backend.load(out, facts, threads=1).run(X)
    for name, want in evaluate(m, X, folder).items():
        close = 1e-5 if want.dtype == np.float32 else 1e-2  # f32 all through, so never rounded
        np.testing.assert_allclose(found[name], want.astype(np.float32), rtol=close, atol=close)
    return facts, onnx.load(str(out / "rank0.onnx"), load_external_data=False)


def places(model: onnx.ModelProto) -> dict[str, dict[str, str]]:
    """Initializer to its external data."""
    return {
        t.name: {entry.key: entry.value for entry in t.external_data}
        for t in model.graph.initializer
        if t.external_data
    }


def test_version_is_what_onnx_runtime_reads(folder: Path) -> None:
    _, model = emitted(linear('@f["a"]'), folder)
    assert (model.ir_version, model.opset_import[0].version) == (IR_VERSION, OPSET) == (11, 24)


def test_weights_are_read_where_they_lie(folder: Path) -> None:
    facts, model = emitted(linear('@f["a"]'), folder)
    where = places(model)["w"]
    assert where["location"] == "m.safetensors" and int(where["offset"]) % 2 == 1
    assert facts["weights"] == [] and sorted(os.listdir(folder / "out")) == ["rank0.onnx"]
    assert facts["external"] == {"base": str(folder), "files": ["m.safetensors"]}
    assert (folder / "out" / "rank0.onnx").stat().st_size < 2000


def test_rows_are_an_offset(folder: Path) -> None:
    m = module(
        'weight @w : f32[2, 5] = @f["c"][3:5, :]',
        "%n = slice %x {dim=1, start=0, stop=2} : f32[S, 2]\n"
        "%y = matmul %n, @w : f32[S, 5]\nreturn %y",
        "f32[S, 5]",
    )
    whole = places(emitted(linear('@f["c"][0:5, 0:4]'), folder, bundle=False)[1])
    assert whole["w"]["location"] == "rank0.weights"
    where = places(emitted(m, folder)[1])["w"]
    assert (where["location"], where["length"]) == ("m.safetensors", "40")


@pytest.mark.parametrize(
    ("ref", "dtype", "stored", "own"),
    [
        ('@f["b"]', "bf16", "BFLOAT16", False),
        ('@f["b"].cast(f32)', "f32", "BFLOAT16", False),  # widened in the graph, not in a file
        ('@f["b"].cast(f32)[0:5, :]', "f32", "BFLOAT16", False),
        ('@f["half"].cast(f32)', "f32", "FLOAT16", False),
        ('@f["a"].cast(bf16)', "bf16", "BFLOAT16", True),
        ('@f["a"].cast(bf16).cast(f32)', "f32", "FLOAT", True),
        ('@f["half"].cast(bf16)', "bf16", "BFLOAT16", True),
        ('@f["c"][0:5, 0:4]', "f32", "FLOAT", True),
        ('@f["c"].transpose(1, 0)[:, 1:5]', "f32", "FLOAT", True),
        ('concat(@f["a"][0:2, :], @f["c"][0:3, 0:4]; 0)', "f32", "FLOAT", True),
        ('random("k", 3, 0.5)', "f32", "FLOAT", True),
    ],
)
def test_only_what_needs_conversion_is_written(
    folder: Path, ref: str, dtype: str, stored: str, own: bool
) -> None:
    facts, model = emitted(linear(ref, dtype), folder)
    (proto,) = (t for t in model.graph.initializer if t.name == "w")
    assert onnx.TensorProto.DataType.Name(proto.data_type) == stored
    assert places(model)["w"]["location"] == ("rank0.weights" if own else "m.safetensors")
    assert facts["weights"] == (["rank0.weights"] if own else [])


def two_files(folder: Path) -> Module:
    """One weight in place, in another folder than a second, and a third that is converted."""
    for name in ("one", "two/deep"):
        (folder / name).mkdir(parents=True)
        write(
            folder / name / "m.safetensors",
            {"w": np.arange(16, dtype=np.float32).reshape(4, 4) / 8},
        )
    files = {"one": "one/m.safetensors", "two": "two/deep/m.safetensors"}
    return module(
        'weight @a : f32[4, 4] = @one["w"]\nweight @b : f32[4, 4] = @two["w"]\n'
        'weight @c : f32[4, 4] = @two["w"].transpose(1, 0)',
        "%1 = linear %x, @a : f32[S, 4]\n%2 = linear %1, @b : f32[S, 4]\n"
        "%3 = linear %2, @c : f32[S, 4]\nreturn %3",
        "f32[S, 4]",
        files,
    )


def test_files_in_several_folders_and_our_own(folder: Path) -> None:
    m = two_files(folder)
    facts, model = emitted(m, folder)
    where = {name: place["location"] for name, place in places(model).items()}
    assert where == {
        "a": "one/m.safetensors",
        "b": "two/deep/m.safetensors",
        "c": "rank0.weights",
    }
    assert facts["external"]["base"] == str(folder)
    moved = folder / "elsewhere" / "out"
    moved.parent.mkdir()
    (folder / "out").rename(moved)
    found = backend.load(moved, facts, threads=1).run(X)
    np.testing.assert_allclose(found["result0"], evaluate(m, X, folder)["result0"])


def test_links_of_a_cache_are_followed(folder: Path) -> None:
    blobs, snapshot = folder / "blobs", folder / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    (folder / "m.safetensors").rename(blobs / "0123")
    (snapshot / "m.safetensors").symlink_to("../../blobs/0123")
    m = linear('@f["a"]')
    out = folder / "out"
    facts = backend.emit(m, out, {"base": snapshot})
    assert facts["external"] == {"base": str(blobs), "files": ["0123"]}
    found = backend.load(out, facts, threads=1).run(X)
    np.testing.assert_allclose(found["result0"], evaluate(m, X, snapshot)["result0"], rtol=1e-6)


def refuse(*_: object) -> int:
    """copy_file_range between two file systems that cannot."""
    raise OSError(errno.EXDEV, "Invalid cross-device link")


@pytest.mark.parametrize("copying", ["whole", "in pieces", "not at all", "absent"])
def test_bundle_stands_alone(folder: Path, copying: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if copying == "in pieces":
        monkeypatch.setattr(storage, "COPY", 24)
    if copying == "not at all":
        monkeypatch.setattr(os, "copy_file_range", refuse, raising=False)
    if copying == "absent":
        monkeypatch.delattr(os, "copy_file_range", raising=False)
    m = two_files(folder)
    facts, model = emitted(m, folder, bundle=True)
    where = places(model)
    assert {place["location"] for place in where.values()} == {"rank0.weights"}
    assert [int(place["offset"]) for place in where.values()] == [0, ALIGNMENT, 2 * ALIGNMENT]
    assert facts["external"] == {"base": None, "files": []}
    wanted = evaluate(m, X, folder)["result0"]
    onnx.checker.check_model(str(folder / "out" / "rank0.onnx"))
    for name in ("one", "two"):
        (folder / name).rename(folder / f"gone {name}")
    found = backend.load(folder / "out", facts, threads=1).run(X)
    np.testing.assert_allclose(found["result0"], wanted)


def test_checker_accepts_a_model_above_its_weights(folder: Path) -> None:
    facts = backend.emit(linear('@f["a"]'), folder, {"base": folder})
    assert facts["external"]["base"] == str(folder)
    onnx.checker.check_model(str(folder / "rank0.onnx"), full_check=True)


def test_check_finds_a_wrong_graph(folder: Path) -> None:
    from irc.backends.onnx.backend import check

    _, model = emitted(linear('@f["a"]'), folder)
    model.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.INT32
    with pytest.raises(onnx.shape_inference.InferenceError):
        check(model.SerializeToString())
    del model.graph.node[:]
    with pytest.raises(onnx.checker.ValidationError):
        check(model.SerializeToString())


def test_names_are_those_of_the_text(folder: Path) -> None:
    shape = Shape()
    m = build(shape, save(shape, folder))
    for op in m.main:
        op.loc = Loc("model.py", 7, "layers.0.mlp")
    backend.emit(m, folder / "out", {"base": folder})
    graph = onnx.load(str(folder / "out" / "rank0.onnx"), load_external_data=False).graph
    made = {name for node in graph.node for name in node.output}
    assert {"q", "k", "q.1", "k.1", "logits"} <= made
    assert "model_layers_0_mlp_up_proj_weight" in {t.name for t in graph.initializer}
    assert [i.name for i in graph.input][:4] == [a.name for a in m.main.args][:4]
    assert [o.name for o in graph.output] == ["logits", "k0.out", "v0.out", "k1.out", "v1.out"]
    nodes = {node.output[0]: node for node in graph.node}
    assert nodes["q"].name == "layers.0.mlp/linear/Gemm.q"
    assert [(p.key, p.value) for p in nodes["q"].metadata_props] == [("loc", "model.py:7")]
    assert len({node.name for node in graph.node}) == len(graph.node)


def test_graph_is_lean(folder: Path) -> None:
    """Per layer no more nodes than the mathematics asks for; angles and shapes once."""
    counts = []
    for layers in (2, 3):
        shape = Shape(layers=layers)
        backend.emit(build(shape, save(shape, folder)), folder / "out", {"base": folder})
        graph = onnx.load(str(folder / "out" / "rank0.onnx"), load_external_data=False).graph
        counts.append(sorted(node.op_type for node in graph.node))
    more = list(counts[1])
    for kind in counts[0]:
        more.remove(kind)
    assert {kind: more.count(kind) for kind in more} == {
        "Add": 2,
        "Attention": 1,
        "Gemm": 7,
        "Mul": 2,
        "RMSNormalization": 2,
        "Reshape": 6,
        "RotaryEmbedding": 2,
        "Sigmoid": 1,
        "TensorScatter": 2,
        "Transpose": 4,
    }


EMIT = """
import sys
from pathlib import Path
from irc.backends.onnx import backend
from tests.backends.decoder import Shape, build
shape = Shape(stored="bf16")
backend.emit(build(shape, ["part-0.safetensors", "part-1.safetensors"]), Path(sys.argv[1]),
             {"base": sys.argv[2], "bundle": True})
"""


def test_same_bytes_in_every_process(folder: Path) -> None:
    save(Shape(stored="bf16"), folder, files=2)
    written: list[dict[str, bytes]] = []
    for seed in ("1", "2"):
        out = folder / f"out{seed}"
        out.mkdir()
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", EMIT, str(out), str(folder)]
        subprocess.run(command, env=environment, check=True)
        written.append({path.name: path.read_bytes() for path in out.iterdir()})
    assert written[0] == written[1] and sorted(written[0]) == ["rank0.onnx", "rank0.weights"]


# -- errors


def test_everything_missing_is_reported_at_once(folder: Path) -> None:
    m = module(
        "",
        '%a = cast %x {dtype="i4"} : i4[S, 4] loc("model.py":3 "top")\n'
        '%b = cast %x {dtype="f64"} : f64[S, 4]\n'
        '%c = erf %b : f64[S, 4] loc("model.py":5 "top")\n'
        '%d = gelu %b : f64[S, 4] loc("model.py":6 "top")\n'
        "return %a, %c, %d",
        "i4[S, 4], f64[S, 4], f64[S, 4]",
        {},
    )
    with pytest.raises(Error) as caught:
        backend.emit(m, folder / "out", {})
    lines = str(caught.value).split("\n")
    assert lines[0] == "the backend onnx cannot run this module"
    assert [line.strip().split(": ")[0] for line in lines[1:]] == [
        "model.py:3 in top",
        "model.py:5 in top",
        "model.py:6 in top",
    ]
    assert "and its expansion needs erf" in lines[3]
    assert not list((folder / "out").iterdir())


def test_a_mesh_of_several_ranks_is_refused(folder: Path) -> None:
    m = linear('@f["a"]')
    m.mesh = type(m.mesh)((("tp", 2),))
    with pytest.raises(Error, match=r"writes one rank, but the mesh is \(tp=2\)"):
        backend.emit(m, folder / "out", {"base": folder})


def test_a_size_that_no_input_tells_is_named(folder: Path) -> None:
    m = module("", "%y = full {value=1.0, shape=[Z]} : f32[Z]\nreturn %y", "f32[Z]", {})
    m.dims["Z"] = (1, 2, 3)
    with pytest.raises(Error, match="no argument of @forward has the dimension Z"):
        backend.emit(m, folder / "out", {})


def test_a_weight_unlike_its_file_is_refused(folder: Path) -> None:
    with pytest.raises(Error, match=r"weight @w is f32\[5, 4\], but @f\[\"c\"\] is f32\[6, 5\]"):
        backend.emit(linear('@f["c"]'), folder / "out", {"base": folder})


def test_a_full_disk_is_an_error(folder: Path) -> None:
    with pytest.raises(Error, match=r"cannot write .*nowhere/rank0\.onnx: No such file"):
        backend.emit(linear('@f["a"]'), folder / "nowhere", {"base": folder})
    with pytest.raises(Error, match=r"cannot write .*nowhere/rank0\.weights: No such file"):
        backend.emit(linear('@f["a"]'), folder / "nowhere", {"base": folder, "bundle": True})


# -- what the walk over functions does


def test_calls_are_inlined_each_with_its_own_values(folder: Path) -> None:
    text = (
        "module @m dims(S=1:3:9) {\n"
        "  func @turn(%a: f32[1, S, 4], %b: i32[1, S]) -> (f32[1, S, 4]) {\n"
        "    %c = add %b, %b : i32[1, S]\n"
        "    %d = rope %a, %c {head_dim=4} : f32[1, S, 4]\n    return %d\n  }\n"
        "  func @forward(%x: f32[S, 4]) -> (f32[1, S, 4]) {\n"
        "    %a = unsqueeze %x {dims=[0]} : f32[1, S, 4]\n"
        "    %i = iota {size=S} : i32[S]\n"
        "    %j = unsqueeze %i {dims=[0]} : i32[1, S]\n"
        "    %k = add %j, %j : i32[1, S]\n"
        "    %1 = call %a, %j {callee=@turn} : f32[1, S, 4]\n"
        "    %2 = call %1, %k {callee=@turn} : f32[1, S, 4]\n    return %2\n  }\n}\n"
    )
    emitted(parse_module(text), folder)


def test_arguments_weights_and_values_may_be_returned_twice(folder: Path) -> None:
    m = module(
        'weight @w : f32[5, 4] = @f["a"]',
        '%y = linear %x, @w : f32[S, 5]\n%z = cast %y {dtype="bf16"} : bf16[S, 5]\n'
        "return %x, @w, %y, %y, %z",
        "a: f32[S, 4], b: f32[5, 4], c: f32[S, 5], d: f32[S, 5], e: bf16[S, 5]",
    )
    m.main.returned[2].name = "a"  # a value called like another result
    facts, model = emitted(m, folder)
    assert [o["name"] for o in facts["ports"]["outputs"]] == ["a", "b", "c", "d", "e"]
    assert facts["ports"]["outputs"][4]["dtype"] == "f32"
    assert [o.name for o in model.graph.output] == ["a", "b", "c", "d", "e"]


def test_third_party_operations_can_be_added_and_fall_back() -> None:
    table = set(map(op_class, ("gated_mlp", "stack", "one_hot")))
    assert not any(TABLE.covers(cls) for cls in table)  # so the tests run their expansions
