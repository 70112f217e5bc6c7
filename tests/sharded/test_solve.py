"""Propagation of shardings: the collectives it inserts, their names and notes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import irc
from irc.backends.reference import evaluate
from irc.ir.core import Module
from irc.ops.collective import Exchange
from irc.passes.shard.place import grouped
from irc.pipeline import run_pipeline
from tests.fresh import fresh
from tests.sharded.checking import check, collectives, drawn, plan_file, sharded
from tests.sharded.layers import LAYERS
from tests.sharded.models import MODELS

# (all_reduces, all_gathers) over two ranks after fuse-collectives
FEWEST: dict[str, tuple[int, int]] = {
    **dict.fromkeys(["biases", "cross", "alibi_5", "plain_4", "normed_heads_8_2"], (1, 0)),
    **dict.fromkeys(["interleaved_5", "mlp_gelu", "heads"], (1, 0)),
    **dict.fromkeys(["experts", "gated_expert", "capacity"], (1, 1)),  # the router's scores
    **dict.fromkeys(["layer_norm", "group_norm"], (1, 1)),
    "gpt2_5": (2, 2),  # of the logits and of what attention gives; of rows, and of the last inputs
    "bert": (3, 1),  # and the pooler's result
    "tied": (2, 1),
}


@pytest.mark.parametrize("name", FEWEST)
def test_no_block_has_superfluous_collectives(name: str, tmp_path: Path) -> None:
    case = LAYERS[name]
    module = case.module()
    plan = f', plan="{plan_file(tmp_path, *case.plan)}"' if case.plan else ""
    text = f'canonicalize, shard{{mesh="tp=2"{plan}}}, fuse-collectives, dce'
    run_pipeline(module, text)
    reduces, gathers = FEWEST[name]
    wanted = {"all_reduce": reduces, "all_gather": gathers}
    assert collectives(module) == {kind: count for kind, count in wanted.items() if count}


X = "%x: f32[B, 4, 6]"
W = 'weight @w : f32[6, 6] = random("w", 1, 0.5)'


def function(results: str, *lines: str, args: str = X, weights: str = "") -> str:
    """A module of some operations; without a return it returns the last one."""
    last = lines[-1].split()[0]
    body = "\n".join(lines) if "return" in last else "\n".join([*lines, f"return {last}"])
    inside = f"func @forward({args}) -> ({results}) {{\n{body}\n}}"
    return f"module @m dims(B=1:2:8) {{\n{weights}\n{inside}\n}}"


def same(text: str, mesh: str, rows: list[str], folder: Path) -> Module:
    """The sharded module; every rank, in both views, must have the results of the unsharded one."""
    module, _ = sharded(text, mesh, plan_file(folder, *rows))
    unsharded = irc.parse(text)
    inputs = drawn(unsharded, fresh(41))
    wanted = evaluate(unsharded, inputs)
    check(module, inputs, wanted, "sharded")
    local = irc.parse(str(module))
    run_pipeline(local, "localize, cse, dce")
    check(local, inputs, wanted, "local")
    return module


# The ids are sharded over the axis of their table.
LOOKUP = """module @m dims(B=1:2:8) {
  weight @t : f32[5, 6] = random("t", 1, 0.5)
  func @forward(%ids: i32[B, 3]) -> (f32[B, 3, 6]) {
    %a = embedding %ids, @t : f32[B, 3, 6]
    return %a
  } }"""
COMPLETE = function(
    "f32[B, 6, 4], f32[B, 4, 6]",
    "%a = linear %x, @w : f32[B, 4, 6]",
    "%b = transpose %a {order=[0, 2, 1]} : f32[B, 6, 4]",
    "%c = exp %a : f32[B, 4, 6]",
    "return %b, %c",
    weights=W,
)
ADDITIVE = function(
    "f32[B, 6]",
    "%a = linear %x, @w : f32[B, 4, 6]",
    "%b = add %a, %a : f32[B, 4, 6]",
    "%c = reduce_sum %b {dims=[1]} : f32[B, 6]",
    weights=W,
)
# 5 * 4 elements become 10 * 2 and 10 * 2 become 5 * 4: neither sharding passes through.
GROUPS = function(
    "f32[10, 2, 5, 4]",
    "%y = reshape %x {shape=[10, 2, 5, 4]} : f32[10, 2, 5, 4]",
    args="%x: f32[5, 4, 10, 2]",
)
BATCH = function(
    "f32[B, 3, 8]", "%y = reshape %x {shape=[B, 3, 8]} : f32[B, 3, 8]", "%z = exp %y : f32[B, 3, 8]"
)
# The shards of a weight take precedence over those of the tokens, also transposed.
VIEW = function(
    "f32[4, B, 6]",
    "%t = transpose @e {order=[0, 2, 1]} : f32[4, 6, 6]",
    "%y = matmul %x, %t : f32[4, B, 6]",
    args="%x: f32[4, B, 6]",
    weights='weight @e : f32[4, 6, 6] = random("e", 1, 0.5)',
)


def outer(size: int) -> str:
    """A sum of values that are sharded over dp, and over dp.tp."""
    type = f"f32[{size}, 6]"
    return function(type, f"%a = add %x, %y : {type}", args=f"%x: {type}, %y: {type}")


COMMUNICATED = [
    (GROUPS, "ep=2,tp=2", ["x 0@ep, 2@tp"], "all_gather ep; all_gather tp"),
    (BATCH, "dp=2,tp=4", ["x 1@tp"], "all_gather tp f32[2*B_dp@dp, 4, 6]"),
    (COMPLETE, "tp=2", ["w 1@tp", "x 2@tp"], "all_reduce tp"),
    (ADDITIVE, "tp=3", ["w 1@tp", "x 2@tp"], "all_reduce tp f32[B, 6]"),
    (VIEW, "tp=2", ["e 0@tp", "x 1@tp"], "all_to_all tp; all_gather tp"),
    (LOOKUP, "dp=2", ["t 0@dp"], "all_gather dp; reduce_scatter dp"),
    (LOOKUP, "dp=2", ["t 1@dp"], "all_gather dp; all_to_all dp"),
    (outer(8), "dp=2,tp=2", ["x 0@dp", "y 0@dp.tp"], "all_gather tp"),
    (outer(6), "dp=2,tp=2", ["x 0@dp", "y 0@dp.tp"], "all_gather dp.tp; shard_slice dp"),
]


@pytest.mark.parametrize(("text", "mesh", "rows", "wanted"), COMMUNICATED)
def test_collectives(text: str, mesh: str, rows: list[str], wanted: str, tmp_path: Path) -> None:
    sent = [op for op in same(text, mesh, rows, tmp_path).ops() if isinstance(op, Exchange)]
    for op, begin in zip(sent, wanted.split("; "), strict=True):
        assert f"{op.opname} {op.axis} {op.result.type}".startswith(begin)


@pytest.mark.parametrize("mesh", ["dp=2", "dp=3"])
def test_the_largest_of_a_sharded_symbolic_dimension(mesh: str, tmp_path: Path) -> None:
    text = function(
        "i32[4, 6], f32[R, 4, 6], i32[1, 4, 6]",
        "%p = argmax %x {dim=0} : i32[4, 6]",
        "%v, %q = topk %x {k=R, dim=0} : f32[R, 4, 6], i32[R, 4, 6]",
        "%w, %r = topk %x {k=1, dim=0} : f32[1, 4, 6], i32[1, 4, 6]",
        "return %p, %v, %r",
        args="%x: f32[R, 4, 6]",
    )
    same(text.replace("B=", "R="), mesh, ["x 0@dp"], tmp_path)
    symbolic = '%p, %q = sharded_topk %x {k=1, dim=0, axis="dp"} : f32[1, 4], i32[1, 4]'
    with pytest.raises(irc.Error, match=r"dimension 0 of f32\[B@dp, 4\] has no fixed size; gather"):
        irc.parse(f"module @m mesh({mesh}) {{ func @f(%x: f32[B@dp, 4]) -> () {{ {symbolic} }} }}")


@pytest.mark.parametrize("number", [np.inf, -np.inf, 0.0, 2.0])
@pytest.mark.parametrize("mesh", ["tp=2", "tp=3", "tp=4"])
def test_infinite_factors_and_divisors_of_zero(number: float, mesh: str, tmp_path: Path) -> None:
    text = function(
        "f32[B, 6], f32[B, 6], f32[B, 6]",
        "%a = linear %x, @w : f32[B, 6]",
        "%b = mul %a, %s : f32[B, 6]",
        "%c = linear %x, @w : f32[B, 6]",
        "%d = div %c, %s : f32[B, 6]",
        "%e = linear %x, @w : f32[B, 6]",
        "%half = constant {values=[0.5]} : f32[]",
        "%f = mul %e, %half : f32[B, 6]",
        "%g = div %f, %half : f32[B, 6]",
        "return %b, %d, %g",
        args="%x: f32[B, 6], %s: f32[B, 6]",
        weights=W,
    )
    module, _ = sharded(text, mesh, plan_file(tmp_path, "w 1@tp", "x 1@tp"))
    inputs = drawn(module, fresh(43)) | {"s": np.full((6, 6), number, np.float32)}
    wanted = evaluate(irc.parse(text), inputs)
    assert not any(np.isnan(array).any() for array in wanted.values())
    run_pipeline(module, "localize")
    check(module, inputs, wanted, "local")
    last = [type(value.producer).__name__ for value in module.main.returned]
    assert last == ["Mul", "Div", "AllReduce"], "one sum waits for a number that is neither"


def test_names_and_notes_of_collectives(tmp_path: Path) -> None:
    text = function(
        "f32[B, 4, 6]",
        "%a = linear %x, @w : f32[B, 4, 6]",
        "%b = mul %a, %x : f32[B, 4, 6]",
        "%c = exp %b : f32[B, 4, 6]",
        weights=W,
    )
    module, stats = sharded(text, "tp=2", plan_file(tmp_path, "w 0@tp"))
    names = [op.result.name for op in module.ops() if op.opname != "return"]
    assert names == ["a", "x_part", "b", "c", "c_full"]
    assert stats.notes == [
        f"@w is f32[6@tp, 6]: {tmp_path}/plan.txt:1",
        "shard_slice of %x, which is f32[B, 4, 6]: mul has it sharded in another operand",
        "all_gather of %c, which is f32[B, 4, 6@tp]: a result is replicated",
    ]


@pytest.mark.parametrize(("first", "state"), [("%s", "f32[B, 6]"), ("%x", "f32[B, 6@tp]")])
def test_a_state_is_sharded_unless_it_was_used_replicated(
    first: str, state: str, tmp_path: Path
) -> None:
    text = function(
        "y: f32[B, 6], s: f32[B, 6] aliases %s",
        f"%a = exp {first} : f32[B, 6]",
        "%b = linear %a, @w : f32[B, 6]",
        "%c = add %s, %b : f32[B, 6]",
        "return %a, %c",
        args="%x: f32[B, 6], %s: f32[B, 6]",
        weights=W,
    )
    module = same(text, "tp=2", ["w 0@tp"], tmp_path)
    assert str(module.main.args[1].type.global_type) == state


def test_notes_of_layers_are_grouped() -> None:
    module = MODELS["five_layers"]()
    (step,) = run_pipeline(module, 'shard{mesh="tp=3"}')
    told = [note for note in step.stats.notes if "mlp.up_proj" in note]
    assert told == [
        "@model.layers.*.mlp.up_proj.weight is f32[22@tp, 24]: auto: column-parallel, contracted "
        "with @model.layers.*.mlp.down_proj.weight (row-parallel it would take 8 us more) (5 times)"
    ]
    assert "%k* is f32[B, 3@tp, C, 4]: it follows cache_update (5 times)" in step.stats.notes
    assert len(step.stats.notes) < 25


def test_notes_that_differ_in_more_than_a_name_are_not_grouped() -> None:
    notes = ["@a.1.w is f32[2]", "@a.2.w is f32[2]", "@a.3.w is f32[3]", "in /tmp/x1/a.txt:2: b"]
    assert grouped(notes) == ["@a.*.w is f32[2] (2 times)", *notes[2:]]
    assert grouped(["%k1 (m.py:3 in layers.1.attn)"] * 2) == ["%k1 (m.py:3 in layers.1.attn)"]


def test_functions_that_share_weights(tmp_path: Path) -> None:
    text = """module @m dims(B=1:2:8) {
      weight @up : f32[5, 6] = random("u", 1, 0.5)
      weight @down : f32[6, 5] = random("d", 1, 0.5)
      func @other(%x: f32[B, 6]) -> (f32[B, 5]) {
        %a = linear %x, @up : f32[B, 5]
        return %a
      }
      func @forward(%x: f32[B, 6]) -> (f32[B, 6]) {
        %a = linear %x, @up : f32[B, 5]
        %b = linear %a, @down : f32[B, 6]
        return %b
      } }"""
    module, _ = sharded(text, "dp=2,tp=2", plan_file(tmp_path, "up 0@tp"))
    run_pipeline(module, "localize")
    given = drawn(irc.parse(text), fresh(43))
    for name in ("forward", "other"):
        wanted = evaluate(irc.parse(text), given, function=name)["result0"]
        got = evaluate(module, given, function=name)["result0"]
        assert np.max(np.abs(got - wanted)) <= 1e-5


def narrow(size: int) -> str:
    """A layer of fewer features than there are ranks."""
    wide = f"f32[B, 4, {size}]"
    return function(
        f"f32[B, 4, 6], {wide}, f32[B, 4]",
        f"%a = linear %x, @up : {wide}",
        f"%b = exp %a : {wide}",
        "%c = linear %b, @down : f32[B, 4, 6]",
        "%d = reduce_sum %b {dims=[2]} : f32[B, 4]",
        "return %c, %b, %d",
        weights=f'weight @up : f32[{size}, 6] = random("u", 1, 0.5)\n'
        f'weight @down : f32[6, {size}] = random("d", 1, 0.5)',
    )


def vectors(size: int) -> str:
    """The place of the largest of a weight, and a weight in another shape."""
    return function(
        "i32[], f32[6], f32[60]",
        "%a = argmax @v : i32[]",
        "%b = reduce_max @m {dims=[0]} : f32[6]",
        "%c = reshape @w {shape=[60]} : f32[60]",
        "return %a, %b, %c",
        args="",
        weights=f'weight @v : f32[{size}] = random("v", 5, 0.4)\n'
        f'weight @m : f32[{size}, 6] = random("m", 6, 0.4)\n'
        'weight @w : f32[12, 5] = random("w", 5, 0.4)',
    )


SUMMED = function(
    "f32[B, 4, 6]",
    "%a = linear %x, @w, bias=@b : f32[B, 4, 6]",
    weights=f'{W}\nweight @b : f32[6] = random("b", 1, 0.5)',
)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("text", "mesh", "rows"),
    [
        *((narrow(size), "tp=3", ["up 0@tp", "down 1@tp"]) for size in (0, 1, 2)),
        *((narrow(size), "dp=2,tp=4", ["up 1@tp", "down 0@tp"]) for size in (0, 1, 2)),
        *((vectors(size), "tp=4", ["v 0@tp", "m 0@tp", "w replicated"]) for size in (10, 12)),
        (vectors(12), "tp=6", ["v 0@tp", "w 0@tp"]),
        (SUMMED, "dp=2,tp=2", ["w 1@tp", "b 0@tp"]),
        (SUMMED, "dp=2,tp=2", ["w 0@tp, 1@dp", "b 0@tp", "x replicated"]),
    ],
)
def test_unusual_weights(text: str, mesh: str, rows: list[str], tmp_path: Path) -> None:
    same(text, mesh, rows, tmp_path)
