"""Judges from the signs of all ranks whether the run can go on, and names who stops it."""

from __future__ import annotations

from collections.abc import Mapping

from irc.backends.mpi.process import DISK, Glance
from irc.backends.mpi.sign import ENDED, MOVES, PAUSED, WAITS, WORKS, Failure, Seen

# A transfer in which nothing arrives may be a slow network: it gets more time.
_PATIENCE = 12


def verdict(
    own: int,
    seen: Mapping[int, Seen],
    glances: Mapping[int, Glance | None],
    limit: float,
    now: float,
) -> Failure | None:
    """Why the run cannot go on, or None.

    `seen` has all ranks, this one too; `glances` what this host's kernel says about those on it.
    `limit`: how many seconds a rank may give no sign, or wait in vain.
    """
    for rank, one in seen.items():
        if rank != own and (failure := _lost(rank, one, glances.get(rank), limit, now)):
            return failure
    if seen[own].sign.state not in (WAITS, MOVES):
        return None
    return _vain(own, seen, limit, now)


def _lost(rank: int, one: Seen, glance: Glance | None, limit: float, now: float) -> Failure | None:
    """A rank that is gone, or gives no sign."""
    who = f"rank {rank} ({one.sign.home})"
    if glance is not None and not glance.there:
        return Failure(f"{who} died: its process is gone", (rank,))
    silent = now - one.heard
    if silent <= limit:
        return None
    since = f"it has given no sign of life for {round(one.blocked) + limit:g} s"
    if glance is None:
        why = "its process or its host has stopped, or the network between the hosts"
        return Failure(f"{who} stalls: {since}; {why}", (rank,))
    if glance.stopped:
        return Failure(f"{who} stalls: {since}, as its process is stopped (SIGSTOP)", (rank,))
    if glance.ready or glance.ticks != one.ticks:
        # it computes, or would, without letting its other threads speak
        one.ticks, one.heard, one.moved, one.blocked = glance.ticks, now, now, 0.0
        return None
    if not glance.on_disk:
        return Failure(f"{who} stalls: {since}, and it uses no CPU", (rank,))
    if one.blocked + silent <= DISK:
        one.heard, one.moved, one.blocked = now, now, one.blocked + silent
        return None
    return Failure(f"{who} stalls: {since}, as it waits for a disk or a driver", (rank,))


def _vain(own: int, seen: Mapping[int, Seen], limit: float, now: float) -> Failure | None:
    """What this rank waits for, directly or not, and will not get."""
    behind = _behind(own, seen)
    idle = {rank for rank in (own, *behind) if now - seen[rank].moved > limit}
    for rank in behind:
        one = seen[rank]
        if one.sign.state == WORKS and rank in idle:
            return Failure(
                f"rank {rank} ({one.sign.home}) is stuck: for {limit:g} s it has neither computed "
                f"nor read anything, while rank {own} waits for it at {seen[own].sign.doing}",
                (rank,),
            )
        if one.sign.state == ENDED:
            return Failure(f"rank {own} is at {seen[own].sign.doing}, but rank {rank} has finished")
    if any(seen[rank].sign.state == PAUSED for rank in behind):
        return None
    if any(seen[rank].sign.state == MOVES for rank in (own, *behind)):
        slow = now - seen[own].moved > _PATIENCE * limit
        return _unmoved(own, behind, seen, _PATIENCE * limit) if slow else None
    if idle != {own, *behind}:
        return None
    other = behind[0]
    return Failure(disagreement(own, seen[own].sign.doing, other, seen[other].sign.doing))


def disagreement(a: int, at_a: str, b: int, at_b: str) -> str:
    """The sentence about two ranks at different calls."""
    return (
        f"the ranks do not do the same: rank {a} is at {at_a}, rank {b} at {at_b}; "
        "all need the same artifact and the same inputs"
    )


def _unmoved(own: int, behind: list[int], seen: Mapping[int, Seen], limit: float) -> Failure:
    others = " and ".join(f"rank {rank} ({seen[rank].sign.home})" for rank in behind)
    return Failure(
        f"nothing has arrived at rank {own} for {limit:g} s, which is at {seen[own].sign.doing} "
        f"and waits for {others}: the network between them loses data"
    )


def _behind(own: int, seen: Mapping[int, Seen]) -> list[int]:
    """The ranks that this one waits for, directly or not, nearest first."""
    found: list[int] = []
    waiting = [own]
    while waiting:
        sign = seen[waiting.pop(0)].sign
        if sign.state not in (WAITS, MOVES):
            continue
        for rank in sign.awaits:
            if rank != own and rank not in found:
                found.append(rank)
                waiting.append(rank)
    return found
