"""`Stats`: counts and notes of a pass; tries, hits and seconds of its rewrite rules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass
class RuleStats:
    """How often a rule was tried and applied, its time in seconds, and its source line."""

    name: str
    where: str
    tries: int = 0
    hits: int = 0
    seconds: float = 0.0


class Stats:
    """Counts of one run of a pass. A rule counts under its name, once per rewrite.

    `notes` are sentences about decisions and their reasons, which `--explain` prints; `summary` is
    a sentence that `irc compile` always prints, or empty.
    """

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.rules: dict[str, RuleStats] = {}
        self.notes: list[str] = []
        self.summary = ""

    def explain(self, note: str) -> None:
        """Add a sentence about a decision and its reason."""
        self.notes.append(note)

    def count(self, what: str, n: int = 1) -> None:
        """Add `n` to a count, which starts at zero."""
        self.counts[what] = self.counts.get(what, 0) + n

    def rule(self, name: str, where: str) -> RuleStats:
        """The record of a rule, created at first use."""
        return self.rules.setdefault(name, RuleStats(name, where))

    def update(self, other: Stats) -> None:
        """Add the counts and rule records of `other`."""
        self.notes += other.notes
        self.summary = other.summary or self.summary
        for what, n in other.counts.items():
            self.count(what, n)
        for name, more in other.rules.items():
            record = self.rule(name, more.where)
            record.tries += more.tries
            record.hits += more.hits
            record.seconds += more.seconds

    def __getitem__(self, what: str) -> int:
        """A count (zero by default), or the hits of a rule."""
        if what in self.rules:
            return self.rules[what].hits
        return self.counts.get(what, 0)

    def __iter__(self) -> Iterator[str]:
        yield from self.counts
        yield from self.rules

    @property
    def total(self) -> int:
        """The sum of all counts and hits; zero if the pass changed nothing."""
        return sum(self.counts.values()) + sum(r.hits for r in self.rules.values())

    def __str__(self) -> str:
        return ", ".join(f"{what}: {self[what]}" for what in self if self[what]) or "nothing"
