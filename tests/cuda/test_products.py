"""Kernels of products, attention and caches, run on the host, against the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import irc.backends.cuda.codegen.attention
import irc.backends.cuda.codegen.caches
import irc.backends.cuda.codegen.layout
import irc.backends.cuda.codegen.matmul  # noqa: F401
from irc.backends.cuda.plan import KERNELS, Template
from irc.backends.reference import evaluate
from irc.ir.core import Module
from irc.ir.dims import symbol
from irc.ir.dtypes import numpy_dtype
from irc.ops import CacheUpdate
from irc.text import parse_module
from tests.cuda.cases import dtypes_taken
from tests.cuda.emulate import prepare, run_templates
from tests.ops.compare import assert_close, run
from tests.ops.example import Arg, Example, inputs_of, module_of, operation

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


CASES = [
    (example, dtype)
    for example in LARGER
    for dtype in ("f32", "bf16", "f64", "f4e2m1")
    if dtype in dtypes_taken(example)
]


def _templates(module: Module) -> Sequence[Template]:
    op = operation(module)
    made = [t for t in KERNELS[type(op)](op, []) if isinstance(t, Template)]
    assert made
    return made


@pytest.fixture(scope="module")
def cases() -> dict[tuple[str, str], tuple[Module, Sequence[Template]]]:
    """Every case with its launches, compiled at once."""
    found: dict[tuple[str, str], tuple[Module, Sequence[Template]]] = {}
    for example, dtype in CASES:
        module = module_of(example, dtype)
        found[str(example), dtype] = module, _templates(module)
    prepare(t.kernel for _, templates in found.values() for t in templates)
    return found


def _emulated(
    module: Module,
    templates: Sequence[Template],
    inputs: dict[str, Any],
    sizes: dict[str, int],
    threaded: bool = False,
) -> list[Any]:
    """The results of the operation, from its launches."""
    function = module.functions["forward"]
    arrays = {arg: inputs[arg.name or ""] for arg in function.args}
    written = run_templates(templates, arrays, sizes, threaded)
    return [written[value] for value in operation(module).results]


# Sums of many narrow numbers may round to either neighbour, in whichever order they are made.
# Per dtype: the largest distance between neighbours, relative and absolute.
NEIGHBOUR = {"f4e2m1": (0.5, 0.5)}


def _check(got: Any, want: Any, dtype: str) -> None:
    if dtype not in NEIGHBOUR:
        assert_close(got, want, dtype, factor=4.0)
        return
    a, b = got.astype(np.float64), want.astype(np.float64)
    finite = np.isfinite(a) & np.isfinite(b)
    assert np.array_equal(np.isnan(a), np.isnan(b))
    relative, absolute = NEIGHBOUR[dtype]
    assert np.all(np.abs(a - b)[finite] <= relative * np.abs(b)[finite] + absolute)


@pytest.mark.parametrize(
    ("example", "dtype"), [pytest.param(e, d, id=f"{d} {e}") for e, d in CASES]
)
def test_the_reference_is_met(
    example: Example, dtype: str, cases: Any, rng: np.random.Generator
) -> None:
    module, templates = cases[str(example), dtype]
    inputs = inputs_of(example, dtype, rng)
    want = run(example, dtype, inputs)
    for got, wanted in zip(_emulated(module, templates, inputs, example.sizes), want, strict=True):
        _check(got, wanted, dtype)


WHOLE = [example for example in LARGER if example.op != "cache_update"]


@pytest.mark.parametrize("example", WHOLE, ids=str)
def test_all_threads_and_wide_indices(example: Example, rng: np.random.Generator) -> None:
    module = module_of(example, "f32")
    inputs = inputs_of(example, "f32", rng)
    wide = [
        replace(each, kernel=replace(each.kernel, macros={"ix": "long long"}))
        for each in _templates(module)
    ]
    got = _emulated(module, wide, inputs, example.sizes, threaded=True)
    for each, wanted in zip(got, run(example, "f32", inputs), strict=True):
        _check(each, wanted, "f32")


def _of_text(text: str, inputs: dict[str, Any]) -> tuple[Any, Any]:
    """(the result of the last operation from its launch, that of the reference), of a function."""
    module = parse_module(f"module @m {{ func @forward{text} }}")
    function = module.functions["forward"]
    op = function.returned[0].producer
    assert op is not None
    arrays = {arg: inputs[arg.name or ""] for arg in function.args}
    templates = [t for t in KERNELS[type(op)](op, []) if isinstance(t, Template)]
    got = run_templates(templates, arrays)[function.returned[0]]
    return got, next(iter(evaluate(module, inputs).values()))


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
    _check(*_of_text(text, inputs), "f32")


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
    got, want = _of_text(text, {"q": q, "k": k, "past": past, "mask": mask})
    assert np.isfinite(want).all()
    _check(got, want, "f32")


@pytest.mark.parametrize("past", [-2, 0, 3, 5, 2**31 - 2])
def test_tokens_beyond_the_capacity_are_not_written(past: int, rng: np.random.Generator) -> None:
    text = """(%c: f32[1, 2, 5, 3], %n: f32[1, 3, 6], %past: i32[1]) -> (f32[1, 2, 5, 3]) {
        %r = cache_update %c, %n, %past : f32[1, 2, 5, 3]
        return %r
    }"""
    cache = rng.standard_normal((1, 2, 5, 3)).astype(np.float32)
    new = rng.standard_normal((1, 3, 6)).astype(np.float32)
    module = parse_module(f"module @m {{ func @forward{text} }}")
    op = operation(module)
    arrays = dict(zip(op.operands, (cache, new, np.array([past], np.int32)), strict=True))
    templates = [t for t in KERNELS[CacheUpdate](op, []) if isinstance(t, Template)]
    got = run_templates(templates, arrays)[op.results[0]]
    want = cache.copy()
    for token in range(3):
        if past >= 0 and past + token < 5:
            want[0, :, past + token] = new[0, token].reshape(2, 3)
    assert np.array_equal(got, want)
