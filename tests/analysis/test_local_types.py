"""The global types of local values: changes of one small module, refused or valid."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from irc.errors import Error
from irc.frontends.models.families.llama import LLAMA
from irc.ir.core import Module, Op
from irc.ir.declare import REGISTRY, Operand, operation
from irc.ir.types import TensorType
from irc.ir.verify import verify
from irc.ops import AllReduce
from irc.pipeline import PASSES, Pass, Stats, register, run_pipeline
from irc.text import parse_module
from tests.sharded.test_speed import LLAMA_70B

MLP = """
module @m local mesh(dp=2, tp=2) dims(B=1:2:4) {
  weight @up : f32[8, 4] of f32[16@tp, 4] = random("up", 7, 0.5, [16, 4]).shard(0, tp)
  weight @down : f32[4, 8] of f32[4, 16@tp] = random("down", 7, 0.5, [4, 16]).shard(1, tp)
  weight @bias : f32[4] = random("bias", 7, 0.5)
  weight @table : f32[5, 4] of f32[10@tp, 4] = random("table", 7, 0.5, [10, 4]).shard(0, tp)
  func @forward(%x: f32[B, 4], %ids: i32[B], %k: f32[B, 2] of f32[B, 4@tp])
    -> (y: f32[B, 4], k: f32[B, 2] of f32[B, 4@tp] aliases %k) {
    %h = linear %x, @up : f32[B, 8] of f32[B, 16@tp] loc("model.py":1 "mlp")
    %a = silu %h : f32[B, 8] of f32[B, 16@tp] loc("model.py":2 "mlp")
    %t = linear %a, @down : f32[B, 4]{sum tp} loc("model.py":3 "mlp")
    %s = all_reduce %t {axis="tp", group_size=2} : f32[B, 4] loc("model.py":4 "mlp")
    %y = add %x, %s : f32[B, 4] loc("model.py":5)
    %n = neg %k : f32[B, 2] of f32[B, 4@tp] loc("model.py":6)
    return %y, %n loc("model.py":7)
  }
}
"""
RANK = '%r = rank {axis="tp"} : i32[]{varies tp}\n'
SUM = '%s = all_reduce %t {axis="tp", group_size=2}'
GROUP = '{axis="tp", group_size=2'


def before(line: str, *lines: str) -> tuple[str, str]:
    """Lines put in front of one."""
    return line, "\n".join([*lines, line])


# name: (changes of the text, words of the Error)
REFUSED: dict[str, tuple[list[tuple[str, str]], str]] = {
    "a lost all_reduce": ([("add %x, %s", "add %x, %t")], "mixes a partial sum over tp"),
    "a lost all_gather": (
        [("return %y", "return %h"), ("(y: f32[B, 4]", "(y: f32[B, 8]")],
        r"returns \(f32\[B, 8\] of f32\[B, 16@tp\]",
    ),
    "reduced twice": (
        [before("%y = add %x, %s", f"%z = all_reduce %s {GROUP}}} : f32[B, 4]")],
        "the same on all ranks of tp already; that makes 2 times the value: leave it out",
    ),
    "reduced over the wrong axis": ([(SUM, SUM.replace("tp", "dp"))], "same on all ranks of dp"),
    "an argument is reduced": ([("all_reduce %t", "all_reduce %x")], "the same on all ranks of tp"),
    "a sum that is broadcast": (
        [("all_reduce %t", "broadcast %t")],
        "must be replicated on the root",
    ),
    "a maximum of a sum": (
        [(SUM, '%s = all_reduce %t {axis="tp", op="max", group_size=2}')],
        "takes the max of a partial sum over tp: only op=sum completes it",
    ),
    "a sum of shards": (
        [before(SUM, f"%b = all_reduce %a {GROUP}}} : f32[B, 8]")],
        "takes the sum of different shards, those of the ranks of tp",
    ),
    "a softmax over shards": (
        [before(SUM, "%w = softmax %a {dim=1} : f32[B, 8] of f32[B, 16@tp]")],
        "softmax needs dimension 'd1' replicated",
    ),
    "shards meet a complete value": (
        [("8] of f32[4, 16@tp] =", "8] ="), (", [4, 16]).shard(1, tp)", ")")],
        "'k' is sharded over tp in x and replicated in weight",
    ),
    "a weight that is cut in another dimension": (
        [("[16, 4]).shard(0, tp)", "[8, 8]).shard(1, tp)")],
        r"weight @up is f32\[8, 4\] of f32\[16@tp, 4\], but .* gives f32\[8, 4\] of f32\[8, 8@tp\]",
    ),
    "a weight of one rank for all": (
        [("[16, 4]).shard(0, tp)", "[8, 4])")],
        r"weight @up is .* of f32\[16@tp, 4\], but .* gives f32\[8, 4\]",
    ),
    "a bias on every rank": (
        [("linear %a, @down", "linear %a, @down, bias=@bias")],
        "add it after the all_reduce instead",
    ),
    "a nonlinear use of a sum": (
        [before(SUM, "%w = tanh %t : f32[B, 4]{varies tp}")],
        "tanh needs complete operands, but x is a partial sum over tp",
    ),
    "the rank in a result": (
        [
            before("%y = add", RANK, '%f = cast %r {dtype="f32"} : f32[]{varies tp}'),
            ("%y = add %x, %s : f32[B, 4]", "%y = add %s, %f : f32[B, 4]"),
        ],
        r"written as f32\[B, 4\], but add gives f32\[B, 4\]\{varies tp\}",
    ),
    "the rank in a layer": (
        [
            before("%h =", RANK, '%f = cast %r {dtype="f32"} : f32[]{varies tp}'),
            before("%h =", "%v = add %x, %f : f32[B, 4]{varies tp}"),
            ("linear %x", "linear %v"),
        ],
        "mixes shards over tp with x, which varies over tp in other dimensions",
    ),
    "a lookup without the rank": (
        [before("%y =", "%e = embedding %ids, @table : f32[B, 4]{sum tp}")],
        "embedding must know where the shard of a rank of tp begins",
    ),
    "a minimum of maxima": (
        [
            before(SUM, "%w = reduce_max %a {dims=[1], keep=true} : f32[B, 1]{varies tp}"),
            before(SUM, f'%w1 = all_reduce %w {GROUP}, op="min"}} : f32[B, 1]'),
        ],
        "by reduce_max, which only op=max completes",
    ),
    "a shard of another size": (
        [("f32[8, 4] of f32[16@tp, 4]", "f32[8, 4] of f32[18@tp, 4]")],
        r"one rank's shard of f32\[18@tp, 4\] is f32\[9, 4\]",
    ),
    "another shard of a type": (
        [("(%x: f32[B, 4],", "(%x: f32[B, 4] of f32[B, 6@tp],")],
        "sharded over tp in x and replicated in",
    ),
}  # fmt: skip

ALLOWED: dict[str, list[tuple[str, str]]] = {
    "as it is": [],
    "a maximum of shards": [
        before(SUM, "%w = reduce_max %a {dims=[1], keep=true} : f32[B, 1]{varies tp}"),
        before(SUM, f'%w1 = all_reduce %w {GROUP}, op="max"}} : f32[B, 1]'),
    ],
    "a maximum of a replicated value": [
        before(SUM, f'%w = all_reduce %x {GROUP}, op="max"}} : f32[B, 4]')
    ],
    "a sum that is cast, padded and sliced": [
        before(SUM, '%s0 = cast %t {dtype="bf16"} : bf16[B, 4]{sum tp}'),
        before(SUM, "%s1 = pad %s0 {before=[0, 0], after=[0, 2]} : bf16[B, 6]{sum tp}"),
        before(SUM, f"%s2 = reduce_scatter %s1 {GROUP}, dim=1}} : bf16[B, 3] of bf16[B, 6@tp]"),
        before(SUM, f"%s3 = all_gather %s2 {GROUP}, dim=1}} : bf16[B, 6]"),
    ],
    "zeros are added": [
        before(SUM, "%z = full {value=0.0, shape=[B, 4]} : f32[B, 4]{sum tp}"),
        before(SUM, "%s1 = add %z, %t : f32[B, 4]{sum tp}"),
    ],
    "a bias on one rank is a term": [
        before(SUM, RANK, '%c = constant {values=[0], dtype="i32"} : i32[]'),
        before(SUM, "%q = eq %r, %c : bool[]{varies tp}"),
        before(SUM, "%z = constant {values=[0.0]} : f32[]"),
        before(SUM, "%b = where %q, @bias, %z : f32[4]{sum tp}"),
        before(SUM, "%u = add %t, %b : f32[B, 4]{sum tp}"),
        (SUM, SUM.replace("%t", "%u")),
    ],
    "a shard by the number of a rank": [
        before("%n =", RANK, "%z = reshape %x {shape=[B, 2, 2]} : f32[B, 2, 2]"),
        before("%n =", "%g = gather %z, %r {dim=1} : f32[B, 2] of f32[B, 4@tp]"),
        ("%n = neg %k", "%n = add %k, %g"),
    ],
    "a root samples": [
        before(SUM, f"%w = reduce %t {GROUP}, root=1}} : f32[B, 4]{{varies tp}}"),
        before(SUM, "%w1 = tanh %w : f32[B, 4]{varies tp}"),
        before(SUM, f"%w2 = broadcast %w1 {GROUP}, root=1}} : f32[B, 4]"),
    ],
    "a result that is each rank's own": [
        before("return", RANK),
        ("return %y, %n", "return %y, %n, %r"),
        (" aliases %k)", " aliases %k, i32[]{varies tp})"),
    ],
}  # fmt: skip


def changed(changes: list[tuple[str, str]]) -> Module:
    """The module with these replacements, verified."""
    text = MLP
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new, 1)
    module = parse_module(text)
    verify(module)
    return module


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    changes, words = REFUSED[name]
    with pytest.raises(Error, match=words):
        changed(changes)


@pytest.mark.parametrize("name", ALLOWED)
def test_allowed(name: str) -> None:
    module = changed(ALLOWED[name])
    assert str(parse_module(str(module))) == str(module)


def test_an_operation_without_a_rule_takes_replicated_values() -> None:
    @operation("unruled")
    class Unruled(Op):
        """An operation without a sharding rule."""

        x: Operand

        def infer(self) -> TensorType:
            return self.x.type

    try:
        changed(
            [
                ("silu %h", "unruled %x"),
                ('f32[B, 8] of f32[B, 16@tp] loc("model.py":2', 'f32[B, 4] loc("model.py":2'),
                ("linear %a, @down", "linear %h, @down"),
            ]
        )
        with pytest.raises(Error, match="unruled has no sharding rule"):
            changed([("silu %h", "unruled %h")])
    finally:
        assert REGISTRY.pop("unruled") is Unruled


CALLS = """
module @m local mesh(tp=2) {
  func @same(%x: f32[4] of f32[8@tp]) -> (f32[4] of f32[8@tp]) {
    return %x
  }
  func @forward(%v: f32[4] of f32[8@tp]) -> (y: f32[4] of f32[8@tp]) {
    %a = call %v {callee=@same} : f32[4] of f32[8@tp]
    return %a
  }
}
"""


def test_calls_pass_global_types_on() -> None:
    verify(parse_module(CALLS))
    with pytest.raises(Error, match=r"@same takes \(f32\[4\]\), not \(f32\[4\] of f32\[8@tp\]\)"):
        parse_module(
            CALLS.replace(
                "(%x: f32[4] of f32[8@tp]) -> (f32[4] of f32[8@tp])", "(%x: f32[4]) -> (f32[4])"
            )
        )


@pytest.fixture
def lossy() -> Iterator[None]:
    """A pass `lossy` that removes every all_reduce, and a pass `idle` that does nothing."""
    known = dict(PASSES)

    @register("idle")
    class Idle(Pass):
        def run(self, module: Module, stats: Stats) -> None:
            stats.count("ran")

    @register("lossy")
    class Lossy(Pass):
        def run(self, module: Module, stats: Stats) -> None:
            for op in module.ops():
                if isinstance(op, AllReduce):
                    op.result.replace_by(op.x)
                    op.erase()

    assert Lossy.name, Idle.name
    yield
    PASSES.clear()
    PASSES.update(known)


@pytest.mark.usefixtures("lossy")
def test_a_pass_that_loses_a_collective_is_named() -> None:
    with pytest.raises(Error) as caught:
        run_pipeline(parse_module(MLP), "idle, lossy, idle")
    text = str(caught.value)
    assert text.startswith("model.py:5: add mixes a partial sum over tp with a complete value")
    assert "the module was valid before the pass lossy" in text
    assert "in the pass lossy, number 2 of 3" in text


def test_a_rewrite_keeps_the_shards_that_are_recorded() -> None:
    module = parse_module("""module @m local mesh(tp=2) {
      func @forward(%x: f32[8]) -> (y: f32[4, 1] of f32[8@tp, 1]) {
        %rank = rank {axis="tp"} : i32[]{varies tp}
        %parts = reshape %x {shape=[2, 4]} : f32[2, 4]
        %own = gather %parts, %rank : f32[4]{varies tp}
        %square = reshape %own {shape=[2, 2]} : f32[2, 2]{varies tp}
        %y = reshape %square {shape=[4, 1]} : f32[4, 1] of f32[8@tp, 1]
        return %y
      }
    }""")
    run_pipeline(module, "canonicalize")
    assert "%y = reshape %own {shape=[4, 1]} : f32[4, 1] of f32[8@tp, 1]" in str(module)


def test_results_name_the_operation_from_which_on_they_differ() -> None:
    module = changed([])
    linear = next(op for op in module.ops() if op.result.name == "t")
    last = module.main.last
    assert linear.parent is not None and last is not None
    last.set_operands((linear.result, module.main.returned[1]))
    with pytest.raises(
        Error, match=r"model\.py:3 in mlp: the result y of @forward is a partial sum over tp"
    ):
        verify(module)


def test_eighty_layers_take_no_time() -> None:
    """The check runs after every pass."""
    module = LLAMA.trace(LLAMA_70B, "bf16", name="llama")
    run_pipeline(module, 'inline, shard{mesh="tp=8"}, localize')
    times: list[float] = []
    for _ in range(5):
        start = time.thread_time()
        verify(module)
        times.append(time.thread_time() - start)
    assert min(times) < 0.1
    lost = [op for op in module.ops() if isinstance(op, AllReduce)][2 * 69]
    lost.result.replace_by(lost.x)
    lost.erase()
    with pytest.raises(Error, match=r"layers\.\d+: add mixes a partial sum over tp"):
        verify(module)
