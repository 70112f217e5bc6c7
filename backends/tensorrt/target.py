"""What an engine is built for: the library, its version, and the GPU architectures."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, cast

from irc.errors import Error, did_you_mean

Flavour: TypeAlias = Literal["tensorrt", "tensorrt-rtx"]

FLAVOURS: tuple[Flavour, ...] = ("tensorrt", "tensorrt-rtx")
# What each flavour is taken to be where the library is not installed, and the oldest that is used.
KNOWN: dict[Flavour, tuple[int, int]] = {"tensorrt": (11, 4), "tensorrt-rtx": (1, 7)}
OLDEST: dict[Flavour, tuple[int, int]] = {"tensorrt": (11, 0), "tensorrt-rtx": (1, 7)}
# Compute capabilities that TensorRT-RTX builds for, and those of an engine where none is named.
RTX_ARCHITECTURES = (75, 80, 86, 89, 120, 121)
# All that an engine can be for: the full TensorRT takes those of every GPU from Turing on.
ARCHITECTURES: dict[Flavour, tuple[int, ...]] = {
    "tensorrt": (75, 80, 86, 87, 88, 89, 90, 100, 101, 103, 107, 110, 120, 121),
    "tensorrt-rtx": RTX_ARCHITECTURES,
}
DEFAULT_ARCHITECTURES: dict[Flavour, tuple[int, ...]] = {
    "tensorrt": (),
    "tensorrt-rtx": (80, 86, 89, 120),
}
# The oldest architecture that has a dtype.
FLOORS: dict[Flavour, dict[str, int]] = {
    "tensorrt": {"bf16": 80, "f8e4m3": 89, "f4e2m1": 100},
    "tensorrt-rtx": {"bf16": 80, "i4": 80, "f8e4m3": 89, "f4e2m1": 120},
}

_TEXT = re.compile(
    r"(?P<flavour>[a-z-]+?)(-(?P<version>\d+\.\d+)(\.\d+)*)?(/(?P<architectures>.*))?"
)


@dataclass(frozen=True)
class Target:
    """A library, its version (major, minor), and compute capabilities, as in 89 for sm_89.

    No architectures: those of the GPU that is there when the engine is built. The text is
    `tensorrt-rtx-1.7/sm_80+sm_89`.
    """

    flavour: Flavour
    version: tuple[int, int]
    architectures: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Target:
        """The target of a text; version and architectures may be left out.

        Of a longer version, as libraries have it (1.7.1.116), the first two numbers count.
        """
        found = _TEXT.fullmatch(text.strip())
        name = found["flavour"] if found else text
        if found is None or name not in FLAVOURS:
            raise Error(
                f"no target {text!r}{did_you_mean(name, FLAVOURS)}; write it as "
                "tensorrt-rtx-1.7/sm_89 or tensorrt-11.4/sm_90"
            )
        flavour = cast("Flavour", name)
        version = _version(found["version"]) if found["version"] else KNOWN[flavour]
        if version < OLDEST[flavour]:
            oldest = ".".join(map(str, OLDEST[flavour]))
            raise Error(f"{text}: irc needs {flavour} {oldest} or newer")
        given = found["architectures"]
        if given is None:
            return cls(flavour, version, DEFAULT_ARCHITECTURES[flavour])
        return cls(flavour, version, _architectures(given, text, ARCHITECTURES[flavour]))

    def of_version(self, version: tuple[int, int]) -> Target:
        """The same with the version that is installed."""
        return replace(self, version=version)

    def lacks(self, dtype: str) -> tuple[int, int] | None:
        """(the oldest architecture that has a dtype, that of the target), where it is too old."""
        floor, weakest = FLOORS[self.flavour].get(dtype, 0), min(self.architectures, default=0)
        return (floor, weakest) if 0 < weakest < floor else None

    def __str__(self) -> str:
        chips = "+".join(f"sm_{each}" for each in self.architectures)
        version = ".".join(map(str, self.version))
        return f"{self.flavour}-{version}" + (f"/{chips}" if chips else "")


def _version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")
    return int(major), int(minor)


def _architectures(text: str, target: str, known: tuple[int, ...]) -> tuple[int, ...]:
    found: list[int] = []
    for each in re.split(r"[+,]", text):
        digits = each.strip().removeprefix("sm_").removeprefix("sm")
        if not digits.isdecimal():
            raise Error(f"{target}: {each!r} is no architecture; write sm_89, or sm_80+sm_89")
        if int(digits) not in known:
            shown = ", ".join(f"sm_{one}" for one in known)
            raise Error(f"{target}: no engine is for sm_{digits}; there are {shown}")
        found.append(int(digits))
    return tuple(sorted(set(found)))
