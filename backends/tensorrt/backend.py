"""The TensorRT backends: ONNX of TensorRT's flavour, engines built from it, a runtime for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from irc.backends.base import Gap, Program, report
from irc.backends.lowering import STRUCTURE
from irc.backends.onnx.backend import check_module, write_model
from irc.backends.onnx.per_rank import Template
from irc.backends.onnx.stages import Stage, stages_of
from irc.backends.onnx.storage import Locations, Storage
from irc.backends.tensorrt.engines import Engines
from irc.backends.tensorrt.facts import base_facts, write_bindings
from irc.backends.tensorrt.golden import self_test
from irc.backends.tensorrt.lowering import table
from irc.backends.tensorrt.lowering.emitter import TensorRTEmitter
from irc.backends.tensorrt.options import EngineOptions
from irc.backends.tensorrt.ranges import profiles_of
from irc.backends.tensorrt.target import KNOWN, Flavour, Target
from irc.checkpoint import Reader
from irc.core import Module, Op
from irc.errors import Error
from irc.report import weight_bytes

_CLEANERS = "inline, static-capacity, canonicalize, cse"


class TensorRTBackend:
    """One of the two flavours, with the options of its engines.

    Engines compute in the module's own dtypes. What the folder holds is described in facts.py.
    """

    default_pipeline = f"{_CLEANERS}, fuse-gated-mlp, fold, dce"
    sharded_pipeline = (
        f"{_CLEANERS}, shard, rewrite-embeddings, fuse-collectives, fuse-gated-mlp, pipeline, "
        "localize, fuse-collectives{norm=true}, cse, fold, dce"
    )

    def __init__(self, flavour: Flavour, options: EngineOptions | None = None) -> None:
        self.flavour: Flavour = flavour
        self.options, self.name = options or EngineOptions(), str(flavour)

    def configured(self, options: Mapping[str, Any]) -> TensorRTBackend:
        """The same backend with other options of engines; see EngineOptions."""
        return TensorRTBackend(self.flavour, EngineOptions.of(options))

    @property
    def target(self) -> Target:
        """What engines are for: the version is that of the library, where engines are built."""
        target = Target.parse(self.options.target or self.flavour)
        if target.flavour != self.flavour:
            raise Error(f"the target {target} is not for the backend {self.name}")
        if not self.options.build:
            return target
        from irc.backends.tensorrt.builder.library import find

        found = find(self.flavour)
        stated = self.options.target.partition("/")[0] != self.flavour
        if self.options.target and stated and target.version != found.release:
            raise Error(
                f"the target is {target}, and {found} is installed; install that version, name "
                "another target, or give --no-build"
            )
        return target.of_version(found.release)

    def unsupported(self, module: Module) -> list[Gap]:
        """Every operation that has neither a lowering nor an expansion that is covered."""
        self._load_plugins()
        target = self.target
        gaps = table.lowerings(target).unsupported(module)
        return [Gap(gap.op, table.refusal(gap.op, target) or gap.reason) for gap in gaps]

    def _load_plugins(self) -> None:
        """Load the user's plugins, whose files may bring lowerings for operations of the model."""
        if not self.options.plugins:
            return
        from irc.backends.tensorrt import plugins

        plugins.load([Path(file) for file in self.options.plugins])
        table.lowerings.cache_clear()

    def covers(self, cls: type[Op]) -> bool:
        """Whether the class has a lowering of its own, or is structure."""
        known = Target(self.flavour, KNOWN[self.flavour])
        return cls.opname in STRUCTURE or table.lowerings(known).covers(cls)

    def emit(self, module: Module, folder: Path, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Write models, bindings or weight files, and engines; see facts.py.

        Options: `base`, the folder that relative paths in `module.files` start from; `progress` is
        told what goes on, and the fraction of it that is done.
        """
        gaps = self.unsupported(module)
        if gaps:
            raise report(gaps, self.name)
        check_module(module)
        return _Emission(self, module, folder, options).facts()

    def load(self, folder: Path, manifest: Mapping[str, Any], **options: Any) -> Program:
        """The program that runs the engines of a folder; options as the runtime has them."""
        from irc.backends.tensorrt.runtime import load

        return load(folder, manifest, **options)


class _Emission:
    def __init__(
        self, backend: TensorRTBackend, module: Module, folder: Path, options: Mapping[str, Any]
    ) -> None:
        self.module, self.folder = module, folder
        self.base, self.progress = options.get("base"), options.get("progress")
        self.chosen, self.target = backend.options, backend.target
        self.outside = self.chosen.outside(module.mesh.ranks, weight_bytes(module))

    def facts(self) -> dict[str, Any]:
        """Write everything; returns what the manifest is to say."""
        storage = Storage(Reader(self.module, self.base), self.module.mesh)
        with stages_of(self.module) as stages:
            emitters = [self._emitted(stage, storage) for stage in stages]
            templates = [Template(emitter, storage) for emitter in emitters]
            found = storage.write(self.folder, self.progress)
            profiles = [profiles_of(stage.function, self.module.dims) for stage in stages]
            facts = base_facts(self.module, stages, emitters, found, profiles)
            for number, stage in enumerate(stages):
                self._write(facts, number, stage, templates[number], emitters[number], found)
        plugin = any(emitter.plugins for emitter in emitters)
        facts |= {
            "target": str(self.target),
            "weights": "outside" if self.outside else "inside",
            "collectives": "plugin" if plugin else "native",
            "plugins": _plugin_versions(emitters),
            "self_test": self_test(self.module, self.base, self.chosen.self_test),
        }
        Engines(self.folder, facts, profiles, self.target, self.chosen, self.progress).make(
            found.base
        )
        return facts

    def _emitted(self, stage: Stage, storage: Storage) -> TensorRTEmitter:
        emitter = TensorRTEmitter(
            self.module,
            stage.function,
            storage,
            stage.ranks,
            self.target,
            self.chosen.collectives,
            self.outside,
        )
        emitter.emit()
        return emitter

    def _write(
        self,
        facts: dict[str, Any],
        number: int,
        stage: Stage,
        template: Template,
        emitter: TensorRTEmitter,
        found: Locations,
    ) -> None:
        """The models of a stage, one for all of its ranks where weights are outside."""
        shared = f"stage{number}.onnx"
        dtypes = {name: form.dtype for name, form in emitter.forms.items()}
        for rank in stage.ranks:
            entry = facts["ranks"][rank]
            if not self.outside:
                entry["model"] = f"rank{rank}.onnx"
                write_model(self.folder / entry["model"], template.model(rank))
                continue
            entry["model"] = shared
            entry["bindings"] = write_bindings(
                self.folder, rank, template.placed(rank), dtypes, found.files[rank]
            )
        if self.outside:
            write_model(self.folder / shared, template.shared())


def _plugin_versions(emitters: Sequence[TensorRTEmitter]) -> dict[str, str]:
    """The versions of the plugins that the graphs use."""
    from irc.backends.tensorrt import plugins

    used = {node.kind for emitter in emitters for node in emitter.graph.nodes}
    known = plugins.versions()
    return {name: known[name] for name in known if name.rpartition("::")[2] in used}
