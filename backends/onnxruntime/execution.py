"""Runs one rank's model: its segments in ONNX Runtime, and the collectives between them."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from onnxruntime import IOBinding, OrtValue

from irc.backends.base import Arrays
from irc.backends.onnxruntime.segments import Collective
from irc.backends.onnxruntime.session import Part, Parts, first_line
from irc.backends.ranks.communicator import Communicator
from irc.errors import Error

Bindings: TypeAlias = dict[Part, tuple[IOBinding, Arrays]]


def run_parts(
    parts: Parts,
    inputs: Arrays,
    memory: Arrays,
    communicator: Communicator | None,
    kept: Bindings | None = None,
) -> Arrays:
    """The outputs of a model for contiguous inputs; those in `memory` are written there.

    A value between two steps is freed after the last step that reads it. The binding of a model
    without collectives stays in `kept`: where the next run has the same memory, it is bound.
    """
    bindings = kept if kept is not None and len(parts.steps) == 1 else {}
    values = dict(inputs)
    for step, unused in zip(parts.steps, parts.unused, strict=True):
        if isinstance(step, Part):
            values |= _run_segment(step, values, memory, bindings)
        else:
            assert communicator is not None  # a model of one rank has no collectives
            values[step.result] = _run_collective(step, values, memory, communicator)
        for name in unused:
            del values[name]
    return values


def _run_segment(part: Part, values: Arrays, memory: Arrays, bindings: Bindings) -> Arrays:
    if part not in bindings:
        bindings[part] = part.session.io_binding(), {}
    binding, bound = bindings[part]
    states = {id(array) for array in memory.values()}
    for name in part.inputs:
        if id(values[name]) not in states or bound.get(name) is not values[name]:
            binding.bind_cpu_input(name, values[name])
            bound[name] = values[name]
    for name in part.outputs:
        if name not in memory:
            binding.bind_output(name)
        elif bound.get(name) is not memory[name]:
            binding.bind_ortvalue_output(name, OrtValue.ortvalue_from_numpy(memory[name]))
            bound[name] = memory[name]
    try:
        part.session.run_with_iobinding(binding)
    except Exception as error:  # each failure has a class of its own, with no common base
        empty = next((name for name in part.inputs if not values[name].size), None)
        hint = f"; {empty} is empty, which not every operation of it can be; give at least one row"
        raise Error(f"ONNX Runtime failed: {first_line(error)}{hint if empty else ''}") from error
    outputs = binding.get_outputs_as_ortvaluevector()  # get_outputs would wrap every state, too
    return {
        name: memory[name] if name in memory else outputs[at].numpy()
        for at, name in enumerate(part.outputs)
    }


def _run_collective(
    step: Collective, values: Arrays, memory: Arrays, communicator: Communicator
) -> np.ndarray:
    """A collective reads where one segment wrote, and writes where another reads."""
    operand = values[step.operand]
    result = memory.get(step.result)
    if result is None:
        result = np.empty(step.call.result_shape(operand.shape), operand.dtype)
    communicator.collective(step.call, operand, result)
    return result
