"""`calibrate`: statistics of a model on data, resumable, in memory that no data set exceeds.

Until the folder is complete it has a folder `partial-KEY` with a file per group of observed values:
what has been counted, and after how many batches.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ..argument_checks import check_count, check_path
from ..artifact.atomic import PART
from ..artifact.checksums import sampled, sha256
from ..artifact.locks import locked
from ..artifact.manifest import Progress, silent
from ..errors import Error
from ..generation.tokenizer import TOKENIZER
from ..ir.core import Module
from ..ir.mesh import Mesh
from ..quantization.observed import Observed, summaries, summarized
from ..quantization.statistics import (
    FACTS,
    STATISTICS,
    Facts,
    Statistics,
    is_calibrated,
    write_facts,
)
from ..quantization.tensors import Tensors, write_each, write_tensors
from ..text.parser import parse_module
from ..text.printer import print_module
from .batches import Batch, Data
from .targets import Observer, Target, find_targets, groups

if TYPE_CHECKING:
    from ..driver.sources import PathLike, Source

Array: TypeAlias = np.ndarray[Any, Any]

MEMORY = 2048  # MiB
_EVERY = 8  # batches between two savings
_PARTIAL, _PROGRAM = "partial-", "program"


def calibrate(
    src: PathLike | Module | Source,
    data: PathLike,
    output: PathLike,
    *,
    gram: bool = False,
    batches: int = 0,
    batch_size: int = 0,
    length: int = 0,
    memory: int = MEMORY,
    progress: Progress | None = None,
    **options: Any,
) -> Statistics:
    """Run a model on data, and write statistics of the inputs of its linears into a folder.

    `data`: a .txt or .npz file, or a folder of such. Text is cut into windows of `length` tokens,
    `batch_size` of which are a batch; 0 leaves both to the model. `batches` > 0: at most so many.
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
    folder = source.folder
    tokenizer = folder if folder is not None and (folder / TOKENIZER).is_file() else None
    progress = progress or silent
    progress("reading the data", 0.0)
    module = _observable(source.module)
    found = Data.of(data).resized(length, batch_size).fitted(module, tokenizer)
    work = _Work(module, found, tokenizer, gram, batches, memory << 20, Path(output), progress)
    return work.done()


@dataclass(frozen=True)
class _Work:
    """A calibration: the module to observe, the data, and the folder to write."""

    module: Module
    data: Data
    tokenizer: Path | None
    gram: bool
    limit: int
    memory: int
    output: Path
    progress: Progress

    def done(self) -> Statistics:
        """The statistics, computed as far as they are not there yet."""
        key = self._key()
        _check_replaceable(self.output)
        self.output.mkdir(parents=True, exist_ok=True)
        with locked(self.output / ".lock", self._refuse):
            if is_calibrated(self.output):
                before = Statistics(self.output)
                if before.facts.key == key and before.facts.gram >= self.gram:
                    return before
            self._compute(key)
        return Statistics(self.output)

    def _refuse(self) -> None:
        raise Error(f"another process is writing {self.output}; wait for it, or choose another")

    def _key(self) -> str:
        """A checksum of the module, its weights, the data, and how it is cut."""
        module, data = self.module, self.data
        facts = {
            "module": print_module(module),
            "weights": [sampled(Path(file)) for file in module.files.values()],
            "data": [sha256(file) for file in data.files],
            "cut": [data.length, data.rows, self.limit],
        }
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def _compute(self, key: str) -> None:
        targets = find_targets(self.module, self.gram)
        first = next(self._batches())
        chosen = groups(targets, first.runs[0].sizes, self.memory)
        text = f"{key} {self.gram} {chosen}"
        folder = self.output / f"{_PARTIAL}{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        for other in (*self.output.glob(f"{_PARTIAL}*"), folder / _PROGRAM):
            if other != folder and other.exists():
                shutil.rmtree(other)
        for orphan in self.output.glob(f".*{PART}"):  # of a process that was killed
            orphan.unlink()
        folder.mkdir(exist_ok=True)
        parts = [folder / f"{i}.safetensors" for i in range(len(chosen))]
        for i, part in enumerate(parts):
            self._observe(chosen[i], part, i, len(parts))
        self._write(targets, dict(zip(parts, chosen, strict=True)), key)
        shutil.rmtree(folder)

    def _batches(self) -> Iterator[Batch]:
        return islice(self.data.batches(self.module, self.tokenizer), self.limit or None)

    def _observe(self, chosen: list[int], path: Path, index: int, count: int) -> None:
        """Run all batches for a group of targets; what has been counted is in the file `path`."""
        before = _State.read(path)
        if before.complete:
            return
        text = print_module(self.module)
        program = path.parent / _PROGRAM
        program.mkdir()
        observer = Observer(text, chosen, self.gram, program, self.progress)
        observer.observed |= before.observed
        state = _State(before.batches, before.rows, False, observer.observed)
        for batch in islice(self._batches(), before.batches, None):
            done = max(batch.done, state.batches / self.limit if self.limit else 0.0)
            self.progress("calibrating", (index + done) / count)
            observer.add(batch)
            state.rows += sum(run.rows for run in batch.runs)
            state.batches += 1
            if state.batches % _EVERY == 0:
                state.write(path)
        state.complete = True
        state.write(path)
        shutil.rmtree(program)

    def _write(self, targets: list[Target], parts: Mapping[Path, list[int]], key: str) -> None:
        """Write the statistics from the files of all groups."""
        files = {i: Tensors(path) for path, chosen in parts.items() for i in chosen}
        states = {targets[i].names[0]: _Part(tensors, i) for i, tensors in sorted(files.items())}
        layout: dict[str, tuple[str, tuple[int, ...]]] = {}
        for i, target in enumerate(targets):
            shapes = {"range": (2,), "histogram": files[i].places[f"{i}/counts"].shape}
            for what in summaries(target.gram):
                shape = (target.width,) * (1 + (what == "gram"))
                kind = "i64" if what == "histogram" else "f32"
                layout[f"{target.names[0]}/{what}"] = (kind, shapes.get(what, shape))

        def array(key: str) -> Array:
            name, _, what = key.rpartition("/")
            return summarized(states[name], what)

        (self.output / FACTS).unlink(missing_ok=True)
        write_each(self.output / STATISTICS, layout, array)
        end = _State.read(next(iter(parts)))
        sites = {name: target.names[0] for target in targets for name in target.names}
        facts = Facts(self.module.name, end.rows, end.batches, key, self.gram, sites)
        write_facts(self.output, facts)


