"""The plain kernels of all operations, compiled for GPUs."""

from __future__ import annotations

import pytest

from irc.backends.cuda.execute.compile import compile_kernel, nvrtc_version
from irc.backends.cuda.plan import KERNELS, Kernel, Template
from irc.backends.cuda.plan.prepare import load_tables
from irc.errors import Error
from irc.ir.core import Op
from tests.cuda.cases import cases
from tests.ops.examples import EXAMPLES


def launches(op: Op) -> list[Template]:
    """The launches of an operation whose operands are in memory."""
    made = KERNELS[type(op)](op, [*op.operands, *op.results])
    return [each for each in made if isinstance(each, Template)]


def all_kernels() -> list[Kernel]:
    """The kernels of every operation, for its first example."""
    load_tables()
    names = sorted({cls.opname for cls in KERNELS})
    first = [next(e for e in EXAMPLES[name] if not e.local) for name in names]
    found = [t.kernel for case in cases(first, launches, ("bf16",)) for t in case.templates]
    return list({kernel.name: kernel for kernel in found if not kernel.macros}.values())


def together(kernels: list[Kernel]) -> Kernel:
    """All kernels as one source, each with helpers of its own."""
    source = "\n".join(f"namespace of_{k.name} {{\n{k.source}\n}}" for k in kernels)
    return Kernel(kernels[0].name, source)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120"])
def test_they_compile(architecture: str) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    try:
        nvrtc_version()
    except Error:
        pytest.skip("no NVRTC on this machine")
    kernels = all_kernels()
    assert len(kernels) > 20
    assert compile_kernel(together(kernels), architecture)
