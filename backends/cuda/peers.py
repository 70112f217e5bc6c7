"""Who the ranks of a group are: told to each other once, so that a lost one can be named."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_WORDS = 6  # int64: rank, ranks, host, process, when the process began, fact


@dataclass(frozen=True)
class Peer:
    """One rank's account of itself. `host` and `fact` are hashes; `began` is in clock ticks."""

    rank: int
    ranks: int
    host: int
    process: int
    began: int
    fact: int

    @classmethod
    def own(cls, rank: int, ranks: int, fact: str) -> Peer:
        """This process."""
        process = os.getpid()
        return cls(rank, ranks, _host(), process, _began(process) or 0, _hash(fact))

    def pack(self) -> bytes:
        """What it sends; `SIZE` bytes."""
        words = (self.rank, self.ranks, self.host, self.process, self.began, self.fact)
        return np.array(words, np.int64).tobytes()

    def gone(self) -> bool:
        """Whether its process is known to have ended; of other hosts nothing is known."""
        if not self.began or self.host != _host():
            return False
        return _began(self.process) != self.began

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.process})"


SIZE = 8 * _WORDS


def unpack(data: bytes) -> list[Peer]:
    """The accounts of all ranks, in their order."""
    words = np.frombuffer(data, np.int64).reshape(-1, _WORDS)
    return [Peer(*(int(each) for each in row)) for row in words]


def disagreement(peers: Sequence[Peer], own: Peer) -> str:
    """Who has another world or another fact than this rank; empty where all agree."""
    for position, peer in enumerate(peers):
        if (peer.rank, peer.ranks) != (position, own.ranks):
            return (
                f"the ranks are not one world: number {position} of {own.ranks} here says that it "
                f"is rank {peer.rank} of {peer.ranks}"
            )
        if peer.fact != own.fact:
            return (
                f"{peer} runs something else than this rank {own.rank}; start every rank with the "
                "same artifact"
            )
    return ""


def lost(peers: Sequence[Peer]) -> list[Peer]:
    """Those whose processes have ended."""
    return [peer for peer in peers if peer.gone()]


def _began(process: int) -> int | None:
    """When a process of this host began, in clock ticks since the host did; None once it ended."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    words = text.rpartition(")")[2].split()
    return None if words[0] in "ZX" else int(words[19])


def _host() -> int:
    """A number for this host, and for the set of process numbers that is seen on it."""
    try:
        space = os.readlink("/proc/self/ns/pid")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return 0
    return _hash(f"{socket.gethostname()} {boot} {space}")


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)
