"""The TensorRT backends: ONNX for TensorRT, engines built from it, a runtime for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from irc.artifact.folder import ArtifactFolder
from irc.artifact.manifest import Progress, silent
from irc.backends.base import Backend, Emitted, Program, Unsupported, check_supported
from irc.backends.commands import Commands
from irc.backends.cuda.runtime import capability
from irc.backends.lowering import STRUCTURE
from irc.backends.onnx.backend import check_module
from irc.backends.tensorrt.options import EngineOptions, LoadOptions
from irc.backends.tensorrt.target import KNOWN, Flavour, Target
from irc.errors import Error
from irc.ir.core import Module, Op

if TYPE_CHECKING:
    from irc.backends.tensorrt.emission import Emission

_CLEANERS = "inline, static-capacity, canonicalize, cse"
# The builder joins products of one input itself, but not of weights that have blocks of scales.
_PRODUCTS = "fuse-linears{blocks}, fuse-gated-mlp{merged=false}"


class TensorRTBackend(Backend):
    """One of the two flavours, with the options of its engines.

    Engines compute in the module's own dtypes. `facts.py` describes the artifact.
    """

    load_options = LoadOptions()
    rank_is_process = True
    default_pipeline = f"{_CLEANERS}, {_PRODUCTS}, fold, dce"
    sharded_pipeline = (
        f"{_CLEANERS}, shard, rewrite-embeddings, fuse-collectives, pipeline, localize, "
        f"fuse-collectives{{norm=true}}, {_PRODUCTS}, cse, fold, dce"
    )

    def __init__(self, flavour: Flavour, options: EngineOptions | None = None) -> None:
        self.flavour: Flavour = flavour
        self.options, self.name = options or EngineOptions(), str(flavour)

    def begin(self, options: Mapping[str, Any]) -> None:
        """Load the user's plugins: their files may declare operations of the model, too."""
        plugins: Any = options.get("plugins", ())
        self._load([plugins] if isinstance(plugins, (str, Path)) else plugins)

    def configured(self, options: Mapping[str, Any]) -> Self:
        """This backend with other options of engines, whose plugins are loaded."""
        chosen = super().configured(options)
        self._load(chosen.options.plugins)
        return chosen

    def _load(self, plugins: Sequence[str | Path]) -> None:
        if plugins:
            from irc.backends.tensorrt.plugins import load

            load(plugins)

    def remembered(self, artifact: ArtifactFolder) -> Mapping[str, Any]:
        """The options of its engines that do not depend on the machine."""
        from irc.backends.tensorrt.facts import Engines

        return artifact.facts(Engines).get("engine", {})

    @property
    def facts(self) -> type[Any]:
        """The types of what `emit` returns."""
        from irc.backends.tensorrt.facts import EngineFacts

        return EngineFacts

    @property
    def target(self) -> Target:
        """The target of engines: if they are built, with the version of the installed library, and
        for TensorRT with the architecture of this machine's GPU."""
        target = Target.parse(self.options.target or self.flavour)
        if target.flavour != self.flavour:
            raise Error(f"the target {target} is not for the backend {self.name}")
        if not self.options.build:
            return target
        from irc.backends.tensorrt.builder.library import find

        found = find(self.flavour)
        has_version = self.options.target.partition("/")[0] not in ("", self.flavour)
        if has_version and target.version != found.release:
            raise Error(
                f"the target is {target}, and {found} is installed; install that version, name "
                "another target, or give --no-build"
            )
        if not found.traits.cross_compiles and not target.architectures:
            here = capability()
            target = replace(target, architectures=() if here is None else (here,))
        return replace(target, version=found.release)

    @property
    def commands(self) -> Commands:
        """Its part of irc's commands."""
        from irc.backends.tensorrt.commands import EngineCommands

        return EngineCommands()

    def unsupported(self, module: Module) -> list[Unsupported]:
        """Every operation without a lowering or a supported expansion."""
        from irc.backends.tensorrt.lowering import table

        return table.lowerings(self.target).unsupported(module)

    def covers(self, cls: type[Op]) -> bool:
        """Whether the class has a lowering of its own, or is structure."""
        from irc.backends.tensorrt.lowering import table

        known = Target(self.flavour, KNOWN[self.flavour])
        return cls.opname in STRUCTURE or table.lowerings(known).covers(cls)

    def emit(
        self, module: Module, folder: Path, *, base: Path | None = None, progress: Progress = silent
    ) -> Emitted:
        """Write models, bindings or weight files, and engines; see facts.py."""
        return self._emission(module, folder, base, progress).write()

    def check(self, module: Module, base: Path) -> list[str]:
        """Raise the errors of `emit` that precede building, those of the linter too.

        Returns the linter's warnings and other notes; nothing is written.
        """
        return self._emission(module, Path(), base, silent).check()

    def _emission(
        self, module: Module, folder: Path, base: Path | None, progress: Progress
    ) -> Emission:
        from irc.backends.tensorrt.emission import Emission

        check_supported(self, module)
        check_module(module)
        return Emission(module, folder, base, progress, self.options, self.target)

    def load(self, folder: Path, manifest: Mapping[str, Any], **options: Any) -> Program:
        """The program that runs the engines of a folder; `runtime.load` documents the options."""
        from irc.backends.tensorrt.runtime import load

        return load(folder, manifest, **options)


tensorrt = TensorRTBackend("tensorrt")
tensorrt_rtx = TensorRTBackend("tensorrt-rtx")
