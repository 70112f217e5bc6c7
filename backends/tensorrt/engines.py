"""Builds the engines of an artifact's models, each once, after the linter has read them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnx.onnx_ml_pb2 import ModelProto

from irc.artifact import Progress
from irc.backends.tensorrt.builder.request import BuildRequest, Profile
from irc.backends.tensorrt.options import EngineOptions
from irc.backends.tensorrt.target import Target
from irc.errors import Error

if TYPE_CHECKING:
    from irc.backends.tensorrt.builder.report import Report
    from irc.backends.tensorrt.lint import Finding


def warnings_of(models: Iterable[tuple[str, ModelProto]], target: Target) -> list[str]:
    """The linter's warnings about models by name, as notes; its errors are one Error."""
    from irc.backends.tensorrt.lint.grouping import notes

    return notes({name: _checked(model, name, target) for name, model in models})


def _checked(model: ModelProto, name: str, target: Target) -> list[Finding]:
    from irc.backends.tensorrt.lint import lint

    found = lint(model, target)
    wrong = [each for each in found if each.severity == "error"]
    if not wrong:
        return found
    error = Error(f"{target} would not compute {name} as it is meant")
    for each in wrong:
        error.add_note(str(each))
    raise error


def _read(path: Path) -> ModelProto:
    """A model that was just written, without its weights."""
    import onnx

    return onnx.load(str(path), load_external_data=False)


class Engines:
    """The engines that the facts of an emission ask for."""

    def __init__(
        self,
        folder: Path,
        facts: dict[str, Any],
        profiles: Sequence[tuple[Profile, ...]],
        target: Target,
        options: EngineOptions,
        progress: Progress,
    ) -> None:
        self.folder, self.facts, self.profiles = folder, facts, profiles
        self.target, self.options, self.progress = target, options, progress

    def make(self, base: str | None) -> None:
        """Lint every model and build its engine; `base` is where checkpoint files are."""
        models = {entry["model"]: entry["stage"] for entry in self.facts["ranks"]}
        self.progress("checking the graphs", 0.0)
        self._note(warnings_of(((m, _read(self.folder / m)) for m in models), self.target))
        if not self.options.build:
            return
        for model, stage in models.items():
            self._build(model, stage, base)
        probe = self.facts["probe"]
        if probe is not None:
            self._built(probe["model"], (), base)
            probe["engine"] = probe["model"].replace(".onnx", ".engine")

    def _plugins(self) -> tuple[str, ...]:
        """The user's files that the building process needs: those given, and others in use."""
        from irc.backends.tensorrt.plugins import files_of

        given = [str(Path(each).resolve()) for each in self.options.plugins]
        return tuple(dict.fromkeys([*given, *files_of(self.facts["plugins"])]))

    def _build(self, model: str, stage: int, base: str | None) -> None:
        """The engine of a model, for all ranks that run it."""
        name = model.removesuffix(".onnx")
        report = self._built(model, tuple(self.profiles[stage]), base)
        text = json.dumps(report.to_json(), indent=1) + "\n"
        (self.folder / f"{name}.report.json").write_text(text, encoding="utf-8")
        entry = self.facts["stages"][stage]
        entry["report"] = entry["report"] or f"{name}.report.json"
        for entry in self.facts["ranks"]:
            if entry["model"] == model:
                entry["engine"] = f"{name}.engine"

    def _built(self, model: str, profiles: tuple[Profile, ...], base: str | None) -> Report:
        """Build one engine, beside its model; what its layers are."""
        from irc.backends.tensorrt.builder.build import build

        name = model.removesuffix(".onnx")
        request = BuildRequest(
            model=self.folder / model,
            engine=self.folder / f"{name}.engine",
            target=self.target,
            profiles=profiles,
            workspace=self.options.workspace,
            plugins=self._plugins(),
            weight_streaming=self.options.weight_streaming,
            refit=self.options.refit,
            strip=self.options.strip,
            base=None if base is None else Path(base),
            cache=self.options.cache,
            caching=self.options.caching,
        )
        built = build(request, self.progress)
        self._note(f"{name}.engine: {warning}" for warning in built.warnings)
        if built.hash:
            self.facts.setdefault("hashes", {})[f"{name}.engine"] = built.hash
        if built.cached:
            self._note([f"{name}.engine: built before, nothing to do"])
        return built.report

    def _note(self, sentences: Iterable[str]) -> None:
        """Keep sentences for the user."""
        self.facts.setdefault("notes", []).extend(sentences)
