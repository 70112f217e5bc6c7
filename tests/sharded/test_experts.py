"""Mixtures of experts over every axis, and when slots may be numbered per rank."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import irc
from irc.ir.dtypes import numpy_dtype
from irc.pipeline import run_pipeline
from tests.fresh import fresh
from tests.sharded.checking import drawn, plan_file, spread
from tests.sharded.layers import LAYERS
from tests.sharded.models import mixtral
from tests.sharded.test_models import check

OVER_DP = (
    "*experts.gate 0@dp, 1@tp",
    "*experts.up 0@dp, 1@tp",
    "*experts.down 0@dp, 2@tp",
    "megatron",
)


@pytest.mark.parametrize(
    ("experts", "chosen", "mesh"),
    [(1, 1, "ep=2"), (3, 1, "ep=2,tp=2"), (7, 3, "ep=4"), (2, 2, "ep=3,tp=2")],
)
def test_other_numbers_of_experts(experts: int, chosen: int, mesh: str) -> None:
    check(mixtral(experts, chosen, num_hidden_layers=1), mesh)


@pytest.mark.parametrize(("experts", "mesh"), [(4, "dp=2"), (5, "dp=2,tp=2")])
def test_experts_sharded_over_dp_exchange_tokens(experts: int, mesh: str, tmp_path: Path) -> None:
    module = mixtral(experts)
    check(module, mesh, plan=plan_file(tmp_path, *OVER_DP))
    exchanges = [op for op in module.ops() if op.opname == "all_to_all"]
    assert len(exchanges) == 4  # to the experts and back, in two layers
    assert all(op.operands[0].type.ndim == 3 for op in exchanges)
    assert {op.attributes["parts"] for op in module.ops() if op.opname == "moe_slots"} == {1}
    assert not any(op.opname == "all_gather" for op in module.ops()) or "tp" in mesh


@pytest.mark.parametrize("mesh", ["ep=2", "tp=3", "dp=2,ep=2", "ep=2,tp=2"])
@pytest.mark.parametrize("name", ["experts", "clamped_experts", "capacity"])
def test_the_experts_of_a_rank_become_one_operation(name: str, mesh: str) -> None:
    module = LAYERS[name].module()
    spread(module, drawn(module, fresh(23)), mesh)
    kinds = [op.opname for op in module.ops()]
    assert kinds.count("experts") == 1 and "moe_dispatch" not in kinds
    assert kinds.count("moe_combine") == (name == "clamped_experts")  # the bias of the results


def test_the_buffer_of_a_rank_holds_its_own_experts_only() -> None:
    module = mixtral()
    run_pipeline(module, 'shard{mesh="ep=2"}, localize')
    buffers = [op.result.type for op in module.ops() if op.opname == "moe_dispatch"]
    assert {str(type) for type in buffers} == {"f32[3, B*S, 24] of f32[5@ep, B*S, 24]"}


@pytest.mark.parametrize("mesh", ["dp=3", "ep=2", "dp=2,ep=2"])
@pytest.mark.parametrize("name", ["experts", "capacity"])
def test_mixtures_stay_where_expand_would_lose_the_tokens_of_a_rank(name: str, mesh: str) -> None:
    module = LAYERS[name].module()
    spread(module, drawn(module, fresh(22)), mesh, after=("expand", "localize", "expand"))
    assert {"moe_dispatch", "moe_combine"} <= {op.opname for op in module.ops()}
    with pytest.raises(irc.Error, match="moe_combine stays composite where there are several"):
        run_pipeline(module, 'expand{ops=["moe_combine"]}')


def test_a_capacity_counts_the_tokens_of_all_ranks() -> None:
    case = LAYERS["capacity"]
    for mesh in ("dp=2", "dp=3,tp=2", "ep=2", "dp=2,ep=2"):
        module = case.module()
        stats = spread(module, drawn(module, fresh(21)), mesh)
        told = [note for note in stats.notes if note.startswith("moe_slots has a capacity")]
        assert len(told) == ("dp" in mesh)


BODY = """%slots = moe_slots %chosen {experts=5} : i32[T, 2]
    %buffer = moe_dispatch %x, %chosen, %slots {experts=5} : f32[5, T, 4]
    %done = matmul %buffer, @w : f32[5, T, 4]
    %y = moe_combine %done, %chosen, %slots, %p : f32[T, 4]"""
ROUTED = """module @m dims(T=2:6:12) {
  weight @w : f32[5, 4, 4] = random("w", 1, 0.5)
  func @forward(%x: f32[T, 4], %chosen: i32[T, 2], %p: f32[T, 2]ARGS) -> (RESULTS) {
    BODY
    return RETURNED
  }
}"""


def routed(
    body: str = BODY, returned: str = "%y", results: str = "f32[T, 4]", args: str = ""
) -> str:
    """A module of a mixture of five experts."""
    text = ROUTED.replace("BODY", body).replace("RETURNED", returned).replace("ARGS", args)
    return text.replace("RESULTS", results)


def routed_inputs(tokens: int = 6) -> dict[str, np.ndarray]:
    """Random tokens with two experts each and their weights."""
    rng = fresh(22)
    chosen = np.array([rng.permutation(5)[:2] for _ in range(tokens)], np.int32)
    return {
        "x": rng.standard_normal((tokens, 4), np.float32),
        "chosen": chosen,
        "p": rng.random((tokens, 2), np.float32),
    }


def parts_of(text: str, mesh: str, inputs: dict[str, np.ndarray]) -> set[int]:
    """The parts of moe_slots after sharding, which must keep the results."""
    module = irc.parse(text)
    run_pipeline(module, f'shard{{mesh="{mesh}"}}')
    spread(irc.parse(text), inputs, mesh)
    return {op.attributes["parts"] for op in module.ops() if op.opname == "moe_slots"}


MASKED = (
    BODY.replace(
        "%buffer",
        '%none = full {value=-1, dtype="i32"} : i32[]\n    '
        '%odd = constant {values=[1, 3], shape=[2], dtype="i32"} : i32[2]\n    '
        "%some = lt %chosen, %odd : bool[T, 2]\n    "
        "%kept = where %some, %slots, %none : i32[T, 2]\n    %buffer",
        1,
    )
    .replace("%chosen, %slots {", "%chosen, %kept {")
    .replace("%slots, %p", "%kept, %p")
)
ALONG = BODY.replace(
    "%done = matmul %buffer",
    "%sums = cumsum %buffer {dim=1} : f32[5, T, 4]\n    %done = matmul %sums",
)
PLACED = BODY.replace(
    "%done = matmul %buffer",
    '%places = iota {size=T, dtype="f32"} : f32[T]\n    '
    "%column = reshape %places {shape=[T, 1]} : f32[T, 1]\n    "
    "%moved = add %buffer, %column : f32[5, T, 4]\n    %done = matmul %moved",
)
TURNED = BODY.replace(
    "%done = matmul %buffer, @w : f32[5, T, 4]",
    "%turned = transpose %buffer {order=[1, 0, 2]} : f32[T, 5, 4]\n    "
    "%back = transpose %turned {order=[1, 0, 2]} : f32[5, T, 4]\n    "
    "%done = matmul %back, @w : f32[5, T, 4]",
)
SUMMED = BODY + "\n    %sum = reduce_sum %buffer {dims=[1]} : f32[5, 4]"
DOUBLE = BODY.replace("%y = ", "%z = mul %done, %buffer : f32[5, T, 4]\n    %y = ").replace(
    "moe_combine %done", "moe_combine %z"
)
OTHERS = BODY.replace("dispatch %x, %chosen", "dispatch %x, %others")
SET = (
    routed(BODY.replace("{experts=5}", "{experts=5, parts=6}").replace("%p :", "%p {parts=6} :"))
    .replace("[T,", "[6*T,")
    .replace(" T, 4]", " 6*T, 4]")
    .replace("T=2:6:12", "T=1:1:2")
)
PARTS = {
    "slots per rank": (routed(), 2),
    "products of two buffers": (routed(DOUBLE), 2),
    "parts set by the user": (SET, 6),
    "slots for other choices": (routed(OTHERS, args=", %others: i32[T, 2]"), 1),
    "slots that are a result": (routed(returned="%y, %slots", results="f32[T, 4], i32[T, 2]"), 1),
    "slots that are changed": (routed(MASKED), 1),
    "a buffer that is a result": (
        routed(returned="%y, %done", results="f32[T, 4], f32[5, T, 4]"),
        1,
    ),
    "a sum along the slots": (routed(ALONG), 1),
    "numbers of the slots": (routed(PLACED), 1),
    "a transposed buffer": (routed(TURNED), 1),
    "a sum over the slots": (routed(SUMMED, "%y, %sum", "f32[T, 4], f32[5, 4]"), 1),
}


@pytest.mark.parametrize("name", PARTS)
def test_slots_are_numbered_per_rank_unless_their_numbers_matter(name: str) -> None:
    text, parts = PARTS[name]
    inputs = routed_inputs()
    if "%others" in text:
        inputs["others"] = np.roll(inputs["chosen"], 1, axis=1)
    assert parts_of(text, "dp=2", inputs) == {parts}
    assert parts_of(text, "dp=3", inputs) == {3 if parts == 2 else parts}


@pytest.mark.parametrize("index", ["i32", "i64"])
def test_a_buffer_of_some_of_the_experts(index: str, tmp_path: Path) -> None:
    body = BODY.replace(
        "%chosen, %slots {experts=5} : f32[5,", "%chosen, %slots, first=%n {experts=3} : f32[3,"
    )
    body = body.replace("@w : f32[5,", "@w : f32[3,").replace("%slots, %p", "%slots, %p, first=%n")
    text = routed(body, args=f", %n: {index}[]").replace("@w : f32[5,", "@w : f32[3,", 1)
    inputs = routed_inputs() | {"n": np.array(1, numpy_dtype(index))}
    plan = plan_file(tmp_path, "w 0@ep")
    module = irc.parse(text)
    spread(module, inputs, "ep=2", plan=plan)
    (buffer,) = (op for op in module.ops() if op.opname == "moe_dispatch")
    assert str(buffer.result.type) == "f32[2, T, 4] of f32[3@ep, T, 4]"


def test_choices_that_pad_a_shard_take_no_slot(tmp_path: Path) -> None:
    """Two choices over three ranks: the third has one that is nothing, not expert 0 in slot 0."""
    inputs = routed_inputs()
    inputs["x"][inputs["chosen"][:, 0] == inputs["chosen"][0, 0]] = np.inf
    for rows in (["p 1@tp"], ["chosen 1@tp", "p 1@tp"]):
        spread(irc.parse(routed()), inputs, "tp=3", plan=plan_file(tmp_path, *rows))
