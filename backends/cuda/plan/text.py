"""Plans as text: a line per buffer, kernel and step.

    plan @forward {B=1, S=1} for B <= 16, S <= 1
      buffer %q bf16[1, 1, 4096] arena +8192
      kernel linear_5a1c {ROWS=4}
      launch linear_5a1c grid 132 1 1 block 256 (%x, @w, out %q, 1) pdl early @w
        %q bytes 33554432 flops 33554432 at llama.py:33
      call nccl.all_reduce (%q, out %sum) {axis="tp", elements=4096}
      return %sum

The steps are the same for all sizes in the ranges behind `for`. A launch with `pdl` may start
before the one in front of it has ended, and reads the memory behind `early` before that. Sources of
kernels are apart, in a file each.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .core import MANY, Argument, Launch, LibraryCall, Plan, Step, pointers


def print_plan(plan: Plan) -> str:
    """The text of a plan, without the sources of its kernels."""
    out = [f"plan @{plan.function} {_literals(plan.sizes)}{_ranges(plan)}"]
    for buffer in plan.buffers.values():
        offset = f" +{buffer.offset}" if buffer.place == "arena" else ""
        shape = ", ".join(map(str, buffer.shape))
        out.append(f"  buffer {buffer.name} {buffer.dtype}[{shape}] {buffer.place}{offset}")
    out += [f"  kernel {name} {_literals(kernel.macros)}" for name, kernel in plan.kernels.items()]
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
        head += " pdl" if step.programmatic else ""
        head += f" early {' '.join(_early(step))}" if step.early else ""
    names = "".join(f"{name} " for name in step.operations)
    at = f" at {step.source}" if step.source else ""
    return f"{head}\n    {names}bytes {step.work.nbytes} flops {step.work.flops}{at}"


def _ranges(plan: Plan) -> str:
    """The sizes for which the steps are the same, but for empty values and 64-bit indices."""
    words: list[str] = []
    for size, (least, largest) in plan.ranges.items():
        low = f"{least} <= " if least > 1 else ""
        high = f" <= {largest}" if largest is not None and largest < MANY - 1 else ""
        words += [f"{low}{size}{high}"] if low or high else []
    return f" for {', '.join(words)}" if words else ""


def _early(step: Launch) -> list[str]:
    given = pointers(step)
    return [given[position].buffer for position in step.early]


def _argument(argument: Argument | int | float) -> str:
    if not isinstance(argument, Argument):
        return repr(argument)
    return f"{'out ' if argument.written else ''}{argument.buffer}"


def _literals(values: Mapping[str, Any]) -> str:
    return "{" + ", ".join(f"{name}={json.dumps(value)}" for name, value in values.items()) + "}"
