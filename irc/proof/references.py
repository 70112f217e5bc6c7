"""References of weights without their shards, and random numbers in the place of checkpoints."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from ..errors import Error
from ..ir.core import Module, Weight
from ..ir.dtypes import is_float
from ..ir.layouts import split_array
from ..ir.types import TensorType
from ..weights import BytesRef, Cast, FileRef, Pad, RandomRef, Ref, Shard, UnboundRef
from ..weights.checkpoint import Reader
from ..weights.sources import shape_before, stated

Array: TypeAlias = np.ndarray[Any, Any]
_KEYS = ("i32", "i64", "u32", "u64")
_MOST_KEYS = 1 << 16


def unsharded(ref: Ref, whole: TensorType) -> Ref | None:
    """The reference of the tensor of which `ref` is one rank's shard.

    None where shards are changed or joined afterwards, so that they need not be shards of one.
    """
    steps = tuple(step for step in ref.steps if not isinstance(step, Shard))
    joins = any(isinstance(step, Shard) for part in ref.inputs for step in part.every_step())
    if joins or steps != ref.steps[: len(steps)]:
        return None
    return _complete(replace(ref, steps=steps), whole)


def _complete(ref: Ref, whole: TensorType) -> Ref:
    """Random and unbound references with the shape and dtype that they have of their weight."""
    if not isinstance(ref, (RandomRef, UnboundRef)):
        return ref
    if ref.shape is None:
        ref = replace(ref, shape=_stored(ref, whole))
    is_cast = any(isinstance(step, Cast) for step in ref.steps)
    return ref if is_cast or isinstance(ref, UnboundRef) else ref.then(Cast(whole.dtype))


def _stored(ref: Ref, whole: TensorType) -> tuple[int, ...] | None:
    """The shape of the source of a tensor; None where steps slice or pad it."""
    return shape_before([size for size in whole.shape if isinstance(size, int)], ref)


class Randomized:
    """Random arrays for the weights of modules: a source has the same numbers wherever it is read.

    A source of a file is known by the path of the file; those of each module start at its base.
    Integers of files that can be read stay as they are, since they may be keys or positions.
    """

    def __init__(self, modules: Sequence[Module], bases: Sequence[str]) -> None:
        self._known: dict[str, tuple[tuple[int, ...], str]] = {}
        self._wholes: dict[str, Array] = {}
        self._files: dict[str, str] = {}  # a name of every file, by its path
        pairs = zip(modules, bases, strict=True)
        self._readers = {module: Reader(module, base) for module, base in pairs}
        for module in modules:
            for weight in module.weights.values():
                ref = self.located(module, weight.ref)
                plain = unsharded(ref, weight.type.global_type)
                shape = None if plain is None else _stored(plain, weight.type.global_type)
                if plain is not None and shape is not None and not plain.inputs:
                    self._known[plain.source_text()] = shape, weight.type.dtype

    def known(self, source: Ref) -> tuple[tuple[int, ...] | None, str | None]:
        """The shape and dtype of a source, where a weight is all of it or where it states them."""
        return self._known.get(source.source_text()) or stated(source)

    def located(self, module: Module, ref: Ref) -> Ref:
        """The reference with one name of a file for one path, whatever a module calls it."""
        if ref.inputs:
            return ref.with_inputs([self.located(module, part) for part in ref.inputs])
        if not isinstance(ref, (FileRef, BytesRef)):
            return ref
        path = os.path.realpath(self._readers[module].path(ref.file))
        return replace(ref, file=self._files.setdefault(path, f"file{len(self._files)}"))

    def is_random(self, module: Module, ref: Ref) -> bool:
        """Whether all sources are drawn, none read."""
        try:
            sources = [self._random(module, replace(source, steps=())) for source in ref.sources()]
        except Error:
            return False
        return not any(isinstance(source, (FileRef, BytesRef)) for source in sources)

    def integers(self, module: Module) -> dict[str, Array]:
        """By dtype all numbers of stored integer weights, among which keys are looked up."""
        found: dict[str, list[Array]] = {}
        for weight in module.weights.values():
            if weight.type.dtype in _KEYS:
                array = self.array(module, weight, 0).reshape(-1)
                found.setdefault(weight.type.dtype, []).append(array[:_MOST_KEYS])
        return {kind: np.concatenate(arrays) for kind, arrays in found.items()}

    def array(self, module: Module, weight: Weight, rank: int) -> Array:
        """What one rank has of a weight; what is sharded is drawn once."""
        ref, mesh = self._random(module, _complete(weight.ref, weight.type)), module.mesh
        at = next((i for i, s in enumerate(ref.steps) if isinstance(s, Shard)), len(ref.steps))
        whole, rest = replace(ref, steps=ref.steps[:at]), ref.steps[at:]
        is_plain = not any(isinstance(step, Shard) for step in whole.every_step())
        if not is_plain or not all(isinstance(step, (Pad, Shard)) for step in rest):
            return self._readers[module].read(ref, rank)
        key = str(self.located(module, whole))
        array = self._wholes.get(key)
        if array is None:
            array = self._wholes[key] = self._readers[module].read(whole)
        for step in rest:
            own = range(array.ndim)
            if isinstance(step, Shard):
                axes = [step.axes if dim == step.dim else () for dim in own]
                array = split_array(array, axes, mesh, rank)
            elif isinstance(step, Pad):
                array = np.pad(array, [(0, step.count if dim == step.dim else 0) for dim in own])
        return array

    def _random(self, module: Module, ref: Ref) -> Ref:
        if ref.inputs:
            return ref.with_inputs([self._random(module, part) for part in ref.inputs])
        if not isinstance(ref, (FileRef, BytesRef, UnboundRef)):
            return ref
        source, plain = self.located(module, ref).source_text(), replace(ref, steps=())
        shape, kind = self._known.get(source) or self._readers[module].known(plain)
        if not is_float(kind) and not isinstance(ref, UnboundRef):
            return ref
        scale = shape[-1] ** -0.5 if len(shape) > 1 else 1.0
        return RandomRef(source, 0, scale, shape, steps=(Cast(kind), *ref.steps))
