"""The ONNX backend: a model per rank, run by ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from irc.backends.base import Gap, Program, report
from irc.backends.communicator import Communicator
from irc.backends.lowering import STRUCTURE
from irc.backends.onnx.emitter import TABLE, Emitter
from irc.backends.onnx.facts import MODEL, facts_of
from irc.backends.onnx.per_rank import Template
from irc.backends.onnx.schema import register_schema
from irc.backends.onnx.stages import Stage, stages_of
from irc.backends.onnx.storage import Storage
from irc.checkpoint import Reader
from irc.core import Module, Op
from irc.errors import Error, did_you_mean


class OnnxBackend:
    """Opset 24, IR version 11, weights as external data; the same module gives the same bytes."""

    name = "onnx"
    default_pipeline = "inline, canonicalize, cse, fuse-gated-mlp, fold, dce"
    sharded_pipeline = (
        "inline, canonicalize, cse, shard, rewrite-embeddings, fuse-collectives, fuse-gated-mlp, "
        "pipeline, localize, fuse-collectives, cse, fold, dce"
    )

    def unsupported(self, module: Module) -> list[Gap]:
        """Every operation that has neither a lowering nor an expansion that is covered."""
        return TABLE.unsupported(module)

    def covers(self, cls: type[Op]) -> bool:
        """Whether the class has a lowering of its own, or is structure."""
        return cls.opname in STRUCTURE or TABLE.covers(cls)

    def emit(self, module: Module, folder: Path, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Write `rank{r}.onnx` for every rank, and weight files where bytes had to be converted:
        `rank{r}.weights`, and `shared.weights` for what several ranks need.

        Options: `base`, the folder that relative paths in `module.files` start from; `progress`
        is told the fraction of the converted weights that is written; `check` runs the ONNX
        checker and shape inference. The facts are described in facts.py.
        """
        gaps = self.unsupported(module)
        if gaps:
            raise report(gaps, self.name)
        check_module(module)
        storage = Storage(Reader(module, options.get("base")), module.mesh)
        with stages_of(module) as stages:
            emitters = [_emitted(module, stage, storage) for stage in stages]
            templates = [Template(emitter, storage) for emitter in emitters]
            found = storage.write(folder, options.get("progress"))
            for stage, template in zip(stages, templates, strict=True):
                for rank in stage.ranks:
                    data = write_model(folder / MODEL.format(rank), template.model(rank))
                    if options.get("check"):
                        check(data)
            return facts_of(module, stages, emitters, found)

    def load(self, folder: Path, manifest: Mapping[str, Any], **options: Any) -> Program:
        """The program on ONNX Runtime: of one rank in this thread, of several in a thread each.

        Options as OnnxRuntimeProgram and ParallelProgram have them. With a `communicator` this
        process runs one of several ranks, see DistributedProgram.
        """
        from irc.backends.onnxruntime import OnnxRuntimeProgram, ParallelProgram

        several = len(manifest["ranks"]) > 1
        communicator: Communicator | None = options.pop("communicator", None)
        threads = several and communicator is None
        known = ("threads", "low_memory", *(("timeout",) if threads else ()))
        for name in options:
            if name not in known:
                raise Error(
                    f"a program of {len(manifest['ranks'])} rank{'s' * several} on ONNX Runtime "
                    f"has no option {name}{did_you_mean(name, known)}; it has {', '.join(known)}"
                )
        if several and communicator is not None:
            from irc.backends.onnxruntime.distributed import DistributedProgram

            return DistributedProgram(folder, manifest, communicator, **options)
        kind = ParallelProgram if several else OnnxRuntimeProgram
        return kind(folder, manifest, **options)


def check_module(module: Module) -> None:
    """Raise about a module of which no models can be written."""
    if module.mesh.ranks > 1 and not module.local:
        raise Error(
            f"module @{module.name} is in the global view, and its mesh ({module.mesh}) has "
            f"{module.mesh.ranks} ranks; add localize to the pipeline, which writes one rank's view"
        )
    if not module.main.returned:
        raise Error(f"@{module.main.name} returns nothing; a model has at least one result")


def _emitted(module: Module, stage: Stage, storage: Storage) -> Emitter:
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


def check(data: bytes) -> None:
    """Raise what the ONNX checker or its shape inference finds wrong with a model."""
    import onnx

    register_schema()
    model = onnx.load_model_from_string(data)
    onnx.checker.check_model(_without_data(model))
    onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)


def _without_data(model: Any) -> Any:
    """A copy whose external initializers are inputs: the checker would open their files."""
    copy = type(model)()
    copy.CopyFrom(model)
    kept = [t for t in copy.graph.initializer if not t.external_data]
    from irc.backends.onnx.graph import value_info_of

    copy.graph.input.extend(value_info_of(t) for t in copy.graph.initializer if t.external_data)
    del copy.graph.initializer[:]
    copy.graph.initializer.extend(kept)
    return copy
