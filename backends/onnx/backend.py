"""The ONNX backend: a model per rank, run by ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from irc.argument_checks import MOST_THREADS, check_count
from irc.artifact.manifest import Progress, silent
from irc.backends.base import Backend, Emitted, Program, Unsupported, check_supported
from irc.backends.fallback import FallbackProgram, fallback_of
from irc.backends.lowering import STRUCTURE
from irc.backends.onnx.emitter import TABLE, Emitter
from irc.backends.onnx.facts import EXACT_MODEL, MODEL, OnnxFacts, facts_of
from irc.backends.onnx.growth import repeatable
from irc.backends.onnx.per_rank import Template
from irc.backends.onnx.stages import Stage, stages_of
from irc.backends.onnx.storage import Locations, Storage
from irc.backends.ranks.communicator import Communicator
from irc.errors import Error, did_you_mean
from irc.ir.core import Function, Module, Op
from irc.weights.checkpoint import Reader


class OnnxBackend(Backend):
    """Opset 24, IR version 11, weights as external data; the same module gives the same bytes."""

    name = "onnx"
    facts = OnnxFacts
    default_pipeline = "inline, canonicalize, cse, fuse-gated-mlp, fold, dce"
    sharded_pipeline = (
        "inline, canonicalize, cse, shard, rewrite-embeddings, fuse-collectives, fuse-gated-mlp, "
        "pipeline, localize, fuse-collectives, cse, fold, dce"
    )

    def unsupported(self, module: Module) -> list[Unsupported]:
        """Every operation that has neither a lowering nor an expansion that is covered."""
        return TABLE.unsupported(module)

    def covers(self, cls: type[Op]) -> bool:
        """Whether the class has a lowering of its own, or is structure."""
        return cls.opname in STRUCTURE or TABLE.covers(cls)

    def emit(
        self, module: Module, folder: Path, *, base: Path | None = None, progress: Progress = silent
    ) -> Emitted:
        """Write `rank{r}.onnx` for every rank, and weight files where bytes had to be converted:
        `rank{r}.weights`, and `shared.weights` for what several ranks need. A function that is to
        run where the capacity of the main one overflows becomes `rank{r}.exact.onnx` over the same
        bytes. See facts.py.
        """
        check_supported(self, module)
        check_module(module)
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

    def load(self, folder: Path, manifest: Mapping[str, Any], **options: Any) -> Program:
        """The program on ONNX Runtime: of one rank in this thread, of several in a thread each.

        Options as OnnxRuntimeProgram has them: with a `communicator` this process runs one of
        several ranks. Where there is a fallback, it gets the same options.
        """
        several = len(manifest["ranks"]) > 1
        threads = several and options.get("communicator") is None
        known = ("threads", "low_memory", *(("timeout",) if threads else ()))
        for name in options:
            if name not in (*known, "communicator"):
                raise Error(
                    f"a program of {len(manifest['ranks'])} rank{'s' * several} on ONNX Runtime "
                    f"has no option {name}{did_you_mean(name, known)}; it has {', '.join(known)}"
                )
        if options.get("threads") is not None:
            check_count("threads", options["threads"], most=MOST_THREADS)
        program, fallback = _loaded(folder, manifest, **options), manifest.get("fallback")
        if fallback is None:
            return program
        return FallbackProgram(
            program, lambda: _loaded(folder, fallback, **options), fallback["again"]
        )


def _loaded(
    folder: Path, facts: Mapping[str, Any], communicator: Communicator | None = None, **options: Any
) -> Program:
    """One program of a folder; no rank talks to another one while it is loaded."""
    from irc.backends.onnxruntime import OnnxRuntimeProgram

    several = len(facts["ranks"]) > 1
    return OnnxRuntimeProgram(folder, facts, communicator if several else None, **options)


def check_module(module: Module) -> None:
    """Raise about a module of which no models can be written."""
    if module.mesh.ranks > 1 and not module.local:
        raise Error(
            f"module @{module.name} is in the global view, and its mesh ({module.mesh}) has "
            f"{module.mesh.ranks} ranks; add localize to the pipeline, which writes one rank's view"
        )
    if not module.main.returned:
        raise Error(f"@{module.main.name} returns nothing; a model has at least one result")


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
