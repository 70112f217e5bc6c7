"""The rewrite driver: what is replaced, what is left behind, what is visited again, how it ends."""

from __future__ import annotations

import itertools

import pytest

from irc.core import Module, Op, Value
from irc.errors import Error
from irc.ops import Add, Concat, Exp, Linear, Mul, Neg, Relu, Silu, Split, Sub, Tanh
from irc.rewrite import P, Rule, Stats, Watch, apply_rules, rule, watching
from irc.verify import verify
from tests.irc.rewriting import module, rewritten, to_relu

SPLIT = "%a, %b = split %x {dim=0, sizes=[3, 5]} : f32[3], f32[5]"


def test_a_match_is_replaced_and_what_died_is_gone() -> None:
    body = "%a = silu %x : f32[8] %b = mul %a, %x : f32[8] %c = neg %b : f32[8] return %c"
    assert rewritten(body, to_relu) == ["%b = relu %x", "%c = neg %b", "return %c"]


def test_commutative_operands_match_the_other_way_round() -> None:
    body = "%a = silu %x : f32[8] %b = mul %x, %a : f32[8] return %b"
    assert rewritten(body, to_relu) == ["%b = relu %x", "return %b"]


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


def test_a_lost_use_is_seen_two_levels_up() -> None:
    @rule(P.neg(P.mul(P.silu("x"), "x")))
    def deep(x: Value) -> Op:
        return Relu(x)

    @rule(P.sub("x", "x"))
    def nothing(x: Value) -> Op:
        from irc.ops import Full

        return Full(value=0.0, shape=(8,))

    # %n is visited while %s still has two uses
    body = """%s = silu %x : f32[8] %p = mul %s, %x : f32[8] %n = neg %p : f32[8]
      %d = sub %s, %s : f32[8] %o = add %n, %d : f32[8] return %o"""
    assert "%n = relu %x" in rewritten(body, deep, nothing)


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


def test_statistics_per_rule() -> None:
    body = """%a = silu %x : f32[8] %b = mul %a, %x : f32[8] %c = mul %b, %y : f32[8] return %c"""
    stats = apply_rules(module(body), [to_relu])
    record = stats.rules["to_relu"]
    # the second mul is tried once, though the first was rewritten below it while it waited
    assert (record.hits, record.tries, stats.total, stats["to_relu"]) == (1, 2, 1, 1)
    assert record.where.startswith("rewriting.py:") and record.seconds > 0
    stats.update(apply_rules(module(body), [to_relu]))
    stats.count("other", 3)
    assert (stats["to_relu"], stats.rules["to_relu"].tries, stats.total) == (2, 4, 5)
    assert str(stats) == "other: 3, to_relu: 2" and str(Stats()) == "nothing"


def test_a_rule_is_a_function_too() -> None:
    found = module("%a = tanh %x : f32[8] return %a")
    assert to_relu(found.main.arg("x")).opname == "relu"


def test_limits_nest() -> None:
    body = "".join(f"%s{i} = silu %x : f32[8] %m{i} = mul %s{i}, %x : f32[8] " for i in range(4))
    text = body + "return %m0, %m1, %m2, %m3"
    found = module(text, result=", ".join(["f32[8]"] * 4))
    with watching(Watch(limit=3)) as outer, watching(Watch(limit=9)) as inner:
        assert apply_rules(found, [to_relu])["to_relu"] == 3
    assert (outer.made, inner.made) == (3, 3)
    assert outer.last == "%m2: to_relu"
    verify(found)
