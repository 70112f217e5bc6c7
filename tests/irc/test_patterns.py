"""What patterns match, and what they say where they nearly match."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from irc.core import Op, Value
from irc.errors import Error
from irc.ops import Exp
from irc.rewrite import P, Rule, Watch, apply_rules, decline, rule, watching
from irc.verify import verify
from tests.irc.rewriting import captured_of, hits, module, variants_of

SPLIT = "%a, %b = split %x {dim=0, sizes=[3, 5]} : f32[3], f32[5]"


def test_operands_that_do_not_commute_stay_in_place() -> None:
    body = "%a = neg %x : f32[8] %b = sub %x, %a : f32[8] %c = sub %a, %x : f32[8] return %b"
    assert hits(body, P.sub("x", P.neg("x", shared=True))) == 1


def test_two_uses_by_the_root_are_two_uses() -> None:
    body = "%a = silu %x : f32[8] %b = mul %a, %a : f32[8] return %b"
    assert hits(body, P.mul(P.silu("x"), "s")) == 0
    assert hits(body, P.mul(P.silu("x", shared=True), "s")) == 1


def test_a_returned_value_is_used() -> None:
    body = "%a = silu %x : f32[8] %b = mul %a, %x : f32[8] return %a, %b"
    assert hits(body, P.mul(P.silu("x"), "x"), result="f32[8], f32[8]") == 0


def test_attributes_are_compared_or_given_to_a_function() -> None:
    body = "%a = softmax %x {dim=0} : f32[8] return %a"
    assert hits(body, P.softmax("x", dim=0)) == 1
    assert hits(body, P.softmax("x", dim=1)) == 0
    assert hits(body, P.softmax("x", dim=lambda dim: dim < 1)) == 1
    assert hits(body, P.softmax("x", dim=lambda dim: dim > 0)) == 0


def test_optional_operands() -> None:
    with_bias = "%a = linear %x, @w, bias=@b : f32[8] return %a"
    without = "%a = linear %x, @w : f32[8] return %a"
    assert (hits(with_bias, P.linear("x", "w")), hits(without, P.linear("x", "w"))) == (0, 1)
    named = P.linear("x", "w", bias="b")
    assert (hits(with_bias, named), hits(without, named)) == (1, 0)
    maybe = P.linear("x", "w", bias=P.maybe("b"))
    assert (hits(with_bias, maybe), hits(without, maybe)) == (1, 1)
    seen: list[Value | None] = []

    @rule(maybe)
    def note(x: Value, w: Value, b: Value | None) -> None:
        seen.append(b)

    for body in (with_bias, without):
        apply_rules(module(body), [note])
    assert [b and b.name for b in seen] == ["b", None]


def test_weights_and_constants() -> None:
    body = """%one = full {value=1.0} : f32[]
      %two = constant {values=[2.0, 2.0], shape=[2]} : f32[2]
      %mix = constant {values=[1.0, 2.0], shape=[2]} : f32[2]
      %a = mul %x, %one : f32[8] %b = mul %two, %mix : f32[2] %c = add %a, @b : f32[8] return %c"""
    assert hits(body, P.mul("x", P.full(1))) == 1
    assert hits(body, P.mul("x", P.constant())) == 2
    assert hits(body, P.mul("x", P.constant(value=lambda number: number > 1))) == 1
    assert hits(body, P.add("x", P.weight("w"))) == 1
    assert hits(body, P.mul("x", P.weight("w"))) == 0


def test_any_is_any_value() -> None:
    body = "%a = add %x, @b : f32[8] return %a"
    assert hits(body, P.add(P.any(), P.any())) >= 1


def test_alternatives_at_the_root_and_inside() -> None:
    body = """%a = silu %x : f32[8] %b = tanh %x : f32[8] %c = exp %x : f32[8]
      %d = neg %a : f32[8] %e = neg %b : f32[8] %f = neg %c : f32[8]
      %g = add %d, %e : f32[8] %h = add %g, %f : f32[8] return %h"""
    assert hits(body, P.neg(P.silu("x") | P.tanh("x"))) == 2
    assert hits(body, P.silu("x") | P.tanh("x") | P.exp("x")) == 3


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
    body = f"{SPLIT} %c = neg %b : f32[5] return %a, %c"
    assert hits(body, P.neg(P.split("x", shared=True).out(1)), result=pair) == 1
    assert hits(body, P.neg(P.split("x", shared=True)), result=pair) == 0
    assert hits(body, P.neg(P.split("x").out(1)), result=pair) == 0  # %a is used as well
    assert hits(f"{SPLIT} %c = neg %b : f32[5] return %c", P.neg(P.split("x").out(1)), "f32[5]")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: P.silo("x"), "no operation called 'silo'; did you mean 'silu'"),
        (lambda: P.silu("x", "y"), r"P.silu takes 1 operands \(x\), not 2"),
        (lambda: P.linear("x"), r"P.linear takes 2 operands \(x, weight\), not 1"),
        (lambda: P.linear("x", "w", bais="b"), "P.linear: no attribute or optional operand 'bais'"),
        (lambda: P.neg(3), "a pattern is a string or made by P, not 3"),
        (lambda: P.neg("*x"), "any number of operands takes"),
        (lambda: P.concat("*x", "y"), "comes last"),
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
    return [str(miss) for miss in watch.misses]


def test_why_not_names_the_nearest_miss() -> None:
    @rule(P.mul(P.silu(P.linear("x", "gate")), P.linear("x", "up")))
    def fuse(x: Value, gate: Value, up: Value) -> None: ...

    body = """%g = linear %x, @w : f32[8] %s = silu %g : f32[8] %u = add %x, %y : f32[8]
      %m = mul %s, %u : f32[8] loc("llama.py":97) return %m"""
    assert why(body, fuse) == [
        "llama.py:97: mul(silu(linear)) matched; operand 2 is add, not linear"
    ]
    body = """%g = linear %x, @w : f32[8] %s = silu %g : f32[8] %u = linear %x, @w : f32[8]
      %m = mul %u, %s : f32[8] return %m, %u"""
    assert why(body, fuse, result="f32[8], f32[8]") == [
        "%m: mul(silu(linear)) matched; operand 2 is linear, which has 2 uses"
    ]
    body = "%g = exp %x : f32[8] %m = mul %g, %y : f32[8] return %m"
    assert why(body, fuse) == []  # only the root matched


@pytest.mark.parametrize(
    ("pattern", "body", "reason"),
    [
        (P.softmax("x", dim=1), "%a = softmax %x {dim=0} : f32[8]", "softmax has dim=0, not 1"),
        (P.linear("x", "w"), "%a = linear %x, @w, bias=@b : f32[8]", "linear has the operand bias"),
        (P.linear("x", "w", bias="b"), "%a = linear %x, @w : f32[8]", "linear has no operand bias"),
        (P.neg(P.weight("x")), "%a = neg %x : f32[8]", "operand 1 is an argument, not a weight"),
        (
            P.sub("x", P.full(1)),
            "%a = sub %x, @b : f32[8]",
            "operand 2 is a weight, not the constant 1",
        ),
        (
            P.sub("x", "x"),
            "%a = sub %x, %y : f32[8]",
            "operand 2 is another value than the first 'x'",
        ),
        (P.neg("x"), "%a = neg %x : f32[8]", "the rule declined"),
    ],
)
def test_why_not_reasons(pattern: object, body: str, reason: str) -> None:
    names = dict.fromkeys(n for v in variants_of(pattern) for n in captured_of(v))
    scope: dict[str, Callable[..., None]] = {}
    exec(f"def never({', '.join(names)}): return None", {}, scope)
    found = why(f"{body} return %a", Rule(pattern, scope["never"]))  # type: ignore[arg-type]
    assert len(found) == 1 and found[0].endswith(f" matched; {reason}")


def test_why_not_tells_why_a_rule_declined_and_leaves_nothing_behind() -> None:
    @rule(P.neg("x"))
    def never(x: Value) -> None:
        Exp(x)
        return decline("the moon is full")

    assert why("%a = neg %x : f32[8] return %a", never) == ["%a: neg matched; the moon is full"]
