"""trace: arguments, results, aliases, ranges; errors; nothing left behind."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import irc
from irc.frontends import Module, Tensor
from irc.frontends import functional as F
from irc.frontends.tracer import active

X = {"x": irc.Spec("f32", ("B", 4))}


def test_a_dict_names_the_results() -> None:
    module = irc.trace(lambda x: {"twice": x + x, "same": x}, X)
    assert module.main.name == "forward" and module.main.result_names() == ("twice", "same")
    array = np.ones((2, 4), np.float32)
    assert irc.evaluate(module, {"x": array})["twice"].tolist() == (array * 2).tolist()


def test_tuples_and_single_tensors() -> None:
    assert irc.trace(lambda x: (x, -x), X).main.result_names() == ("result0", "result1")
    assert irc.trace(lambda x: -x, X).main.result_names() == ("result0",)


def test_ranges_of_symbols() -> None:
    module = irc.trace(lambda x: -x, X, dims={"B": (1, 4, 16)})
    assert str(module).startswith("module @lambda dims(B=1:4:16) {")


def test_names_of_modules() -> None:
    class TwoTower(Module):
        def forward(self, x: Tensor) -> Tensor:
            return -x

    assert irc.trace(TwoTower(), X).name == "two_tower"
    assert irc.trace(TwoTower(), X, name="other").name == "other"


def test_symbols_in_specs_may_be_expressions() -> None:
    module = irc.trace(lambda x: -x, {"x": irc.Spec("f32", ("B", "2*S + 1"))})
    assert str(module.main.args[0].type) == "f32[B, 2*S + 1]"


def test_aliases_are_declared() -> None:
    cache = irc.Spec("f32", ("B", 2, "C", 8))
    new = irc.Spec("f32", ("B", "S", 16))
    module = irc.trace(
        lambda k, new, past: {"k": F.cache_update(k, new, past)},
        {"k": cache, "new": new, "past": irc.Spec("i32", ("B",))},
        aliases={"k": "k"},
    )
    assert module.main.aliases() == {0: 0}
    assert "-> (k: f32[B, 2, C, 8] aliases %k)" in str(module)


def test_every_trace_prints_and_parses() -> None:
    text = str(irc.trace(lambda x: (F.softmax(x * 0.5, dim=-1), x[:, 1:]), X, {"B": (1, 2, 3)}))
    assert str(irc.parse(text)) == text


def test_nothing_of_a_trace_is_left_after_an_exception() -> None:
    def fails(x: Tensor) -> Tensor:
        assert active() is not None
        raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        irc.trace(fails, X)
    assert active() is None


def test_a_trace_inside_a_trace() -> None:
    def outer(x: Tensor) -> Tensor:
        irc.trace(lambda x: -x, X)
        return x + 1

    assert [op.opname for op in irc.trace(outer, X).main] == ["full", "add", "return"]


class Pair(Module):
    def forward(self, ids: Tensor, *, lengths: Tensor, mask: Any = None) -> Tensor:
        return ids + lengths


IDS = irc.Spec("i32", ("B",))
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "unknown input": (
        lambda: irc.trace(Pair(), {"idds": IDS}),
        "no argument called 'idds'; did you mean 'ids'?; it takes ids, lengths, mask",
    ),
    "missing input": (
        lambda: irc.trace(Pair(), {"ids": IDS}),
        "Pair.forward needs lengths; describe it in inputs",
    ),
    "no spec": (lambda: irc.trace(lambda x: x, {"x": "f32"}), "is given by irc.Spec"),  # type: ignore[dict-item]
    "bad dtype": (
        lambda: irc.trace(lambda x: x, {"x": irc.Spec("int32", ("B",))}),
        "the input x: no dtype called 'int32'",
    ),
    "bad size": (
        lambda: irc.trace(lambda x: x, {"x": irc.Spec("i32", (1.5,))}),
        "the input x: a size is an int or the name of a symbol, not 1.5",
    ),
    "no model": (lambda: irc.trace(3, X), "a int is no model"),  # type: ignore[arg-type]
    "unknown symbol": (
        lambda: irc.trace(lambda x: x, X, dims={"b": (1, 2, 3)}),
        "dims gives a range for b, which no input has",
    ),
    "symbol without range": (
        lambda: irc.trace(lambda x: x, {"x": irc.Spec("i32", ("B", "S"))}, dims={"B": (1, 2, 3)}),
        "dims gives no range for S; add 'S': (min, typical, max)",
    ),
    "no range": (
        lambda: irc.trace(lambda x: x, X, dims={"B": 4}),  # type: ignore[dict-item]
        "the range of B is (min, typical, max), not 4",
    ),
    "falling range": (
        lambda: irc.trace(lambda x: x, X, dims={"B": (4, 2, 8)}),
        "must rise: min <= typical <= max, not (4, 2, 8)",
    ),
    "returns None": (lambda: irc.trace(lambda x: None, X), "the result is None; return a tensor"),
    "returns numbers": (lambda: irc.trace(lambda x: {"y": 3}, X), "the result is a int"),
    "returns nothing": (lambda: irc.trace(lambda x: (), X), "returns no tensors"),
    "second result": (lambda: irc.trace(lambda x: (x, [x]), X), "result 1 is a list"),
    "alias of no result": (
        lambda: irc.trace(lambda x: {"out": x}, X, aliases={"ou": "x"}),
        "there is no result 'ou'; did you mean 'out'?",
    ),
    "alias of no input": (
        lambda: irc.trace(lambda x: {"out": x}, X, aliases={"out": "xx"}),
        "there is no input 'xx'; did you mean 'x'?",
    ),
    "alias of another type": (
        lambda: irc.trace(lambda x: {"out": x[:, 1:]}, X, aliases={"out": "x"}),
        "the result out is f32[B, 3], but the input x it aliases is f32[B, 4]",
    ),
    "bad name": (lambda: irc.trace(lambda **k: k, {"a b": IDS}), "no name for an input"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_use_says_what_to_change(name: str) -> None:
    call, message = WRONG[name]
    with pytest.raises(irc.Error) as caught:
        call()
    assert message in str(caught.value)
    assert str(caught.value).startswith("test_trace.py:")
