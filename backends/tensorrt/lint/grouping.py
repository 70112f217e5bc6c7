"""Findings as they are told: those of one rule and sentence together, with the first places."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from irc.backends.tensorrt.lint.rules import Finding, Severity

SHOWN = 5  # places of one kind of finding, where not all are asked for


@dataclass(frozen=True)
class Group:
    """Findings that differ in their place only: `places` are lines and operations, or nodes."""

    severity: Severity
    sentence: str
    places: tuple[str, ...]

    def lines(self, all_places: bool = False) -> list[str]:
        """The places to show, and how many are left out."""
        shown = self.places if all_places else self.places[:SHOWN]
        left = len(self.places) - len(shown)
        return [*shown, *([f"and {left} more; irc lint --all prints them"] if left else [])]


def grouped(findings: Iterable[Finding]) -> list[Group]:
    """The groups, in the order in which each is found first."""
    found: dict[tuple[Severity, str], list[str]] = {}
    for each in findings:
        places = found.setdefault((each.severity, f"[{each.rule}] {each.message}"), [])
        if each.node:
            where = (each.source, each.op or each.node)
            places.append("  ".join(place for place in where if place))
    return [Group(*kind, tuple(places)) for kind, places in found.items()]


def notes(findings: Mapping[str, Sequence[Finding]]) -> list[str]:
    """Sentences about models by name; what holds of several models is said once."""
    models: dict[Group, list[str]] = {}
    for name, every in findings.items():
        for group in grouped(every):
            models.setdefault(group, []).append(name)
    return [
        "\n    ".join([f"{_joined(names)}: {group.severity} {group.sentence}", *group.lines()])
        for group, names in models.items()
    ]


def _joined(names: Sequence[str]) -> str:
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return ", ".join(names[:2]) + more
