"""`calibrate`: statistics of a model on data, resumable, in memory that no data set exceeds.

The folder has a file KEY-I.safetensors per group of observed values: what has been counted, and
after how many batches. It is complete with its calibration.json.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ..argument_checks import check_count, check_path
from ..artifact.checksums import sampled, sha256
from ..artifact.manifest import Progress, silent
from ..backends.base import Program
from ..errors import Error
from ..ir.core import Module, Result, Value
from ..ir.dims import bind
from ..ir.mesh import Mesh
from ..passes.shared.edit import set_results
from ..text.parser import parse_module
from ..text.printer import print_module
from ..weights.safetensors import Tensors, write_tensors
from .batches import Batch, Data, data_files
from .sites import by_input, find_caches, find_sites
from .statistics import BINS, FACTS, GRAM_BLOCK, Facts, RunningStatistics, Statistics, is_calibrated

_EVERY = 8  # batches between two savings
_PROGRAM = ".irc-program"  # the folder of the program that runs
_PART = re.compile(r"[.]?[0-9a-f]{16}-\d+\.safetensors.*")  # a file of this or another calibration


def calibrate(
    module: Module,
    tokenizer: Path | None,
    data: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    gram: bool = False,
    batches: int = 0,
    batch_size: int = 0,
    length: int = 0,
    memory: int = 2048,
    progress: Progress = silent,
) -> Statistics:
    """Run a module on data, and write statistics of the inputs of its linears into a folder.

    `data`: a .txt or .npz file, or a folder of such. Text needs a folder with a `tokenizer`, and is
    cut into rows of `length` tokens; `batch_size` rows are a batch; 0 leaves both to the model.
    `batches` > 0: at most so many.
    `gram`: the gram matrices that the algorithms AWQ and GPTQ need. `memory` MiB: for statistics
    and observed values; where they need more, the data is read several times.

    An interrupted calibration goes on where it was; a complete one of the same model, data and
    options is returned as it is.
    """
    check_path("the data", data)
    check_path("the folder to write", output)
    for name, value in {"batches": batches, "batch_size": batch_size, "length": length}.items():
        check_count(name, value, 0)
    check_count("memory", memory)
    progress("reading the data", 0.0)
    folder = Path(output)
    model_data = Data(data_files(data), _observable(module), tokenizer, length, batch_size)
    key = _key(model_data, batches)
    _check_replaceable(folder)
    if is_calibrated(folder):
        before = Statistics(folder)
        if before.facts.key == key and before.facts.gram >= gram:
            return before
    try:
        _Work(model_data, gram, batches, folder, progress).run(key, memory << 20)
    except OSError as error:
        raise Error(
            f"cannot write the calibration {folder}: {error.strerror or error}; what was counted "
            "is kept there, and the same command continues with it"
        ) from error
    finally:
        shutil.rmtree(folder / _PROGRAM, ignore_errors=True)
    return Statistics(folder)


def _observable(module: Module) -> Module:
    """A copy of a module with no calls, in which the inputs of its linears can be observed."""
    from .. import passes  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers them)
    from ..pipeline import run_pipeline

    if module.local or any(value.type.sharded for op in module.ops() for value in op.results):
        raise Error("the module is sharded already; calibrate the source that it was made from")
    copy = parse_module(print_module(module))
    copy.mesh = Mesh()
    run_pipeline(copy, "inline, canonicalize, cse, dce", ())
    return copy


def _key(data: Data, limit: int) -> str:
    """A checksum of the module, its weights, the data, and how it is cut."""
    facts = {
        "module": print_module(data.module),
        "weights": [sampled(Path(file)) for file in data.module.files.values()],
        "data": [sha256(file) for file in data.files],
        "cut": [data.length, data.rows, limit],
        "sites": [target.names for target in find_targets(data.module, gram=False)],
    }
    return _hash(facts)


def _hash(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _check_replaceable(output: Path) -> None:
    """An Error where the folder has anything but a calibration, complete or not."""
    names = os.listdir(output) if output.is_dir() else ["a file"] * output.exists()
    others = [name for name in names if name[0] != "." and not _PART.fullmatch(name)]
    if others and FACTS not in names:
        raise Error(
            f"{output} holds {others[0]} and no calibration, so it is left alone; choose another "
            "folder"
        )


@dataclass
class _State:
    """After how many batches and rows a group of targets has been counted so far."""

    batches: int
    rows: int
    complete: bool

    @classmethod
    def read(cls, path: Path) -> _State:
        """The state in a file; that before the first batch where it is damaged or missing."""
        try:
            batches, rows, complete = map(int, Tensors(path)["progress"])
        except (Error, KeyError, ValueError, TypeError):
            return cls(0, 0, False)
        return cls(batches, rows, bool(complete))

    def write(self, path: Path, observed: Mapping[str, RunningStatistics]) -> None:
        """Replace the file."""
        arrays = {
            f"{name}/{k}": v
            for name, statistics in observed.items()
            for k, v in statistics.state.items()
        }
        progress = np.array([self.batches, self.rows, self.complete], np.int64)
        write_tensors(path, {"progress": progress, **arrays})


@dataclass(frozen=True)
class _Work:
    """A calibration on data, at most `limit` batches of it, and the folder to write."""

    data: Data
    gram: bool
    limit: int
    output: Path
    progress: Progress

    def run(self, key: str, memory: int) -> None:
        """Compute what is missing, and write the facts."""
        targets = find_targets(self.data.module, self.gram)
        chosen = groups(targets, next(self._batches()).sizes, memory)
        prefix = _hash([key, self.gram, chosen])[:16]
        self.output.mkdir(parents=True, exist_ok=True)
        (self.output / FACTS).unlink(missing_ok=True)
        for other in self.output.iterdir():
            if _PART.fullmatch(other.name) and not other.name.startswith(prefix):
                other.unlink()  # of other data, or of a killed process
        paths = [self.output / f"{prefix}-{i}.safetensors" for i in range(len(chosen))]
        for i, path in enumerate(paths):
            stage = f"calibrating, part {i + 1} of {len(paths)}" if i else "calibrating"
            self._observe(chosen[i], path, stage)
        end = _State.read(paths[0])
        sites = {name: target.names[0] for target in targets for name in target.names}
        name, files = self.data.module.name, [path.name for path in paths]
        Facts(name, end.rows, end.batches, key, self.gram, files, sites).write(self.output)

    def _batches(self) -> Iterator[Batch]:
        return islice(self.data.batches(), self.limit or None)

    def _observe(self, chosen: list[int], path: Path, stage: str) -> None:
        """Run all batches for a group of targets; what has been counted is in the file `path`."""
        state = _State.read(path)
        if state.complete:
            return
        program = self.output / _PROGRAM
        shutil.rmtree(program, ignore_errors=True)
        program.mkdir()
        text = print_module(self.data.module)
        observer = Observer(text, chosen, self.gram, program, self.progress)
        if state.batches:
            kept = Tensors(path)
            for name, statistics in observer.observed.items():
                statistics.state = {key: kept[f"{name}/{key}"] for key in statistics.state}
        for batch in islice(self._batches(), state.batches, None):
            done = state.batches / self.limit if self.limit else 0.0
            self.progress(stage, max(batch.done, done))
            observer.add(batch)
            state.batches, state.rows = state.batches + 1, state.rows + batch.rows
            if state.batches % _EVERY == 0:
                state.write(path, observer.observed)
        state.complete = True
        state.write(path, observer.observed)


# -- what is observed: inputs of linears and new rows of caches, in groups that fit memory


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
    chosen: list[list[int]] = [[]]
    free = memory
    for i, target in enumerate(targets):
        need = target.needed(sizes)
        if need > free and chosen[-1]:
            chosen.append([])
            free = memory
        chosen[-1].append(i)
        free -= need
    return chosen


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
        self.observed = {
            target.names[0]: RunningStatistics(target.width, target.gram) for target in self.targets
        }
        values = dict.fromkeys(target.value for target in self.targets)
        self.results = {value: f"x{i}" for i, value in enumerate(values)}
        set_results(copy.main, [*self.results], [*map(Result, self.results.values())])
        run_pipeline(copy, "dce", ())
        backend = get("onnx")
        emitted = backend.emit(copy, folder, base=folder, progress=progress)
        self.program: Program = backend.load(folder, dict(emitted.facts))

    def add(self, batch: Batch) -> None:
        """Run the program, and count what it computes; an Error names a site that has NaN."""
        results = self.program.run(batch.arrays)
        for target in self.targets:
            array = results[self.results[target.value]]
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
