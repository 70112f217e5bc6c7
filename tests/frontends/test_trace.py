"""irc.trace: arguments, results, aliases, ranges, errors."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import irc
from irc.frontends import Module, Tensor
from irc.frontends import functional as F
from irc.frontends.tracer import active
from irc.source import shown_path

X = {"x": irc.Spec("f32", ("B", 4))}


def test_a_dict_names_the_results() -> None:
    module = irc.trace(lambda x: {"twice": x + x, "same": x}, X)
    assert module.main.name == "forward" and module.main.result_names() == ("twice", "same")
    array = np.ones((2, 4), np.float32)
    assert irc.evaluate(module, {"x": array})["twice"].tolist() == (array * 2).tolist()


def test_names_and_ranges() -> None:
    class TwoTower(Module):
        def forward(self, x: Tensor) -> Tensor:
            return -x

    assert irc.trace(lambda x: (x, -x), X).main.result_names() == ("result0", "result1")
    assert irc.trace(lambda x: -x, X).main.result_names() == ("result0",)
    assert irc.trace(TwoTower(), X).name == "two_tower"
    assert irc.trace(TwoTower(), X, name="other").name == "other"
    module = irc.trace(lambda x: -x, X, dims={"B": (1, 4, 16)})
    assert str(module).startswith("module @lambda dims(B=1:4:16) {")
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


def test_an_exception_ends_the_trace() -> None:
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


def traced(spec: Any = X, model: Any = lambda x: x, **options: Any) -> Callable[[], Any]:
    return lambda: irc.trace(model, spec, **options)


def aliased(result: str, source: str, model: Any = lambda x: {"out": x}) -> Callable[[], Any]:
    return traced(model=model, aliases={result: source})


WRONG: list[tuple[Callable[[], Any], str]] = [
    (
        traced({"idds": IDS}, Pair()),
        "no argument called 'idds'; did you mean 'ids'?; it takes ids, lengths, mask",
    ),
    (traced({"ids": IDS}, Pair()), "Pair.forward needs lengths; describe it in inputs"),
    (traced({"x": "f32"}), "the input x is 'f32'; expected irc.Spec("),
    (traced({"x": irc.Spec("int32", ("B",))}), "the input x: no dtype called 'int32'"),
    (
        traced({"x": irc.Spec("i32", (1.5,))}),  # pyright: ignore[reportArgumentType]
        "the input x: a size is an int or the name of a symbol, not 1.5",
    ),
    (traced(X, 3), "a int is no model"),
    (traced(dims={"b": (1, 2, 3)}), "the model has no dimension 'b'; did you mean 'B'?; it has B"),
    (
        traced({"x": irc.Spec("i32", ("B", "S"))}, dims={"B": (1, 2, 3)}),
        "dims has no range for S; add 'S': (min, typical, max)",
    ),
    (traced(dims={"B": "4"}), "the range of B is '4'; give (min, typical, max), or one number"),
    (traced(dims={"B": (4, 2, 8)}), "the range B=4:2:8 must rise"),
    (traced(model=lambda x: None), "the result is None; return a tensor"),
    (traced(model=lambda x: {"y": 3}), "the result is an int"),
    (traced(model=lambda x: ()), "returns no tensors"),
    (traced(model=lambda x: (x, [x])), "result 1 is a list"),
    (aliased("ou", "x"), "there is no result 'ou'; did you mean 'out'?"),
    (aliased("out", "xx"), "there is no input 'xx'; did you mean 'x'?"),
    (
        aliased("out", "x", lambda x: {"out": x[:, 1:]}),
        "the result out is f32[B, 3], but the input x it aliases is f32[B, 4]",
    ),
    (traced(model=lambda x: {"a b": x}), "expected a result name such as logits, found 'a b'"),
    (traced({"a b": IDS}, lambda **k: k), "expected an input name such as input_ids"),
]


@pytest.mark.parametrize(("call", "message"), WRONG)
def test_errors_state_what_to_change(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(irc.Error) as caught:
        call()
    assert message in caught.value.message
    assert str(caught.value).startswith(shown_path(__file__) + ":")
