"""Every fact of every operation that its declaration states, against numpy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from irc.ir.core import Op
from irc.ir.declare import REGISTRY, operation
from irc.ir.dtypes import numpy_dtype
from irc.ir.facts import facts_text
from irc.ir.sharding import operand_words, parse_rule, result_words
from irc.ops import Cast, Exp, Pad, Relu, Reshape
from tests.cli.runner import works
from tests.ops.example import Example, inputs_of, module_of
from tests.ops.example import operation as operation_of
from tests.ops.examples import EXAMPLES
from tests.ops.test_declarations import value
from tests.ops.test_every_op import WITHOUT_MEANING, meaning

Inputs = dict[str, Any]


def bound(example: Example) -> tuple[Example, str, Op]:
    """An example with numbers for its symbols, its first dtype, and its operation."""
    dtype = example.dtypes[0]
    return example.bound(), dtype, operation_of(module_of(example.bound(), dtype))


def cases(holds: Callable[[Op], bool]) -> list[Any]:
    """The examples of which a fact holds."""
    every = [e for examples in EXAMPLES.values() for e in examples if e.op not in WITHOUT_MEANING]
    return [pytest.param(e, id=str(e)) for e in every if holds(bound(e)[2])]


def results(example: Example, dtype: str, inputs: Inputs) -> list[np.ndarray]:
    """The results, rounded to their dtypes."""
    op = operation_of(module_of(example, dtype))
    with np.errstate(all="ignore"):
        arrays = meaning(op, list(inputs.values()), example)
        types = [numpy_dtype(result.type.dtype) for result in op.results]
        return [np.asarray(a).astype(t) for a, t in zip(arrays, types, strict=True)]


def held_together(op: Op) -> Iterator[list[bool]]:
    """Per dimension of the result that operands have too: which operands have it."""
    text = op.sharding_rule()
    assert text is not None, "a fact about dimensions needs a sharding rule"
    rule = parse_rule(text)
    named = operand_words(op, rule)
    for words in result_words(rule, [result.type for result in op.results]):
        for word in {word for word in words if word != "1" and word not in rule.replicated}:
            holds = [word in have or rule.is_elementwise for _, have in named]
            chosen = any(h and n in op.safe_values for h, (n, _) in zip(holds, named, strict=True))
            if any(holds) and not chosen:
                yield holds


@pytest.mark.parametrize("example", cases(lambda op: op.keeps_zeros))
def test_zeros_give_zeros(example: Example, rng: np.random.Generator) -> None:
    example, dtype, op = bound(example)
    for holds in held_together(op):
        inputs = inputs_of(example, dtype, rng)
        for name, zero in zip(inputs, holds, strict=True):
            inputs[name] = np.zeros_like(inputs[name]) if zero else inputs[name]
        assert not any(np.any(array) for array in results(example, dtype, inputs))


def extremes(array: np.ndarray, rng: np.random.Generator, above: tuple[float, ...]) -> np.ndarray:
    """The largest, the smallest and usual numbers of a float array's dtype, and those `above`."""
    if array.dtype.kind in "iub":
        return array
    most = float(np.finfo(array.dtype).max) if array.dtype.kind == "f" else 3e38
    numbers = rng.choice([most, -most, 0.0, 1.0, -1.0, 0.7, *above], array.shape)
    return np.asarray(numbers).astype(array.dtype)


@pytest.mark.parametrize(
    "example", cases(lambda op: any(op.bound(i) != "no" for i in range(len(op.results))))
)
def test_no_infinity_arises(example: Example, rng: np.random.Generator) -> None:
    plain = example.bound()
    for dtype in example.dtypes:
        op = operation_of(module_of(plain, dtype))
        for i in range(len(op.results)):
            above = (np.inf, -np.inf) if op.bound(i) == "always" else ()
            inputs = inputs_of(plain, dtype, rng)
            # weights are finite and of a usual size in every model
            weights = {"weight", "bias"} if op.bound(i) == "always" else set[str]()
            names = [name for name, _ in op.named_operands()]
            for key, name in zip(inputs, names, strict=True):
                inputs[key] = inputs[key] if name in weights else extremes(inputs[key], rng, above)
            if op.bound(i) != "no":
                array = results(plain, dtype, inputs)[i].astype(np.float64)
                assert not np.any(np.isinf(array)), (op, dtype)
                assert above or not np.any(np.isnan(array)), (op, dtype)


