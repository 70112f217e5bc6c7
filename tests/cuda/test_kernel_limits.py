"""What kernels of models of real shapes need of a multiprocessor, by their machine code.

Every kernel has to fit: its registers, its shared memory, and nothing on a stack, to which
registers are spilled; and a product has to fit beside the decode attention that it is launched
beside. `exceeding.json` lists what does not, with a case in which it occurs. Some cases are drawn
afresh; IRC_TEST_LIMITS=all takes all of them, which needs ten minutes.

    python -m tests.cuda.test_kernel_limits          prints the list and writes it
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import numpy as np
import pytest

from benchmarks.cubin import Facts, facts_of
from benchmarks.cuda_plans import Sizes, models, role_of
from irc.backends.cuda.execute import compile as compiling
from irc.backends.cuda.execute.compile import Compiler, architecture_of, default_folder, key_of
from irc.backends.cuda.plan import Launch
from irc.backends.cuda.plan.build import Planner
from irc.backends.cuda.plan.regime import Target
from irc.backends.cuda.tuning import device_of
from irc.ir.core import Module
from irc.text import parse_module

TARGETS = {
    target.capability: target
    for target in (
        Target(80, 108, 163 << 10),
        Target(89, 142, 99 << 10),
        Target(),
        Target(100, 148, 227 << 10),
        Target(120, 188, 99 << 10),
    )
}
REGISTERS = 65536  # of a multiprocessor, and of a block at most
RESERVED = 1024  # bytes of shared memory that every block has besides its own
BESIDE = (90,)  # capabilities on which products fit beside attention
PATH = Path(__file__).with_name("exceeding.json")
T = TypeVar("T")
DRAWN = 2  # cases, and entries of the list
pytestmark = pytest.mark.usefixtures("nvrtc")


@cache
def module_and_cases(model: str) -> tuple[Module, Sizes]:
    """A model with three layers, which have all of its kernels."""
    make, cases = next((make, cases) for name, make, cases in models(layers=3) if name == model)
    with TemporaryDirectory() as folder:
        return make(Path(folder)), cases


def exceeding(capability: int, model: str, case: str) -> set[str]:
    """What exceeds a limit in one case."""
    module, cases = module_and_cases(model)
    plan = Planner(module, device=device_of(TARGETS[capability])).plan(cases[case])
    images = Compiler(capability, default_folder()).images(plan.kernels.values())
    launches = [step for step in plan.steps if isinstance(step, Launch)]
    kernels = [plan.kernels[launch.kernel] for launch in launches]
    facts = [facts_of(images[key_of(kernel)], kernel.name) for kernel in kernels]
    used = list(zip(launches, facts, strict=True))
    found = {text for launch, of in used for text in alone(launch, of, TARGETS[capability])}
    if capability in BESIDE:
        found |= {text for a, b in pairwise(used) for text in beside(*a, *b)}
    return found


def name_of(launch: Launch) -> str:
    """The name of a kernel without its number."""
    return launch.kernel.rpartition("_")[0]


def registers(launch: Launch, facts: Facts) -> int:
    """The registers of a block, which a thread has in eights."""
    return -(-facts.registers // 8) * 8 * launch.block


def alone(launch: Launch, facts: Facts, target: Target) -> Iterator[str]:
    """The limits that one launch exceeds."""
    name = f"{name_of(launch)}, {launch.block} threads"
    if (count := registers(launch, facts)) > REGISTERS:
        yield f"{name}: {count} registers"
    if facts.stack:
        yield f"{name_of(launch)}, {facts.registers} registers: {facts.stack} bytes of stack"
    if (shared := facts.shared + launch.shared) > target.shared:
        yield f"{name}: {shared} bytes of shared memory"


def beside(a: Launch, of_a: Facts, b: Launch, of_b: Facts) -> Iterator[str]:
    """The limits that a product exceeds together with the decode attention next to it."""
    if {role_of(a.kernel), role_of(b.kernel)} != {"product", "decode attention"}:
        return
    name = " + ".join(sorted(f"{name_of(each)}, {each.block} threads" for each in (a, b)))
    if (count := registers(a, of_a) + registers(b, of_b)) > REGISTERS:
        yield f"{name}: {count} registers"
    shared = of_a.shared + a.shared + of_b.shared + b.shared + RESERVED
    if shared > TARGETS[90].shared:
        yield f"{name}: {shared} bytes of shared memory"


def known() -> dict[str, dict[str, str]]:
    """By architecture, what exceeds a limit -> a case in which it does."""
    recorded = json.loads(PATH.read_text(encoding="utf-8"))
    if recorded.pop("nvrtc") != list(compiling.nvrtc_version()):
        pytest.skip("another version of NVRTC needs other registers")
    return recorded


def all_cases() -> list[tuple[int, str, str]]:
    """Capability, model and case of everything that is tested."""
    named = [(name, case) for name, _, cases in models() for case in cases]
    return [(capability, *each) for capability in TARGETS for each in named]


def drawn(every: Sequence[T], rng: np.random.Generator) -> list[T]:
    """Some of these, or all."""
    number = len(every) if os.environ.get("IRC_TEST_LIMITS") == "all" else min(DRAWN, len(every))
    return [every[i] for i in rng.choice(len(every), number, replace=False)]


def test_kernels_fit(rng: np.random.Generator) -> None:
    """Cases have no problems but those of the list."""
    recorded = known()
    for capability, *case in drawn(all_cases(), rng):
        more = exceeding(capability, *case) - recorded[architecture_of(capability)].keys()
        assert not more, f"{capability} {case}: {sorted(more)}"


def test_listed_kernels_still_do_not_fit(rng: np.random.Generator) -> None:
    recorded = known()
    arches = {architecture_of(each): each for each in TARGETS}
    every = [(arches[arch], *each) for arch in recorded for each in recorded[arch].items()]
    for capability, problem, where in drawn(every, rng):
        model, _, case = where.partition(", ")
        assert problem in exceeding(capability, model, case), f"remove it: {problem}, {where}"


def softmax_of_a_chain(count: int) -> str:
    """A module with a softmax of rows of 20480 numbers, which are computed from `count` values."""
    kind = "bf16[B, 20480]"
    lines, last = list[str](), "%x0"
    for i in range(1, count):
        lines += [
            f"%s{i} = tanh %x{i} : {kind}",
            f"%m{i} = mul %s{i}, {last} : {kind}",
            f"%t{i} = add %m{i}, %x{i - 1} : {kind}",
            f"%e{i} = erf %t{i} : {kind}",
        ]
        last = f"%e{i}"
    given = ", ".join(f"%x{i}: {kind}" for i in range(count))
    body = "\n".join([*lines, f"%y = softmax {last} {{dim=-1}} : {kind}", "return %y"])
    return f"module @m dims(B=1:1:64) {{ func @main({given}) -> ({kind}) {{ {body} }} }}"


@pytest.mark.parametrize("capability", TARGETS)
def test_blocks_of_many_threads_keep_to_the_registers(capability: int) -> None:
    """Also where a softmax computes its operand from ten values."""
    plan = Planner(parse_module(softmax_of_a_chain(10))).plan({"B": 3})
    (launch,) = plan.steps
    assert isinstance(launch, Launch) and launch.block == 1024
    kernel = plan.kernels[launch.kernel]
    facts = facts_of(Compiler(capability).image(kernel), kernel.name)
    assert registers(launch, facts) <= REGISTERS


def main() -> None:
    found: dict[str, dict[str, str]] = {architecture_of(each): {} for each in TARGETS}
    for capability, model, case in all_cases():
        for problem in sorted(exceeding(capability, model, case)):
            found[architecture_of(capability)].setdefault(problem, f"{model}, {case}")
    for architecture, problems in found.items():
        print(architecture, *(f"{k} ({v})" for k, v in problems.items()), sep="\n  ")
    text = json.dumps({"nvrtc": compiling.nvrtc_version(), **found}, indent=1)
    PATH.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
