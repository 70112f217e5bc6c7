"""What is asked of the builder, and its answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from irc.backends.tensorrt.builder.report import Report
from irc.backends.tensorrt.options import EngineOptions
from irc.backends.tensorrt.target import Target

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class Profile:
    """The shapes that one optimisation profile allows, per dynamic input: (min, opt, max)."""

    name: str
    shapes: Mapping[str, tuple[Shape, ...]]

    def to_json(self) -> dict[str, Any]:
        """{name, shapes: {input: [min, opt, max]}}."""
        shapes = {name: [*map(list, bounds)] for name, bounds in self.shapes.items()}
        return {"name": self.name, "shapes": shapes}


@dataclass(frozen=True)
class BuildRequest:
    """One engine to build; `base` is a second folder, beside the model's own, for weight files."""

    model: Path
    engine: Path
    target: Target
    profiles: tuple[Profile, ...] = ()
    options: EngineOptions = field(default_factory=EngineOptions)
    base: Path | None = None

    @property
    def plugins(self) -> list[str]:
        """The absolute paths of the user's files of plugins, each once."""
        return list(dict.fromkeys(str(Path(path).resolve()) for path in self.options.plugins))

    def settings(self) -> dict[str, Any]:
        """What determines the engine besides model, library and plugins, as JSON."""
        options = self.options
        flags = {
            "WEIGHT_STREAMING": options.weight_streaming,
            "REFIT": options.refit,
            "STRIP_PLAN": options.strip,
        }
        return {
            "target": str(self.target),
            "profiles": [profile.to_json() for profile in self.profiles],
            "workspace": options.workspace,
            "flags": [name for name, is_set in flags.items() if is_set],  # of BuilderFlag
        }


@dataclass(frozen=True)
class Built:
    """A built engine. `hash` is its `sha256:...` if the cache computed it, else ""."""

    engine: Path
    report: Report
    cached: bool
    warnings: tuple[str, ...] = ()
    hash: str = ""
