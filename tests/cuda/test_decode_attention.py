"""Attention of one query per sequence: equal to the reference, and compiled for every GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from irc.backends.cuda.codegen.decode_attention import decode_attention, shapes_of
from irc.backends.cuda.execute.compile import compile_kernel
from irc.backends.cuda.plan import Launch, Template
from irc.backends.reference import evaluate
from irc.ir.core import Module
from irc.ops import FusedAttention
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
    "short in a long cache": Case(4, 2, 64, 2, 5000, (300, 4)),
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
}


def launch(case: Case, module: Module) -> Template:
    """The launch for the only operation of a case."""
    (op,) = operations_of(module)
    (template,) = made_by(decode_attention, op, case.regime(module))
    return template


@pytest.mark.parametrize("name", CASES)
def test_equal_to_the_reference(name: str) -> None:
    case = CASES[name]
    module = case.module()
    template = launch(case, module)
    assert template.early, "arguments and old rows of caches are there before the launch"
    inputs = arrays_of(case, module, fresh())
    check_results(case, module, inputs, run_templates([template], inputs, case.sizes))


@pytest.mark.parametrize("name", ["grouped", "short in a long cache", "heads in parts", "long"])
def test_a_launch_serves_all_sizes_of_its_regime(name: str) -> None:
    rng, case = fresh(), CASES[name]
    module = case.module()
    (op,), regime = operations_of(module), case.regime(module)
    made, others = made_by(decode_attention, op, regime), [case]
    while len(others) < 4:
        capacity = int(rng.integers(1, 2 * case.capacity))
        batch = int(rng.integers(1, 5))
        other = replace(case, batch=batch, capacity=capacity, past=(capacity - 1,))
        others += [other] if regime.holds(other.sizes) else []
    for other in others:
        inputs = arrays_of(other, module, rng)
        check_results(other, module, inputs, run_templates(made, inputs, other.sizes))


def test_shapes_of_llama_8b() -> None:
    """What an H200 was measured with."""
    wanted = {
        (1, 1024): "8 splits, 8 warps, 1 resident",
        (1, 8256): "16 splits, 8 warps, 1 resident",
        (1, 32832): "16 splits, 12 warps, 1 resident",
        (16, 1024): "1 splits, 8 warps, 1 resident",
        (16, 8256): "1 splits, 12 warps, 1 resident",
        (17, 1024): "1 splits, 4 warps, 4 resident",
    }
    for (batch, capacity), name in wanted.items():
        case = Case(32, 8, 128, batch, capacity, (0,))
        (op,) = operations_of(case.module())
        assert isinstance(op, FusedAttention)
        assert next(iter(shapes_of(op, regime_of(case.sizes)))) == name


def program_of(case: Case, module: Module) -> HostProgram:
    """The program of a module, whose results are those of the reference."""
    inputs = {str(value.name): a for value, a in arrays_of(case, module, fresh()).items()}
    program = HostProgram(module, fused=True)
    near(program.run(inputs)["mixed"], evaluate(module, inputs)["mixed"], 0.03)
    return program


def test_plans_use_it_for_one_token_only() -> None:
    case = CASES["grouped"]
    (planner,) = program_of(case, case.module()).planners
    (step,) = planner.plan(case.sizes).steps
    assert isinstance(step, Launch)
    assert step.kernel.startswith("decode_attention") and step.cluster == 2
    two = planner.plan(case.sizes | {"S": 2})
    kinds = [step.kernel.rpartition("_")[0] for step in two.steps if isinstance(step, Launch)]
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