@dataclass
class _State:
    """What has been counted of a group of targets, after how many batches and rows."""

    batches: int
    rows: int
    complete: bool
    observed: Mapping[int, Observed]

    @classmethod
    def read(cls, path: Path) -> _State:
        """The state in a file; that before the first batch where there is none."""
        if not path.is_file():
            return cls(0, 0, False, {})
        tensors = Tensors(path)
        batches, rows, complete = map(int, tensors["progress"])
        found = sorted({int(key.partition("/")[0]) for key in tensors if "/" in key})
        observed = {} if complete else {i: Observed.restored(_Part(tensors, i)) for i in found}
        return cls(batches, rows, bool(complete), observed)

    def write(self, path: Path) -> None:
        """Replace the file."""
        arrays = {f"{i}/{k}": v for i, o in self.observed.items() for k, v in o.state().items()}
        progress = np.array([self.batches, self.rows, self.complete], np.int64)
        write_tensors(path, {"progress": progress, **arrays})


class _Part(Mapping[str, Array]):
    """The tensors of a state file that belong to one target."""

    def __init__(self, tensors: Tensors, index: int) -> None:
        self.tensors, self.prefix = tensors, f"{index}/"

    def __getitem__(self, key: str) -> Array:
        return self.tensors[self.prefix + key]

    def __iter__(self) -> Iterator[str]:
        keys = (key for key in self.tensors if key.startswith(self.prefix))
        return (key.removeprefix(self.prefix) for key in keys)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _observable(module: Module) -> Module:
    """A copy of a module with no calls, in which the inputs of its linears can be observed."""
    from .. import passes  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers them)
    from ..pipeline import run_pipeline

    sharded = any(value.type.sharded for op in module.ops() for value in op.results)
    if module.local or sharded:
        raise Error("the module is sharded already; calibrate the source that it was made from")
    copy = parse_module(print_module(module))
    copy.mesh = Mesh()
    run_pipeline(copy, "inline, canonicalize, cse, dce", ())
    return copy


def _check_replaceable(output: Path) -> None:
    """An Error where the folder has anything but a calibration."""
    if output.is_dir():
        names = {name for name in os.listdir(output) if not name.startswith((".", _PARTIAL))}
        if not names or FACTS in names or names == {STATISTICS}:
            return
    elif not output.exists():
        return
    raise Error(f"{output} is no calibration, so it is left alone; choose another folder with -o")
