"""Emission: the models of every rank of a module, and their weight files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from irc.analysis.stages import Stage, stages_of
from irc.artifact.manifest import Progress
from irc.backends.base import Emitted
from irc.backends.fallback import fallback_of
from irc.backends.onnx.emitter import Emitter
from irc.backends.onnx.facts import EXACT_MODEL, MODEL, facts_of
from irc.backends.onnx.growth import repeatable
from irc.backends.onnx.per_rank import Template
from irc.backends.onnx.storage import Locations, Storage
from irc.errors import Error
from irc.ir.core import Function, Module
from irc.weights.checkpoint import Reader


def write_program(module: Module, folder: Path, base: Path | None, progress: Progress) -> Emitted:
    """Write the models and weight files, see OnnxBackend.emit."""
    storage = Storage(Reader(module, base), module.mesh)
    exact = fallback_of(module)
    main = _Emission(module, module.main, MODEL, storage)
    other = None if exact is None else _Emission(module, exact, EXACT_MODEL, storage)
    found = storage.write(folder, progress)
    facts = main.write(folder, found)
    if other is None:
        return Emitted(facts | {"fallback": None}, hashes=found.hashes)
    again = {"again": repeatable(main.function, other.function)}
    facts |= {"fallback": other.write(folder, found) | again}
    return Emitted(facts, hashes=found.hashes)


class _Emission:
    """The graphs of one function."""

    def __init__(self, module: Module, function: Function, model: str, storage: Storage) -> None:
        self.module, self.function, self.model = module, function, model
        self.stages = stages_of(module, function)
        self.emitters = [self._emitted(stage, storage) for stage in self.stages]
        self.templates = [Template(emitter, storage) for emitter in self.emitters]

    def _emitted(self, stage: Stage, storage: Storage) -> Emitter:
        emitter = Emitter(self.module, stage.function, storage, stage.ranks)
        emitter.emit()
        return emitter

    def write(self, folder: Path, found: Locations) -> dict[str, Any]:
        """Write a model per rank, once the weights have their places; the facts about them."""
        for stage, template in zip(self.stages, self.templates, strict=True):
            for rank in stage.ranks:
                write_model(folder / self.model.format(rank), template.model(rank))
        return facts_of(self.module, self.function, self.stages, self.emitters, found, self.model)


def write_model(path: Path, model: Any) -> bytes:
    """Write a model's bytes, which are always the same, and return them."""
    data: bytes = model.SerializeToString(deterministic=True)
    try:
        path.write_bytes(data)
    except OSError as error:
        raise Error(f"cannot write {path}: {error.strerror or error}") from error
    return data
