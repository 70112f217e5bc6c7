"""Attention of few queries per sequence: equal to the reference, and compiled for every GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from irc.backends.cuda.codegen.decode_attention import decode_attention, shapes_of, template
from irc.backends.cuda.execute.compile import compile_kernel
from irc.backends.cuda.plan import Launch, Template
from irc.backends.reference import evaluate
from irc.ir.core import Module
from irc.ops import Attention, FusedAttention
from irc.text import parse_module
from tests.cuda.decode_cases import Case, arrays_of, check_results, made_by, near, operations_of
from tests.cuda.emulate import run_templates
from tests.cuda.regimes import regime_of
from tests.cuda.run_plan import HostProgram
from tests.fresh import fresh

LLAMA3 = ', theta=500000.0, kind="llama3", factor=8.0, original_positions=64'
CASES = {
    "grouped": Case(8, 2, 64, 2, 100, (37, 99)),
    "first token": Case(4, 2, 32, 1, 40, (0,)),
    "short in a long cache": Case(4, 2, 64, 2, 5000, (300, 4), multiprocessors=3),
    "window in a long cache": Case(2, 1, 64, 1, 5000, (4900,), options=", causal, window=100"),
    "long": Case(2, 1, 64, 1, 5000, (4321,)),
    "cluster of eight": Case(2, 1, 32, 1, 600, (555,)),
    "one split": Case(4, 1, 64, 1, 40, (33,), form="apart", dtype="f16"),
    "many query heads": Case(12, 1, 128, 1, 70, (64,)),
    "heads in parts": Case(21, 1, 64, 1, 70, (50,)),
    "wide heads": Case(20, 2, 256, 1, 70, (50,), dtype="f16"),
    "heads of 80": Case(6, 2, 80, 2, 90, (80, 3), index="i64"),
    "heads of 96, in part rotated": Case(3, 3, 96, 1, 50, (20,), rope=", rotary_dim=24"),
    "rotated in pairs": Case(4, 2, 64, 1, 50, (49,), rope=", interleaved"),
    "slowed": Case(4, 2, 64, 1, 50, (49,), rope=LLAMA3),
    "no rope": Case(4, 2, 64, 1, 50, (49,), rope=None, form="apart"),
    "window": Case(4, 2, 64, 2, 300, (299, 7), options=", causal, window=50"),
    "capped": Case(4, 2, 64, 1, 50, (30,), options=", causal, softcap=2.0, scale=0.2"),
    "lengths": Case(4, 2, 64, 2, 50, (30, 40), lengths=(20, 0)),
    "heads of length one": Case(6, 2, 64, 1, 50, (30,), norm=""),
    "norms without rope": Case(4, 2, 80, 1, 50, (30,), rope=None, norm=", offset=1.0"),
    "sinks": Case(12, 2, 64, 2, 300, (299, 7), options=", causal, window=50", sinks="bf16"),
    "sinks of long": Case(2, 1, 64, 1, 5000, (4321,), sinks="f32"),
    "sinks and no keys": Case(4, 2, 64, 2, 50, (30, 40), lengths=(20, 0), sinks="f32"),
    "only read": Case(4, 2, 64, 2, 50, (30, 41), rope=None, form="read"),
    "of an encoder": Case(
        *(4, 2, 64, 2, 50, ()), rope=None, form="tokens", lengths=(33, 50), options=""
    ),
    "many sequences": Case(8, 2, 64, 37, 2100, (37, 1099, 0, 2070, 1600)),
    "many sequences of many lengths": Case(
        *(4, 2, 64, 37, 4200, (37, 4099, 0, 270, 1600)), multiprocessors=5
    ),
    "one long sequence among short ones": Case(
        *(4, 2, 64, 4, 5000, (37, 4999, 0, 27)), multiprocessors=6, lengths=(20, 5000, 0, 5000)
    ),
    "long sequences with a window": Case(
        *(4, 1, 64, 3, 5000, (4990, 1200, 0)),
        multiprocessors=4,
        tokens=3,
        options=", causal, window=900",
    ),
    "codes of FP8": Case(
        *(8, 2, 64, 2, 90, (30, 71)), rope=None, form="read", codes="f8e4m3", tokens=2
    ),
    "codes of INT8": Case(4, 1, 96, 1, 90, (70,), rope=None, form="read", codes="i8", dtype="f16"),
    "many codes": Case(
        *(4, 2, 128, 4, 4500, (37, 4400, 0, 27)),
        multiprocessors=3,
        rope=None,
        form="read",
        codes="i8",
        options=", causal, window=2000",
    ),
    "two tokens": Case(8, 2, 64, 2, 100, (14, 98), tokens=2),
    "three tokens in a cluster": Case(4, 2, 32, 1, 600, (555,), tokens=3, norm=""),
    "four tokens of a long cache": Case(
        *(8, 2, 64, 2, 5000, (4321, 0)), tokens=4, sinks="f32", multiprocessors=7
    ),
    "five tokens in parts": Case(21, 3, 64, 2, 90, (80, 3), tokens=5, rope=", interleaved"),
    "eight tokens with a window": Case(
        *(4, 2, 64, 2, 2500, (2300, 7)), tokens=8, options=", causal, window=3, softcap=9.0"
    ),
    "four tokens beyond lengths": Case(
        *(4, 2, 64, 2, 60, (30, 40)), tokens=4, lengths=(32, 0), options=", causal, window=2"
    ),
    "four tokens of wide heads": Case(6, 2, 256, 1, 90, (70,), tokens=4, dtype="f16"),
    "four tokens that read": Case(4, 1, 96, 2, 50, (30, 41), rope=None, form="read", tokens=4),
    "tokens of a decoder over an encoder": Case(
        *(4, 2, 64, 2, 50, ()), rope=None, form="tokens", lengths=(33, 0), options="", tokens=6
    ),
}


def launch(case: Case, module: Module) -> Template:
    """The launch for the only operation of a case."""
    (op,), regime = operations_of(module), case.regime(module)
    if case.multiprocessors == 132:
        (made,) = made_by(decode_attention, op, regime)
        return made
    assert isinstance(op, Attention | FusedAttention)
    return template(op, regime, shapes_of(op, regime)["0 splits, 8 warps, 1 resident"])


@pytest.mark.parametrize("name", CASES)
def test_equal_to_the_reference(name: str) -> None:
    case = CASES[name]
    module = case.module()
    made = launch(case, module)
    assert made.early, "arguments and old rows of caches are there before the launch"
    inputs = arrays_of(case, module, fresh())
    check_results(case, module, inputs, run_templates([made], inputs, case.sizes))


@pytest.mark.parametrize(
    "name", ["grouped", "short in a long cache", "heads in parts", "long", "five tokens in parts"]
)
def test_a_launch_serves_all_sizes_of_its_regime(name: str) -> None:
    rng, case = fresh(), CASES[name]
    module = case.module()
    (op,), regime = operations_of(module), case.regime(module)
    made, others = made_by(decode_attention, op, regime), [case]
    while len(others) < 4:
        capacity = int(rng.integers(1, 2 * case.capacity))
        batch = int(rng.integers(1, 5))
        tokens = min(capacity, int(rng.integers(1, case.tokens + 1)))
        other = replace(case, batch=batch, capacity=capacity, tokens=tokens)
        other = replace(other, past=(capacity - tokens,))
        others += [other] if regime.holds(other.sizes) else []
    for other in others:
        inputs = arrays_of(other, module, rng)
        check_results(other, module, inputs, run_templates(made, inputs, other.sizes))


@pytest.mark.parametrize("past", [37, 40, 41, -2, -9])
def test_tokens_beyond_the_capacity_change_nothing_else(past: int) -> None:
    """Those that have a place get the results that they would have without the others."""
    case = Case(8, 2, 64, 1, 40, (past,), tokens=4)
    module = case.module()
    inputs = dict(arrays_of(replace(case, past=(0,)), module, fresh()))
    named = {str(value.name): value for value in inputs}
    for name, array in (("past", [past]), ("positions", [[*range(past, past + 4)]])):
        inputs[named[name]] = np.array(array, np.int32)
    for name in ("k0", "v0"):
        shape = inputs[named[name]].shape
        inputs[named[name]] = fresh().uniform(-1, 1, shape).astype(inputs[named[name]].dtype)
    got = run_templates([launch(case, module)], inputs, case.sizes)
    kept = slice(max(0, -past), max(0, 40 - past))
    mixed, *caches = module.main.returned
    if not 0 <= past <= 40:
        for name, value in zip(("k0", "v0"), caches, strict=True):
            new, old = got[value].astype(np.float32), inputs[named[name]].astype(np.float32)
            assert np.array_equal(new[:, :, max(0, past + 4) :], old[:, :, max(0, past + 4) :])
        return
    fewer = {str(value.name): array for value, array in inputs.items()}
    fewer |= {name: fewer[name][:, kept] for name in ("qkv", "positions")}
    want = evaluate(module, fewer)
    near(got[mixed][:, kept], want["mixed"], 0.03)
    for name, value in zip(("k0", "v0"), caches, strict=True):
        near(got[value], want[name], 0.01)


def test_shapes_of_llama_8b() -> None:
    """What an H200 was measured with."""
    wanted = {
        (1, 1, 1024): "8 splits, 8 warps, 1 resident",
        (1, 1, 8256): "16 splits, 8 warps, 1 resident",
        (1, 1, 32832): "16 splits, 12 warps, 1 resident",
        (16, 1, 1024): "1 splits, 8 warps, 1 resident",
        (16, 1, 8256): "0 splits, 12 warps, 1 resident",
        (16, 4, 8256): "0 splits, 8 warps, 1 resident",
        (17, 1, 1024): "1 splits, 4 warps, 4 resident",
        (1, 4, 8256): "16 splits, 8 warps, 1 resident",
    }
    for (batch, tokens, capacity), name in wanted.items():
        case = Case(32, 8, 128, batch, capacity, (0,), tokens=tokens)
        (op,) = operations_of(case.module())
        assert isinstance(op, FusedAttention)
        assert next(iter(shapes_of(op, regime_of(case.sizes)))) == name


def program_of(case: Case, module: Module) -> HostProgram:
    """The program of a module, whose results are those of the reference."""
    inputs = {str(value.name): a for value, a in arrays_of(case, module, fresh()).items()}
    program = HostProgram(module, fused=True)
    near(program.run(inputs)["mixed"], evaluate(module, inputs)["mixed"], 0.03)
    return program


def test_plans_use_it_for_few_tokens_only() -> None:
    case = CASES["grouped"]
    (planner,) = program_of(case, case.module()).planners
    (step,) = planner.plan(case.sizes).steps
    assert isinstance(step, Launch)
    assert step.kernel.startswith("decode_attention") and step.cluster == 2
    (step,) = planner.plan(case.sizes | {"S": 8}).steps
    assert isinstance(step, Launch) and step.kernel.startswith("decode_attention")
    nine = planner.plan(case.sizes | {"S": 9})
    kinds = [step.kernel.rpartition("_")[0] for step in nine.steps if isinstance(step, Launch)]
    assert kinds == ["rope_and_cache", "prefill_attention"]


@pytest.mark.parametrize("tokens", [1, 2])
def test_norms_of_two_dtypes_are_computed_apart(tokens: int) -> None:
    case = replace(CASES["heads of length one"], tokens=tokens)
    program_of(case, parse_module(case.text().replace("%k_norm: bf16", "%k_norm: f32")))


ARCHITECTURES = ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120"]


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("number", range(len(ARCHITECTURES)), ids=ARCHITECTURES)
def test_kernels_compile_for_every_gpu(number: int) -> None:
    for case in list(CASES.values())[number :: len(ARCHITECTURES)]:
        assert compile_kernel(launch(case, case.module()).kernel, ARCHITECTURES[number])
