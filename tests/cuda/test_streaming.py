"""Streaming products on the host, with all threads of their blocks, against numpy."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from irc.backends.cuda.codegen.streaming.choices import one_row
from irc.backends.cuda.execute.compile import compile_kernel
from irc.backends.cuda.execute.load import CudaProgram, program_of
from irc.backends.cuda.plan import Launch
from irc.backends.cuda.plan.build import Planner
from irc.backends.cuda.plan.regime import Device, Target
from irc.backends.reference import evaluate
from irc.ops.mlp import Act
from irc.text import parse_module
from tests.cuda.emulate import prepare
from tests.cuda.run_plan import HostProgram
from tests.cuda.streaming_cases import SCHEMES, Case
from tests.fresh import fresh

SMALL = Target(multiprocessors=3)
OLD = Target(80, 3, 163 << 10)
NARROW = Target(89, 3, 99 << 10)
ARCHITECTURES = {
    "sm_80": Target(80, 108, 163 << 10),
    "sm_89": Target(89, 142, 99 << 10),
    "sm_90": Target(),
    "sm_100": Target(100, 148, 227 << 10),
    "sm_120": Target(120, 170, 99 << 10),
}
CASES = [
    (SMALL, Case("float", "bf16", "norm", 1, 37, 1024)),
    (SMALL, Case("float", "bf16", "norm gated bias", 1, 101, 2048)),
    (SMALL, Case("float", "f16", "bias residual", 1, 120, 1792)),
    (SMALL, Case("float", "bf16", "residual", 1, 41, 8)),
    (SMALL, Case("float", "bf16", "norm gated", 1, 70, 1096)),
    (SMALL, Case("float", "f16", "bias", 1, 13, 4864)),
    (SMALL, Case("float", "bf16", "gated", 1, 7, 8640)),
    (SMALL, Case("float", "bf16", "residual", 1, 5, 18944)),
    (SMALL, Case("float", "f16", "norm gated", 16, 101, 1024)),
    (SMALL, Case("float", "bf16", "residual", 3, 2, 64)),
    (OLD, Case("float", "bf16", "norm residual", 1, 37, 192)),
    (NARROW, Case("float", "bf16", "norm gated", 13, 70, 3072)),
    *((SMALL, Case(scheme, "bf16", "norm", 1, 101, 1024)) for scheme in SCHEMES),
    *((SMALL, Case(scheme, "f16", "gated bias", 5, 37, 512)) for scheme in SCHEMES),
    *((NARROW, Case(scheme, "bf16", "norm residual", 16, 70, 1536)) for scheme in SCHEMES),
    *((OLD, Case(scheme, "f16", "norm", 2, 70, 768)) for scheme in SCHEMES),
    (SMALL, Case("int8", "bf16", "norm", 17, 37, 256)),
    (SMALL, Case("fp8", "bf16", "norm gated bias", 23, 37, 256)),
    (OLD, Case("uint4", "f16", "residual", 24, 21, 256)),
    (NARROW, Case("int4 of 32", "bf16", "norm residual", 33, 18, 384)),
    (SMALL, Case("mxfp4", "bf16", "bias", 64, 20, 256)),
    (SMALL, Case("float", "bf16", "gated bias", 16, 150, 8200)),
    (SMALL, Case("fp8", "f16", "norm residual", 20, 75, 8208)),
    (SMALL, Case("fp8", "bf16", "gated bias", 16, 70, 4096)),
    (SMALL, Case("fp8", "bf16", "norm residual", 1, 70, 1552)),
]


@cache
def planned(case: Case, target: Target) -> tuple[HostProgram, Launch]:
    """The program of a case, and its product, of which 16-bit weights may have a norm in front."""
    program = HostProgram(case.module(), fused=True, target=target)
    *norm, step = program.planners[0].plan({"B": case.rows}).steps
    assert isinstance(step, Launch) and step.kernel.startswith("linear_rows")
    assert len(norm) <= (case.has("norm") and (case.rows > 1 or case.scheme == "float"))
    return program, step


def check(program: HostProgram | CudaProgram, case: Case) -> None:
    """The result of a program is that of numpy."""
    inputs = case.inputs(fresh())
    (found,) = program.run(inputs).values()
    assert case.error(found, case.expected(inputs)) <= 1


@pytest.fixture(scope="module")
def compiled() -> None:
    """All cases compiled at once, which is faster."""
    plans = [planned(case, of)[0].planners[0].plan({"B": case.rows}) for of, case in CASES]
    prepare(kernel for plan in plans for kernel in plan.kernels.values())


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(("target", "case"), CASES, ids=[f"{t.capability} {c}" for t, c in CASES])
def test_results_are_those_of_numpy(target: Target, case: Case) -> None:
    check(planned(case, target)[0], case)


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", SCHEMES)
def test_on_a_gpu(scheme: str, tmp_path: Path) -> None:
    """Of real widths: launched, captured, and from a graph."""
    for i, rows in enumerate([1, 2, 5, 8, 16, 17, 64][: 5 if scheme == "float" else 7]):
        form = ("", "norm", "bias residual", "norm gated bias")[i % 4]
        case = Case(scheme, ("bf16", "f16")[i % 2], form, rows, 1003, (4096, 1536, 14336)[i % 3])
        program = program_of(case.module(), tmp_path)
        for _ in range(3):
            check(program, case)
        program.close()


def test_numbers_that_f16_cannot_hold_are_scaled() -> None:
    case = Case("int8", "bf16", "", 2, 33, 256)
    inputs, sizes = case.inputs(fresh()), np.array([[2.0**40], [2.0**-60]], np.float32)
    inputs["x"] = (inputs["x"] * sizes).astype(inputs["x"].dtype)
    (found,) = planned(case, SMALL)[0].run(inputs).values()
    assert case.error(found.astype(np.float32) / sizes, case.expected(inputs) / sizes) <= 1


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("target", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_blocks_have_a_multiprocessor_of_their_own(scheme: str, target: Target) -> None:
    """With two blocks on some multiprocessors and none on others, a step takes a fifth longer."""
    for form, n, k in (("norm gated", 14336, 4096), ("residual", 4096, 14336), ("", 128256, 2048)):
        rows = int(fresh().choice([1, 2, 8, 16]))
        _, step = planned(Case(scheme, "bf16", form, rows, n, k), target)
        x, y, layers = step.grid
        assert layers == 1 and 0.85 * target.multiprocessors < x * y <= target.multiprocessors
        by_registers = scheme == "float" and rows > 4  # their operands take more than half of them
        assert by_registers or target.shared / 2 < step.shared <= target.shared


@pytest.mark.parametrize("scheme", SCHEMES)
def test_candidates_give_the_same_results(scheme: str, rng: np.random.Generator) -> None:
    """For a number of rows that is drawn: one, of a gated product, or of the most."""
    rows = int(rng.choice([1, 3, 16]))
    case = Case(scheme, "bf16", "gated" if rows == 3 else "bias", rows, 37, 1024)
    programs: list[HostProgram] = []
    ((key, names),) = planned(case, SMALL)[0].planners[0].plan({"B": rows}).candidates.items()
    for name in names:
        programs.append(HostProgram(case.module(), fused=True))
        programs[-1].planners[0].device = Device(SMALL, {key: name})
    plans = [each.planners[0].plan({"B": rows}) for each in programs]
    prepare(kernel for plan in plans for kernel in plan.kernels.values())
    assert len({name for plan in plans for name in plan.kernels}) == len(names) > 1
    for program in programs:
        check(program, case)


def test_rings_have_two_stages_or_more() -> None:
    for k in (int(k) for k in fresh().integers(1, 4096, 100) * 8):
        choice = one_row(4096, k, bool(k % 16), Target(), ranks=int(fresh().choice([1, 2, 8])))
        assert not isinstance(choice, str)
        values = choice.constants
        assert values["STAGES"] >= 2 and 16 * values["SEGMENT"] <= values["COPY"]


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (Case("float", "bf16", "", 17, 64, 64), "at most 16 rows of 16-bit weights"),
        (Case("int8", "bf16", "", 65, 64, 64), "at most 64 rows of 8-bit weights"),
        (Case("int8", "bf16", "", 1, 64, 40), "rows of 40 weights of 8 bits cannot be cut"),
        (Case("float", "bf16", "", 2, 64, 0), "bf16[64, 0] is empty"),
    ],
)
def test_reasons(case: Case, reason: str) -> None:
    declined = Planner(case.module()).regime({"B": case.rows}).launches.declined
    assert any(reason in why for _, why in declined)


def test_every_activation() -> None:
    """Behind a linear, and of a gate."""
    lines: list[str] = []
    for act in get_args(Act):
        for gate in ("", ", gate=@v, residual=%r"):
            lines.append(f'%y{len(lines)} = fused_linear %x, @w{gate} {{act="{act}"}} : f16[B, 8]')
    names = [line.split()[0] for line in lines]
    body, types = "\n".join(lines), ", ".join("f16[B, 8]" for _ in names)
    module = parse_module(f"""module @m dims(B=1:2:64) {{
      weight @w : f16[8, 64] = random("w", 1, 0.3)
      weight @v : f16[8, 64] = random("v", 1, 0.3)
      func @main(%x: f16[B, 64], %r: f16[B, 8]) -> ({types}) {{
        {body}
        return {", ".join(names)} }} }}""")
    program, rng = HostProgram(module, fused=True), fresh()
    steps = program.planners[0].plan({"B": 3}).steps
    assert all(isinstance(step, Launch) and "linear_rows" in step.kernel for step in steps)
    assert len(steps) == len(names)
    inputs = {"x": rng.standard_normal((3, 64)), "r": rng.standard_normal((3, 8))}
    inputs = {name: array.astype(np.float16) for name, array in inputs.items()}
    results, wanted = program.run(inputs), evaluate(module, inputs)
    for name, array in wanted.items():
        np.testing.assert_allclose(results[name], array, 4e-3, 4e-3, err_msg=name)


COMPUTED = """module @m dims(B=1:1:64) {{
  func @main(%x: bf16[B, 1024], %w: i8[256, 1024], %s: bf16[256, 1], %g: bf16[1024])
      -> (bf16[B, 256]) {{
    {0}
    %d = dequantize %w, {1} : bf16[256, 1024]
    %h = neg %x : bf16[B, 1024]
    %y = fused_linear %h, %d, norm={2} {{eps=1e-05}} : bf16[B, 256]
    return %y }} }}"""


@pytest.mark.parametrize(
    "words",
    [
        ("", "%s", "%g"),
        ("%c = neg %s : bf16[256, 1]", "%c", "%g"),
        ("%c = neg %g : bf16[1024]", "%s", "%c"),
    ],
)
def test_what_is_computed_is_waited_for(words: tuple[str, ...]) -> None:
    """The kernel reads weights at once, so no other kernel may be writing them."""
    *_, step = Planner(parse_module(COMPUTED.format(*words), "m")).plan({"B": 1}).steps
    assert isinstance(step, Launch) and step.kernel.startswith("linear_rows")
    assert (step.early, step.programmatic) == (((), False) if words[0] else ((1, 2, 3), True))


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_sources_compile(architecture: str) -> None:
    schemes = {"float": 8, "int8": 1, "fp8": 16, "uint4": 8, "mxfp4": 1}
    cases = [Case(s, "bf16", "gated bias", r, 512, 1024) for s, r in schemes.items()]
    for case in (*cases, Case("float", "f16", "norm residual", 1, 512, 1024)):
        program, step = planned(case, ARCHITECTURES[architecture])
        kernels = program.planners[0].plan({"B": case.rows}).kernels
        assert compile_kernel(kernels[step.kernel], architecture)
