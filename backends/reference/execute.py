"""Runs a function on numpy arrays, all ranks in lockstep.

Floats narrower than f32 are computed in f32 and rounded to the declared dtype after every
operation. A value is dropped after its last use.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from irc.analysis.stages import stages_of
from irc.backends.lowering import expansion
from irc.backends.recorder import Recorder
from irc.errors import Error
from irc.ir.core import Function, Module, Op, Value, Weight
from irc.ir.declare import placeholder
from irc.ir.dims import Dim, bind
from irc.ir.dtypes import numpy_dtype, widened
from irc.ir.types import TensorType
from irc.ops.collective import Collective
from irc.text.printer import names_of

from .inputs import Sizes
from .weights import Weights

Array = np.ndarray
Scope = dict[Value, list[Array]]  # one array per rank
Observe = Callable[[Value, list[Array]], object]


class Executor:
    """Runs functions of one module. `sizes` are the symbols' values per rank; `seen` gets the
    arrays of the values in `watched`. `observe` is called with every result of an operation and
    its arrays, which it may replace in the list. `recorder` gets the times of operations of all
    ranks.
    """

    def __init__(
        self,
        module: Module,
        weights: Weights,
        sizes: list[Sizes],
        watched: Collection[Value] = (),
        observe: Observe | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.module, self.weights, self.sizes = module, weights, sizes
        self._recorder, self._rank = recorder, 0
        stages = stages_of(module) if recorder is not None and module.local else ()
        self._first_ranks = {stage.function: stage.ranks[0] for stage in stages}
        self.watched, self.seen, self.observe = watched, Scope(), observe
        self.ranks = range(len(sizes))
        self._dying: dict[Function, dict[Op, list[Value]]] = {}

    def function(self, function: Function, args: Sequence[list[Array]]) -> list[list[Array]]:
        """The results of `function`, each with one array per rank."""
        scope: Scope = dict(zip(function.args, args, strict=True))
        dying = self._dying.get(function)
        if dying is None:
            dying = self._dying[function] = last_uses(function)
        names = names_of(function) if self._recorder is not None else {}
        self._rank = self._first_ranks.get(function, self._rank)
        for op in function:
            if op.opname == "return":
                break
            began = time.time_ns()
            self._operation(op, scope)
            if self._recorder is not None and op.opname != "call":
                value = names[op.results[0]] if op.results else ""
                self._recorder.add(self._rank, op.opname, value, began)
            for value in dying.get(op, ()):
                scope.pop(value, None)
        return [self._read(value, scope) for value in function.returned]

    def _operation(self, op: Op, scope: Scope) -> None:
        operands = [self._read(value, scope) for value in op.operands]
        try:
            results = self._results(op, operands)
        except Error as error:
            raise error.at(op) from error.__cause__
        for result, arrays in zip(op.results, results, strict=True):
            scope[result] = [
                _declared(op, array, result.type, sizes)
                for array, sizes in zip(arrays, self.sizes, strict=True)
            ]
            if self.observe is not None:
                self.observe(result, scope[result])
            if result in self.watched:
                self.seen[result] = scope[result]

    def _read(self, value: Value, scope: Scope) -> list[Array]:
        if isinstance(value, Weight):
            return [self.weights.get(value, rank) for rank in self.ranks]
        return scope[value]

    def _results(self, op: Op, operands: list[list[Array]]) -> list[list[Array]]:
        if op.opname == "call":
            return self.function(op.attributes["callee"], operands)
        if isinstance(op, Collective):
            return [self._collective(op, operands)]
        if op.composite and type(op).evaluate is Op.evaluate:
            return self._expansion(op, operands)
        per_rank = [self._evaluate(op, [o[r] for o in operands], r) for r in self.ranks]
        return [list(arrays) for arrays in zip(*per_rank, strict=True)]

    def _evaluate(self, op: Op, operands: list[Array], rank: int) -> tuple[Array, ...]:
        fixed = len(operands) - len(op.present)
        wide = [widened(array) for array in operands]
        named = dict(zip(op.present, wide[fixed:], strict=True))
        bound = bind_attributes(op, self.sizes[rank])
        results = bound.evaluate(*wide[:fixed], *[named.get(n) for n in op.optional_names])
        return tuple(results) if isinstance(results, (tuple, list)) else (results,)

    def _expansion(self, op: Op, operands: list[list[Array]]) -> list[list[Array]]:
        expanded = expansion(op)
        scope: Scope = dict(zip(expanded.operands, operands, strict=True))
        for part in expanded.ops:
            self._operation(part, scope)
        return [self._read(value, scope) for value in expanded.results]

    def _collective(self, op: Collective, operands: list[list[Array]]) -> list[Array]:
        op.verify(self.module)
        if not self.module.local:
            return [op.whole(array) for array in operands[0]]
        by_rank: dict[int, Array] = {}
        for group in self.module.mesh.groups(op.axes):
            shards = [widened(operands[0][rank]) if operands else None for rank in group]
            _check_alike(op, shards)
            by_rank |= dict(zip(group, op.combine(shards), strict=True))
        return [by_rank[rank] for rank in self.ranks]


def _check_alike(op: Op, shards: Sequence[Array | None]) -> None:
    shapes = {shard.shape for shard in shards if shard is not None}
    if len(shapes) > 1:
        a, b = sorted(shapes)[:2]
        raise Error(f"{op.opname}: the ranks of one group hold {list(a)} and {list(b)}")


def last_uses(function: Function) -> dict[Op, list[Value]]:
    """Per operation, the values whose last use it is."""
    seen: set[Value] = set()
    dying: dict[Op, list[Value]] = {}
    for op in reversed(function):
        for value in (*op.results, *op.operands):
            if value not in seen and not isinstance(value, Weight):
                seen.add(value)
                dying.setdefault(op, []).append(value)
    return dying


def bind_attributes(op: Op, sizes: Sizes) -> Op:
    """`op`, or a copy whose dimensions are numbers."""
    changed: dict[str, Any] = {}
    for name in op.attribute_types:
        value = getattr(op, name)
        if isinstance(value, Dim):
            changed[name] = _number(value, sizes)
        elif isinstance(value, tuple) and any(isinstance(item, Dim) for item in value):
            changed[name] = tuple(_number(item, sizes) for item in value)
    if not changed:
        return op
    copy = placeholder(op, op.operands)
    for name, value in changed.items():
        setattr(copy, name, value)
    return copy


def _number(value: Any, sizes: Sizes) -> Any:
    if not isinstance(value, Dim):
        return value
    bound = bind(value, sizes)
    if isinstance(bound, Dim):
        raise Error(f"{next(bound.symbols())} has no value: no input of the function has it")
    return bound


def _declared(op: Op, array: Any, type: TensorType, sizes: Sizes) -> Array:
    """One result in its declared dtype; an Error where its shape is another one."""
    array = np.asarray(array)
    shape = tuple(_number(dim, sizes) for dim in type.shape)
    if array.shape != shape:
        raise Error(f"{op.opname} gave the shape {list(array.shape)} for {type}", op)
    return array.astype(numpy_dtype(type.dtype), copy=False)
