"""Kernels of every operation compile for every GPU that the backend serves; no GPU is needed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from irc.backends.cuda.execute.compile import compile_kernel
from irc.backends.cuda.plan import Kernel
from irc.backends.cuda.plan.build import Planner
from irc.errors import Error
from irc.ir.dtypes import DTYPES
from tests.ops.example import Example, module_of
from tests.ops.examples import EXAMPLES


def renamed(kernel: Kernel, name: str) -> str:
    """A kernel under another name, in a scope of its own, so that one source can have many."""
    lines = [f"#undef {k}\n#define {k} {v}" for k, v in kernel.macros.items()]
    lines += [f"#define {kernel.name} {name}", f"namespace in_{name} {{", kernel.source, "}"]
    lines += [f"#undef {k}" for k in (kernel.name, *kernel.macros)]
    return "\n".join([*lines, "#undef ix", "#define ix int"])


def some_kernels(rng: np.random.Generator) -> dict[str, Kernel]:
    """Kernels of an example of every operation, in a dtype drawn among those that it takes."""
    found: dict[str, Kernel] = {}
    for examples in EXAMPLES.values():
        example = examples[rng.integers(len(examples))]
        for dtype in ("f32", *rng.permutation(list(DTYPES))):
            made = _kernels(example, dtype)
            found |= {kernel.name: kernel for kernel in made}
            if made and dtype != "f32":
                break
    return found


def _kernels(example: Example, dtype: str) -> list[Kernel]:
    """Those of a plan, with kernels of composite operations and memory that ranks share."""
    try:
        planner = Planner(module_of(example, dtype))
    except Error:
        return []  # not for this dtype
    return list(planner.plan(example.sizes).kernels.values())


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120"])
def test_kernels_of_operations_compile(arch: str, rng: np.random.Generator) -> None:
    """A third of them, drawn afresh."""
    every = list(some_kernels(rng).values())
    assert len(every) > 100
    found = [every[i] for i in rng.choice(len(every), len(every) // 3, replace=False)]
    large = [replace(each, macros={**each.macros, "ix": "long long"}) for each in found]
    chosen = large if arch == "sm_90" else found
    source = "\n".join(renamed(kernel, f"kernel_{i}") for i, kernel in enumerate(chosen))
    assert compile_kernel(Kernel("operations", source), arch)
