"""Follows the layout of every value of a function between ranks, through calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

from ..errors import Error
from ..ir.core import Function, Module, Op, Value
from ..ir.expansion import expansion
from ..ops import Call, Gather, Reshape
from ..ops.collective import Collective
from .fused import is_fused
from .layout import Layout, layout_of_type, layout_of_weight, same
from .local_collectives import exchanged
from .local_operations import local_layouts
from .origin import wrong_operation
from .reshaped import moved_axes
from .stages import PIPELINE, stage_of

Layouts: TypeAlias = tuple[Layout, ...]
Choices: TypeAlias = dict[object, Layouts]  # by operation, or for all operations of one key
_ATTEMPTS = 64  # to find the choices that are right for a function
_DEPTH = 2  # choices that may lead to an earlier error


class Frame:
    """One function with the layouts of its arguments in some call of it."""

    def __init__(self, function: Function, known: dict[Value, Layout]) -> None:
        self.function = function
        self.layouts = known  # of arguments, weights and results of operations
        self.reached = 0  # operations that have layouts
        self.error: Error | None = None  # about the next one

    @property
    def returned(self) -> Layouts:
        """The layouts of its results."""
        return tuple([self.layouts[value] for value in self.function.returned])


Check: TypeAlias = Callable[[Frame, bool], None]


class Dataflow:
    """Follows functions of one module; equal operations on equal layouts are computed once.

    `check` is called with every frame, and whether its function has callers; it may raise an Error.
    """

    def __init__(self, module: Module, check: Check) -> None:
        self.mesh, self.check = module.mesh, check
        self.frames: dict[tuple[Function, Layouts], Frame] = {}
        weights = module.weights.values()
        self._weights: dict[Value, Layout] = {w: layout_of_weight(w, self.mesh) for w in weights}
        self._memo: dict[object, Layouts] = {}
        self._attempts = 0

    def entry(self, function: Function) -> Frame:
        """The frame of a function whose arguments have their declared layouts."""
        types = [function.argument_layout(arg) for arg in function.args]
        inputs = tuple([layout_of_type(type, self.mesh) for type in types])
        return self.frame(function, inputs, called=False)

    def frame(self, function: Function, inputs: Layouts, called: bool = True) -> Frame:
        """The frame of a function for these layouts of its arguments.

        Where a reshape leaves open which dimension of size 1 is sharded, the choice that is right
        for the operations behind it is looked for.
        """
        known = self.frames.get((function, inputs))
        if known is not None:
            return known
        first = self._attempt(function, inputs, {}, called)
        self._attempts = _ATTEMPTS
        frame = first if first.error is None else self._search(first, inputs, {}, called, _DEPTH)
        if frame is None:
            assert first.error is not None
            raise first.error
        self.frames[function, inputs] = frame
        return frame

    def _search(
        self, before: Frame, inputs: Layouts, chosen: Choices, called: bool, depth: int
    ) -> Frame | None:
        """A frame without an error, by other choices than those of `before`; None if not found.

        At most `depth` of them may lead to an earlier error.
        """
        for key, other in _open_choices(before, chosen):
            if self._attempts == 0:
                return None
            self._attempts -= 1
            choices = {**chosen, key: other}
            frame = self._attempt(before.function, inputs, choices, called)
            if frame.error is None:
                return frame
            left = depth - (frame.reached <= before.reached)
            found = self._search(frame, inputs, choices, called, left) if left >= 0 else None
            if found is not None:
                return found
        return None

    def _attempt(self, function: Function, inputs: Layouts, chosen: Choices, called: bool) -> Frame:
        """The frame up to the first operation that does not take its operands."""
        frame = Frame(function, self._weights | dict(zip(function.args, inputs, strict=True)))
        try:
            for op in function:
                if op.opname != "return":
                    found = self._found(frame, op, chosen)
                    frame.layouts.update(zip(op.results, found, strict=True))
                else:
                    self.check(frame, called)
                frame.reached += 1
        except Error as error:
            frame.error = error
        return frame

    def _found(self, frame: Frame, op: Op, chosen: Choices) -> Layouts:
        inputs = tuple([frame.layouts[value] for value in op.operands])
        key = _key(op, inputs)
        if chosen and (op in chosen or key in chosen):
            return chosen.get(op) or chosen[key]
        if isinstance(op, Call):
            returned = self.frame(op.callee, inputs).returned
            # along pp only one stage has the result
            gone = [PIPELINE] if stage_of(op) >= 0 else []
            return tuple([layout.without(gone) for layout in returned])
        found = self._memo.get(key)
        if found is None:
            try:
                found = self._fresh(op, inputs)
            except Error as error:
                if not op.results or any(0 not in result.type.shape for result in op.results):
                    raise wrong_operation(error, op, frame.layouts) from None
                made = [same(r.type.ndim, local=True, uniform=True, zero=True) for r in op.results]
                found = tuple(made)  # nothing in it can be wrong
            self._memo[key] = found
        return found

    def _fresh(self, op: Op, inputs: Layouts) -> Layouts:
        if isinstance(op, Collective) and not op.composite:
            return (exchanged(op, inputs, self.mesh),)
        if not is_fused(op):
            return local_layouts(op, inputs, self.mesh)
        made = expansion(op)
        known = dict(zip(made.operands, inputs, strict=True))
        for part in made.ops:
            given = tuple([known[value] for value in part.operands])
            known.update(zip(part.results, self._fresh(part, given), strict=True))
        return tuple([known[value] for value in made.results])


def _key(op: Op, inputs: Layouts) -> object:
    """What determines the layouts of results; a gather depends on how its operands were made."""
    if isinstance(op, Call):
        return op
    return (op if isinstance(op, Gather) else op.type_key()), inputs


def _open_choices(frame: Frame, chosen: Choices) -> Iterator[tuple[object, Layouts]]:
    """Other layouts of reshaped values before the error of a frame, the nearest first.

    All equal reshapes are given them, or one alone.
    """
    waiting, seen = [list(frame.function)[frame.reached]], set[Op]()
    while waiting:
        for value in waiting.pop(0).operands:
            op = value.producer
            if op is None or op in seen or frame.layouts[value].plain:
                continue
            waiting.append(op)
            seen.add(op)
            if not isinstance(op, (Reshape, Call)):
                continue
            key = _key(op, tuple([frame.layouts[each] for each in op.operands]))
            given = tuple([frame.layouts[result] for result in op.results])
            for other in moved_axes(frame.layouts[value], value.type.shape):
                layouts = (*given[: value.index], other, *given[value.index + 1 :])
                yield from (
                    (each, layouts) for each in dict.fromkeys((key, op)) if each not in chosen
                )
