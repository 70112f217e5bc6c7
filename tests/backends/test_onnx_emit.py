"""The emitted ONNX model: names, determinism, calls, the report of unsupported operations."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import onnx
import pytest

from irc.backends.onnx import backend
from irc.errors import Error
from irc.text import parse_module
from tests.backends.checked_models import check_model
from tests.backends.decoder import build
from tests.backends.emission import emitted, linear, module
from tests.layout import ROOT


def test_check_finds_a_wrong_graph(folder: Path) -> None:
    _, model = emitted(linear('@f["a"]'), folder)
    model.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.INT32
    with pytest.raises(onnx.shape_inference.InferenceError):
        check_model(model.SerializeToString())
    del model.graph.node[:]
    with pytest.raises(onnx.checker.ValidationError):
        check_model(model.SerializeToString())


NAMED = """module @m {
  weight @layers.0.up.weight : f32[4, 4] = random("u", 1, 0.5)
  func @forward(%x: f32[2, 4], %k0: f32[2, 4]) -> (logits: f32[2, 4], k0: f32[2, 4] aliases %k0) {
    %q = linear %x, @layers.0.up.weight : f32[2, 4] loc("model.py":7 "layers.0.mlp")
    %p = linear %q, @layers.0.up.weight : f32[2, 4] loc("model.py":7 "layers.0.mlp")
    %new = add %k0, %p : f32[2, 4] loc("model.py":8 "layers.0.mlp")
    %last = neg %p : f32[2, 4] loc("model.py":9 "layers.0.mlp")
    return %last, %new
  }
}"""


def test_names_are_those_of_the_text(folder: Path) -> None:
    m = parse_module(NAMED)
    for op in list(m.main)[:2]:
        op.results[0].name = "q"
    backend.emit(m, folder / "out", base=folder)
    graph = onnx.load(str(folder / "out" / "rank0.onnx"), load_external_data=False).graph
    assert {"q", "q.1"} <= {name for node in graph.node for name in node.output}
    assert [t.name for t in graph.initializer] == ["layers.0.up.weight"]
    assert [i.name for i in graph.input] == ["x", "k0"]
    assert [o.name for o in graph.output] == ["logits", "k0.out"]
    nodes = {node.output[0]: node for node in graph.node}
    assert nodes["q.1"].name == "layers.0.mlp/linear/Gemm.q.1"
    assert [(p.key, p.value) for p in nodes["q.1"].metadata_props] == [("loc", "model.py:7")]
    assert len({node.name for node in graph.node}) == len(graph.node)


def test_nodes_of_a_decoder_layer(folder: Path) -> None:
    """Angles of RoPE and shapes are computed once, not in each layer."""
    counts: list[Counter[str]] = []
    for layers in (2, 3):
        backend.emit(build(num_hidden_layers=layers), folder / "out", base=folder)
        graph = onnx.load(str(folder / "out" / "rank0.onnx"), load_external_data=False).graph
        counts.append(Counter(node.op_type for node in graph.node))
    assert counts[1] - counts[0] == {
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
from collections import Counter
from pathlib import Path
from irc.backends.onnx import backend
from tests.backends.decoder import build
backend.emit(build("bf16"), Path(sys.argv[1]))
"""


def test_same_bytes_in_every_process(folder: Path) -> None:
    written: list[dict[str, bytes]] = []
    for seed in ("1", "2"):
        out = folder / f"out{seed}"
        out.mkdir()
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", EMIT, str(out)]
        subprocess.run(command, env=environment, check=True)
        written.append({path.name: path.read_bytes() for path in out.iterdir()})
    assert written[0] == written[1] and sorted(written[0]) == ["rank0.onnx", "rank0.weights"]


# -- errors


def test_all_unsupported_operations_are_reported_at_once(folder: Path) -> None:
    m = module(
        "",
        '%b = cast %x {dtype="f64"} : f64[S, 4]\n'
        '%c = erf %b : f64[S, 4] loc("model.py":5 "top")\n'
        '%d = gelu %b : f64[S, 4] loc("model.py":6 "top")\n'
        "return %c, %d",
        "f64[S, 4], f64[S, 4]",
        {},
    )
    with pytest.raises(Error) as caught:
        backend.emit(m, folder / "out")
    lines = str(caught.value).split("\n")
    assert lines[0] == "the backend onnx cannot run this module"
    assert [line.strip().split(": ")[0] for line in lines[1:]] == [
        "model.py:5 in top",
        "model.py:6 in top",
    ]
    assert "and its expansion needs erf" in lines[2]
    assert not list((folder / "out").iterdir())


def test_the_global_view_of_several_ranks_is_refused(folder: Path) -> None:
    m = linear('@f["a"]')
    m.mesh = type(m.mesh)((("tp", 2),))
    with pytest.raises(Error, match=r"mesh \(tp=2\) has 2 ranks; add localize to the pipeline"):
        backend.emit(m, folder / "out", base=folder)


def test_a_size_without_an_input_is_named(folder: Path) -> None:
    m = module("", "%y = full {value=1.0, shape=[Z]} : f32[Z]\nreturn %y", "f32[Z]", {})
    m.dims["Z"] = (1, 2, 3)
    with pytest.raises(Error, match="no argument of @forward has the dimension Z"):
        backend.emit(m, folder / "out")


# -- calls and results


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
    last = facts["ports"]["outputs"][4]
    assert (last["dtype"], last["computed"]) == ("bf16", "f32")
    assert [o.name for o in model.graph.output] == ["a", "b", "c", "d", "e"]


def test_the_reference_of_onnx_works_beside_the_schema_of_collectives() -> None:
    script = (
        "from irc.backends.onnx.schema import register_schema; register_schema(); "
        "from onnx.reference import ReferenceEvaluator"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
