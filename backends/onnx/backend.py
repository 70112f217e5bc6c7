"""The ONNX backend: a model per rank, run by ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from irc.argument_checks import MOST_THREADS, check_count
from irc.artifact.manifest import Progress, silent
from irc.backends.base import Backend, Emitted, Program, Unsupported, check_supported
from irc.backends.lowering import STRUCTURE
from irc.errors import Error, did_you_mean
from irc.ir.core import Module, Op
from irc.pipeline import option


@dataclass(frozen=True)
class OnnxOptions:
    """The options of `irc compile` for this backend."""

    layout: Literal["", "genai"] = option(
        "", "genai: also write what onnxruntime-genai loads, with --bundle"
    )


@dataclass(frozen=True)
class OnnxLoadOptions:
    """The options with which a program is loaded."""

    threads: int | None = option(
        None,
        "threads of one operation (default: the physical cores)",
        metavar="N",
        least=1,
        most=MOST_THREADS,
    )
    low_memory: bool = option(
        False, "read weights from their files: loads at once, runs about a fifth slower"
    )


class OnnxBackend(Backend):
    """Opset 24, IR version 11, weights as external data; the same module gives the same bytes."""

    name = "onnx"
    records = True
    options: OnnxOptions = OnnxOptions()
    load_options = OnnxLoadOptions()
    # MatMulNBits reads large weights faster; codes of a checkpoint are not copied for that
    default_pipeline = (
        "inline, canonicalize, cse, fuse-linears{blocks, computed}, fuse-gated-mlp{merged=false}, "
        "fold, dce"
    )
    sharded_pipeline = (
        "inline, canonicalize, cse, shard, rewrite-embeddings, fuse-collectives, fuse-gated-mlp, "
        "pipeline, localize, fuse-collectives, cse, fold, dce"
    )

    @property
    def facts(self) -> type[Any]:
        """The types of what `emit` returns."""
        from irc.backends.onnx.facts import OnnxFacts

        return OnnxFacts

    def unsupported(self, module: Module) -> list[Unsupported]:
        """Every operation that has neither a lowering nor an expansion that is covered."""
        from irc.backends.onnx.emitter import TABLE

        return TABLE.unsupported(module)

    def covers(self, cls: type[Op]) -> bool:
        """Whether the class has a lowering of its own, or is structure."""
        from irc.backends.onnx.emitter import TABLE

        return cls.opname in STRUCTURE or TABLE.covers(cls)

    def emit(
        self, module: Module, folder: Path, *, base: Path | None = None, progress: Progress = silent
    ) -> Emitted:
        """Write `rank{r}.onnx` for every rank, and weight files where bytes had to be converted:
        `rank{r}.weights`, and `shared.weights` for what several ranks need. See facts.py.
        """
        from irc.backends.onnx.emission import write_program

        check_supported(self, module)
        check_module(module)
        return write_program(module, folder, base, progress)

    @property
    def needs_bundle(self) -> bool:
        """Whether the weights have to be in the folder, as onnxruntime-genai finds them there."""
        return bool(self.options.layout)

    def opens(self, manifest: Mapping[str, Any]) -> str:
        """What opens the ONNX files."""
        if len(manifest["program"]["ranks"]) > 1:
            return (
                "irc runs its ranks; ONNX Runtime has no collectives, so it opens none of the files"
            )
        if manifest["weights"]:
            return "irc opens it; rank0.onnx opens in plain ONNX Runtime if compiled with --bundle"
        return "irc opens it, and plain ONNX Runtime opens rank0.onnx"

    def finish(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """Write the files of another layout."""
        if self.options.layout:
            from irc.backends.onnx.genai import write_genai

            write_genai(folder, facts)

    def load(self, folder: Path, manifest: Mapping[str, Any], **options: Any) -> Program:
        """The program on ONNX Runtime: of one rank in this thread, of several in a thread each.

        Options as OnnxRuntimeProgram has them: with a `communicator` this process runs one of
        several ranks.
        """
        several = len(manifest["ranks"]) > 1
        threads = several and options.get("communicator") is None
        names = ("threads", "low_memory", *(("timeout",) if threads else ()))
        recorder = options.pop("recorder", None)
        for name in options:
            if name not in (*names, "communicator"):
                raise Error(
                    f"a program of {len(manifest['ranks'])} rank{'s' * several} on ONNX Runtime "
                    f"has no option {name}{did_you_mean(name, names)}; it has {', '.join(names)}"
                )
        if options.get("threads") is not None:
            check_count("threads", options["threads"], most=MOST_THREADS)
        from irc.backends.onnxruntime import OnnxRuntimeProgram

        communicator = options.pop("communicator", None)
        return OnnxRuntimeProgram(
            folder, manifest, communicator if several else None, recorder=recorder, **options
        )


def check_module(module: Module) -> None:
    """Raise about a module of which no models can be written."""
    if module.mesh.ranks > 1 and not module.local:
        raise Error(
            f"module @{module.name} is in the global view, and its mesh ({module.mesh}) has "
            f"{module.mesh.ranks} ranks; add localize to the pipeline, which writes one rank's view"
        )
    if not module.main.returned:
        raise Error(f"@{module.main.name} returns nothing; a model has at least one result")


backend = OnnxBackend()
