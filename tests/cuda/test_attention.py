"""Attention of many queries, with all threads of a block emulated, against the reference: on tensor
cores, what is in front of it, and plain kernels of wide heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from irc.backends.cuda.codegen.attention import plain_attention, prefill_attention
from irc.backends.cuda.codegen.rope_and_cache import rope_and_cache
from irc.backends.cuda.execute.compile import compile_kernel
from irc.backends.cuda.plan import Template
from irc.backends.cuda.plan.template import Launcher
from irc.ir.core import Module, Op
from irc.ir.dims import symbol
from irc.pipeline import run_pipeline
from tests.cuda.decode_cases import Case, arrays_of, check_results, made_by, operations_of
from tests.cuda.emulate import prepare, run_templates
from tests.cuda.regimes import regime_of
from tests.cuda.test_decode_attention import CASES as ONE_TOKEN
from tests.fresh import fresh
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
    return made_by(prefill_attention, operation(module), regime_of(sizes))


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """All kernels of this file, compiled at once."""
    modules = [module_of(example, dtype) for example, dtype in CASES]
    prepare(t.kernel for module in modules for t in _templates(module, SIZES))


def _check(example: Example, dtype: str, inputs: Any, maker: Any = prefill_attention) -> Any:
    """The result, which is close to that of the reference."""
    module = module_of(example, dtype)
    op, sizes = operation(module), example.sizes
    arrays = {arg: inputs[arg.name or ""] for arg in module.main.args}
    made = made_by(maker, op, regime_of(sizes))
    result = run_templates(made, arrays, sizes)[op.result]
    # The weights of values are rounded to the dtype, too.
    assert_close(result, run(example, dtype, inputs)[0], str(example), factor=3.0)
    return result


@pytest.mark.parametrize(("example", "dtype"), CASES, ids=lambda case: str(case))
def test_the_reference_is_met(example: Example, dtype: str, rng: np.random.Generator) -> None:
    _check(example, dtype, inputs_of(example, dtype, rng))


def test_keys_that_no_query_sees_may_hold_anything(rng: np.random.Generator) -> None:
    example = _caches(PAST, LENGTHS, causal=True)
    inputs = inputs_of(example, "bf16", rng)
    inputs["past"][:], inputs["lengths"][:] = (3, 70), (99, 90)
    for name in ("x1", "x2"):
        inputs[name][0, :, 3 + SIZES["S"] :] = np.nan
        inputs[name][1, :, 90:] = np.nan
    assert np.isfinite(_check(example, "bf16", inputs).astype(np.float32)).all()


def test_a_query_that_sees_no_key_gives_zero(rng: np.random.Generator) -> None:
    inputs = inputs_of(_tokens(LENGTHS), "f16", rng)
    inputs["lengths"][:] = (0, -1)
    assert not _check(_tokens(LENGTHS), "f16", inputs).any()


FRONT = {
    name: replace(case, tokens=19, capacity=case.capacity + 18)
    for name, case in ONE_TOKEN.items()
    if case.updates and (case.rope is not None or case.norm is not None) and case.capacity < 1000
}


def launches(case: Case) -> tuple[Module, list[Template]]:
    """A module with rope_and_cache and attention, and the launches of both."""
    module = case.module()
    run_pipeline(module, "expand{ops=[fused_attention]}")
    front, attention = operations_of(module)
    made = made_by(rope_and_cache, front, regime_of())
    return module, made + made_by(prefill_attention, attention, regime_of())


@pytest.mark.parametrize("name", FRONT)
def test_attention_behind_rope_and_caches(name: str) -> None:
    case = FRONT[name]
    module, templates = launches(case)
    inputs = arrays_of(case, module, fresh())
    check_results(case, module, inputs, run_templates(templates, inputs, case.sizes))


def _front(change: dict[str, Any]) -> Op:
    module = replace(ONE_TOKEN["grouped"], **change).module()
    run_pipeline(module, "expand{ops=[fused_attention]}")
    return operations_of(module)[0]


@pytest.mark.parametrize(
    ("maker", "op", "why"),
    [
        (prefill_attention, operation(module_of(_tokens(), "f32")), "takes bf16 and f16"),
        (prefill_attention, operation(module_of(_tokens(head_dim=12), "f16")), "of 8, not 12"),
        (prefill_attention, operation(module_of(_tokens(head_dim=264), "f16")), "to 256 features"),
        (prefill_attention, operation(module_of(_caches(MASK), "bf16")), "no mask over caches"),
        (rope_and_cache, _front({"dtype": "f32"}), "it takes bf16 and f16, not f32"),
        (rope_and_cache, _front({"size": 6}), "multiples of 4, not [6, 6, 6"),
        (rope_and_cache, _front({"rope": ", rotary_dim=6"}), "multiples of 4, not [64, 64, 6"),
    ],
)
def test_what_kernels_decline(maker: Launcher, op: Op, why: str) -> None:
    declined = maker(op, regime_of(SIZES))
    assert isinstance(declined, str) and why in declined


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_89", "sm_90a", "sm_100", "sm_120"])
def test_kernels_compile_for_every_gpu(architecture: str, rng: np.random.Generator) -> None:
    example, dtype = CASES[rng.integers(len(CASES))]
    templates = _templates(module_of(example, dtype), SIZES)
    templates += launches(FRONT["heads of length one"])[1][:1]
    wide = module_of(Example("attention", (Arg((1, S, 30000)),) * 3, {"head_dim": 30000}))
    templates += made_by(plain_attention, operation(wide), regime_of({"S": 2}))
    for template in templates:
        assert compile_kernel(template.kernel, architecture)


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("heads", [1, 2])
def test_heads_wider_than_shared_memory(heads: int, dtype: str, rng: np.random.Generator) -> None:
    """12800 features in f32 are more than the 48 KB of a block; so are 6400 in f64."""
    wide = Arg((B, S, 12800))
    args = (wide, wide, Arg((B, S, 3 * heads)), LENGTHS)
    options = {"head_dim": 12800 // heads, "causal": True}
    example = Example("attention", args, options, sizes={"B": 2, "S": 3})
    module = module_of(example, dtype)
    (template,) = made_by(plain_attention, operation(module), regime_of(example.sizes))
    assert bool(template.scratch) == (dtype == "f64" or heads == 1)
    _check(example, dtype, inputs_of(example, dtype, rng), plain_attention)
