"""The rewrite driver: replacements, dead operations, repeated visits, bounds and errors."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from irc.errors import Error
from irc.ir.core import Module, Op, Value
from irc.ir.verify import verify
from irc.ops import Add, Concat, Exp, Full, Linear, Mul, Neg, Relu, Silu, Split, Sub, Tanh
from irc.rewrite import P, Rule, Stats, Watch, apply_rules, rule, watching
from tests.irc.rewriting import module, rewritten, to_relu


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ("%b = mul %a, %x : f32[8] %c = neg %b : f32[8]", "%b = relu %x|%c = neg %b"),
        ("%c = mul %x, %a : f32[8]", "%c = relu %x"),  # mul is commutative
        # %x and %y are different values for one name; %a has a second use
        ("%c = mul %a, %y : f32[8]", "%a = silu %x|%c = mul %a, %y"),
        (
            "%b = mul %a, %x : f32[8] %c = add %a, %b : f32[8]",
            "%a = silu %x|%b = mul %a, %x|%c = add %a, %b",
        ),
    ],
)
def test_a_match_is_replaced_and_dead_operations_are_removed(body: str, wanted: str) -> None:
    found = rewritten(f"%a = silu %x : f32[8] {body} return %c", to_relu)
    assert found == [*wanted.split("|"), "return %c"]


@pytest.mark.parametrize("swaps", list(itertools.product([False, True], repeat=3)))
def test_nested_commutative_choices_are_all_tried(swaps: tuple[bool, ...]) -> None:
    def pair(swap: bool, a: str, b: str) -> str:
        return f"{b}, {a}" if swap else f"{a}, {b}"

    body = f"""
      %a = add {pair(swaps[0], "%x", "%y")} : f32[8]
      %b = add {pair(swaps[1], "%x", "%z")} : f32[8]
      %c = mul {pair(swaps[2], "%a", "%b")} : f32[8]
      return %c"""

    @rule(P.mul(P.add("common", "p"), P.add("common", "q")))
    def distribute(common: Value, p: Value, q: Value) -> Op:
        return Add(common, Mul(p, q))

    assert rewritten(body, distribute)[0] in ("%0 = mul %y, %z", "%0 = mul %z, %y")


def test_a_rule_that_declines_one_match_gets_the_next() -> None:
    found = module("%a = add %x, %y : f32[8] return %a")
    wanted = found.main.arg("y")

    @rule(P.add("p", "q"))
    def only_y_first(p: Value, q: Value) -> Op | None:
        return Sub(p, q) if p is wanted else None

    assert apply_rules(found, [only_y_first])["only_y_first"] == 1
    assert "sub %y, %x" in str(found)
    verify(found)


def test_shared_operations_stay_for_their_other_users() -> None:
    @rule(P.neg(P.neg("x", shared=True)))
    def twice(x: Value) -> Value:
        return x

    body = "%a = neg %x : f32[8] %b = neg %a : f32[8] %c = add %a, %b : f32[8] return %c"
    assert rewritten(body, twice) == ["%a = neg %x", "%c = add %a, %x", "return %c"]


def test_a_tuple_replaces_several_results() -> None:
    @rule(P.split(P.concat("a", "b")))
    def cancel(a: Value, b: Value) -> tuple[Value, Op]:
        return a, Neg(Neg(b))

    body = """%c = concat %x, %y {dim=0} : f32[16]
      %a, %b = split %c {dim=0, sizes=[8, 8]} : f32[8], f32[8] return %a, %b"""
    found = rewritten(body, cancel, result="f32[8], f32[8]")
    assert found == ["%0 = neg %y", "%b = neg %0", "return %x, %b"]


def test_an_operation_with_several_results_replaces_another() -> None:
    @rule(P.split("x", sizes=(3, 5)).capture("root"))
    def again(x: Value, root: Op) -> Op | None:
        return None if root.loc is None else Split(Neg(x), dim=0, sizes=(3, 5))

    body = "%a, %b = split %x {dim=0, sizes=[3, 5]} : f32[3], f32[5]"
    found = module(f'{body} loc("a.py":1) return %a, %b', result="f32[3], f32[5]")
    with pytest.raises(Error, match=r"again .* does not stop"):
        apply_rules(found, [again])


def test_fresh_trees_are_placed_operands_first_with_name_and_location() -> None:
    @rule(P.tanh("x"))
    def tree(x: Value) -> Op:
        shared = Exp(x)
        return Sub(Add(shared, Neg(x)), Mul(shared, shared))

    found = module('%a = relu %x : f32[8] %t = tanh %a : f32[8] loc("s.py":7 "mlp") return %t')
    apply_rules(found, [tree])
    verify(found)
    ops = list(found.main)
    assert [op.opname for op in ops] == ["relu", "exp", "neg", "add", "mul", "sub", "return"]
    assert [op.loc.where() for op in ops[1:6] if op.loc] == ["s.py:7 in mlp"] * 5
    assert ops[5].result.name == "t"


def test_a_deep_replacement_needs_no_deep_stack() -> None:
    @rule(P.tanh("x"))
    def deep(x: Value) -> Value:
        for _ in range(5000):
            x = Neg(x).result
        return x

    found = module("%t = tanh %x : f32[8] return %t")
    apply_rules(found, [deep])
    verify(found)
    assert sum(1 for _ in found.main) == 5001


def test_unused_operations_of_a_rule_leave_no_uses() -> None:
    @rule(P.exp("x") | P.concat("*all"))
    def wasteful(x: Value | None, all: tuple[Value, ...] | None) -> Op | None:
        if x is None:
            assert all
            Neg(all[0])
            return None
        Neg(Tanh(x))
        new = Relu(x)
        Neg(x)
        return new

    body = "%a = exp %x : f32[8] %b = concat %x, %x {dim=0} : f32[16] return %a, %b"
    found = module(body, result="f32[8], f32[16]")
    apply_rules(found, [wasteful])
    verify(found)
    assert len(found.main.arg("x").users) == 2


def test_a_rewrite_makes_others_possible() -> None:
    @rule(P.neg(P.neg("x")))
    def twice(x: Value) -> Value:
        return x

    @rule(P.tanh(P.exp(P.relu("x"))))
    def deep(x: Value) -> Op:
        return Silu(x)

    @rule(P.sub("x", "x"))
    def nothing(x: Value) -> Op:
        return Full(value=0.0, shape=(8,))

    @rule(P.neg(P.mul(P.silu("x"), "x")))
    def high(x: Value) -> Op:
        return Relu(x)

    # relu appears under exp and tanh; the second use of %r is removed
    body = """%r = relu %x : f32[8] %n = neg %r : f32[8] %m = neg %n : f32[8]
      %e = exp %m : f32[8] %t = tanh %e : f32[8] return %t"""
    assert rewritten(body, twice, deep) == ["%t = silu %x", "return %t"]
    body = """%s = silu %x : f32[8] %p = mul %s, %x : f32[8]
      %d = sub %s, %s : f32[8] %o = add %p, %d : f32[8] return %o"""
    assert "%p = relu %x" in rewritten(body, to_relu, nothing)
    # %n, two levels above %s, is visited while %s still has two uses
    body = """%s = silu %x : f32[8] %p = mul %s, %x : f32[8] %n = neg %p : f32[8]
      %d = sub %s, %s : f32[8] %o = add %n, %d : f32[8] return %o"""
    assert "%n = relu %x" in rewritten(body, high, nothing)


@pytest.mark.parametrize(
    ("replacement", "message"),
    [
        (lambda x: Exp(Tanh(x)), r"the rule wrong .*does not stop"),
        (lambda x: Concat([x, x], dim=0), r"the rule wrong .* returns f32\[16\] for f32\[8\]"),
        (lambda x: 3, r"the rule wrong .* returns 3, which is no value"),
        (lambda x: Linear(x, x), r"(?s)linear.*in the rule wrong \(test_rewrite.py:\d+\)"),
    ],
)
def test_errors_name_the_rule(replacement: Callable[[Value], Any], message: str) -> None:
    found = module('%a = tanh %x : f32[8] loc("s.py":3) return %a')
    with pytest.raises(Error, match=message):
        apply_rules(found, [Rule(P.tanh("x"), replacement, name="wrong")])


def test_the_bound_is_declared() -> None:
    def chain(count: int) -> Module:
        body = "%v0 = tanh %x : f32[8] "
        body += "".join(f"%v{i + 1} = exp %v{i} : f32[8] " for i in range(count))
        return module(body + f"return %v{count}")

    pattern = P.exp(P.tanh("x"))
    sink = lambda x: Tanh(Exp(x))  # noqa: E731
    with pytest.raises(Error, match="it applied 4 times"):
        apply_rules(chain(10), [Rule(pattern, sink, bound=3, name="sink")])
    assert apply_rules(chain(10), [Rule(pattern, sink, bound=10, name="sink")])["sink"] == 10


def test_statistics_per_rule() -> None:
    body = """%a = silu %x : f32[8] %b = mul %a, %x : f32[8] %c = mul %b, %y : f32[8] return %c"""
    stats = apply_rules(module(body), [to_relu])
    record = stats.rules["to_relu"]
    # the second mul is tried once, although the first was rewritten while it was queued
    assert (record.hits, record.tries, stats.total, stats["to_relu"]) == (1, 2, 1, 1)
    assert record.where.startswith("rewriting.py:") and record.seconds > 0
    stats.update(apply_rules(module(body), [to_relu]))
    stats.count("other", 3)
    assert (stats["to_relu"], stats.rules["to_relu"].tries, stats.total) == (2, 4, 5)
    assert str(stats) == "other: 3, to_relu: 2" and str(Stats()) == "nothing"


def test_limits_nest() -> None:
    body = "".join(f"%s{i} = silu %x : f32[8] %m{i} = mul %s{i}, %x : f32[8] " for i in range(4))
    text = body + "return %m0, %m1, %m2, %m3"
    found = module(text, result=", ".join(["f32[8]"] * 4))
    with watching(Watch(limit=3)) as outer, watching(Watch(limit=9)) as inner:
        assert apply_rules(found, [to_relu])["to_relu"] == 3
    assert (outer.made, inner.made) == (3, 3)
    assert outer.last == "%m2: to_relu"
    verify(found)
