"""The target of an engine: the library, its version, and the GPU architectures."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, cast

from irc.argument_checks import whole_number_in
from irc.errors import Error, did_you_mean

Flavour: TypeAlias = Literal["tensorrt", "tensorrt-rtx"]

FLAVOURS: tuple[Flavour, ...] = ("tensorrt", "tensorrt-rtx")
# The version assumed if the library is not installed, and the oldest that is supported.
KNOWN: dict[Flavour, tuple[int, int]] = {"tensorrt": (11, 4), "tensorrt-rtx": (1, 7)}
OLDEST: dict[Flavour, tuple[int, int]] = {"tensorrt": (11, 0), "tensorrt-rtx": (1, 7)}
# Compute capabilities that engines can be built for, and those of an engine by default.
ARCHITECTURES: dict[Flavour, tuple[int, ...]] = {
    "tensorrt": (75, 80, 86, 87, 88, 89, 90, 100, 101, 103, 107, 110, 120, 121),
    "tensorrt-rtx": (75, 80, 86, 89, 120, 121),
}
DEFAULT_ARCHITECTURES: dict[Flavour, tuple[int, ...]] = {
    "tensorrt": (),
    "tensorrt-rtx": (80, 86, 89, 120),
}
BUILDER = "layer dump of the TensorRT-RTX 1.7.1.116 builder on CPU"
# The oldest architecture with a dtype.
FLOORS: dict[Flavour, dict[str, int]] = {
    "tensorrt": {"bf16": 80, "f8e4m3": 89, "f4e2m1": 100, "f8e8m0": 100},
    "tensorrt-rtx": {"bf16": 80, "i4": 80, "f8e4m3": 89, "f4e2m1": 120, "f8e8m0": 120},
}

_TEXT = re.compile(
    r"(?P<flavour>[a-z-]+?)(-(?P<version>\d+\.\d+)(\.\d+)*)?(/(?P<architectures>.*))?"
)


@dataclass(frozen=True)
class Target:
    """A library, its version (major, minor), and compute capabilities, as in 89 for sm_89.

    No architectures: that of the GPU of the machine that builds the engine. As text it is
    `tensorrt-rtx-1.7/sm_80+sm_89`.
    """

    flavour: Flavour
    version: tuple[int, int]
    architectures: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Target:
        """The target of a text. Version and architectures are optional; of a full version
        (1.7.1.116) the first two numbers count."""
        found = _TEXT.fullmatch(text.strip())
        name = found["flavour"] if found else text
        if found is None or name not in FLAVOURS:
            raise Error(
                f"no target {text!r}{did_you_mean(name, FLAVOURS)}; write it as "
                "tensorrt-rtx-1.7/sm_89 or tensorrt-11.4/sm_90"
            )
        flavour = cast("Flavour", name)
        version = release_of(found["version"]) if found["version"] else KNOWN[flavour]
        if version < OLDEST[flavour]:
            oldest = ".".join(map(str, OLDEST[flavour]))
            raise Error(f"{text}: irc needs {flavour} {oldest} or newer")
        given = found["architectures"]
        if given is None:
            return cls(flavour, version, DEFAULT_ARCHITECTURES[flavour])
        return cls(flavour, version, _architectures(given, text, ARCHITECTURES[flavour]))

    @property
    def note(self) -> str:
        """A sentence where the version is newer than all that irc knows, else empty."""
        known = KNOWN[self.flavour]
        if self.version <= known:
            return ""
        newest = f"{self.flavour}-{known[0]}.{known[1]}"
        return f"irc knows no version after {newest}; what holds there is assumed for {self}"

    def lacks(self, dtype: str) -> tuple[int, Target] | None:
        """(the oldest architecture with a dtype, the target without older ones) if it has some."""
        floor = FLOORS[self.flavour].get(dtype, 0)
        kept = tuple(chip for chip in self.architectures if chip >= floor)
        if kept == self.architectures:
            return None
        return floor, replace(self, architectures=kept or (floor,))

    def __str__(self) -> str:
        chips = "+".join(f"sm_{each}" for each in self.architectures)
        version = ".".join(map(str, self.version))
        return f"{self.flavour}-{version}" + (f"/{chips}" if chips else "")


@dataclass(frozen=True, kw_only=True)
class Scope:
    """The targets that a fact is about.

    `since` and `before` bound the version, the latter excluded. If there are `architectures`, the
    target must have one of them.
    """

    flavour: Flavour | None = None
    since: tuple[int, int] = (0, 0)
    before: tuple[int, int] = (1 << 30, 0)
    architectures: tuple[int, ...] = ()

    def includes(self, target: Target) -> bool:
        """Whether the fact is about a target."""
        is_flavour = self.flavour in (None, target.flavour)
        any_chip = not self.architectures or {*self.architectures} & {*target.architectures}
        return is_flavour and self.since <= target.version < self.before and bool(any_chip)


def release_of(version: str) -> tuple[int, int]:
    """(major, minor) of a version, `1.7.1.116`."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _architectures(text: str, target: str, known: tuple[int, ...]) -> tuple[int, ...]:
    found: list[int] = []
    for each in re.split(r"[+,]", text):
        digits = each.strip().removeprefix("sm_").removeprefix("sm")
        if (number := whole_number_in(digits)) is None:
            raise Error(f"{target}: {each!r} is not an architecture; write sm_89, or sm_80+sm_89")
        if number not in known:
            shown = ", ".join(f"sm_{one}" for one in known)
            raise Error(f"{target}: no engine is for sm_{digits}; there are {shown}")
        found.append(number)
    return tuple(sorted(set(found)))
