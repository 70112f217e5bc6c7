"""The backend `cuda`: the module's text, plans at some sizes, and the sources of their kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from irc.artifact.folder import ArtifactFolder
from irc.artifact.manifest import Progress, silent
from irc.backends.base import Backend, Emitted, Program, Unsupported, check_supported
from irc.backends.commands import Commands
from irc.backends.onnx.backend import check_module
from irc.ir.core import Module, Op
from irc.pipeline.options import option, target_option
from irc.text.printer import print_module
from irc.weights import is_computed

_BEFORE = "inline, canonicalize, cse"
_FUSED = (
    "fuse-experts, fuse-gated-mlp{merged=false}, fuse-qkv, fuse-attention, fuse-quantize, fold, "
    "dce, fuse-linear-epilogue"
)


@dataclass(frozen=True)
class CudaOptions:
    """The options with which a module is compiled."""

    target: str = target_option()


@dataclass(frozen=True)
class CudaLoadOptions:
    """The options with which a program is loaded."""

    locked: bool = option(
        False, "an error where the GPU, a version or a kernel is not that of the artifact's choices"
    )


class CudaBackend(Backend):
    """NVIDIA GPUs, one per rank: launches of generated kernels and library calls, as CUDA graphs.

    Plans are made again, at the sizes of every call; those in the folder are for people to read.
    They are for the GPU that is the target, and for what `choices.json` says about it.
    """

    name = "cuda"
    options = CudaOptions()
    load_options = CudaLoadOptions()
    records = True
    rank_is_process = True
    default_pipeline = f"{_BEFORE}, {_FUSED}"
    sharded_pipeline = f"{_BEFORE}, shard, rewrite-embeddings, pipeline, localize, cse, {_FUSED}"

    def remembered(self, artifact: ArtifactFolder) -> Mapping[str, Any]:
        """The target of an artifact."""
        from irc.backends.cuda.tuning import read_choices

        return {"target": f"cuda/sm_{read_choices(artifact.path).target.capability}"}

    @property
    def facts(self) -> type[Any]:
        """The types of what `emit` returns."""
        from irc.backends.cuda.facts import CudaFacts

        return CudaFacts

    @property
    def commands(self) -> Commands:
        """Its part of irc's commands."""
        from irc.backends.cuda.commands import CudaCommands

        return CudaCommands()

    def unsupported(self, module: Module) -> list[Unsupported]:
        """Every operation without a kernel, elements or an expansion in such."""
        from irc.backends.cuda.plan.prepare import unsupported

        return unsupported(module)

    def covers(self, cls: type[Op]) -> bool:
        """Whether operations of the class run without their expansion, at least some."""
        from irc.backends.cuda.plan import LAUNCHES
        from irc.backends.cuda.plan.prepare import covers

        return covers(cls) or cls in LAUNCHES

    def emit(
        self, module: Module, folder: Path, *, base: Path | None = None, progress: Progress = silent
    ) -> Emitted:
        """Write `module.irc`, `choices.json`, `plans/*.txt` at typical and at least sizes, and
        `kernels/*.cu`."""
        from irc.backends.cuda.facts import TEXT, base_of
        from irc.backends.cuda.plan_files import write_plans
        from irc.backends.cuda.tuning import Choices, parse_target

        self._check(module)
        (folder / TEXT).write_text(print_module(module, locs=True), encoding="utf-8")
        write_plans(module, folder, Choices(parse_target(self.options.target)))
        return Emitted({"base": base_of(folder, base)}, _notes(module))

    def check(self, module: Module, base: Path) -> list[str]:
        """Raise the errors of `emit`; nothing is written."""
        from irc.backends.cuda.plan_files import plans_of
        from irc.backends.cuda.tuning import device_of, parse_target

        self._check(module)
        for _ in plans_of(module, device_of(parse_target(self.options.target))):
            pass
        return _notes(module)

    def load(self, folder: Path, manifest: Mapping[str, Any], **options: Any) -> Program:
        """The program on the GPU of this rank; `execute/load.py` documents the options."""
        from irc.backends.cuda.execute.load import load

        return load(folder, manifest, **options)

    def _check(self, module: Module) -> None:
        check_supported(self, module)
        check_module(module)


def _notes(module: Module) -> list[str]:
    """What the user should know about a program of the module."""
    count = sum(is_computed(weight.ref) for weight in module.weights.values())
    what = "a weight is" if count == 1 else f"{count} weights are"
    return [f"{what} computed whenever this is loaded; --bundle stores them"] if count else []


backend = CudaBackend()
