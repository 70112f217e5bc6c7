"""The linter on complete models: places, types, inner graphs, reports, damage, irc's own models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from irc.backends.tensorrt.builder.library import find
from irc.backends.tensorrt.lint import RULES, Finding, lint, lint_file
from irc.backends.tensorrt.lint.known import IMPORTED, MICROSOFT, NEED_PLUGINS, UNSUPPORTED
from irc.backends.tensorrt.lint.rules import notes
from irc.backends.tensorrt.target import FLAVOURS, Target
from irc.errors import Error
from tests.cli.runner import works
from tests.fresh import fresh
from tests.layout import ROOT
from tests.tensorrt.graphs import F16, F32, collective, constant, model, node, value
from tests.tensorrt.test_lint import EXAMPLES

RTX = Target.parse("tensorrt-rtx-1.7/sm_80+sm_89")
ONE = "x:f16[4,8]"
TINY = (ROOT / "examples" / "llama.py", "--checkpoint", ROOT / "examples" / "tiny_llama")


def named(findings: list[Finding]) -> list[str]:
    return [each.rule for each in findings]


def branch(made: onnx.NodeProto) -> Any:
    """A graph of one node, as a branch of If."""
    result = helper.make_tensor_value_info(made.output[0], F16, [4, 8])
    return helper.make_graph([made], "inner", [], [result])


def short() -> onnx.NodeProto:
    return node("Cast", "x", "t", to=TensorProto.INT16)


# ------------------------------------------------------------------ places


def test_a_finding_names_the_operation_and_its_line() -> None:
    bad = short()
    bad.name = "model.layers.0/cast/Cast.t"
    bad.metadata_props.add(key="loc", value="llama.py:7")
    (found,) = lint(model([bad, node("Relu", "x")]), RTX)
    assert (found.op, found.source) == ("model.layers.0/cast", "llama.py:7")
    assert str(found).startswith("error: llama.py:7 model.layers.0/cast: a Cast to int16")
    assert str(found).endswith("[cast-to]")


def test_a_finding_names_the_line_that_torch_recorded() -> None:
    bad = short()
    bad.name = "node_cast_3"
    trace = 'File "run.py", line 1, in f\nFile "net.py", line 12, in forward\n  y = x.short()'
    bad.metadata_props.add(key="pkg.torch.onnx.stack_trace", value=trace)
    (found,) = lint(model([bad, node("Relu", "x")]), RTX)
    assert (found.node, found.op, found.source) == ("node_cast_3", "", "net.py:12")


def test_errors_come_first() -> None:
    body = [node("Cast", "x", "d", to=TensorProto.DOUBLE), node("Cast", "x", to=TensorProto.INT16)]
    found = lint(model(body, ONE, "y:i16[4,8]"), RTX)
    assert [each.severity for each in found] == ["error", "error", "warning"]


# ------------------------------------------------------------------ types and data


def test_types_are_inferred_through_operators_of_tensorrt() -> None:
    """4 rows become 8 by all_gather, and 4 again by reduce_scatter, in float32."""
    sizes = [collective("all_gather", "c", "g"), collective("reduce_scatter", "g", "s")]
    body = [node("Cast", "x", "c", to=F32), *sizes]
    concat = [node("Concat", "x x", "xx", axis=0), node("Add", "g xx")]
    assert named(lint(model([*body, *concat], ONE, "y:f16[8,8]"), RTX)) == ["mixed-dtypes"]
    assert named(lint(model([*body, node("Add", "s x")]), RTX)) == ["mixed-dtypes"]


def test_constants_outside_the_model_are_read(tmp_path: Path) -> None:
    scale = numpy_helper.from_array(np.full(8, -1, np.float16), "s")
    (tmp_path / "s.bin").write_bytes(scale.raw_data)
    scale.ClearField("raw_data")
    scale.data_location = TensorProto.EXTERNAL
    scale.external_data.add(key="location", value="s.bin")
    body = [node("DequantizeLinear", "w s", "d", axis=1), node("MatMul", "x d")]
    proto = model(body, constants=[constant("w:i8[8,8]"), scale])
    assert lint(proto, RTX) == []
    assert named(lint(proto, RTX, [tmp_path])) == ["scale-positive"]


# ------------------------------------------------------------------ graphs and functions


def test_graphs_inside_nodes_and_bodies_of_functions_are_read() -> None:
    inner, other = branch(short()), branch(node("Relu", "x", "r"))
    condition = node("If", "c", then_branch=inner, else_branch=other)
    assert named(lint(model(condition, f"{ONE} c:bool[]"), RTX)) == ["cast-to"]
    proto = model(node("Short", "x", "y", "mine"))
    body = [node("Cast", "a", "b", to=TensorProto.INT16), node("Cast", "b", "c", to=F16)]
    opset = helper.make_opsetid("", 24)
    proto.functions.append(helper.make_function("mine", "Short", ["a"], ["c"], body, [opset]))
    assert named(lint(proto, RTX)) == ["cast-to"]


@pytest.mark.parametrize("typed", [True, False])
def test_models_without_inferred_types_are_linted(typed: bool) -> None:
    proto = model([node("Add", "x", "a"), node("BitwiseNot", "a")])
    if typed:
        proto.graph.value_info.extend(value(f"{name}:f16[4,8]") for name in "ay")
    else:
        proto.graph.input[0].type.ClearField("tensor_type")
    assert {"unsupported-operator", "untyped"} <= set(named(lint(proto, RTX)))


# ------------------------------------------------------------------ rules and targets


@pytest.mark.parametrize(
    ("rule", "applies", "does_not"),
    [
        ("collective-silent", "tensorrt-11.0/sm_90", "tensorrt-11.1/sm_90"),
        ("collective-silent", "tensorrt-11.0/sm_90", "tensorrt-rtx-1.7/sm_89"),
        ("native-cache-wrong", "tensorrt-11.2/sm_121", "tensorrt-11.3/sm_121"),
        ("native-cache-wrong", "tensorrt-11.1/sm_90+sm_121", "tensorrt-11.2/sm_90"),
        ("native-cache-wrong", "tensorrt-11.1/sm_121", "tensorrt-11.0/sm_121"),
        ("architecture-f32-product", "tensorrt-rtx-1.7/sm_75", "tensorrt-11.4/sm_75"),
    ],
)
def test_rules_are_about_flavours_versions_and_architectures(
    rule: str, applies: str, does_not: str
) -> None:
    assert RULES[rule].where.includes(Target.parse(applies))
    assert not RULES[rule].where.includes(Target.parse(does_not))


def test_an_error_that_was_not_observed_on_a_flavour_is_a_warning_there() -> None:
    proto = model(node("NonZero", "x"), ONE, "y:i64[2,N]")
    found = {text: lint(proto, Target.parse(text))[0].severity for text in FLAVOURS}
    assert found == {"tensorrt": "warning", "tensorrt-rtx": "error"}


@pytest.mark.needs_rtx
def test_the_table_of_operators_is_that_of_the_parser() -> None:
    trt = find("tensorrt-rtx").module
    logger = trt.Logger(trt.Logger.ERROR)
    parser = trt.OnnxParser(trt.Builder(logger).create_network(0), logger)
    kinds = {each.name for each in onnx.defs.get_all_schemas_with_history() if not each.domain}
    kinds |= IMPORTED | UNSUPPORTED.keys()
    supported = {kind for kind in kinds if parser.supports_operator(kind)}
    assert supported & UNSUPPORTED.keys() == set()
    assert supported == set(IMPORTED)
    assert MICROSOFT | NEED_PLUGINS.keys() <= supported


@pytest.mark.parametrize(
    "words",
    [
        ("--mesh", "tp=1"),
        ("--mesh", "tp=2", "--collectives", "native"),
        ("--mesh", "tp=2,pp=2", "--collectives", "plugin"),
        ("--mesh", "tp=3", "--dtype", "bf16", "--weights", "outside"),
    ],
)
def test_models_of_irc_have_no_findings(words: tuple[str, ...], tmp_path: Path) -> None:
    to = ["--backend", "tensorrt-rtx", "--no-build", "-o", tmp_path / "out"]
    works("compile", *TINY, *to, *words)
    paths = sorted((tmp_path / "out").glob("*.onnx"))
    assert paths
    for path in paths:
        assert lint_file(path, Target.parse("tensorrt-rtx")) == []


# ------------------------------------------------------------------ reports


def warned(node: str) -> Finding:
    return Finding("some-rule", "warning", "m; c", node, f"scope/{node}", "net.py:1")


def test_a_finding_of_several_models_is_printed_once() -> None:
    same = {f"rank{i}.onnx": [warned("a")] for i in range(4)}
    assert notes(same | {"other.onnx": [], "last.onnx": [warned("b")]}) == [
        "rank0.onnx, rank1.onnx and 2 more: warning [some-rule] m; c\n    net.py:1  scope/a",
        "last.onnx: warning [some-rule] m; c\n    net.py:1  scope/b",
    ]


@pytest.mark.parametrize("dry", [False, True])
def test_compiling_prints_the_warnings(dry: bool, tmp_path: Path) -> None:
    words = ("--backend", "tensorrt", "--no-build", "--target", "tensorrt-11.2/sm_120")
    to = ["--dry-run"] if dry else ["-o", tmp_path / "out"]
    out = works("compile", *TINY, *words, *to).out
    assert "rank0.onnx: warning [native-cache-builds] native caches failed" in out
    assert "\n    llama.py:33  model.layers.0.self_attn/cache_update\n" in out
    assert "and 3 more; irc lint --all prints them" in out
    if not dry:
        linted = works("lint", tmp_path / "out").out
        assert "rank0.onnx: 8 warnings\n  warning [native-cache-builds] native caches" in linted


# ------------------------------------------------------------------ damaged files


def test_a_constant_of_the_wrong_size_is_an_error_that_names_it(tmp_path: Path) -> None:
    weight = constant("k:i64[1]")
    weight.ClearField("int64_data")
    weight.raw_data = b"abc"
    proto = model(node("TopK", "x k", "y i"), ONE, "y:f16[4,1]", [weight])
    path = tmp_path / "m.onnx"
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(Error, match=r"the tensor 'k' is damaged \(.*\); export it again") as caught:
        lint_file(path, RTX)
    assert f"in {path}" in str(caught.value)


@pytest.mark.parametrize(
    "damaged", [collective("all_reduce", "x"), node("Cast", "x", "y", to=TensorProto.UINT8)]
)
def test_nodes_without_outputs(damaged: onnx.NodeProto) -> None:
    whole = model(damaged, ONE, "y:f16[4,8]")
    del whole.graph.node[0].output[:]
    assert "nothing computes the output 'y'" in " ".join(each.message for each in lint(whole, RTX))


def test_damaged_files_give_findings_or_an_error(tmp_path: Path) -> None:
    rng, path = fresh(83), tmp_path / "m.onnx"
    models = [each.bad.SerializeToString() for _, each in EXAMPLES if each.bad.ByteSize() < 20000]
    for _ in range(400):
        data = bytearray(models[int(rng.integers(len(models)))])
        for _ in range(int(rng.integers(1, 4))):
            data[int(rng.integers(len(data)))] = int(rng.integers(256))
        path.write_bytes(bytes(data))
        try:
            lint_file(path, RTX)
        except Error:
            continue
