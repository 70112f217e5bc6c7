"""The backend `cuda`: the module's text, plans at some sizes, and the sources of their kernels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from irc.analysis.stages import stages_of
from irc.artifact.manifest import Progress, silent
from irc.backends.base import Backend, Emitted, Program, Unsupported, check_supported
from irc.backends.commands import Commands
from irc.backends.onnx.backend import check_module
from irc.ir.core import Module, Op
from irc.text.printer import print_module
from irc.weights import is_computed

if TYPE_CHECKING:
    from irc.backends.cuda.plan.core import Kernel, Plan

KERNELS, PLANS = "kernels", "plans"  # folders in that of the program

_BEFORE = "inline, canonicalize, cse"


class CudaBackend(Backend):
    """NVIDIA GPUs, one per rank: launches of generated kernels and library calls, as CUDA graphs.

    Plans are made again, at the sizes of every call; those in the folder are for people to read.
    """

    name = "cuda"
    rank_is_process = True
    default_pipeline = f"{_BEFORE}, fuse-qkv, fold, dce"
    sharded_pipeline = (
        f"{_BEFORE}, shard, rewrite-embeddings, pipeline, localize, cse, fuse-qkv, fold, dce"
    )

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
        """Whether operations of the class run without their expansion."""
        from irc.backends.cuda.plan.prepare import covers

        return covers(cls)

    def emit(
        self, module: Module, folder: Path, *, base: Path | None = None, progress: Progress = silent
    ) -> Emitted:
        """Write `module.irc`, `plans/*.txt` at typical and at least sizes, and `kernels/*.cu`."""
        from irc.backends.cuda.facts import TEXT, base_of

        self._check(module)
        (folder / TEXT).write_text(print_module(module, locs=True), encoding="utf-8")
        write_plans(module, folder)
        return Emitted({"base": base_of(folder, base)}, _notes(module))

    def check(self, module: Module, base: Path) -> list[str]:
        """Raise the errors of `emit`; nothing is written."""
        self._check(module)
        for _ in plans_of(module):
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


def plans_of(module: Module) -> Iterator[tuple[str, Plan]]:
    """A name and a plan per stage of the module, at typical and at least sizes."""
    from irc.backends.cuda.facts import sizes_of
    from irc.backends.cuda.plan.build import Planner

    for stage in stages_of(module):
        planner = Planner(module, stage.function.name, stage.ranks[0])
        for name, sizes in sizes_of(module, stage.function).items():
            yield f"{stage.function.name}.{name}", planner.plan(sizes)


def write_plans(module: Module, folder: Path) -> None:
    """Write the texts of plans, and every kernel once."""
    from irc.backends.cuda.plan.text import print_plan

    kernels: dict[str, Kernel] = {}
    (folder / PLANS).mkdir()
    for name, plan in plans_of(module):
        (folder / PLANS / f"{name}.txt").write_text(print_plan(plan), encoding="utf-8")
        kernels |= plan.kernels
    (folder / KERNELS).mkdir()
    for name, kernel in kernels.items():
        macros = "".join(f"#define {key} {value}\n" for key, value in kernel.macros.items())
        (folder / KERNELS / f"{name}.cu").write_text(macros + kernel.source, encoding="utf-8")


backend = CudaBackend()
