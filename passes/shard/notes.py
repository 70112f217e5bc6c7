"""Notes about the layers of a model, with equal notes of many layers merged."""

from __future__ import annotations

import re

_NAME = re.compile(r"(?<![^\s(])(?:[@%]\w+(?:\.\w+)*|[A-Za-z_]\w*(?:\.\w+)+)")
_PART = re.compile(r"(?<=\.)\d+(?=\.|$)")  # as in layers.3.mlp
_END = re.compile(r"(?<=[A-Za-z_])\d+$")  # as in %k3


def grouped(notes: list[str]) -> list[str]:
    """The notes in order; those that differ in the numbers within names only are one, counted."""
    groups: dict[str, list[str]] = {}
    for note in notes:
        groups.setdefault(_NAME.sub(lambda match: general(match[0]), note), []).append(note)
    return [_told(pattern, same) for pattern, same in groups.items()]


def general(name: str) -> str:
    """A name with * for the numbers in it."""
    name = _PART.sub("*", name)
    return _END.sub("*", name) if name[0] in "@%" else name


def _told(pattern: str, same: list[str]) -> str:
    return same[0] if len(set(same)) == 1 else f"{pattern} ({len(same)} times)"
