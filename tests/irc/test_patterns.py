"""What patterns match, and the reasons of match failures."""

from collections.abc import Callable

import pytest

from irc.errors import Error
from irc.ir.core import Op, Value
from irc.ir.verify import verify
from irc.ops import Exp
from irc.rewrite import P, Pattern, Rule, Watch, apply_rules, decline, rule, watching
from tests.irc.rewriting import hits, module, rule_of

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
