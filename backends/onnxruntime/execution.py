"""Runs one rank's model: its segments in ONNX Runtime, and the collectives between them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from onnxruntime import IOBinding, OrtValue

from irc.backends.base import Arrays
from irc.backends.onnxruntime.profile import value_of
from irc.backends.onnxruntime.segments import Collective
from irc.backends.onnxruntime.session import Part, Parts, first_line
from irc.backends.ranks.communicator import Communicator
from irc.errors import Error

SMALL = 4096  # bytes


@dataclass
class States:
    """The states of a model in memory, by the names of its inputs.

    `written` has the outputs that are written in place. These states stay bound to a model without
    collectives, of which `others` has the names of the other inputs and the places of the outputs.
    """

    read: Arrays = field(default_factory=Arrays)
    written: dict[str, str] = field(default_factory=dict[str, str])
    binding: IOBinding | None = None
    small: Arrays = field(default_factory=Arrays)  # inputs that are copied to where they are bound
    others: tuple[tuple[str, ...], tuple[int, ...]] = ((), ())

    @property
    def memory(self) -> Arrays:
        """By the names of outputs."""
        return {output: self.read[state] for state, output in self.written.items()}


def run_parts(
    parts: Parts, inputs: Arrays, states: States, communicator: Communicator | None
) -> Arrays:
    """The outputs of a model for contiguous inputs, without those that are written to `states`.

    A value between two steps is freed after the last step that reads it.
    """
    if len(parts.steps) == 1 and isinstance(parts.steps[0], Part):
        return _run_whole(parts.steps[0], inputs, states)
    values: Arrays = {**inputs, **states.read}
    memory = states.memory
    for step, unused in zip(parts.steps, parts.unused, strict=True):
        if isinstance(step, Part):
            values |= _run_segment(step, values, memory)
        else:
            assert communicator is not None  # a model of one rank has no collectives
            begin = time.time_ns()
            values[step.result] = _run_collective(step, values, memory, communicator)
            if parts.recorder is not None:
                _, value = value_of(step.call.place.partition(" (")[0])
                parts.recorder.add(communicator.rank, step.call.operation, value, begin)
        for name in unused:
            del values[name]
    return values


def _run_whole(part: Part, inputs: Arrays, states: States) -> Arrays:
    if states.binding is None:
        states.binding = part.session.io_binding()
        memory, kept = states.memory, states.written.keys()
        for name in kept:
            states.binding.bind_cpu_input(name, states.read[name])
        _bind_outputs(states.binding, part.outputs, memory)  # in the order of their places
        outputs = tuple(at for at, name in enumerate(part.outputs) if name not in memory)
        states.others = tuple(name for name in part.inputs if name not in kept), outputs
    names, places = states.others
    for name in names:
        _bind_input(states, name, inputs[name] if name in inputs else states.read[name])
    _bind_outputs(states.binding, [part.outputs[at] for at in places], {})
    _run_bound(part, states.binding, inputs)
    # get_outputs would wrap every state, too
    values = states.binding.get_outputs_as_ortvaluevector()
    return {part.outputs[at]: values[at].numpy() for at in places}


def _bind_input(states: States, name: str, array: np.ndarray) -> None:
    """Copying the few numbers of a step takes less time than binding other memory."""
    held = states.small.get(name)
    if held is not None and held.shape == array.shape:
        held[...] = array
        return
    states.small.pop(name, None)
    if array.nbytes <= SMALL:
        array = states.small[name] = array.copy()
    assert states.binding is not None
    states.binding.bind_cpu_input(name, array)


def _run_segment(part: Part, values: Arrays, memory: Arrays) -> Arrays:
    binding = part.session.io_binding()
    for name in part.inputs:
        binding.bind_cpu_input(name, values[name])
    _bind_outputs(binding, part.outputs, memory)
    _run_bound(part, binding, values)
    outputs = binding.get_outputs_as_ortvaluevector()
    return {
        name: memory[name] if name in memory else outputs[at].numpy()
        for at, name in enumerate(part.outputs)
    }


def _bind_outputs(binding: IOBinding, names: Iterable[str], memory: Arrays) -> None:
    for name in names:
        if name in memory:
            binding.bind_ortvalue_output(name, OrtValue.ortvalue_from_numpy(memory[name]))
        else:
            binding.bind_output(name)


def _run_bound(part: Part, binding: IOBinding, values: Arrays) -> None:
    try:
        part.session.run_with_iobinding(binding)
    except Exception as error:  # each failure has a class of its own, with no common base
        empty = next((name for name, value in values.items() if not value.size), None)
        hint = f"; {empty} is empty, which not every operation of it can be; give at least one row"
        raise Error(f"ONNX Runtime failed: {first_line(error)}{hint if empty else ''}") from error


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
