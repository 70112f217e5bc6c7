"""Attention on tensor cores, with all threads of a block emulated, against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from irc.backends.cuda.codegen.prefill_attention import prefill_attention
from irc.backends.cuda.execute.compile import compile_kernel
from irc.backends.cuda.plan import Fused, Template
from irc.ir.core import Module
from irc.ir.dims import symbol
from tests.cuda.emulate import prepare, run_templates
from tests.ops.compare import assert_close, run
from tests.ops.example import Arg, Example, inputs_of, module_of, operation

B, S, T = symbol("B"), symbol("S"), symbol("T")
SIZES = {"B": 2, "S": 37, "T": 150}
PAST = Arg((B,), "i32", low=0, high=113, name="past")
LENGTHS = Arg((B,), "i64", low=0, high=160, name="lengths")
BIAS = Arg((1, 4, S, T), "f32", name="bias")
SINKS = Arg((4,), "f32", name="sinks")
MASK = Arg((B, 1, S, T), "bool", name="mask")


def _tokens(*more: Arg, head_dim: int = 16, heads: int = 2, width: int = 0, **options: Any) -> Any:
    """Four query heads over `heads` key-value heads; values of `width` features."""
    q, k = Arg((B, S, 4 * head_dim)), Arg((B, T, heads * head_dim))
    v = Arg((B, T, heads * (width or head_dim)))
    attributes = {"head_dim": head_dim} | options
    return Example("attention", (q, k, v, *more), attributes, sizes=SIZES)


def _caches(*more: Arg, head_dim: int = 16, **options: Any) -> Example:
    cache = Arg((B, 2, T, head_dim))
    args = (Arg((B, S, 4 * head_dim)), cache, cache, *more)
    return Example("attention", args, {"head_dim": head_dim} | options, sizes=SIZES)


EXAMPLES = [
    _tokens(),
    _tokens(causal=True),
    _tokens(causal=True, scale=4.0),  # scores that grow by more than weights may
    _tokens(causal=True, window=29, heads=4),
    _tokens(window=60),
    _tokens(MASK),
    _tokens(BIAS, MASK, scale=0.3, softcap=2.0),
    _tokens(LENGTHS, head_dim=24, width=40),
    _tokens(head_dim=136, heads=1, causal=True),
    _tokens(head_dim=8, scale=-0.4),
    _caches(PAST, causal=True, head_dim=64),
    _caches(PAST, LENGTHS, causal=True, window=40),
    _caches(PAST, LENGTHS, SINKS, causal=True, window=40),
    _tokens(SINKS, causal=True, scale=4.0),
]
CASES = [(example, dtype) for example in EXAMPLES for dtype in ("bf16", "f16")]


def _templates(module: Module, sizes: dict[str, int]) -> list[Template]:
    found = prefill_attention(operation(module), sizes)
    assert isinstance(found, Fused)
    return [template for template in found.templates if isinstance(template, Template)]


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """All kernels of this file, compiled at once."""
    modules = [module_of(example, dtype) for example, dtype in CASES]
    prepare(t.kernel for module in modules for t in _templates(module, SIZES))


@pytest.mark.parametrize(("example", "dtype"), CASES, ids=lambda case: str(case))
def test_the_reference_is_met(example: Example, dtype: str, rng: np.random.Generator) -> None:
    module = module_of(example, dtype)
    inputs = inputs_of(example, dtype, rng)
    arrays = {arg: inputs[arg.name or ""] for arg in module.functions["forward"].args}
    written = run_templates(_templates(module, example.sizes), arrays, example.sizes)
    # The weights of values are rounded to the dtype, too.
    want = run(example, dtype, inputs)[0]
    assert_close(written[operation(module).result], want, str(example), factor=3.0)


def test_keys_that_no_query_sees_may_hold_anything(rng: np.random.Generator) -> None:
    example = _caches(PAST, LENGTHS, causal=True)
    module = module_of(example, "bf16")
    inputs = inputs_of(example, "bf16", rng)
    inputs["past"][:], inputs["lengths"][:] = (3, 70), (99, 90)
    for name in ("x1", "x2"):
        inputs[name][0, :, 3 + SIZES["S"] :] = np.nan
        inputs[name][1, :, 90:] = np.nan
    arrays = {arg: inputs[arg.name or ""] for arg in module.functions["forward"].args}
    got = run_templates(_templates(module, SIZES), arrays, SIZES)[operation(module).result]
    assert np.isfinite(got.astype(np.float32)).all()
    assert_close(got, run(example, "bf16", inputs)[0], str(example), factor=3.0)


def test_a_query_that_sees_no_key_gives_zero(rng: np.random.Generator) -> None:
    example = _tokens(LENGTHS)
    module = module_of(example, "f16")
    inputs = inputs_of(example, "f16", rng)
    inputs["lengths"][:] = (0, -1)
    arrays = {arg: inputs[arg.name or ""] for arg in module.functions["forward"].args}
    got = run_templates(_templates(module, SIZES), arrays, SIZES)[operation(module).result]
    assert not got.any()


@pytest.mark.parametrize(
    ("example", "dtype", "why"),
    [
        (_tokens(), "f32", "takes bf16 and f16"),
        (_tokens(head_dim=12), "bf16", "a multiple of 8, not 12"),
        (_tokens(head_dim=264), "bf16", "to 256 features"),
        (_caches(MASK), "bf16", "no mask over caches"),
    ],
)
def test_what_the_kernel_declines(example: Example, dtype: str, why: str) -> None:
    declined = prefill_attention(operation(module_of(example, dtype)), SIZES)
    assert isinstance(declined, str)
    assert why in declined


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_89", "sm_90a", "sm_100", "sm_120"])
def test_kernels_compile_for_every_gpu(architecture: str, rng: np.random.Generator) -> None:
    example, dtype = CASES[rng.integers(len(CASES))]
    for template in _templates(module_of(example, dtype), SIZES):
        assert compile_kernel(template.kernel, architecture)
