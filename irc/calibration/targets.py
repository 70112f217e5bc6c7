"""What is observed: the inputs of linears and the new rows of caches, in groups that fit memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..artifact.manifest import Progress
from ..backends.base import Program
from ..errors import Error
from ..ir.core import Module, Result, Value
from ..ir.dims import bind
from ..passes.shared.edit import set_results
from ..quantization.observed import BINS, GRAM_BLOCK, Observed
from ..quantization.sites import by_input, find_caches, find_sites
from ..text.parser import parse_module
from .batches import Batch


@dataclass(frozen=True)
class Target:
    """A value whose rows are observed: the one that the sites of these keys multiply.

    `sparse`: rows of zeros are empty slots of experts, which do not count.
    """

    names: tuple[str, ...]
    value: Value
    gram: bool = False
    sparse: bool = False

    @property
    def width(self) -> int:
        """The number of channels."""
        return int(str(self.value.type.shape[-1]))

    def needed(self, sizes: Mapping[str, int]) -> int:
        """The bytes of the statistics, and of the value for a batch with these sizes."""
        shape = [bind(dim, sizes) for dim in self.value.type.shape]
        numbers = math.prod(dim for dim in shape if isinstance(dim, int))
        sums = self.width * (self.width + GRAM_BLOCK) if self.gram else 0
        return 4 * (numbers + sums) + 12 * self.width + 8 * BINS


def find_targets(module: Module, gram: bool) -> list[Target]:
    """The targets of a module, in the order of its operations; copies have the same ones."""
    targets = [
        Target(tuple(dict.fromkeys(s.key for s in same)), same[0].x, gram, len(same[0].shape) > 2)
        for same in by_input(find_sites(module))
    ]
    targets += [Target((cache.name,), cache.new) for cache in find_caches(module)]
    if not targets:
        raise Error(
            "the model has no linear with a float weight and no cache of floats, so there is "
            "nothing to calibrate"
        )
    return targets


def groups(targets: Sequence[Target], sizes: Mapping[str, int], memory: int) -> list[list[int]]:
    """The numbers of targets that are observed in the same run, each group within `memory` bytes.

    A target that needs more is a group of its own. `sizes` are the symbols of a batch.
    """
    found: list[list[int]] = [[]]
    free = memory
    for i, target in enumerate(targets):
        need = target.needed(sizes)
        if need > free and found[-1]:
            found.append([])
            free = memory
        found[-1].append(i)
        free -= need
    return found


class Observer:
    """A program that computes the targets of these numbers, and what is known of them so far.

    `module` is the text of the module. The program is written into `folder`.
    """

    def __init__(
        self, module: str, chosen: Sequence[int], gram: bool, folder: Path, progress: Progress
    ) -> None:
        from ..backends import get
        from ..pipeline import run_pipeline

        copy = parse_module(module)
        every = find_targets(copy, gram)
        self.targets = [every[i] for i in chosen]
        self.observed = {each.names[0]: Observed(each.width, each.gram) for each in self.targets}
        values = dict.fromkeys(target.value for target in self.targets)
        self.results = {value: f"x{i}" for i, value in enumerate(values)}
        set_results(copy.main, [*self.results], [*map(Result, self.results.values())])
        run_pipeline(copy, "dce", ())
        backend = get("onnx")
        emitted = backend.emit(copy, folder, base=folder, progress=progress)
        self.program: Program = backend.load(folder, dict(emitted.facts))

    def add(self, batch: Batch) -> None:
        """Run the program, and count what it computes; an Error names a site that has NaN."""
        found = self.program.run(batch.arrays)
        for target in self.targets:
            array = found[self.results[target.value]]
            rows = array.reshape(-1, array.shape[-1])
            if batch.mask is not None and len(rows) == batch.mask.size:
                rows = rows[batch.mask.ravel()]
            rows = rows[rows.any(axis=1)] if target.sparse else rows
            if not np.isfinite(rows).all():
                raise Error(
                    f"{batch.place}: the input of {target.names[0]} has NaN or infinity; "
                    "f16 overflows above 65504, where --dtype f32 helps"
                )
            self.observed[target.names[0]].add(rows)
