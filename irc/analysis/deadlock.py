"""Deadlock check: all ranks communicate in one order, without waiting in a cycle."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from ..errors import Error
from ..ir.core import Module
from .events import RECEIVE, SEND, Event, Modules, ranks_of, sequences
from .identity import Identity
from .places import listed
from .replication import entries

Group = tuple[int, ...]


def check_ranks(modules: Modules, function: str | None = None) -> None:
    """An Error where the ranks of a run would deadlock, or would exchange wrong tensors.

    `modules` and `function` as in `sequences`; of one module all entry functions are checked if
    none is named. A send waits for its receive here, so that nothing depends on buffers.
    """
    if isinstance(modules, Module):
        names = [function] if function is not None else [f.name for f in entries(modules)]
        for name in names:
            check_sequences(sequences(modules, name))
        return
    found = sequences(modules, function)
    check_sequences(found)
    _check_order(found)


def check_sequences(found: Sequence[Sequence[Event]]) -> None:
    """An Error unless every rank can complete its events, see `check_ranks`."""
    for rank, events in enumerate(found):
        for event in events:
            _check_members(rank, event, len(found))
    _Run(found).run()


def _check_members(rank: int, event: Event, ranks: int) -> None:
    if rank not in ranks_of(event):
        raise Error(f"rank {rank} runs {event}, whose group lacks it", event.op)
    if max(event.group) >= ranks or len(set(event.group)) < len(event.group):
        raise Error(f"rank {rank} runs {event}, but there are {ranks} ranks, each once", event.op)


class _Run:
    """Simulates all ranks: a communication happens once every rank of its group is at it."""

    def __init__(self, found: Sequence[Sequence[Event]]) -> None:
        self.found = found
        self.at = [0] * len(found)
        self.waiting: dict[Group, list[int]] = {}  # the ranks that have arrived

    def current(self, rank: int) -> Event | None:
        """The next event of the rank, None at the end."""
        events, at = self.found[rank], self.at[rank]
        return events[at] if at < len(events) else None

    def run(self) -> None:
        """Run all ranks to the end, or raise."""
        ready = deque(range(len(self.found)))
        while ready:
            event = self.current(rank := ready.popleft())
            if event is None:
                continue
            there = self.waiting.setdefault(event.group, [])
            there.append(rank)
            if len(there) < len(event.group):
                continue
            self._check_alike(event.group)
            del self.waiting[event.group]
            for member in event.group:
                self.at[member] += 1
            ready.extend(event.group)
        if self.waiting:
            raise self._stuck()

    def _check_alike(self, group: Group) -> None:
        first = self.found[group[0]][self.at[group[0]]]
        for rank in group[1:]:
            event = self.found[rank][self.at[rank]]
            if event is first:
                continue
            if event.form != first.form or not _fit(first.kind, event.kind):
                raise _mismatch(group[0], first, rank, event)

    def _stuck(self) -> Error:
        """The Error about ranks that deadlock."""
        blockers = {
            rank: [other for other in group if other not in there]
            for group, there in self.waiting.items()
            for rank in there
        }
        for rank, others in sorted(blockers.items()):
            for other in others:
                if self.current(other) is None:
                    return self._ended(rank, other)
        return self._circle(blockers)

    def _ended(self, rank: int, other: int) -> Error:
        """The Error about a rank that waits for one that has finished."""
        event = self._now(rank)
        return Error(
            f"rank {rank} waits forever in {event}: rank {other} has no such communication left. "
            f"{self._first_difference(rank, other, event.group)}",
            event.op,
        )

    def _first_difference(self, rank: int, other: int, group: Group) -> str:
        """A sentence about the first difference between two ranks, within one group."""
        mine, theirs = ([e for e in self.found[r] if e.group == group] for r in (rank, other))
        for a, b in zip(mine, theirs, strict=False):
            if a.place != b.place:
                return f"They differ where rank {rank} runs {a.at} and rank {other} {b.at}"
        return f"Of {listed(group)}, rank {rank} has {len(mine)} and rank {other} {len(theirs)}"

    def _circle(self, blockers: Mapping[int, Sequence[int]]) -> Error:
        """The Error about a cycle of ranks that wait for each other."""
        path = [min(blockers)]
        while (rank := min(blockers[path[-1]])) not in path:
            path.append(rank)
        ranks = path[path.index(rank) :]
        clauses = [
            f"rank {rank} is in {self._now(rank)} and waits for rank {other}"
            for rank, other in zip(ranks, [*ranks[1:], ranks[0]], strict=True)
        ]
        return Error(
            f"{listed(sorted(ranks))} wait for each other forever: {'; '.join(clauses)}. "
            "Every rank of a group must run its communications in the same order",
            self._now(ranks[0]).op,
        )

    def _now(self, rank: int) -> Event:
        return self.found[rank][self.at[rank]]


def _fit(first: str, other: str) -> bool:
    return {first, other} == {SEND, RECEIVE} or (first == other and first not in (SEND, RECEIVE))


def _mismatch(rank: int, event: Event, other: int, found: Event) -> Error:
    return Error(
        f"ranks {rank} and {other} meet in different communications: rank {rank} is in {event}, "
        f"rank {other} in {found}; all ranks of a group must do the same",
        event.op,
    )


def _check_order(found: Sequence[Sequence[Event]]) -> None:
    """An Error where two ranks run the same communications in another order.

    If these have equal types nothing hangs, but each rank gets the data of the other. Operations
    with the same location and the same computation on both ranks are the same.
    """
    identity = Identity()
    by_group: dict[Group, dict[int, list[Event]]] = {}
    for rank, events in enumerate(found):
        for event in events:
            by_group.setdefault(event.group, {}).setdefault(rank, []).append(event)
    for members in by_group.values():
        (first, mine), *rest = members.items()
        for other, theirs in rest:
            _check_pair(first, mine, other, theirs, identity)


def _check_pair(
    rank: int, mine: list[Event], other: int, theirs: list[Event], identity: Identity
) -> None:
    if all(a is b for a, b in zip(mine, theirs, strict=True)):
        return
    own, others = ([identity.of(event) for event in events] for events in (mine, theirs))
    for a, b, event, found in zip(own, others, mine, theirs, strict=True):
        if a != b and a in others and b in own:
            raise Error(
                f"ranks {rank} and {other} run the same communications in another order: where "
                f"rank {rank} is in {event}, rank {other} is in {found}",
                event.op,
            )
