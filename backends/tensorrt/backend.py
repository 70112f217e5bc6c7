"""The TensorRT backends: ONNX of TensorRT's flavour, engines built from it, a runtime for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from onnx.onnx_ml_pb2 import ModelProto

from irc.artifact import silent
from irc.backends.base import Gap, Program, report
from irc.backends.cuda.runtime import capability
from irc.backends.fallback import fallback_of
from irc.backends.lowering import STRUCTURE
from irc.backends.onnx.backend import check_module, write_model
from irc.backends.onnx.per_rank import Template
from irc.backends.onnx.stages import Stage, stages_of
from irc.backends.onnx.storage import Locations, Storage
from irc.backends.tensorrt import probe, triton
from irc.backends.tensorrt.engines import Engines, warnings_of
from irc.backends.tensorrt.facts import base_facts, write_bindings
from irc.backends.tensorrt.golden import is_left_out, self_test
from irc.backends.tensorrt.lowering import table
from irc.backends.tensorrt.lowering.collectives import Collectives
from irc.backends.tensorrt.lowering.emitter import TensorRTEmitter
from irc.backends.tensorrt.nodes import COLLECTIVE_PLUGIN
from irc.backends.tensorrt.options import EngineOptions
from irc.backends.tensorrt.ranges import profiles_of
from irc.backends.tensorrt.target import KNOWN, Flavour, Target
from irc.checkpoint import Reader
from irc.core import Module, Op
from irc.errors import Error

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
        """The same backend with other options of engines; see EngineOptions.

        The user's plugins are loaded now: their files may declare operations of the model, too.
        """
        chosen = EngineOptions.of(options)
        if chosen.plugins:
            from irc.backends.tensorrt.plugins import load

            load(chosen.plugins)
        return TensorRTBackend(self.flavour, chosen)

    @property
    def target(self) -> Target:
        """What engines are for: where they are built, the version is that of the library, and what
        builds on its GPU only is for that.
        """
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
        if not found.traits.capabilities and not target.architectures:
            here = capability()
            target = replace(target, architectures=() if here is None else (here,))
        return target.of_version(found.release)

    def unsupported(self, module: Module) -> list[Gap]:
        """Every operation that has neither a lowering nor an expansion that is covered."""
        target = self.target
        gaps = table.lowerings(target).unsupported(module)
        return [Gap(gap.op, table.refusal(gap.op, target) or gap.reason) for gap in gaps]

    def covers(self, cls: type[Op]) -> bool:
        """Whether the class has a lowering of its own, or is structure."""
        known = Target(self.flavour, KNOWN[self.flavour])
        return cls.opname in STRUCTURE or table.lowerings(known).covers(cls)

    def emit(self, module: Module, folder: Path, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Write models, bindings or weight files, and engines; see facts.py.

        Options: `base`, the folder that relative paths in `module.files` start from; `progress` is
        told what goes on, and the fraction of it that is done; `output`, where the folder will be.
        """
        self._refuse(module)
        if self.options.triton is not None and "output" in options:
            triton.check_place(self.options.triton, options["output"])
        return _Emission(self, module, folder, options).facts()

    def check(self, module: Module, options: Mapping[str, Any]) -> list[str]:
        """Raise what `emit` would before it builds engines, with the linter; nothing is written.

        Returns sentences for the user, warnings of the linter among them.
        """
        self._refuse(module)
        return _Emission(self, module, Path(), options).linted()

    def finish(self, folder: Path, manifest: Mapping[str, Any]) -> list[str]:
        """What follows once an artifact is in its place: the repository for Triton, if wanted.

        Returns sentences for the user.
        """
        wanted = self.options.triton
        return [] if wanted is None else triton.write(folder, manifest, wanted)

    def _refuse(self, module: Module) -> None:
        """Raise about a module of which no engines can be made."""
        gaps = self.unsupported(module)
        if gaps:
            raise report(gaps, self.name)
        check_module(module)
        _check_room(module)

    def load(self, folder: Path, manifest: Mapping[str, Any], **options: Any) -> Program:
        """The program that runs the engines of a folder; options as the runtime has them."""
        from irc.backends.tensorrt.runtime import load

        return load(folder, manifest, **options)


def _check_room(module: Module) -> None:
    """An Error where ids may find no room: engines have no fallback."""
    if fallback_of(module) is not None:
        raise Error(
            "capacity in rewrite-embeddings leaves ids without room, whose calls run again with "
            "room for all; engines cannot do that, so leave it out, or give --backend onnx"
        )


