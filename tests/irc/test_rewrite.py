"""The rewrite driver and its patterns: what matches, what is left behind, when it stops."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from irc.core import Module, Op, Value
from irc.errors import Error
from irc.ops import Add, Concat, Exp, Linear, Mul, Neg, Relu, Silu, Split, Sub, Tanh
from irc.rewrite import P, Rule, Stats, Watch, apply_rules, decline, rule, watching
from irc.text import parse_module
from irc.verify import verify


def module(body: str, args: str = "%x: f32[8], %y: f32[8], %z: f32[8]", result: str = "f32[8]"):
    weights = 'weight @w : f32[8, 8] = random("w", 1, 1.0)\n weight @b : f32[8] = unbound("b")'
    return parse_module(f"module @m {{ {weights}\n func @f({args}) -> ({result}) {{ {body} }} }}")


def rewritten(body: str, *rules: Rule, result: str = "f32[8]") -> list[str]:
    """The operations after the rules, as text; the module is verified."""
    found = module(body, result=result)
    apply_rules(found, rules)
    verify(found)
    lines = str(found).splitlines()
    return [line.strip().partition(" : ")[0] for line in lines if line.startswith("    ")]


def hits(body: str, pattern: object, result: str = "f32[8]") -> int:
    """How many roots a pattern matches, whatever it captures."""
    found = module(body, result=result)
    names = dict.fromkeys(n for v in variants_of(pattern) for n in captured_of(v))
    scope: dict[str, Callable[..., None]] = {}
    seen: list[int] = []
    exec(f"def count({', '.join(names)}): return note()", {"note": lambda: seen.append(1)}, scope)
    apply_rules(found, [Rule(pattern, scope["count"])])  # type: ignore[arg-type]
    verify(found)
    return len(seen)


def variants_of(pattern: object) -> list[object]:
    from irc.rewrite.patterns import variants

    return list(variants(pattern))  # type: ignore[arg-type]


def captured_of(pattern: object) -> list[str]:
    from irc.rewrite.patterns import captured_names

    return list(captured_names(pattern))  # type: ignore[arg-type]


@rule(P.mul(P.silu("x"), "x"))
def to_relu(x: Value) -> Op:
    return Relu(x)


def test_a_match_is_replaced_and_what_died_is_gone() -> None:
    body = "%a = silu %x : f32[8] %b = mul %a, %x : f32[8] %c = neg %b : f32[8] return %c"
    assert rewritten(body, to_relu) == ["%b = relu %x", "%c = neg %b", "return %c"]


def test_commutative_operands_match_the_other_way_round() -> None:
    body = "%a = silu %x : f32[8] %b = mul %x, %a : f32[8] return %b"
    assert rewritten(body, to_relu) == ["%b = relu %x", "return %b"]


def test_operands_that_do_not_commute_stay_in_place() -> None:
    body = "%a = neg %x : f32[8] %b = sub %x, %a : f32[8] %c = sub %a, %x : f32[8] return %b"
    assert hits(body, P.sub("x", P.neg("x", shared=True))) == 1


def test_a_repeated_name_is_the_same_value() -> None:
    body = "%a = silu %x : f32[8] %b = mul %a, %y : f32[8] return %b"
    assert rewritten(body, to_relu) == ["%a = silu %x", "%b = mul %a, %y", "return %b"]


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


def test_an_inner_operation_with_a_second_use_does_not_match() -> None:
    body = "%a = silu %x : f32[8] %b = mul %a, %x : f32[8] %c = add %a, %b : f32[8] return %c"
    assert rewritten(body, to_relu)[1] == "%b = mul %a, %x"


def test_two_uses_by_the_root_are_two_uses() -> None:
    body = "%a = silu %x : f32[8] %b = mul %a, %a : f32[8] return %b"
    assert hits(body, P.mul(P.silu("x"), "s")) == 0
    assert hits(body, P.mul(P.silu("x", shared=True), "s")) == 1


def test_a_returned_value_is_used() -> None:
    body = "%a = silu %x : f32[8] %b = mul %a, %x : f32[8] return %a, %b"
    assert hits(body, P.mul(P.silu("x"), "x"), result="f32[8], f32[8]") == 0


def test_shared_operations_stay_for_their_other_users() -> None:
    @rule(P.neg(P.neg("x", shared=True)))
    def twice(x: Value) -> Value:
        return x

    body = "%a = neg %x : f32[8] %b = neg %a : f32[8] %c = add %a, %b : f32[8] return %c"
    assert rewritten(body, twice) == ["%a = neg %x", "%c = add %a, %x", "return %c"]


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


SPLIT = "%a, %b = split %x {dim=0, sizes=[3, 5]} : f32[3], f32[5]"


def test_results_of_operations_with_several() -> None:
    pair = "f32[3], f32[5]"
    body = f"{SPLIT} %c = neg %b : f32[5] return %a, %c"
    assert hits(body, P.neg(P.split("x", shared=True).out(1)), result=pair) == 1
    assert hits(body, P.neg(P.split("x", shared=True)), result=pair) == 0
    assert hits(body, P.neg(P.split("x").out(1)), result=pair) == 0  # %a is used as well
    assert hits(f"{SPLIT} %c = neg %b : f32[5] return %c", P.neg(P.split("x").out(1)), "f32[5]")


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

    found = module(f'{SPLIT} loc("a.py":1) return %a, %b', result="f32[3], f32[5]")
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


def test_what_a_rule_built_and_did_not_use_leaves_no_trace() -> None:
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


def test_a_rewrite_makes_others_possible_above_and_beside() -> None:
    @rule(P.neg(P.neg("x")))
    def twice(x: Value) -> Value:
        return x

    @rule(P.tanh(P.exp(P.relu("x"))))
    def deep(x: Value) -> Op:
        return Silu(x)

    # below: relu appears under exp and tanh; beside: the second use of %r goes away
    body = """%r = relu %x : f32[8] %n = neg %r : f32[8] %m = neg %n : f32[8]
      %e = exp %m : f32[8] %t = tanh %e : f32[8] return %t"""
    assert rewritten(body, twice, deep) == ["%t = silu %x", "return %t"]

    @rule(P.sub("x", "x"))
    def nothing(x: Value) -> Op:
        from irc.ops import Full

        return Full(value=0.0, shape=(8,))

    body = """%s = silu %x : f32[8] %p = mul %s, %x : f32[8]
      %d = sub %s, %s : f32[8] %o = add %p, %d : f32[8] return %o"""
    assert "%p = relu %x" in rewritten(body, to_relu, nothing)


def test_order_is_kept() -> None:
    body = "".join(f"%s{i} = silu %x : f32[8] %m{i} = mul %s{i}, %x : f32[8] " for i in range(5))
    found = rewritten(
        body + "return %m0, %m1, %m2, %m3, %m4", to_relu, result=", ".join(["f32[8]"] * 5)
    )
    assert found[:5] == [f"%m{i} = relu %x" for i in range(5)]


def test_a_rule_that_grows_is_an_error_that_names_it() -> None:
    @rule(P.neg("x"))
    def grow(x: Value) -> Op:
        return Exp(Neg(x))

    with pytest.raises(Error, match=r"the rule grow \(test_rewrite.py:\d+\) does not stop"):
        apply_rules(module("%a = neg %x : f32[8] return %a"), [grow])


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


def test_a_replacement_of_another_type_is_an_error() -> None:
    @rule(P.tanh("x"))
    def wrong(x: Value) -> Op:
        return Concat([x, x], dim=0)

    with pytest.raises(Error, match=r"the rule wrong .* gives f32\[16\] for f32\[8\]"):
        apply_rules(module("%a = tanh %x : f32[8] return %a"), [wrong])


def test_a_replacement_that_is_no_value_is_an_error() -> None:
    with pytest.raises(Error, match=r"the rule odd .* gives 3, which is no value"):
        apply_rules(
            module("%a = tanh %x : f32[8] return %a"), [Rule(P.tanh("x"), lambda x: 3, name="odd")]
        )


def test_an_error_in_a_rule_names_rule_and_operation() -> None:
    @rule(P.tanh("x"))
    def fails(x: Value) -> Op:
        return Linear(x, x)

    with pytest.raises(Error) as caught:
        apply_rules(module('%a = tanh %x : f32[8] loc("s.py":3) return %a'), [fails])
    assert "in the rule fails (test_rewrite.py:" in str(caught.value)


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


def test_statistics_per_rule() -> None:
    body = """%a = silu %x : f32[8] %b = mul %a, %x : f32[8] %c = mul %b, %y : f32[8] return %c"""
    stats = apply_rules(module(body), [to_relu])
    record = stats.rules["to_relu"]
    # the second mul is tried once, though the first was rewritten below it while it waited
    assert (record.hits, record.tries, stats.total, stats["to_relu"]) == (1, 2, 1, 1)
    assert record.where.startswith("test_rewrite.py:") and record.seconds > 0
    stats.update(apply_rules(module(body), [to_relu]))
    stats.count("other", 3)
    assert (stats["to_relu"], stats.rules["to_relu"].tries, stats.total) == (2, 4, 5)
    assert str(stats) == "other: 3, to_relu: 2" and str(Stats()) == "nothing"


def test_a_rule_is_a_function_too() -> None:
    found = module("%a = tanh %x : f32[8] return %a")
    assert to_relu(found.main.arg("x")).opname == "relu"


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


def test_limits_nest() -> None:
    body = "".join(f"%s{i} = silu %x : f32[8] %m{i} = mul %s{i}, %x : f32[8] " for i in range(4))
    text = body + "return %m0, %m1, %m2, %m3"
    found = module(text, result=", ".join(["f32[8]"] * 4))
    with watching(Watch(limit=3)) as outer, watching(Watch(limit=9)) as inner:
        assert apply_rules(found, [to_relu])["to_relu"] == 3
    assert (outer.made, inner.made) == (3, 3)
    assert outer.last == "%m2: to_relu"
    verify(found)
