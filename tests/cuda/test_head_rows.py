"""Attention of many queries with rms_norm and rope of heads and updates of caches before it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from irc.backends.cuda.codegen.prefill_attention import prefill_attention
from irc.backends.cuda.execute.compile import compile_kernel
from irc.backends.cuda.plan import Fused, Template
from irc.ir.core import Module
from tests.cuda.decode_cases import Case, arrays_of, attention_of, check_results
from tests.cuda.emulate import run_templates
from tests.cuda.test_decode_attention import CASES as ONE_TOKEN
from tests.fresh import fresh

FUSED = (
    "grouped",
    "first token",
    "one split",
    "many query heads",
    "wide heads",
    "heads of 80",
    "heads of 96, in part turned",
    "turned in pairs",
    "slowed",
    "heads of length one",
)
CASES = {
    name: replace(case, tokens=19, capacity=case.capacity + 18)
    for name, case in ONE_TOKEN.items()
    if name in FUSED
}
APART = {name: replace(ONE_TOKEN[name], tokens=3) for name in ("no rope", "only read")}


def launches(case: Case, module: Module) -> tuple[list[Template], Fused]:
    """The launches for the attention of a case, and what they cover."""
    found = prefill_attention(attention_of(module), case.sizes)
    assert isinstance(found, Fused), found
    return [each for each in found.templates if isinstance(each, Template)], found


@pytest.mark.parametrize("name", CASES)
def test_equal_to_the_reference(name: str) -> None:
    case = CASES[name]
    module = case.module()
    templates, found = launches(case, module)
    assert len(templates) == 2
    assert {op.opname for op in module.main if op not in found.covers} <= {"split", "return"}
    inputs = arrays_of(case, module, fresh())
    check_results(case, module, inputs, run_templates(templates, inputs, case.sizes))


@pytest.mark.parametrize("name", APART)
def test_other_attention_is_one_launch(name: str) -> None:
    templates, found = launches(APART[name], APART[name].module())
    assert len(templates) == len(found.covers) == 1


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_120"])
def test_the_kernel_compiles_for_every_gpu(architecture: str) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="no NVRTC: pip install '.[cuda]'")
    case = CASES["heads of length one"]
    assert compile_kernel(launches(case, case.module())[0][0].kernel, architecture)
