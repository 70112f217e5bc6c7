"""What is asked of the builder, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from irc.backends.tensorrt.builder.report import Report
from irc.backends.tensorrt.target import Target
from irc.errors import Error

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class Profile:
    """The shapes that one optimisation profile allows, per dynamic input: (min, opt, max)."""

    name: str
    shapes: Mapping[str, tuple[Shape, Shape, Shape]]


@dataclass(frozen=True)
class BuildRequest:
    """One engine to build.

    `base` is a folder besides the model's own in which its external weights may lie. `workspace`
    limits the memory that one kernel may use, in bytes. `plugins` are files that register
    plugins. `cache` is the folder of engines built before: the user's own unless given, and then it
    must be writable; `caching=False` builds anew.
    """

    model: Path
    engine: Path
    target: Target
    profiles: tuple[Profile, ...] = ()
    workspace: int | None = None
    plugins: tuple[str, ...] = ()
    weight_streaming: bool = False
    refit: bool = False
    strip: bool = False
    base: Path | None = None
    cache: Path | None = None
    caching: bool = True

    @property
    def flags(self) -> tuple[str, ...]:
        """The builder's flags, as members of BuilderFlag."""
        flags = {
            "WEIGHT_STREAMING": self.weight_streaming,
            "REFIT": self.refit,
            "STRIP_PLAN": self.strip,
        }
        return tuple(name for name, wanted in flags.items() if wanted)

    @property
    def folders(self) -> tuple[Path, ...]:
        """Where external weights are looked for, in order."""
        own = self.model.resolve().parent
        return (own, self.base.resolve()) if self.base is not None else (own,)

    def options(self) -> dict[str, Any]:
        """All that decides how the engine is built, beside the model and the library."""
        return {
            "target": str(self.target),
            "profiles": [
                {"name": each.name, "shapes": {k: list(v) for k, v in each.shapes.items()}}
                for each in self.profiles
            ],
            "workspace": self.workspace,
            "flags": list(self.flags),
        }

    def check(self) -> None:
        """Raise about what no library could build."""
        if self.workspace is not None and self.workspace <= 0:
            raise Error(f"a workspace of {self.workspace} bytes is none; give a positive number")
        names = [each.name for each in self.profiles]
        if len({*names}) < len(names):
            raise Error(f"two profiles have one name: {', '.join(names)}")
        for profile in self.profiles:
            _check_profile(profile)


def _check_profile(profile: Profile) -> None:
    for name, (low, usual, high) in profile.shapes.items():
        ordered = len(low) == len(usual) == len(high) and all(
            0 <= a <= b <= c for a, b, c in zip(low, usual, high, strict=True)
        )
        if not ordered:
            raise Error(
                f"profile {profile.name!r}: the shapes of {name} must not shrink, and go from "
                f"{list(low)} over {list(usual)} to {list(high)}"
            )


@dataclass(frozen=True)
class Built:
    """An engine that lies where it was wanted. `seconds` is what it took this time.

    `peak_bytes` is the largest resident memory of the process that built it, 0 if none had to.
    `warnings` are sentences for the user. `hash` is `sha256:...` over the engine where the cache
    has read it, else empty.
    """

    engine: Path
    report: Report
    cached: bool
    seconds: float = 0.0
    peak_bytes: int = 0
    warnings: tuple[str, ...] = ()
    hash: str = ""
