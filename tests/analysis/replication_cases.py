"""Changes of one small module: invalid ones with the error they must cause, and valid ones."""

from __future__ import annotations

import re
from typing import NamedTuple

from irc.analysis.replication import check_replication
from irc.ir.core import Op
from irc.ir.declare import REGISTRY, Operand, operation
from irc.ir.types import TensorType
from irc.text import parse_module

MLP = """
module @m local mesh(dp=2, tp=2) dims(B=1:2:4) {
  weight @up : f32[8, 4] = random("up", 7, 0.5, [16, 4]).shard(0, tp)
  weight @down : f32[4, 8] = random("down", 7, 0.5, [4, 16]).shard(1, tp)
  weight @bias : f32[4] = random("bias", 7, 0.5)
  weight @table : f32[5, 4] = random("table", 7, 0.5, [10, 4]).shard(0, tp)
  func @forward(%x: f32[B, 4], %ids: i32[B], %k: f32[B, 2])
    -> (y: f32[B, 4], k: f32[B, 2] aliases %k) layouts(%k: f32[B, 4@tp]) {
    %h = linear %x, @up : f32[B, 8] loc("model.py":1 "mlp")
    %a = silu %h : f32[B, 8] loc("model.py":2 "mlp")
    %t = linear %a, @down : f32[B, 4] loc("model.py":3 "mlp")
    %s = all_reduce %t {axis="tp", group_size=2} : f32[B, 4] loc("model.py":4 "mlp")
    %y = add %x, %s : f32[B, 4] loc("model.py":5)
    %n = neg %k : f32[B, 2] loc("model.py":6)
    return %y, %n loc("model.py":7)
  }
}
"""


def check_unruled(layouts: str = "") -> None:
    """Check a module with an operation that has no sharding rule."""

    @operation("unruled")
    class Unruled(Op):
        """An operation without a sharding rule."""

        x: Operand

        def infer(self) -> TensorType:
            return self.x.type

    text = """module @m local mesh(tp=2) {
  func @f(%x: f32[4]) -> (y: f32[4]) layouts(LAYOUTS) {
    %y = unruled %x : f32[4] loc("f.py":3)
    return %y
  }
}"""
    text = text.replace(" layouts(LAYOUTS)", f" layouts({layouts})" if layouts else "")
    try:
        check_replication(parse_module(text))
    finally:
        assert REGISTRY.pop("unruled") is Unruled


class Case(NamedTuple):
    """Replacements in MLP, words of the Error in order, and the line it names (0: no Error)."""

    changes: list[tuple[str, str]]
    words: list[str]
    line: int


def cases_of(text: str) -> dict[str, Case]:
    """The cases of a text: `# name`, changes (`- old => new`, or as in a diff), `! words`.

    `!5 words` names the line of the Error, and `+5 text` gives an operation that line. `{tp` begins
    the options of a collective over tp.
    """
    found: dict[str, Case] = {}
    case = Case([], [], 0)
    for line in text.strip().splitlines():
        kind, number, rest = re.fullmatch(r"(.)(\d*) (.*)", line).groups()  # type: ignore[union-attr]
        rest = rest.replace("{tp", '{axis="tp", group_size=2')
        if kind == "#":
            case = found[rest] = Case([], [], 0)
        elif kind == "-":
            old, _, new = rest.partition(" => ")
            case.changes.append((old, new))
        elif kind == "+":
            old, new = case.changes.pop()
            rest += f' loc("model.py":{number})' if number else ""
            case.changes.append((old, f"{new}\n    {rest}" if new else rest))
        else:
            case.words.append(rest)
            name = next(reversed(found))
            case = found[name] = case._replace(line=int(number or case.line))
    return found


