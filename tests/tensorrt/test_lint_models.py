"""The linter on models as they come: places, folders, functions, inner graphs, our own emission."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from irc.backends.tensorrt.builder.library import find
from irc.backends.tensorrt.lint import RULES, Finding, lint, lint_file
from irc.backends.tensorrt.lint.known import (
    IMPORTED,
    MICROSOFT,
    NEED_PLUGINS,
    UNSUPPORTED,
)
from irc.backends.tensorrt.target import FLAVOURS, Target
from irc.errors import Error
from tests.cli.runner import works
from tests.layout import ROOT
from tests.tensorrt.lint_cases_graph import branch
from tests.tensorrt.lint_models import F16, F32, constant, model, node, value

RTX = Target.parse("tensorrt-rtx-1.7/sm_80+sm_89")
ONE = "x:f16[4,8]"


def named(findings: list[Finding]) -> list[str]:
    return [each.rule for each in findings]


# ------------------------------------------------------------------ places


def test_a_finding_names_the_operation_and_its_line() -> None:
    bad = node("Cast", "x", "t", to=TensorProto.INT16)
    bad.name = "model.layers.0/cast/Cast.t"
    bad.metadata_props.add(key="loc", value="llama.py:7")
    (found,) = lint(model([bad, node("Relu", "x")], ONE), RTX)
    assert (found.op, found.source) == ("model.layers.0/cast", "llama.py:7")
    assert str(found).startswith("error: llama.py:7 model.layers.0/cast: a Cast to int16")
    assert str(found).endswith("[cast-to]")


def test_a_finding_names_the_line_that_torch_wrote() -> None:
    bad = node("Cast", "x", "t", to=TensorProto.INT16)
    bad.name = "node_cast_3"
    trace = 'File "run.py", line 1, in f\nFile "net.py", line 12, in forward\n  y = x.short()'
    bad.metadata_props.add(key="pkg.torch.onnx.stack_trace", value=trace)
    (found,) = lint(model([bad, node("Relu", "x")], ONE), RTX)
    assert (found.node, found.op, found.source) == ("node_cast_3", "", "net.py:12")


def test_errors_come_first() -> None:
    body = [node("Cast", "x", "d", to=TensorProto.DOUBLE), node("Cast", "x", to=TensorProto.INT16)]
    found = lint(model(body, ONE, "y:i16[4,8]"), RTX)
    assert [each.severity for each in found] == ["error", "error", "warning"]


# ------------------------------------------------------------------ types


def test_types_are_told_through_nodes_that_onnx_does_not_know() -> None:
    around = {"collective_operation": "all_gather", "reduce_op": "none", "root": -1}
    body = [
        node("Cast", "x", "c", to=F32),
        node("DistCollective", "c", "g", group_size=2, groups=[0, 1], nb_rank=2, **around),
        node("Relu", "x", "r"),
        node("Concat", "r r", "rr", axis=0),
        node("Add", "g rr"),
    ]
    assert named(lint(model(body, ONE, "y:f16[8,8]"), RTX)) == ["mixed-dtypes"]
    around = {"collective_operation": "reduce_scatter", "reduce_op": "sum", "root": -1}
    body[1] = node("DistCollective", "c", "g", group_size=2, groups=[0, 1], nb_rank=2, **around)
    body[4] = node("DistCollective", "g", group_size=3, groups=[0, 1, 2], nb_rank=3, **around)
    found = lint(model(body, ONE, "y:f32[2,8]"), RTX)
    assert "collective-dim-0" in named(found)  # 2 rows are left of 4, and cannot be cut into 3


def test_weights_are_not_read(tmp_path: Path) -> None:
    weight = TensorProto(name="w", data_type=TensorProto.INT8, dims=[4096, 4096])
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="w.bin")
    with (tmp_path / "w.bin").open("wb") as file:
        file.truncate(4096 * 4096)
    scale = constant("s:f16[4096]", 0.5)
    body = [node("DequantizeLinear", "w s", "d", axis=1), node("MatMul", "x d")]
    path = tmp_path / "m.onnx"
    proto = model(body, "x:f16[4,4096]", "y:f16[4,4096]", [weight, scale])
    path.write_bytes(proto.SerializeToString())
    assert lint_file(path, RTX) == []


def test_constants_outside_the_model_are_read(tmp_path: Path) -> None:
    scale = numpy_helper.from_array(np.full(8, -1, np.float16), "s")
    (tmp_path / "s.bin").write_bytes(scale.raw_data)
    scale.ClearField("raw_data")
    scale.data_location = TensorProto.EXTERNAL
    scale.external_data.add(key="location", value="s.bin")
    body = [node("DequantizeLinear", "w s", "d", axis=1), node("MatMul", "x d")]
    proto = model(body, ONE, "y:f16[4,8]", [constant("w:i8[8,8]"), scale])
    assert lint(proto, RTX) == []
    assert named(lint(proto, RTX, [tmp_path])) == ["scale-positive"]


# ------------------------------------------------------------------ structure


def test_graphs_inside_nodes_are_read() -> None:
    inner = branch(node("Cast", "x", "t", to=TensorProto.INT16))
    plain = branch(node("Relu", "x", "r"))
    body = node("If", "c", then_branch=inner, else_branch=plain)
    assert named(lint(model(body, f"{ONE} c:bool[]"), RTX)) == ["cast-to"]


def test_bodies_of_functions_are_read() -> None:
    proto = model(node("Short", "x", "y", "mine"), ONE, "y:f16[4,8]")
    body = [
        helper.make_node("Cast", ["a"], ["b"], to=TensorProto.INT16),
        helper.make_node("Cast", ["b"], ["c"], to=F16),
    ]
    opset = helper.make_opsetid("", 24)
    proto.functions.append(helper.make_function("mine", "Short", ["a"], ["c"], body, [opset]))
    assert named(lint(proto, RTX)) == ["cast-to"]


@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.parametrize("operands", ["", "x", "x x x x x x x x"])
def test_no_rule_fails_on_operands_that_make_no_sense(operands: str, typed: bool) -> None:
    kinds = sorted({*UNSUPPORTED, *IMPORTED, "IrcCollective"})
    body = [node(kind, operands, f"{kind.lower()} {kind.lower()}2") for kind in kinds]
    proto = model([*body, node("Relu", "x")], ONE)
    if typed:
        names = [name for each in body for name in each.output]
        proto.graph.value_info.extend(value(f"{name}:f16[4,8]") for name in names)
    else:
        proto.graph.input[0].type.ClearField("tensor_type")
    assert {"unsupported-operator", "untyped"} <= set(named(lint(proto, RTX)))


# ------------------------------------------------------------------ what is asked for


def test_a_rule_that_does_not_exist_is_named() -> None:
    with pytest.raises(Error, match="no rule is called 'cast-too'; did you mean 'cast-to'"):
        lint(model(node("Relu", "x"), ONE), RTX, ignore=["cast-too"])


def test_what_is_no_model_is_said(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    with pytest.raises(Error, match=r"cannot read .*m\.onnx: No such file"):
        lint_file(path, RTX)
    path.write_bytes(b"\xff" * 100)
    with pytest.raises(Error, match="is not an ONNX model"):
        lint_file(path, RTX)
    path.write_bytes(b"")
    with pytest.raises(Error, match="it has no graph"):
        lint_file(path, RTX)


def test_rules_hold_for_flavours_versions_and_architectures() -> None:
    def holding(text: str) -> set[str]:
        target = Target.parse(text)
        return {rule.name for rule in RULES.values() if rule.holds(target)}

    assert "collective-silent" in holding("tensorrt-11.0/sm_90")
    assert "collective-silent" not in holding("tensorrt-11.1/sm_90")
    assert "collective-silent" not in holding("tensorrt-rtx-1.7/sm_89")
    assert "native-cache-wrong" in holding("tensorrt-11.2/sm_121")
    assert "native-cache-wrong" not in holding("tensorrt-11.3/sm_121")
    assert "native-cache-wrong" not in holding("tensorrt-11.2/sm_90")
    assert "attention-ranks" not in holding("tensorrt-11.4/sm_90")


def test_an_error_that_was_not_seen_on_a_flavour_is_a_warning_there() -> None:
    proto = model(node("NonZero", "x"), ONE, "y:i64[2,N]")
    said = {text: lint(proto, Target.parse(text))[0].severity for text in FLAVOURS}
    assert said == {"tensorrt": "warning", "tensorrt-rtx": "error"}


def test_every_rule_says_where_its_fact_is_from() -> None:
    for rule in RULES.values():
        assert rule.reason.endswith("."), rule
        assert re.search(r"http|ONNX|TensorRT|irc\.", rule.source), rule


# ------------------------------------------------------------------ against the library


@pytest.mark.needs_rtx
def test_the_table_of_operators_is_that_of_the_parser() -> None:
    trt = find("tensorrt-rtx").module
    logger = trt.Logger(trt.Logger.ERROR)
    parser = trt.OnnxParser(trt.Builder(logger).create_network(0), logger)
    kinds = {each.name for each in onnx.defs.get_all_schemas_with_history() if not each.domain}
    kinds |= IMPORTED | UNSUPPORTED.keys()
    said = {kind for kind in kinds if parser.supports_operator(kind)}
    assert said & UNSUPPORTED.keys() == set()
    assert said == set(IMPORTED)
    assert MICROSOFT | NEED_PLUGINS.keys() <= said


@pytest.mark.parametrize(
    "words",
    [
        ("--mesh", "tp=1"),
        ("--mesh", "tp=2", "--collectives", "native"),
        ("--mesh", "tp=2,pp=2", "--collectives", "plugin"),
        ("--mesh", "tp=3", "--dtype", "bf16", "--weights", "outside"),
    ],
)
def test_what_irc_emits_is_clean(words: tuple[str, ...], tmp_path: Path) -> None:
    tiny = ROOT / "examples" / "tiny_llama"
    to = ["--backend", "tensorrt-rtx", "--no-build", "-o", tmp_path / "out"]
    works("compile", ROOT / "examples" / "llama.py", "--checkpoint", tiny, *to, *words)
    paths = sorted((tmp_path / "out").glob("*.onnx"))
    assert paths
    for path in paths:
        assert lint_file(path, Target.parse("tensorrt-rtx")) == []
