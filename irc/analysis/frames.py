"""Follows the variation of every value of a function between ranks, through calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from ..ir.core import Function, Module, Op, Value
from ..ir.expansion import expansion
from ..ops.collective import Collective
from ..ops.control import Call
from .fused import is_fused
from .stages import PIPELINE, stage_of
from .transfer import exchanged, transfer
from .variation import Variation, Variations

Inputs: TypeAlias = tuple[Variation, ...]


class Frame:
    """One function with the variations of its arguments in some call of it."""

    def __init__(self, function: Function, known: dict[Value, Variation]) -> None:
        self.function = function
        self.variations = known  # of arguments, weights and results of operations
        self.calls: dict[Op, Frame] = {}

    @property
    def returned(self) -> tuple[Variation, ...]:
        """The variations of its results."""
        return tuple([self.variations[value] for value in self.function.returned])


class Point(NamedTuple):
    """A value in a frame, with the calls that lead to it, outermost first."""

    frame: Frame
    value: Value
    calls: tuple[tuple[Frame, Op], ...] = ()


Check: TypeAlias = Callable[[Collective, Inputs, Point, Variations], None]


class Dataflow:
    """Follows functions of one module; equal operations on equal variations are computed once.

    `check` is called for every new kind of collective, with the point of its result.
    """

    def __init__(self, module: Module, check: Check) -> None:
        self.module, self.check = module, check
        self.variations = Variations(module.mesh)
        self.frames: dict[tuple[Function, Inputs], Frame] = {}
        self._weights: dict[Value, Variation] = {
            w: self.variations.of_weight(w) for w in module.weights.values()
        }
        self._memo: dict[object, Inputs] = {}
        self._running: list[tuple[Frame, Op]] = []

    def entry(self, function: Function) -> Frame:
        """The frame of a function whose arguments have their declared layouts."""
        layouts = [function.argument_layout(arg) for arg in function.args]
        return self.frame(function, tuple([self.variations.of_type(type) for type in layouts]))

    def frame(self, function: Function, inputs: Inputs) -> Frame:
        """The frame of a function for these variations of its arguments."""
        known = self.frames.get((function, inputs))
        if known is not None:
            return known
        variations = self._weights | dict(zip(function.args, inputs, strict=True))
        frame = Frame(function, variations)
        for op in function:
            if op.opname != "return":
                self._operation(frame, op)
        self.frames[function, inputs] = frame
        return frame

    def _operation(self, frame: Frame, op: Op) -> None:
        known = frame.variations
        inputs = tuple([known[value] for value in op.operands])
        if isinstance(op, Call):
            found = self._call(frame, op, inputs)
        else:
            key = (op.type_key(), inputs)
            found = self._memo.get(key)
            if found is None:
                found = self._memo[key] = self._fresh(frame, op, inputs)
        for result, variation in zip(op.results, found, strict=True):
            known[result] = variation

    def _call(self, frame: Frame, op: Call, inputs: Inputs) -> Inputs:
        self._running.append((frame, op))
        inner = frame.calls[op] = self.frame(op.callee, inputs)
        self._running.pop()
        if stage_of(op) < 0:
            return inner.returned
        # along pp only one stage has the result
        return tuple([self._without_pipeline(variation) for variation in inner.returned])

    def _without_pipeline(self, variation: Variation) -> Variation:
        axes = variation.axes - {PIPELINE}
        partial, broken = (names & axes for names in (variation.partial, variation.broken))
        rest = (variation.mixed, variation.numbered, variation.zero)
        return self.variations.make(axes, variation.split, partial, broken, *rest)

    def _fresh(self, frame: Frame, op: Op, inputs: Inputs) -> Inputs:
        point = Point(frame, op.results[0], tuple(self._running)) if op.results else None
        if point is None or not (isinstance(op, Collective) or is_fused(op)):
            return transfer(op, inputs, self.variations)
        if isinstance(op, Collective) and not op.composite:
            return self._exchanged(op, inputs, point)
        made = expansion(op)
        known = dict(zip(made.operands, inputs, strict=True))
        for part in made.ops:
            given = tuple([known[value] for value in part.operands])
            if isinstance(part, Collective):
                found = self._exchanged(part, given, point)
            else:
                found = transfer(part, given, self.variations)
            known.update(zip(part.results, found, strict=True))
        return tuple([known[value] for value in made.results])

    def _exchanged(self, op: Collective, inputs: Inputs, point: Point) -> Inputs:
        self.check(op, inputs, point, self.variations)
        return (exchanged(op, inputs, self.variations),)
