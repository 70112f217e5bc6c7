"""The health check: from the heartbeats of all ranks, why a run cannot go on, and who is to blame.

A rank that is running or runnable never times out. A rank fails where its process is gone, where it
is silent for `limit` seconds, or where it idles so long while another rank waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from irc.backends.ranks.process import DISK, ProcessState, RankProcess

RUNNING = "running"  # outside of any call
WAITING = "waiting"  # in a call, for other ranks
TRANSFERRING = "transferring"  # a large array, with ranks that are at the same call
PAUSED = "paused"  # waits for a person
ENDED = "ended"

# A large transfer, and ranks at the same call, may be slowed down by the network.
_SLOW = 12  # times the limit
# Growth of the activity counter of a rank that does something, within so many seconds: a driver's
# own threads spend less.
_ACTIVE, _WINDOW = 20, 2.0
_BUSY = 10  # ticks of CPU time above those of threads that wait for Python's lock


@dataclass(frozen=True)
class Failure:
    """Why a run cannot go on. `silent`: the ranks that cannot tell it to the user."""

    text: str
    silent: tuple[int, ...] = ()


@dataclass(frozen=True)
class Heartbeat:
    """What a rank tells all others, twice a second.

    `activity` grows while the rank computes or reads, `progress` with every call that it finishes;
    `call` is the call that it is in, and `awaits` the other ranks that take part. `last`: it sends
    no other.
    """

    rank: int
    process: RankProcess
    state: str = RUNNING
    activity: int = 0
    progress: int = 0
    call: str = ""
    awaits: tuple[int, ...] = ()
    failure: Failure | None = None
    last: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.process})"

    @property
    def waits_for(self) -> tuple[int, ...]:
        """The ranks without which its call cannot end; none outside of calls."""
        return self.awaits if self.state in (WAITING, TRANSFERRING) else ()


@dataclass
class Peer:
    """What is known about a rank: its last heartbeat, when it came, when the rank last moved.

    Times are seconds of this host's clock; `ticks` is the CPU time that the kernel last reported,
    and `counted` the time of the heartbeat whose activity the next ones are compared with.
    """

    beat: Heartbeat
    heard: float
    moved: float
    ticks: int = 0
    counted: float = 0.0

    def hear(self, beat: Heartbeat, now: float) -> None:
        """Take in a heartbeat."""
        before, self.heard = self.beat, now
        grown = beat.state == RUNNING and abs(beat.activity - before.activity) >= _ACTIVE
        if grown or (beat.state, beat.progress) != (before.state, before.progress):
            self.beat, self.moved, self.counted = beat, now, now
        elif now - self.counted > _WINDOW:
            self.beat, self.counted = beat, now
        else:  # small steps of the activity add up
            self.beat = replace(beat, activity=before.activity)


def find_failure(
    own: int,
    peers: Mapping[int, Peer],
    states: Mapping[int, ProcessState | None],
    limit: float,
    now: float,
) -> Failure | None:
    """Why the run cannot go on, as rank `own` sees it; None where nothing is wrong.

    `peers` has all ranks; `states` what the kernel of this host reports about those on it.
    """
    for rank, peer in peers.items():
        if rank != own and (failure := _lost(peer, states.get(rank), limit, now)):
            return failure
    return _deadlock(own, peers, limit, now)


def _lost(peer: Peer, state: ProcessState | None, limit: float, now: float) -> Failure | None:
    """A rank whose process is gone, or that is silent."""
    who, rank, silent = str(peer.beat), peer.beat.rank, now - peer.heard
    if state is not None and not state.exists:
        return Failure(f"{who} died: its process is gone", (rank,))
    slow = _SLOW if state is None and peer.beat.state == TRANSFERRING else 1
    if silent <= limit * slow:
        if state is not None and silent <= limit / 2:
            peer.ticks = state.ticks
        return None
    since = f"it has given no sign of life for {int(silent)} s"
    if state is None:
        why = "its process or its host has stopped, or the network between the hosts"
        return Failure(f"{who} stalls: {since}; {why}", (rank,))
    if state.stopped:
        return Failure(f"{who} stalls: {since}, as its process is stopped (SIGSTOP)", (rank,))
    if state.runnable or state.ticks - peer.ticks > _BUSY:  # its heartbeat thread gets no turn
        peer.ticks, peer.heard, peer.moved = state.ticks, now, now
        return None
    if not state.on_disk:
        return Failure(f"{who} stalls: {since}, and it uses no CPU", (rank,))
    if silent <= DISK:
        peer.moved = now
        return None
    return Failure(f"{who} stalls: {since}, as it waits for a disk or a driver", (rank,))


def _deadlock(own: int, peers: Mapping[int, Peer], limit: float, now: float) -> Failure | None:
    """What this rank waits for, directly or not, and will not get."""
    others, here = awaited(own, lambda rank: peers[rank].beat.waits_for), peers[own].beat
    idle = min(now - peers[rank].moved for rank in (own, *others))
    for peer in (peers[rank] for rank in others):
        if peer.beat.state == RUNNING and now - peer.moved > limit:
            return Failure(
                f"{peer.beat} is stuck: for {limit:g} s it has neither computed nor read anything, "
                f"while rank {own} waits for it at {here.call}",
                (peer.beat.rank,),
            )
        if peer.beat.state == ENDED:
            return Failure(f"rank {own} is at {here.call}, but rank {peer.beat.rank} has finished")
    states = {peers[rank].beat.state for rank in (own, *others)}
    if not others or idle <= limit or not states <= {WAITING, TRANSFERRING}:
        return None
    elsewhere = [peers[rank].beat for rank in others if peers[rank].beat.call != here.call]
    if elsewhere and TRANSFERRING not in states:
        return Failure(disagreement(own, here.call, elsewhere[0].rank, elsewhere[0].call))
    if idle <= limit * _SLOW:
        return None
    who = " and ".join(str(peers[rank].beat) for rank in others)
    return Failure(
        f"nothing has arrived at rank {own} for {int(idle)} s, which is at {here.call} and waits "
        f"for {who}: the network between them loses data"
    )


def disagreement(a: int, at_a: str, b: int, at_b: str) -> str:
    """The message about two ranks that make different calls."""
    return (
        f"the ranks make different calls: rank {a} is at {at_a}, rank {b} at {at_b}; "
        "all need the same artifact and the same inputs"
    )


def awaited(rank: int, waits_for: Callable[[int], Iterable[int]]) -> list[int]:
    """The other ranks that a rank waits for, directly or not, nearest first."""
    found: list[int] = []
    queue = [rank]
    while queue:
        new = [each for each in waits_for(queue.pop(0)) if each != rank and each not in found]
        found += new
        queue += new
    return found
