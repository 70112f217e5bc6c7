"""`calibrate`: statistics of a model on data, resumable, in memory that no data set exceeds.

The folder has a file KEY-I.safetensors per group of observed values: what has been counted, and
after how many batches. It is complete with its calibration.json.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..argument_checks import check_count, check_path
from ..artifact.checksums import sampled, sha256
from ..artifact.manifest import Progress, silent
from ..errors import Error
from ..ir.core import Module
from ..ir.mesh import Mesh
from ..quantization.observed import Observed
from ..quantization.statistics import FACTS, Facts, Statistics, is_calibrated
from ..quantization.tensors import Tensors, write_tensors
from ..text.parser import parse_module
from ..text.printer import print_module
from .batches import Batch, Data, data_files
from .targets import Observer, find_targets, groups

if TYPE_CHECKING:
    from ..driver.sources import PathLike, Source

_EVERY = 8  # batches between two savings
_PROGRAM = ".irc-program"  # the folder of the program that runs
_PART = re.compile(r"[.]?[0-9a-f]{16}-\d+\.safetensors.*")  # a file of this or another calibration


def calibrate(
    src: PathLike | Module | Source,
    data: PathLike,
    output: PathLike,
    *,
    gram: bool = False,
    batches: int = 0,
    batch_size: int = 0,
    length: int = 0,
    memory: int = 2048,
    progress: Progress | None = None,
    **options: Any,
) -> Statistics:
    """Run a model on data, and write statistics of the inputs of its linears into a folder.

    `data`: a .txt or .npz file, or a folder of such. Text is cut into rows of `length` tokens;
    `batch_size` rows are a batch; 0 leaves both to the model. `batches` > 0: at most so many.
    `gram`: the gram matrices that the algorithms AWQ and GPTQ need. `memory` MiB: for statistics
    and observed values; where they need more, the data is read several times. `options` are those
    of a source: `checkpoint`, `dtype`, `settings`, `dims`, `random_weights`.

    An interrupted calibration goes on where it was; a complete one of the same model, data and
    options is returned as it is.
    """
    from ..driver.sources import Source, find_source

    check_path("the data", data)
    check_path("the folder to write", output)
    for name, value in {"batches": batches, "batch_size": batch_size, "length": length}.items():
        check_count(name, value, 0)
    check_count("memory", memory)
    source = src if isinstance(src, Source) else find_source(src, **options)
    progress = progress or silent
    progress("reading the data", 0.0)
    module, folder = _observable(source.module), Path(output)
    found = Data(data_files(data), module, source.folder, length, batch_size)
    key = _key(found, batches)
    _check_replaceable(folder)
    if is_calibrated(folder):
        before = Statistics(folder)
        if before.facts.key == key and before.facts.gram >= gram:
            return before
    try:
        _Work(found, gram, batches, folder, progress).run(key, memory << 20)
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

    def write(self, path: Path, observed: Mapping[str, Observed]) -> None:
        """Replace the file."""
        arrays = {
            f"{name}/{k}": v for name, each in observed.items() for k, v in each.state.items()
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
            for name, each in observer.observed.items():
                each.state = {key: kept[f"{name}/{key}"] for key in each.state}
        for batch in islice(self._batches(), state.batches, None):
            done = state.batches / self.limit if self.limit else 0.0
            self.progress(stage, max(batch.done, done))
            observer.add(batch)
            state.batches, state.rows = state.batches + 1, state.rows + batch.rows
            if state.batches % _EVERY == 0:
                state.write(path, observer.observed)
        state.complete = True
        state.write(path, observer.observed)