class _Emission:
    def __init__(
        self, backend: TensorRTBackend, module: Module, folder: Path, options: Mapping[str, Any]
    ) -> None:
        self.module, self.folder = module, folder
        self.base, self.progress = options.get("base"), options.get("progress") or silent
        self.chosen, self.target = backend.options, backend.target
        self.outside = self.chosen.outside(module)

    def linted(self) -> list[str]:
        """What the linter has against the models that would be written; an Error where that is one.

        Whatever is wrong with the profiles is an Error too.
        """
        storage = Storage(Reader(self.module, self.base), self.module.mesh)
        models: list[tuple[str, ModelProto]] = []
        with stages_of(self.module) as stages:
            profiles_of((stage.function for stage in stages), self.module.dims)
            emitters = self._emitters(stages, storage)
            templates = [Template(emitter, storage) for emitter in emitters]
            storage.locate(self.folder)
            for number, (stage, template) in enumerate(zip(stages, templates, strict=True)):
                models += self._models(number, stage, template)
        linted = [f"{name} was linted for {self.target}" for name, _ in models]
        return linted + warnings_of(models, self.target)

    def facts(self) -> dict[str, Any]:
        """Write everything; returns what the manifest is to say."""
        storage = Storage(Reader(self.module, self.base), self.module.mesh)
        with stages_of(self.module) as stages:
            profiles = profiles_of((stage.function for stage in stages), self.module.dims)
            emitters = self._emitters(stages, storage)
            templates = [Template(emitter, storage) for emitter in emitters]
            found = storage.write(self.folder, self.progress)
            facts = base_facts(self.module, stages, emitters, found, profiles)
            for number, stage in enumerate(stages):
                self._write(facts, number, stage, templates[number], emitters[number], found)
        plugin = any(emitter.plugins for emitter in emitters)
        facts |= {
            "target": str(self.target),
            "weights": "outside" if self.outside else "inside",
            "collectives": "plugin" if plugin else "native",
            "plugins": _plugin_versions(emitters),
            "engine": self.chosen.remembered(),
            "probe": self._probe() if any(emitter.natives for emitter in emitters) else None,
            "self_test": self_test(self.module, self.base, self.chosen.self_test, self.progress),
        }
        facts["notes"] = _told(emitters)
        if is_left_out(self.module, self.chosen.self_test):
            facts["notes"].append(_UNTESTED)
        Engines(self.folder, facts, profiles, self.target, self.chosen, self.progress).make(
            found.base
        )
        return facts

    def _emitters(self, stages: Sequence[Stage], storage: Storage) -> list[TensorRTEmitter]:
        """The graphs of all stages; an Error where they cannot be served as is wanted."""
        emitters = [self._emitted(stage, storage) for stage in stages]
        if self.chosen.triton is not None:
            triton.check(self.module, _plugin_versions(emitters))
        return emitters

    def _emitted(self, stage: Stage, storage: Storage) -> TensorRTEmitter:
        """The graph of a stage. Collectives are all TensorRT's own or all the plugin's: nobody has
        run both on one communicator.
        """
        emitter = self._written(stage, storage, self.chosen.collectives)
        mixed = emitter.natives and emitter.plugins
        return self._written(stage, storage, "plugin") if mixed else emitter

    def _written(self, stage: Stage, storage: Storage, wanted: Collectives) -> TensorRTEmitter:
        ranks, target = stage.ranks, self.target
        emitter = TensorRTEmitter(
            self.module, stage.function, storage, ranks, target, wanted, self.outside
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
        """The models of a stage, and where the weights of its ranks are."""
        for name, model in self._models(number, stage, template):
            write_model(self.folder / name, model)
        dtypes = {name: form.dtype for name, form in emitter.forms.items()}
        for rank in stage.ranks:
            entry = facts["ranks"][rank]
            entry["model"] = self._model(number, rank)
            if self.outside:
                entry["bindings"] = write_bindings(
                    self.folder, rank, template.placed(rank), dtypes, found.files[rank]
                )

    def _models(
        self, number: int, stage: Stage, template: Template
    ) -> Iterator[tuple[str, ModelProto]]:
        """The models of a stage by name, one for all of its ranks where weights are outside."""
        for rank in stage.ranks[:1] if self.outside else stage.ranks:
            model = template.shared() if self.outside else template.model(rank)
            yield self._model(number, rank), model

    def _probe(self) -> dict[str, Any]:
        """The model that tries TensorRT's own collectives; see probe.py."""
        stage = probe.probe(self.module)
        storage = Storage(Reader(self.module, self.base), self.module.mesh)
        emitter = self._written(stage, storage, "native")
        write_model(self.folder / probe.MODEL, Template(emitter, storage).shared())
        return {"model": probe.MODEL, "engine": None}

    def _model(self, stage: int, rank: int) -> str:
        """The name of the model that a rank runs."""
        return f"stage{stage}.onnx" if self.outside else f"rank{rank}.onnx"


def _told(emitters: Sequence[TensorRTEmitter]) -> list[str]:
    """Which collectives the stages use."""
    notes: list[str] = []
    for number, each in enumerate(emitters):
        count = each.natives or each.plugins
        by = "TensorRT itself (DistCollective)" if each.natives else f"NCCL ({COLLECTIVE_PLUGIN})"
        if count:
            notes.append(f"stage {number}: {count} collective{'s' * (count > 1)} by {by}")
    return notes


_UNTESTED = (
    "loading compares no answer of the reference, which takes long to compute here; "
    "--self-test always stores one"
)


def _plugin_versions(emitters: Sequence[TensorRTEmitter]) -> dict[str, str]:
    """The versions of the plugins that the graphs use."""
    from irc.backends.tensorrt import plugins

    used = {node.kind for emitter in emitters for node in emitter.graph.nodes}
    known = plugins.versions()
    return {name: known[name] for name in known if name.rpartition("::")[2] in used}
