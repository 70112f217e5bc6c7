"""Rewriting: patterns and reasons of match failures; replacements, bounds and errors of rules."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from irc.errors import Error
from irc.ir.core import Module, Op, Value
from irc.ir.verify import verify
from irc.ops import Add, Concat, Exp, Full, Linear, Mul, Neg, Relu, Silu, Split, Sub, Tanh
from irc.rewrite import P, Pattern, Rule, Stats, Watch, apply_rules, decline, rule, watching
from irc.rewrite.patterns import captured_names, variants
from irc.text import parse_module


def module(
    body: str, args: str = "%x: f32[8], %y: f32[8], %z: f32[8]", result: str = "f32[8]"
) -> Module:
    weights = 'weight @w : f32[8, 8] = random("w", 1, 1.0)\n weight @b : f32[8] = unbound("b")'
    return parse_module(f"module @m {{ {weights}\n func @f({args}) -> ({result}) {{ {body} }} }}")


def rewritten(body: str, *rules: Rule, result: str = "f32[8]") -> list[str]:
    """The operations after the rules, as text; the module is verified."""
    found = module(body, result=result)
    apply_rules(found, rules)
    verify(found)
    lines = str(found).splitlines()
    return [line.strip().partition(" : ")[0] for line in lines if line.startswith("    ")]


def rule_of(pattern: Pattern, build: Callable[[], None]) -> Rule:
    """A rule whose function takes whatever the pattern captures."""
    names = dict.fromkeys(n for v in variants(pattern) for n in captured_names(v))
    scope: dict[str, Any] = {"build": build}
    exec(f"def call({', '.join(names)}): return build()", scope)
    return Rule(pattern, scope["call"])


def hits(body: str, pattern: Pattern, result: str = "f32[8]") -> int:
    """How many roots a pattern matches, whatever it captures."""
    found, seen = module(body, result=result), list[int]()
    apply_rules(found, [rule_of(pattern, lambda: seen.append(1))])
    verify(found)
    return len(seen)


@rule(P.mul(P.silu("x"), "x"))
def to_relu(x: Value) -> Op:
    return Relu(x)


# -- patterns

ALTERNATIVES = """%a = silu %x : f32[8] %b = tanh %x : f32[8] %c = exp %x : f32[8]
  %d = neg %a : f32[8] %e = neg %b : f32[8] %f = neg %c : f32[8]
  %g = add %d, %e : f32[8] %h = add %g, %f : f32[8] return %h"""
CONSTANTS = """%one = full {value=1.0} : f32[]
  %two = constant {values=[2.0, 2.0], shape=[2]} : f32[2]
  %mix = constant {values=[1.0, 2.0], shape=[2]} : f32[2]
  %a = mul %x, %one : f32[8] %b = mul %two, %mix : f32[2] %c = add %a, @b : f32[8] return %c"""
SOFTMAX = "%a = softmax %x {dim=0} : f32[8] return %a"
SQUARE = "%a = silu %x : f32[8] %b = mul %a, %a : f32[8] return %b"
BIAS = "%a = linear %x, @w, bias=@b : f32[8] return %a"
LINEAR = "%a = linear %x, @w : f32[8] return %a"


@pytest.mark.parametrize(
    ("pattern", "body", "count"),
    [
        # sub does not commute
        (
            P.sub("x", P.neg("x", shared=True)),
            "%a = neg %x : f32[8] %b = sub %x, %a : f32[8] %c = sub %a, %x : f32[8] return %b",
            1,
        ),
        # two uses by the root are two uses
        (P.mul(P.silu("x"), "s"), SQUARE, 0),
        (P.mul(P.silu("x", shared=True), "s"), SQUARE, 1),
        # attributes are compared, or passed to a function
        (P.softmax("x", dim=0), SOFTMAX, 1),
        (P.softmax("x", dim=1), SOFTMAX, 0),
        (P.softmax("x", dim=lambda dim: dim < 1), SOFTMAX, 1),
        (P.softmax("x", dim=lambda dim: dim > 0), SOFTMAX, 0),
        (P.linear("x", "w"), BIAS, 0),
        (P.linear("x", "w"), LINEAR, 1),
        (P.linear("x", "w", bias="b"), BIAS, 1),
        (P.linear("x", "w", bias="b"), LINEAR, 0),
        (P.linear("x", "w", bias=P.maybe("b")), BIAS, 1),
        (P.linear("x", "w", bias=P.maybe("b")), LINEAR, 1),
        (P.mul("x", P.full(1)), CONSTANTS, 1),
        (P.mul("x", P.constant()), CONSTANTS, 2),
        (P.mul("x", P.constant(value=lambda number: number > 1)), CONSTANTS, 1),
        (P.add("x", P.weight("w")), CONSTANTS, 1),
        (P.mul("x", P.weight("w")), CONSTANTS, 0),
        (P.neg(P.silu("x") | P.tanh("x")), ALTERNATIVES, 2),
        (P.silu("x") | P.tanh("x") | P.exp("x"), ALTERNATIVES, 3),
    ],
)
def test_matches(pattern: Pattern, body: str, count: int) -> None:
    assert hits(body, pattern) == count


def test_any_is_any_value() -> None:
    assert hits("%a = add %x, @b : f32[8] return %a", P.add(P.any(), P.any())) >= 1


def test_a_returned_value_is_used() -> None:
    body = "%a = silu %x : f32[8] %b = mul %a, %x : f32[8] return %a, %b"
    assert hits(body, P.mul(P.silu("x"), "x"), result="f32[8], f32[8]") == 0


def test_an_optional_operand_may_be_none() -> None:
    seen: list[Value | None] = []

    @rule(P.linear("x", "w", bias=P.maybe("b")))
    def note(x: Value, w: Value, b: Value | None) -> None:
        seen.append(b)

    for body in (BIAS, LINEAR):
        apply_rules(module(body), [note])
    assert [b and b.name for b in seen] == ["b", None]


def test_a_name_of_another_alternative_is_none_and_operations_are_captured() -> None:
    seen: list[tuple[object, ...]] = []

    @rule((P.add("x", P.neg("y")) | P.exp("x")).capture("root"))
    def note(x: Value, y: Value | None, root: Op) -> None:
        seen.append((root.opname, y and y.name))

    found = module("%a = neg %y : f32[8] %b = add %x, %a : f32[8] %c = exp %b : f32[8] return %c")
    apply_rules(found, [note])
    assert seen == [("add", "y"), ("exp", None)]


def test_any_number_of_operands() -> None:
    body = "%a = concat %x, %y, %z {dim=0} : f32[24] return %a"
    assert hits(body, P.concat("*all"), result="f32[24]") == 1
    assert hits(body, P.concat("a", "b", "c"), result="f32[24]") == 1
    assert hits(body, P.concat("a", "b"), result="f32[24]") == 0
    seen: list[int] = []

    @rule(P.concat("first", "*rest"))
    def note(first: Value, rest: tuple[Value, ...]) -> None:
        seen.append(len(rest))

    apply_rules(module(body, result="f32[24]"), [note])
    assert seen == [2]


def test_results_of_operations_with_several() -> None:
    pair = "f32[3], f32[5]"
    split = f"%a, %b = split %x {{dim=0, sizes=[3, 5]}} : {pair} %c = neg %b : f32[5]"
    both = f"{split} return %a, %c"
    assert hits(both, P.neg(P.split("x", shared=True).out(1)), result=pair) == 1
    assert hits(both, P.neg(P.split("x", shared=True)), result=pair) == 0
    assert hits(both, P.neg(P.split("x").out(1)), result=pair) == 0  # %a is used as well
    assert hits(f"{split} return %c", P.neg(P.split("x").out(1)), "f32[5]")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: P.silo("x"), "no operation called 'silo'; did you mean 'silu'"),
        (lambda: P.silu("x", "y"), r"P.silu takes 1 operands \(x\), not 2"),
        (lambda: P.linear("x"), r"P.linear takes 2 operands \(x, weight\), not 1"),
        (lambda: P.linear("x", "w", bais="b"), "P.linear: no attribute or optional operand 'bais'"),
        (lambda: P.neg(3), "a pattern is a string or made by P, not 3"),
        (lambda: P.neg("*x"), "needs an operation with any number of operands"),
        (lambda: P.concat("*x", "y"), "must be the last operand"),
        (lambda: (P.neg("x") | P.any("y")).capture("r"), "only an operation is captured"),
        (lambda: Rule(P.any("x"), lambda x: x), "the root of a pattern is an operation"),
        (lambda: Rule(P.neg("x"), lambda y: y), "takes 'y', which its pattern does not capture"),
        (lambda: Rule(P.add("x", "y"), lambda x: x), "captures 'y', but its function"),
    ],
)
def test_wrong_patterns(make: Callable[[], object], message: str) -> None:
    with pytest.raises(Error, match=message):
        make()


def test_too_many_alternatives() -> None:
    unary = P.neg("x") | P.exp("x") | P.tanh("x") | P.relu("x") | P.silu("x")
    three = P.where(P.any("c"), unary, unary)
    with pytest.raises(Error, match="write several rules"):
        Rule(P.concat(three, three, unary), lambda c, x: None)


def why(body: str, *rules: Rule, result: str = "f32[8]") -> list[str]:
    found = module(body, result=result)
    with watching(Watch(collect=True)) as watch:
        apply_rules(found, rules)
    verify(found)
    return [str(failure) for failure in watch.failures]


def test_why_not_names_the_deepest_match_failure() -> None:
    @rule(P.mul(P.silu(P.linear("x", "gate")), P.linear("x", "up")))
    def fuse(x: Value, gate: Value, up: Value) -> None: ...

    body = """%g = linear %x, @w : f32[8] %s = silu %g : f32[8] %u = add %x, %y : f32[8]
      %m = mul %s, %u : f32[8] loc("llama.py":97) return %m"""
    expected = "llama.py:97: mul(silu(linear)) matched; operand 2 is add, not linear"
    assert why(body, fuse) == [expected]
    body = """%g = linear %x, @w : f32[8] %s = silu %g : f32[8] %u = linear %x, @w : f32[8]
      %m = mul %u, %s : f32[8] return %m, %u"""
    expected = "%m: mul(silu(linear)) matched; operand 2 is linear, which has 2 uses"
    assert why(body, fuse, result="f32[8], f32[8]") == [expected]
    body = "%g = exp %x : f32[8] %m = mul %g, %y : f32[8] return %m"
    assert why(body, fuse) == []  # only the root matched


@pytest.mark.parametrize(
    ("pattern", "body", "reason"),
    [
        (P.softmax("x", dim=1), "%a = softmax %x {dim=0} : f32[8]", "softmax has dim=0, not 1"),
        (P.linear("x", "w"), "%a = linear %x, @w, bias=@b : f32[8]", "linear has the operand bias"),
        (P.linear("x", "w", bias="b"), "%a = linear %x, @w : f32[8]", "linear has no operand bias"),
        (P.neg(P.weight("x")), "%a = neg %x : f32[8]", "operand 1 is an argument, not a weight"),
        (P.sub("x", P.full(1)), "%a = sub %x, @b : f32[8]", "operand 2 is a weight, not the const"),
        (P.sub("x", "x"), "%a = sub %x, %y : f32[8]", "operand 2 is another value than the first"),
        (P.neg("x"), "%a = neg %x : f32[8]", "the rule declined"),
    ],
)
def test_why_not_reasons(pattern: Pattern, body: str, reason: str) -> None:
    found = why(f"{body} return %a", rule_of(pattern, lambda: None))
    assert len(found) == 1 and f" matched; {reason}" in found[0]


def test_why_not_has_the_reason_of_a_rule_that_declined() -> None:
    @rule(P.neg("x"))
    def never(x: Value) -> None:
        Exp(x)
        return decline("the dtypes differ")

    assert why("%a = neg %x : f32[8] return %a", never) == ["%a: neg matched; the dtypes differ"]


# -- rules


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
        (lambda x: 3, r"the rule wrong .* returns 3, which is not a value"),
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
    assert record.where.startswith("test_rewrite.py:") and record.seconds > 0
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
