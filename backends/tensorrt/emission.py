"""Writes the models of a module, checks them with the linter, and has their engines built."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnx.onnx_ml_pb2 import ModelProto

from irc.analysis.stages import Stage, stages_of
from irc.artifact.manifest import Progress
from irc.backends.base import Emitted
from irc.backends.onnx.emission import write_model
from irc.backends.onnx.per_rank import Template
from irc.backends.onnx.storage import Locations, Storage
from irc.backends.tensorrt.builder.failures import CompilerFailure
from irc.backends.tensorrt.builder.request import BuildRequest, Built, Profile
from irc.backends.tensorrt.facts import base_facts, write_bindings
from irc.backends.tensorrt.golden import is_left_out, self_test
from irc.backends.tensorrt.lowering.emitter import TensorRTEmitter
from irc.backends.tensorrt.nodes import COLLECTIVE_PLUGIN, PLAINER
from irc.backends.tensorrt.options import EngineOptions
from irc.backends.tensorrt.ranges import profiles_of
from irc.backends.tensorrt.target import Target
from irc.errors import Error
from irc.ir.core import Module
from irc.weights.checkpoint import Reader

if TYPE_CHECKING:
    from irc.backends.tensorrt.lint import Finding

_UNTESTED = (
    "no answer of the reference is stored to compare when loading, because computing it takes long "
    "here; --self-test always stores one"
)


@dataclass(frozen=True)
class _Graph:
    """The graph of one stage, and the profiles of its engine."""

    number: int
    stage: Stage
    emitter: TensorRTEmitter
    template: Template
    profiles: tuple[Profile, ...]


@dataclass(frozen=True)
class Emission:
    """The emission of one module into a folder, without nodes of the kinds `avoided`."""

    module: Module
    folder: Path
    base: Path | None
    progress: Progress
    options: EngineOptions
    target: Target
    avoided: tuple[str, ...] = ()

    def check(self) -> list[str]:
        """Raise what the linter and the profiles have against the models; returns warnings."""
        storage = self._storage()
        graphs = self._graphs(storage)
        storage.locate(self.folder)
        models = [pair for graph in graphs for pair in self._models(graph)]
        findings = {name: self._lint(name, model) for name, model in models}
        linted = [f"{name} was linted" for name in findings]
        return [*linted, *_notes(findings), *filter(None, [self.target.note])]

    def write(self) -> Emitted:
        """Write the models and everything beside them, and build the engines. Where the library's
        compiler fails, the nodes it is about are written in a plainer form."""
        try:
            return self._write()
        except CompilerFailure as failure:
            kind = next((x for x in PLAINER if x in failure.kinds and x not in self.avoided), None)
            if kind is None:
                raise
            emitted = replace(self, avoided=(*self.avoided, kind)).write()
            note = f"{failure}\n    built with {PLAINER[kind]} in place of {kind}"
            return replace(emitted, notes=[note, *emitted.notes])

    def _write(self) -> Emitted:
        storage = self._storage()
        weights = [] if self._outside else self.module.weights.values()
        storage.reader.check_copied(weights)
        findings: dict[str, list[Finding]] = {}
        graphs = self._graphs(storage)
        locations = storage.write(self.folder, self.progress)
        emitters = [graph.emitter for graph in graphs]
        profiles = [graph.profiles for graph in graphs]
        stages = [graph.stage for graph in graphs]
        facts = base_facts(self.module, stages, emitters, locations, profiles)
        self.progress("checking the graphs", 0.0)
        for graph in graphs:
            for name, model in self._models(graph):
                findings[name] = self._lint(name, model)
                write_model(self.folder / name, model)
            self._add_ranks(facts, graph, locations)
        facts |= {
            "target": str(self.target),
            "weights": "outside" if self._outside else "inside",
            "plugins": _plugin_versions(emitters),
            "engine": self.options.remembered(),
            "self_test": self_test(self.module, self.base, self.options.self_test, self.progress),
        }
        notes = [self.target.note, *map(_collectives_note, graphs), *_notes(findings)]
        if is_left_out(self.module, self.options.self_test):
            notes.append(_UNTESTED)
        built = self._build_all(facts, profiles, locations.base) if self.options.build else {}
        for name, engine in built.items():
            notes += [f"{name}: {warning}" for warning in engine.warnings]
            notes += [f"{name}: found in the cache"] if engine.cached else []
        hashes = {**locations.hashes} | {name: x.hash for name, x in built.items() if x.hash}
        return Emitted(facts, [*filter(None, notes)], hashes)

    @property
    def _outside(self) -> bool:
        return self.options.outside(self.module)

    def _storage(self) -> Storage:
        return Storage(Reader(self.module, self.base), self.module.mesh)

    def _graphs(self, storage: Storage) -> list[_Graph]:
        stages = stages_of(self.module)
        profiles = profiles_of((stage.function for stage in stages), self.module.dims)
        emitters = [self._emitter(stage, storage) for stage in stages]
        parts = zip(stages, emitters, profiles, strict=True)
        return [
            _Graph(i, stage, emitter, Template(emitter, storage), profile)
            for i, (stage, emitter, profile) in enumerate(parts)
        ]

    def _emitter(self, stage: Stage, storage: Storage) -> TensorRTEmitter:
        where = self.target, self._outside, self.avoided
        emitter = TensorRTEmitter(self.module, stage.function, storage, stage.ranks, *where)
        emitter.emit()
        return emitter

    def _models(self, graph: _Graph) -> Iterator[tuple[str, ModelProto]]:
        """(file name, model) of a stage: one for all its ranks if weights are outside."""
        for rank in graph.stage.ranks[:1] if self._outside else graph.stage.ranks:
            model = graph.template.shared() if self._outside else graph.template.model(rank)
            yield self._model_name(graph.number, rank), model

    def _model_name(self, stage: int, rank: int) -> str:
        return f"stage{stage}.onnx" if self._outside else f"rank{rank}.onnx"

    def _lint(self, name: str, model: ModelProto) -> list[Finding]:
        """The linter's warnings about a model; its errors are one Error."""
        from irc.backends.tensorrt.lint import lint

        findings = lint(model)
        errors = [finding for finding in findings if finding.severity == "error"]
        if not errors:
            return findings
        error = Error(f"TensorRT would miscompute {name}")
        for finding in errors:
            error.add_note(str(finding))
        raise error

    def _add_ranks(self, facts: dict[str, Any], graph: _Graph, locations: Locations) -> None:
        """Write the bindings of a stage's ranks, and add the names of their files to the facts."""
        dtypes = {name: form.dtype for name, form in graph.emitter.forms.items()}
        for rank in graph.stage.ranks:
            entry = facts["ranks"][rank]
            entry["model"] = self._model_name(graph.number, rank)
            if self._outside:
                weights = graph.template.placed(rank)
                files = locations.files[rank]
                entry["bindings"] = write_bindings(self.folder, rank, weights, dtypes, files)

    def _build_all(
        self, facts: dict[str, Any], profiles: Sequence[tuple[Profile, ...]], base: str | None
    ) -> dict[str, Built]:
        """Build the engine of every model, each once, and add them to the facts; `base` is the
        folder of the checkpoint's files."""
        engines: dict[str, Built] = {}
        for entry in facts["ranks"]:
            stage = facts["stages"][entry["stage"]]
            name = entry["model"].removesuffix(".onnx")
            entry["engine"] = f"{name}.engine"
            if entry["engine"] not in engines:
                built = self._build(name, facts, profiles[entry["stage"]], base)
                engines[entry["engine"]] = built
                text = json.dumps(built.report.to_json(), indent=1) + "\n"
                (self.folder / f"{name}.report.json").write_text(text, encoding="utf-8")
                stage["report"] = stage["report"] or f"{name}.report.json"
        return engines

    def _build(
        self, name: str, facts: dict[str, Any], profiles: tuple[Profile, ...], base: str | None
    ) -> Built:
        from irc.backends.tensorrt.builder.build import build
        from irc.backends.tensorrt.plugins import files_of

        # the user's files that the building process needs: from the options, and others in use
        files = (*self.options.plugins, *files_of(facts["plugins"]))
        model, engine = (self.folder / f"{name}.{kind}" for kind in ("onnx", "engine"))
        options = replace(self.options, plugins=files)
        folder = None if base is None else Path(base)
        request = BuildRequest(model, engine, self.target, profiles, options, folder)
        return build(request, self.progress)


def _notes(findings: dict[str, list[Finding]]) -> list[str]:
    from irc.backends.tensorrt.lint.rules import notes

    return notes(findings)


def _collectives_note(graph: _Graph) -> str:
    """How many collectives a stage has, or ""."""
    count = graph.emitter.plugins
    plural = "s" if count > 1 else ""
    what = f"{count} collective{plural} by NCCL ({COLLECTIVE_PLUGIN})"
    return f"stage {graph.number}: {what}" if count else ""


def _plugin_versions(emitters: list[TensorRTEmitter]) -> dict[str, str]:
    """The versions of the plugins that the graphs use."""
    from irc.backends.tensorrt import plugins

    used = {node.kind for emitter in emitters for node in emitter.graph.nodes}
    versions = plugins.versions().items()
    return {name: version for name, version in versions if name.rpartition("::")[2] in used}
