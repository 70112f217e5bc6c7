"""What a rank tells all others twice a second: that it lives, what it does, whether it failed."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from irc.backends.mpi.process import Home

WORKS = "works"  # outside of any call here
WAITS = "waits"  # for other ranks to come to the same call
MOVES = "moves"  # arrays, with ranks that came
PAUSED = "paused"  # waits for the user, for as long as that takes
ENDED = "ended"

SIZE = 8192  # bytes of an encoded sign at most
_LONGEST = 800  # characters of a text in it; a character takes six bytes at most


@dataclass(frozen=True)
class Failure:
    """Why the run cannot go on. `silent` are the ranks that cannot say it themselves."""

    text: str
    silent: tuple[int, ...] = ()


@dataclass(frozen=True)
class Sign:
    """One sign of life of one rank.

    `life` grows while the rank computes or reads (see process.py), `progress` with every call that
    it finishes. `doing` says at which call it is and `awaits` for which ranks. `said` is whether
    the user knows about the failure.
    """

    rank: int
    home: Home
    state: str = WORKS
    life: int = 0
    progress: int = 0
    doing: str = ""
    awaits: tuple[int, ...] = ()
    failure: Failure | None = None
    said: bool = False

    def encoded(self) -> bytes:
        """JSON of at most SIZE bytes."""
        facts = asdict(self)
        facts["doing"] = self.doing[:_LONGEST]
        if self.failure is not None:
            facts["failure"]["text"] = self.failure.text[:_LONGEST]
            facts["failure"]["silent"] = self.failure.silent[:100]
        facts["awaits"] = self.awaits[:100]
        return json.dumps(facts).encode()


def decoded(data: bytes) -> Sign:
    """The sign that `encoded` wrote."""
    facts: dict[str, Any] = json.loads(data)
    failed = facts["failure"]
    return Sign(
        **{
            **facts,
            "home": Home(**facts["home"]),
            "awaits": tuple(facts["awaits"]),
            "failure": failed and Failure(failed["text"], tuple(failed["silent"])),
        }
    )


@dataclass
class Seen:
    """What this process knows of a rank: its last sign, when it came, and when it last moved.

    Times are seconds of this host's clock. `ticks` is the CPU time that the kernel said last, and
    `blocked` for how long it has been silent for the sake of a disk.
    """

    sign: Sign
    heard: float
    moved: float
    ticks: int = field(default=0)
    blocked: float = field(default=0.0)

    def hear(self, sign: Sign, now: float) -> None:
        """Take in a sign."""
        self.heard, self.blocked = now, 0.0
        if _moved(self.sign, sign):
            self.sign, self.moved = sign, now
            return
        # the life and progress compared with stay those of the last move
        self.sign = Sign(**{**vars(sign), "life": self.sign.life})


_ALIVE = 20  # by how much `life` grows in a rank that does something


def _moved(before: Sign, after: Sign) -> bool:
    if (before.state, before.progress, before.awaits) != (
        after.state,
        after.progress,
        after.awaits,
    ):
        return True
    return after.state == WORKS and abs(after.life - before.life) >= _ALIVE
