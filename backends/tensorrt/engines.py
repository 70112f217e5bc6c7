"""Builds the engines of an artifact's models, each once, after the linter has read them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from irc.backends.tensorrt.builder.request import BuildRequest, Profile
from irc.backends.tensorrt.options import EngineOptions
from irc.backends.tensorrt.target import Target
from irc.errors import Error

Tell: TypeAlias = Callable[[str, float], None]


class Engines:
    """The engines that the facts of an emission ask for."""

    def __init__(
        self,
        folder: Path,
        facts: dict[str, Any],
        profiles: Sequence[tuple[Profile, ...]],
        target: Target,
        options: EngineOptions,
        progress: Callable[[float], None] | None,
    ) -> None:
        self.folder, self.facts, self.profiles = folder, facts, profiles
        self.target, self.options, self.progress = target, options, progress

    def make(self, base: str | None) -> None:
        """Lint every model and build its engine; `base` is where checkpoint files are."""
        models = {entry["model"]: entry["stage"] for entry in self.facts["ranks"]}
        for model in models:
            self._lint(self.folder / model)
        if not self.options.build:
            return
        for done, (model, stage) in enumerate(models.items()):
            self._build(model, stage, base, done, len(models))

    def _lint(self, model: Path) -> None:
        import onnx

        from irc.backends.tensorrt.lint import lint

        found = lint(onnx.load(str(model), load_external_data=False), self.target)
        wrong = [each for each in found if each.severity == "error"]
        if not wrong:
            return
        error = Error(f"{self.target} would not compute {model.name} as it is meant")
        for each in wrong:
            error.add_note(str(each))
        raise error

    def _build(self, model: str, stage: int, base: str | None, done: int, count: int) -> None:
        from irc.backends.tensorrt.builder.build import build

        name = model.removesuffix(".onnx")
        request = BuildRequest(
            model=self.folder / model,
            engine=self.folder / f"{name}.engine",
            target=self.target,
            profiles=tuple(self.profiles[stage]),
            workspace=self.options.workspace,
            plugins=self.options.plugins,
            weight_streaming=self.options.weight_streaming,
            refit=self.options.refit,
            strip=self.options.strip,
            base=None if base is None else Path(base),
            cache=self.options.cache,
            caching=self.options.caching,
        )
        built = build(request, self._tell(done, count))
        text = json.dumps(built.report.to_json(), indent=1) + "\n"
        (self.folder / f"{name}.report.json").write_text(text, encoding="utf-8")
        entry = self.facts["stages"][stage]
        entry["report"] = entry["report"] or f"{name}.report.json"
        notes: list[str] = self.facts.setdefault("notes", [])
        notes += [f"{name}.engine: {warning}" for warning in built.warnings]
        if built.cached:
            notes.append(f"{name}.engine: built before, nothing to do")
        for entry in self.facts["ranks"]:
            if entry["model"] == model:
                entry["engine"] = f"{name}.engine"

    def _tell(self, done: int, count: int) -> Tell:
        progress = self.progress

        def tell(stage: str, fraction: float) -> None:
            if progress is not None:
                progress((done + fraction) / count)

        return tell
