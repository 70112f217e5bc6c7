"""Kernels of products, attention and caches, run on the host, against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from irc.backends.cuda.plan.prepare import load_tables
from irc.backends.reference import evaluate
from irc.ir.dims import symbol
from irc.ir.dtypes import numpy_dtype
from irc.text import parse_module
from tests.cuda.cases import Case, cases, launches, wide_launches
from tests.cuda.emulate import prepare, run_templates
from tests.ops.compare import assert_close
from tests.ops.example import Arg, Example

load_tables()
B, S, T = symbol("B"), symbol("S"), symbol("T")
HEADS = {"head_dim": 8}
PAST = Arg((B,), "i32", low=0, high=60, name="past")
LENGTHS = Arg((B,), "i64", low=0, high=90, name="lengths")
LONG = {"B": 2, "S": 21, "T": 83}
P, K, N, M, X, J, HEAD, FIRST = map(symbol, ("i", "k", "n", "m", "x", "j", "head", "first"))
LARGER = [
    # Sizes with the names of variables in kernels.
    Example("matmul", (Arg((K, N, X)), Arg((X, M))), sizes={"k": 2, "n": 3, "x": 40, "m": 5}),
    Example(
        "attention",
        (Arg((P, HEAD, 32)), *[Arg((P, FIRST, 8))] * 2, Arg((P, 1, 1, FIRST), name="bias")),
        HEADS | {"causal": True},
        sizes={"i": 2, "head": 3, "first": 5},
    ),
    Example("linear", (Arg((J, M, 9)), Arg((5, 9))), sizes={"j": 3, "m": 2}),
    Example("matmul", (Arg((70, 65)), Arg((65, 67)))),
    Example("matmul", (Arg((2, B, 3)), Arg((3, 140))), sizes={"B": 66}),
    Example("matmul", (Arg((3, 0)), Arg((0, 5)))),
    Example("linear", (Arg((B, S, 70)), Arg((66, 70))), sizes={"B": 3, "S": 23}),
    Example("linear", (Arg((3, 40)), Arg((7, 40)), Arg((7,), name="bias"))),
    Example("conv", (Arg((2, 70, S)), Arg((20, 35, 2))), {"groups": 2}, sizes={"S": 70}),
    Example("conv", (Arg((2, 6, 9)), Arg((6, 1, 3)), Arg((6,), name="bias")), {"groups": 6}),
    Example("cache_update", (Arg((2, 1, 5, 3)), Arg((2, 3, 3)), Arg((2,), "i64", 0, 3))),
    Example(
        "attention",
        (Arg((B, S, 32)), *[Arg((B, 2, T, 8))] * 2, PAST, LENGTHS, Arg((4,), "f32", name="sinks")),
        HEADS | {"causal": True, "window": 37},
        sizes=LONG,
    ),
    Example(
        "attention",
        (Arg((B, 4, 32)), *[Arg((B, T, 8))] * 2, Arg((B, 4, 4, T), "bool", name="mask")),
        HEADS | {"softcap": 1.5},
        sizes=LONG,
    ),
    *(
        Example("attention", (Arg((1, S, d)), *[Arg((1, T, d))] * 2), {"head_dim": d}, sizes=LONG)
        for d in (160, 600)
    ),
    Example("attention", (Arg((2, 3, 8)), Arg((2, 5, 8)), Arg((2, 5, 1100))), HEADS),
]


CASES = cases(LARGER, launches, ("f32", "bf16", "f64", "f4e2m1"))
WHOLE = [example for example in LARGER if example.op != "cache_update"]


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """All launches, compiled at once."""
    prepare(each.kernel for case in CASES for each in case.templates)


@pytest.mark.parametrize("case", [pytest.param(c, id=f"{c.dtype} {c.example}") for c in CASES])
def test_the_reference_is_met(case: Case, rng: np.random.Generator) -> None:
    case.check(rng, case.example.sizes)


@pytest.mark.parametrize("example", WHOLE, ids=str)
def test_all_threads_and_wide_indices(example: Example, rng: np.random.Generator) -> None:
    (case,) = cases([example], wide_launches, ("f32",))
    case.check(rng, example.sizes, threaded=True)


def _of_text(text: str, inputs: dict[str, Any]) -> Any:
    """The result of the last operation of a function, from its launch."""
    module = parse_module(f"module @m {{ func @forward{text} }}")
    function = module.main
    op = function.returned[0].producer
    assert op is not None
    arrays = {arg: inputs[arg.name or ""] for arg in function.args}
    return run_templates(launches(op, *function.args), arrays)[function.returned[0]]


def _check(text: str, inputs: dict[str, Any]) -> None:
    (want,) = evaluate(parse_module(f"module @m {{ func @forward{text} }}"), inputs).values()
    assert np.isfinite(want).all()
    assert_close(_of_text(text, inputs), want, text, factor=4.0)


def test_operands_are_computed_inside(rng: np.random.Generator) -> None:
    text = """(%x: f32[7, 2, 32], %w: i4[9, 64], %s: f32[9, 2]) -> (f32[7, 9]) {
        %y = reshape %x {shape=[7, 64]} : f32[7, 64]
        %d = dequantize %w, %s : f32[9, 64]
        %r = linear %y, %d : f32[7, 9]
        return %r
    }"""
    inputs = {
        "x": rng.standard_normal((7, 2, 32)).astype(np.float32),
        "w": rng.integers(-8, 8, (9, 64)).astype(numpy_dtype("i4")),
        "s": rng.uniform(0.1, 1.0, (9, 2)).astype(np.float32),
    }
    _check(text, inputs)


def test_keys_that_no_query_sees_may_hold_anything(rng: np.random.Generator) -> None:
    text = """(%q: f32[2, 3, 8], %k: f32[2, 2, 40, 4], %past: i32[2], %mask: bool[1, 1, 1, 40])
        -> (f32[2, 3, 8]) {
        %r = attention %q, %k, %k, mask=%mask, past=%past {head_dim=4, causal} : f32[2, 3, 8]
        return %r
    }"""
    k = rng.standard_normal((2, 2, 40, 4)).astype(np.float32)
    mask = np.ones((1, 1, 1, 40), np.bool_)
    k[0, :, 9:], k[1, :, 31:], k[:, :, 4], mask[..., 4] = np.nan, np.nan, np.nan, False
    q = rng.standard_normal((2, 3, 8)).astype(np.float32)
    past = np.array([6, 28], np.int32)
    _check(text, {"q": q, "k": k, "past": past, "mask": mask})


@pytest.mark.parametrize("past", [-2, 0, 3, 5, 2**31 - 2])
def test_tokens_beyond_the_capacity_are_not_written(past: int, rng: np.random.Generator) -> None:
    text = """(%c: f32[1, 2, 5, 3], %n: f32[1, 3, 6], %past: i32[1]) -> (f32[1, 2, 5, 3]) {
        %r = cache_update %c, %n, %past : f32[1, 2, 5, 3]
        return %r
    }"""
    cache = rng.standard_normal((1, 2, 5, 3)).astype(np.float32)
    new = rng.standard_normal((1, 3, 6)).astype(np.float32)
    got = _of_text(text, {"c": cache, "n": new, "past": np.array([past], np.int32)})
    want = cache.copy()
    for token in range(3):
        if past >= 0 and past + token < 5:
            want[0, :, past + token] = new[0, token].reshape(2, 3)
    assert np.array_equal(got, want)
