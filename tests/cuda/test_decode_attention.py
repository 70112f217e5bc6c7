"""Attention of one query per sequence: equal to the reference, and compiled for every GPU."""

from __future__ import annotations

import pytest

from irc.backends.cuda.codegen.decode_choices import decode_attention
from irc.backends.cuda.execute.compile import compile_kernel
from irc.backends.cuda.plan import Fused, Launch, Template
from irc.backends.reference import evaluate
from irc.ir.core import Module
from tests.cuda.decode_cases import Case, arrays_of, attention_of, check_results, near
from tests.cuda.emulate import run_templates
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
    "heads of 96, in part turned": Case(3, 3, 96, 1, 50, (20,), rope=", rotary_dim=24"),
    "turned in pairs": Case(4, 2, 64, 1, 50, (49,), rope=", interleaved"),
    "slowed": Case(4, 2, 64, 1, 50, (49,), rope=LLAMA3),
    "no rope": Case(4, 2, 64, 1, 50, (49,), rope=None, form="apart"),
    "window": Case(4, 2, 64, 2, 300, (299, 7), options=", causal, window=50"),
    "capped": Case(4, 2, 64, 1, 50, (30,), options=", causal, softcap=2.0, scale=0.2"),
    "lengths": Case(4, 2, 64, 2, 50, (30, 40), lengths=(20, 0)),
    "heads of length one": Case(6, 2, 64, 1, 50, (30,), norm=""),
    "normalized and read": Case(4, 2, 80, 1, 50, (30,), form="read", norm=", offset=1.0"),
    "sinks": Case(12, 2, 64, 2, 300, (299, 7), options=", causal, window=50", sinks="bf16"),
    "sinks of long": Case(2, 1, 64, 1, 5000, (4321,), sinks="f32"),
    "sinks and no keys": Case(4, 2, 64, 2, 50, (30, 40), lengths=(20, 0), sinks="f32"),
    "only read": Case(4, 2, 64, 2, 50, (30, 41), form="read"),
    "of an encoder": Case(4, 2, 64, 2, 50, (), form="tokens", lengths=(33, 50), options=""),
}


def launch(case: Case, module: Module) -> Template:
    """The launch for the attention of a case."""
    found = decode_attention(attention_of(module), case.sizes)
    assert isinstance(found, Fused), found
    rest = {op.opname for op in module.main if op not in found.covers}
    assert rest <= {"split", "return"}, rest
    (template,) = found.templates
    assert isinstance(template, Template)
    return template


@pytest.mark.parametrize("name", CASES)
def test_equal_to_the_reference(name: str) -> None:
    case = CASES[name]
    module = case.module()
    inputs = arrays_of(case, module, fresh())
    got = run_templates([launch(case, module)], inputs, case.sizes)
    check_results(case, module, inputs, got)


def test_plans_use_it_for_one_token_only() -> None:
    case = CASES["grouped"]
    module = case.module()
    inputs = {str(value.name): a for value, a in arrays_of(case, module, fresh()).items()}
    program = HostProgram(module, fused=True)
    (step,) = program.planners[0].plan(case.sizes).steps
    assert isinstance(step, Launch)
    assert step.kernel.startswith("decode_attention") and step.cluster == 2
    got = program.run(inputs)
    near(got["mixed"], evaluate(module, inputs)["mixed"], 0.03)
    two = program.planners[0].plan(case.sizes | {"S": 2})
    assert not any(name.startswith("decode_attention") for name in two.kernels)


ARCHITECTURES = ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120"]


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("number", range(len(ARCHITECTURES)), ids=ARCHITECTURES)
def test_kernels_compile_for_every_gpu(number: int) -> None:
    for case in list(CASES.values())[number :: len(ARCHITECTURES)]:
        assert compile_kernel(launch(case, case.module()).kernel, ARCHITECTURES[number])