REFUSED = cases_of("""
# lost all_reduce
- add %x, %s => add %x, %t
!5 the add at model.py:5 adds x to the partial sum over tp, once per rank
! the linear at model.py:3 in mlp uses @down, which is sharded over tp
! put an all_reduce over tp behind it
# lost all_gather
- return %y => return %h
- (y: f32[B, 4] => (y: f32[B, 8]
!1 the linear at model.py:1 in mlp uses @up
! put an all_gather over tp behind it
# a sharded argument
- return %y => return %k
- (y: f32[B, 4] => (y: f32[B, 2]
!7 the result y
! because %k is sharded over tp: put an all_gather over tp behind %k
# the rank added
- %y = add %x, %s
+10 %r = rank {axis="tp"} : i32[]
+11 %f = cast %r {dtype="f32"} : f32[]
+ %y = add %s, %f
!5 the rank at model.py:10 differs on every rank of tp
# a scatter of a replicated value
- return %y
+ %z = collective_scatter %x {axis="dp", dim=1, group_size=2} : f32[B, 2]
+ return %z
- (y: f32[B, 4] => (y: f32[B, 2]
!7 ranks of dp
! the collective_scatter %z leaves something else on every rank of dp
# a lookup
- %y = add %x, %s
+10 %r = rank {axis="tp"} : i32[]
+12 %i = sub %ids, %r : i32[B]
+13 %e = embedding %i, @table : f32[B, 4]
+ %y = add %s, %e
!5 the embedding at model.py:13 uses @table, which is sharded over tp
! an all_reduce over
# all_reduce after a nonlinear use
- add %x, %s => add %x, %t
- return %y
+20 %m = linear %y, @up : f32[B, 8]
+21 %o = linear %m, @down : f32[B, 4]
+22 %p = all_reduce %o {tp} : f32[B, 4]
+ return %p
!5 the add at model.py:5 adds x to the partial sum over tp
! the linear at model.py:3 in mlp uses @down
! put an all_reduce over tp behind it
# rows of a partial sum
- %y = add %x, %s
+10 %r = rank {axis="tp"} : i32[]
+12 %g = gather %t, %r {dim=1} : f32[B]
+13 %z = all_reduce %g {tp} : f32[B]
+ %y = add %x, %s
!12 the gather at model.py:12 has a wrong operand
! the ranks of tp hold shards of one operand and terms of another
# partial sums in another contraction
-   func
+   weight @wide : f32[4, 4] = random("wide", 7, 0.5, [4, 8]).shard(1, tp)
+   func
- %y = add %x, %s
+12 %g = linear %t, @wide : f32[B, 4]
+13 %z = all_reduce %g {tp} : f32[B, 4]
+ %y = add %x, %s
!12 the linear at model.py:12 has a wrong operand
! a dimension is sharded over tp in weight and replicated in x
# added to the result of a root
- %y = add %x, %s
+12 %g = reduce %t {tp} : f32[B, 4]
+13 %w = add %g, %x : f32[B, 4]
+14 %z = all_reduce %w {tp} : f32[B, 4]
+ %y = add %x, %s
!14 the all_reduce at model.py:14 has a wrong operand
! only rank 0 of tp has its operand
# a bias on every rank
- linear %a, @down => linear %a, @down, bias=@bias
!3 the linear at model.py:3 in mlp adds its bias once per rank of tp
! add it behind the all_reduce instead
# a state computed from a partial sum
-   func
+   weight @k : f32[2, 4] = random("k", 7, 0.5, [4, 4]).shard(0, tp)
+   func
- %n = neg %k
+8 %w = tanh %t : f32[B, 4]
+9 %v = linear %w, @k : f32[B, 2]
+ %n = add %k, %v
!8 the tanh at model.py:8 takes as complete the partial sum over tp
# a partial state
- %n = neg %k => %n = slice %t {dim=1, start=0, stop=2}
!6 the result k of @forward is a partial sum over tp, but its layout is f32[B, 4@tp]
! because the linear at model.py:3 in mlp uses @down
# reduced twice
- %y = add %x, %s
+8 %z = all_reduce %s {tp} : f32[B, 4]
+ %y = add %x, %z
!8 the all_reduce at model.py:8 reduces a value that is the same on all ranks of tp already
! makes 2 times the value: leave it out
# reduced over the wrong axis
- all_reduce %t {axis="tp" => all_reduce %t {axis="dp"
!4 the same on all ranks of dp already
! the linear at model.py:3 in mlp uses
# an argument is reduced
- %t {axis => %x {axis
!4 reduces a value that is the same on all ranks of tp already
# a rank in a layer
- %y = add %x, %s
+10 %r = rank {axis="tp"} : i32[]
+11 %f = cast %r {dtype="f32"} : f32[]
+12 %v = add %s, %f : f32[B, 4]
+ %y = add %x, %v
- return %y
+20 %m = linear %y, @up : f32[B, 8]
+21 %o = linear %m, @down : f32[B, 4]
+22 %p = all_reduce %o {tp} : f32[B, 4]
+ return %p
!20 the linear at model.py:20 has a wrong operand
! the rank at model.py:10 differs on every rank of tp
# a rank in a sum
- %s = all_reduce %t
+10 %r = rank {axis="tp"} : i32[]
+ %i = neg %r : i32[]
+11 %f = cast %i {dtype="f32"} : f32[]
+12 %v = add %t, %f : f32[B, 4]
+ %s = all_reduce %v
!12 the add at model.py:12 adds y to the partial sum over tp
! the rank at model.py:10
# partial sums are gathered and added
- %s = all_reduce %t {tp} : f32[B, 4]
+ %t1 = unsqueeze %t {dims=[0]} : f32[1, B, 4]
+ %s = all_gather %t1 {tp, dim=0} : f32[2, B, 4]
- add %x, %s => reduce_sum %s {dims=[0]}
!4 its operand is a partial sum over tp, which only a reduction completes
# a minimum of shards
- %s = all_reduce %t
+9 %w = reduce_min %a {dims=[1], keep=true} : f32[B, 1]
+ %w1 = all_reduce %w {tp, op="min"} : f32[B, 1]
+ %s = all_reduce %t
- add %x, %s => add %w1, %s
!9 the reduce_min at model.py:9 needs a dimension replicated that is sharded over tp
# a maximum of each shard
- %s = all_reduce %t
+ %w = reduce_max %a {dims=[1], keep=true} : f32[B, 1]
+ %w1 = cast %w {dtype="f32"} : f32[B, 1]
+9 %w2 = div %a, %w1 : f32[B, 8]
+ %s = all_reduce %t
!9 the div at model.py:9 has a wrong operand
# a minimum of maxima
- %s = all_reduce %t
+ %w = reduce_max %a {dims=[1], keep=true} : f32[B, 1]
+9 %w1 = all_reduce %w {tp, op="min"} : f32[B, 1]
+ %s = all_reduce %t
!9 the all_reduce at model.py:9
! takes the min of different shards
# a maximum without its dimension
- %s = all_reduce %t
+9 %w = reduce_max %a {dims=[1]} : f32[B]
+ %s = all_reduce %t
!9 the reduce_max at model.py:9 needs a dimension replicated that is sharded over tp
# angles of the positions of a rank
- %s = all_reduce %t
+ %r = rank {axis="tp"} : i32[]
+ %f = cast %r {dtype="f32"} : f32[]
+ %i = mul %f, @bias : f32[4]
+ %c = cos %i : f32[4]
+9 %q = mul %t, %c : f32[B, 4]
+ %s = all_reduce %q
!9 the mul at model.py:9 has a wrong operand
# shards chosen by rank in a layer
- return %y
+ %r = rank {axis="tp"} : i32[]
+ %u = constant {values=[0.0]} : f32[]
+ %c = constant {values=[0], dtype="i32"} : i32[]
+ %q = eq %r, %c : bool[]
+ %w = where %q, %y, %u : f32[B, 4]
+9 %m = linear %w, @up : f32[B, 8]
+ %o = linear %m, @down : f32[B, 4]
+ %p = all_reduce %o {tp} : f32[B, 4]
+ return %p
!9 the linear at model.py:9 has a wrong operand
# rows taken by rank in a layer
- return %y
+ %r = rank {axis="tp"} : i32[]
+ %w = gather %y, %r {dim=1} : f32[B]
+ %w1 = unsqueeze %w {dims=[1]} : f32[B, 1]
+ %w2 = expand %w1 {shape=[B, 4]} : f32[B, 4]
+9 %m = linear %w2, @up : f32[B, 8]
+ %o = linear %m, @down : f32[B, 4]
+ %p = all_reduce %o {tp} : f32[B, 4]
+ return %p
!9 the linear at model.py:9 has a wrong operand
""")
for op in ("max", "min", "prod"):
    for collective in ("all_reduce", "reduce", "reduce_scatter"):
        dim, type = (", dim=1", "f32[B, 2]") if "scatter" in collective else ("", "f32[B, 4]")
        REFUSED |= cases_of(f"""
# a {op} over a sum, {collective}
- all_reduce %t {{tp}} : f32[B, 4] => {collective} %t {{tp, op="{op}"{dim}}} : {type}
- add %x, %s => neg %x
!4 the {collective} at model.py:4 in mlp takes the {op} of the partial sum
! over tp: only op=sum completes it
! the linear at model.py:3 in mlp uses @down, which is sharded over tp
""")

