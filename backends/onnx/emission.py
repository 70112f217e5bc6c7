"""Emission: the models of every rank of a module, and their weight files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from irc.analysis.stages import Stage, stages_of
from irc.artifact.manifest import Progress
from irc.backends.base import Emitted
from irc.backends.onnx.emitter import Emitter
from irc.backends.onnx.facts import MODEL, facts_of
from irc.backends.onnx.per_rank import Template
from irc.backends.onnx.storage import Storage
from irc.errors import Error
from irc.ir.core import Module
from irc.weights.checkpoint import Reader


def write_program(module: Module, folder: Path, base: Path | None, progress: Progress) -> Emitted:
    """Write the models and weight files, see OnnxBackend.emit."""
    storage, function = Storage(Reader(module, base), module.mesh), module.main
    stages = stages_of(module, function)
    emitters = [_emitted(module, stage, storage) for stage in stages]
    templates = [Template(emitter, storage) for emitter in emitters]
    locations = storage.write(folder, progress)
    for stage, template in zip(stages, templates, strict=True):
        for rank in stage.ranks:
            write_model(folder / MODEL.format(rank), template.model(rank))
    facts = facts_of(module, function, stages, emitters, locations)
    return Emitted(facts, hashes=locations.hashes)


def _emitted(module: Module, stage: Stage, storage: Storage) -> Emitter:
    """The graph of a stage."""
    emitter = Emitter(module, stage.function, storage, stage.ranks)
    emitter.emit()
    return emitter


def write_model(path: Path, model: Any) -> bytes:
    """Write a model's bytes, which are always the same, and return them."""
    data: bytes = model.SerializeToString(deterministic=True)
    try:
        path.write_bytes(data)
    except OSError as error:
        raise Error(f"cannot write {path}: {error.strerror or error}") from error
    return data
