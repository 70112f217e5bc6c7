"""What is observed: the inputs of linears and the new rows of caches, in groups that fit memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ..artifact.manifest import Progress
from ..backends.base import Program
from ..errors import Error
from ..ir.core import Module, Result, Value
from ..ir.dims import bind
from ..ops import Matmul
from ..passes.shared.edit import set_results
from ..quantization.observed import BINS, GRAM_BLOCK, Observed
from ..quantization.sites import find_caches, find_sites
from ..text import parse_module
from .batches import Batch, Run

Array: TypeAlias = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Target:
    """Values whose rows are observed together: those that the same sites multiply.

    `sparse`: rows of zeros are empty slots of experts, which do not count.
    """

    names: tuple[str, ...]
    values: tuple[Value, ...]
    gram: bool
    sparse: bool

    @property
    def width(self) -> int:
        """The number of channels."""
        return int(str(self.values[0].type.shape[-1]))


def find_targets(module: Module, gram: bool) -> list[Target]:
    """The targets of a module, in the order of its operations; copies have the same ones."""
    values: dict[str, dict[Value, None]] = {}
    sparse: set[Value] = set()
    for site in find_sites(module):
        values.setdefault(site.name, {})[site.x] = None
        if isinstance(site.op, Matmul) and len(site.shape) > 2:
            sparse.add(site.x)
    names: dict[tuple[Value, ...], list[str]] = {}
    for name, each in values.items():
        names.setdefault(tuple(each), []).append(name)
    found = [
        Target(tuple(same), each, gram, not sparse.isdisjoint(each)) for each, same in names.items()
    ]
    caches = [Target((cache.name,), (cache.new,), False, False) for cache in find_caches(module)]
    if not found:
        raise Error("the model has no linear with a float weight, so there is nothing to calibrate")
    return [*found, *caches]


def groups(targets: Sequence[Target], sizes: Mapping[str, int], memory: int) -> list[list[int]]:
    """The numbers of targets that are observed in the same run, each group within `memory` bytes.

    A target that needs more is a group of its own. `sizes` are the symbols of a batch.
    """
    found: list[list[int]] = [[]]
    free = memory
    for i, target in enumerate(targets):
        need = needed(target, sizes)
        if need > free and found[-1]:
            found.append([])
            free = memory
        found[-1].append(i)
        free -= need
    return found


def needed(target: Target, sizes: Mapping[str, int]) -> int:
    """The bytes of the statistics and of the observed values of a batch."""
    shapes = [[bind(dim, sizes) for dim in value.type.shape] for value in target.values]
    numbers = sum(math.prod(dim for dim in s if isinstance(dim, int)) for s in shapes)
    sums = target.width * (target.width + GRAM_BLOCK) if target.gram else 0
    return 4 * (numbers + sums) + 12 * target.width + 8 * BINS


class Observer:
    """A program that computes some of the targets of a module, and their statistics so far."""

    def __init__(
        self, text: str, chosen: Sequence[int], gram: bool, folder: Path, progress: Progress
    ) -> None:
        from ..backends import get
        from ..pipeline import run_pipeline

        module = parse_module(text)
        every = find_targets(module, gram)
        self.targets = {i: every[i] for i in chosen}
        self.observed = {i: Observed(each.width, each.gram) for i, each in self.targets.items()}
        self.results = {f"x{i}_{j}": v for i, j, v in _numbered(self.targets)}
        set_results(module.main, [*self.results.values()], [Result(name) for name in self.results])
        run_pipeline(module, "dce", ())
        backend = get("onnx")
        emitted = backend.emit(module, folder, base=folder, progress=progress)
        self.program: Program = backend.load(folder, dict(emitted.facts))

    def add(self, batch: Batch) -> None:
        """Run the program, and count what it computes; an Error names a site that has NaN."""
        for run in batch.runs:
            found = self.program.run(run.arrays)
            for i, j, _ in _numbered(self.targets):
                target = self.targets[i]
                try:
                    self.observed[i].add(_rows(found.pop(f"x{i}_{j}"), run, target.sparse))
                except Error as error:
                    raise Error(
                        f"{batch.place}: the input of {target.names[0]} cannot be calibrated, "
                        f"{error.message}; f16 overflows above 65504, where --dtype f32 helps"
                    ) from None


def _numbered(targets: Mapping[int, Target]) -> Iterator[tuple[int, int, Value]]:
    for i, target in targets.items():
        for j, value in enumerate(target.values):
            yield i, j, value


def _rows(array: Array, run: Run, sparse: bool) -> Array:
    """The rows [N, K] of an observed value that count."""
    rows = array.reshape(-1, array.shape[-1])
    if run.mask is not None and len(rows) == run.mask.size:
        rows = rows[run.mask.ravel()]
    return rows[rows.any(axis=1)] if sparse else rows