ALLOWED = cases_of("""
# as it is
# a maximum of shards
- %s = all_reduce %t
+9 %w = reduce_max %a {dims=[1], keep=true} : f32[B, 1]
+ %w1 = all_reduce %w {tp, op="max"} : f32[B, 1]
+ %s = all_reduce %t
- add %x, %s => add %w1, %s
# a maximum of a replicated value
- all_reduce %t {axis="tp" => all_reduce %x {axis="tp", op="max"
# a sharded result with its layout
- return %y => return %a
- (y: f32[B, 4] => (y: f32[B, 8]
- layouts(%k => layouts(y: f32[B, 16@tp], %k
# a sum that is cast, padded and sliced
- %s = all_reduce %t
+ %s0 = cast %t {dtype="bf16"} : bf16[B, 4]
+ %s1 = pad %s0 {before=[0, 0], after=[0, 2]} : bf16[B, 6]
+ %s2 = reduce_scatter %s1 {tp, dim=1} : bf16[B, 3]
+ %s3 = all_gather %s2 {tp, dim=1} : bf16[B, 6]
+ %s4 = slice %s3 {dim=1, start=0, stop=4} : bf16[B, 4]
+ %s5 = cast %s4 {dtype="f32"} : f32[B, 4]
+ %s = all_reduce %t
- add %x, %s => add %s, %s5
# zeros are added
- %s = all_reduce %t
+ %z = full {value=0.0, shape=[B, 4]} : f32[B, 4]
+ %s1 = add %z, %t : f32[B, 4]
+ %s = all_reduce %s1
# a bias on one rank
- %s = all_reduce %t
+ %r = rank {axis="tp"} : i32[]
+ %c = constant {values=[0], dtype="i32"} : i32[]
+ %q = eq %r, %c : bool[]
+ %z = constant {values=[0.0]} : f32[]
+ %b = where %q, @bias, %z : f32[4]
+ %u = add %t, %b : f32[B, 4]
+ %s = all_reduce %u
# a root samples
- all_reduce %t {tp} => reduce %t {tp, root=1}
- %y = add %x, %s
+ %s1 = tanh %s : f32[B, 4]
+ %s2 = broadcast %s1 {tp, root=1} : f32[B, 4]
+ %y = add %x, %s2
# an axis of one rank
- dp=2, tp=2 => dp=2, tp=1
- [16, 4] => [8, 4]
- [4, 16] => [4, 8]
- [10, 4] => [5, 4]
- 4@tp] => 2@tp]
- %s = all_reduce %t {tp}
+ %s0 = all_reduce %x {axis="tp", group_size=1} : f32[B, 4]
+ %s = neg %s0
# shards times the number of a rank
- %t = linear %a
+ %r = rank {axis="tp"} : i32[]
+ %f = cast %r {dtype="f32"} : f32[]
+ %w = mul %a, %f : f32[B, 8]
+ %t = linear %w
# numbers that make up the shards of a contraction
- %t = linear %a
+ %r = rank {axis="tp"} : i32[]
+ %f = cast %r {dtype="f32"} : f32[]
+ %w = expand %f {shape=[B, 8]} : f32[B, 8]
+ %t = linear %w
""")
