"""`Certificate`: what of one module is equal to another, how it is known, and what is not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

Status: TypeAlias = Literal["proved", "supported", "neither"]
ORDER: tuple[Status, ...] = ("proved", "supported", "neither")


@dataclass
class Evidence:
    """A value that random inputs support, and the operations that were evaluated for it.

    `count` equal regions, as those of equal layers, were evaluated once. `tolerance` is relative to
    the largest usual number of the value, `dtype` the one computed in. `note` says where sizes
    were drawn that are below integers of the operations.
    """

    value: str
    scope: str
    operations: int
    draws: list[str]
    dtype: str
    tolerance: float
    note: str = ""
    count: int = 0


@dataclass
class Certificate:
    """The values of a module B beside those of a module A.

    Operations of B are `proved` (by sharding rules, declared expansions and identities),
    `supported` (by numbers) or `neither`; those that no result needs are not counted. `results` has
    the status of every result, `reasons` say why B is not certified, `notes` what is certified but
    different, as layouts of results and rounding, and `difference` is the first
    value that differs from that of its name: its name, line and numbers.
    """

    results: dict[str, Status] = field(default_factory=dict[str, Status])
    counts: dict[Status, int] = field(default_factory=lambda: dict.fromkeys(ORDER, 0))
    identities: dict[str, int] = field(default_factory=dict[str, int])
    evidence: list[Evidence] = field(default_factory=list[Evidence])
    reasons: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])
    difference: str = ""

    @property
    def certified(self) -> bool:
        """Whether every result is proved or supported, and callers see no difference."""
        is_known = bool(self.results) and "neither" not in self.results.values()
        return is_known and not self.reasons

    def facts(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {"certified": self.certified, **asdict(self)}

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {status}" for status, count in self.counts.items())
        return f"{'certified' if self.certified else 'not certified'}: {counts} operations"


def worst(statuses: Iterable[Status]) -> Status:
    """The least certain of some statuses; "proved" of none."""
    places = [ORDER.index(status) for status in statuses]
    return ORDER[max(places, default=0)]