@pytest.mark.parametrize("example", cases(lambda op: op.moves_data))
def test_moved_elements_are_those_of_the_operands(
    example: Example, rng: np.random.Generator
) -> None:
    example, dtype, op = bound(example)
    inputs = inputs_of(example, dtype, rng)
    for array, result in zip(results(example, dtype, inputs), op.results, strict=True):
        kind = numpy_dtype(result.type.dtype)
        chosen = [
            a
            for a, (n, _) in zip(inputs.values(), op.named_operands(), strict=True)
            if n not in op.safe_values and (not op.selects or n == op.selects)
        ]
        known = [a.astype(kind).astype(np.float64).ravel() for a in chosen]
        allowed = np.concatenate([*known, [0.0, op.attributes.get("value", 0)]])
        assert np.isin(array.astype(np.float64), allowed).all()


@pytest.mark.parametrize("example", cases(lambda op: op.is_view))
def test_a_view_keeps_the_order_of_elements(example: Example, rng: np.random.Generator) -> None:
    example, dtype, _ = bound(example)
    inputs = inputs_of(example, dtype, rng)
    (array,) = results(example, dtype, inputs)
    assert np.array_equal(array.ravel(), next(iter(inputs.values())).ravel())


@pytest.mark.parametrize("example", cases(lambda op: bool(op.in_place)))
def test_overwritten_operands_have_the_types_of_results(example: Example) -> None:
    _, _, op = bound(example)
    overwritten = op.overwrites()
    assert len(overwritten) == len(op.in_place.split())
    assert all(result.type == operand.type for result, operand in overwritten.items())


@pytest.mark.parametrize("example", cases(lambda op: bool(op.safe_values)))
def test_safe_values_are_no_errors(example: Example, rng: np.random.Generator) -> None:
    example, _, op = bound(example)
    dtype = "i32" if "i32" in example.dtypes else example.dtypes[0]
    inputs = inputs_of(example, dtype, rng)
    for key, (name, _) in zip(inputs, op.named_operands(), strict=True):
        if name in op.safe_values:
            inputs[key] = np.full_like(inputs[key], op.safe_values[name])
    with np.errstate(divide="raise"):
        assert results(example, dtype, inputs)


def test_facts_of_attributes() -> None:
    """What holds for some attributes only is asked of the operation, not of its class."""
    x = value("f32[2]")
    assert Pad(x, before=(1,), after=(0,)).bound(0) == "operands"
    assert Pad(x, before=(1,), after=(0,), value=np.inf).bound(0) == "no"
    for source, target, bound in (
        *(("f32", "f64", "operands"), ("f32", "f16", "no"), ("bf16", "f16", "no")),
        *(("f16", "bf16", "operands"), ("i64", "f16", "no"), ("i32", "f32", "operands")),
        *(("f8e8m0", "f8e5m2", "no"), ("f32", "i8", "operands")),
    ):
        assert Cast(value(f"{source}[2]"), dtype=target).bound(0) == bound, (source, target)


def test_facts_are_checked_and_shown() -> None:
    declare: Any = operation
    assert facts_text(Relu) == 'keeps_zeros, bounded="operands"'
    assert facts_text(Exp) == ""
    assert 'facts: keeps_zeros, bounded="operands"' in works("ops", "relu").out
    assert Reshape.moves_data and Reshape.bounded == "operands" and Reshape.keeps_zeros
    for facts, message in (
        ({"selects": "y"}, "has no operand 'y'"),
        ({"sums": "x | z"}, "has no operand 'z'"),
        ({"is_view": True}, "a view moves data"),
        ({"bounded": "sometimes"}, "bounded is one of"),
    ):
        with pytest.raises(ValueError, match=message):
            declare("wrong", **facts)(type("Wrong", (Relu.__mro__[1],), {"__doc__": "Wrong."}))
        assert "wrong" not in REGISTRY
