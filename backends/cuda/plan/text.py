"""Plans as text: a line per buffer, kernel and step.

    plan @forward {B=1, S=1}
      buffer %q bf16[1, 1, 4096] arena +8192
      kernel linear_5a1c {ROWS=4}
      launch linear_5a1c grid 132 1 1 block 256 (%x, @w, out %q, 1) constant 1 early
        %q bytes 33554432 flops 33554432 at llama.py:33
      call nccl.all_reduce (%q, out %sum) {axis="tp", elements=4096}
      return %sum

Sources of kernels are apart, in a file each.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .core import Argument, LibraryCall, Plan, Step


def print_plan(plan: Plan) -> str:
    """The text of a plan, without the sources of its kernels."""
    out = [f"plan @{plan.function} {_literals(plan.sizes)}"]
    for each in plan.buffers.values():
        offset = f" +{each.offset}" if each.place == "arena" else ""
        shape = ", ".join(map(str, each.shape))
        out.append(f"  buffer {each.name} {each.dtype}[{shape}] {each.place}{offset}")
    out += [f"  kernel {name} {_literals(each.macros)}" for name, each in plan.kernels.items()]
    out += map(_step, plan.steps)
    out.append(f"  return {' '.join(plan.results)}".rstrip())
    return "\n".join(out) + "\n"


def _step(step: Step) -> str:
    args = ", ".join(map(_argument, step.arguments))
    if isinstance(step, LibraryCall):
        head = f"  call {step.library}.{step.function} ({args}) {_literals(step.settings)}"
    else:
        grid = " ".join(map(str, step.grid))
        head = f"  launch {step.kernel} grid {grid} block {step.block}"
        head += f" shared {step.shared}" if step.shared else ""
        head += f" cluster {step.cluster}" if step.cluster != 1 else ""
        head += f" ({args})"
        head += f" constant {' '.join(map(str, step.constant))}" if step.constant else ""
        head += " early" if step.programmatic else ""
    names = "".join(f"{name} " for name in step.operations)
    at = f" at {step.source}" if step.source else ""
    return f"{head}\n    {names}bytes {step.nbytes} flops {step.flops}{at}"


def _argument(argument: Argument | int | float) -> str:
    if not isinstance(argument, Argument):
        return repr(argument)
    return f"{'out ' if argument.written else ''}{argument.buffer}"


def _literals(values: Mapping[str, Any]) -> str:
    return "{" + ", ".join(f"{name}={json.dumps(value)}" for name, value in values.items()) + "}"
