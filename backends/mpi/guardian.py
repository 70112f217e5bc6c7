"""The parent of a rank: a program of its own, which starts with nothing but the standard library.

`guardian.py RANK_PROCESS PIPE RANK RANKS LOCAL`: the rank writes to the pipe when it has met the
others and when it is done. MPI's own start and end block, and hold Python's lock meanwhile, so the
rank cannot watch itself then: a rank that dies or stops before it has met the others is found here.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from typing import NamedTuple

MET, DONE = b"m", b"d"
SAID = 75  # the exit status where the user has been told why
HEARD_BY_THE_RANK = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_RANK = (b"PMI_RANK=", b"OMPI_COMM_WORLD_RANK=")
_TURN = 0.25
_SETTLING = 1.0  # seconds before the first look: ranks may not have begun, launchers be busy
_RELAY = 0.5  # seconds that a launcher has to pass words on
_STOPPED = 5.0  # seconds that another rank may be stopped before it has met the others
_STARTING = 60.0  # seconds until all ranks have met
_DONE = 5.0  # seconds that MPI has to end
_WAIT = 12.0  # seconds that the other ranks have after this one died


class Guardian:
    """What the program does for one rank; `local` ranks of all `ranks` are on this host."""

    def __init__(self, process: int, pipe: int, rank: int, ranks: int, local: int) -> None:
        self.process, self.pipe, self.rank = process, pipe, rank
        self.ranks, self.local = ranks, local
        self.stopped: dict[int, float] = {}
        self.missing: set[int] = set()
        self.spent = 0

    def run(self) -> int:
        """The exit status of the rank, once it has ended."""
        self._meet()
        while not self._heard(2 * _TURN):
            pass
        self._until_it_ends(_DONE)
        self._kill()
        return 0

    def _meet(self) -> None:
        until = time.monotonic() + _STARTING
        if self._heard(_SETTLING):
            return
        while not self._heard(_TURN):
            problem = self.problem(time.monotonic())
            if not problem and time.monotonic() > until:
                problem = f"the ranks have not met within {_STARTING:g} s", -1
            if problem:
                self._give_up(*problem)

    def _heard(self, seconds: float) -> bool:
        """Whether the rank says something within so many seconds; where it ends, so does this."""
        ready = select.select([self.pipe], [], [], seconds)[0]
        if ready and os.read(self.pipe, 1):
            return True
        self._end_with_it(0 if ready else os.WNOHANG)
        return False

    def _until_it_ends(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._end_with_it(os.WNOHANG)
            time.sleep(_TURN / 10)

    def _end_with_it(self, options: int) -> None:
        """End as the rank did; after a sudden death the others have time to say which it was."""
        process, status = os.waitpid(self.process, options)
        if not process:
            return
        code = os.waitstatus_to_exitcode(status)
        if code < 0 and -code not in HEARD_BY_THE_RANK:
            time.sleep(_WAIT)
        os._exit(code if code >= 0 else 128 - code)

    def _kill(self) -> None:
        _kill_one(self.process)
        os.waitpid(self.process, 0)

    def _give_up(self, text: str, other: int) -> None:
        """End the rank; of all ranks one tells the user, and ends the one that is to blame."""
        if self.rank == (1 if other == 0 else 0):
            os.write(2, f"error: {text}\n".encode())
            time.sleep(_RELAY)
            for process in (ranks_below(os.getppid()) or {}).get(other, Living("", ())).processes:
                _kill_one(process)
        time.sleep(_RELAY)
        self._kill()
        os._exit(SAID)

    def problem(self, now: float) -> tuple[str, int] | None:
        """What is wrong with another rank of this host, and which one it is."""
        launcher = os.getppid()
        living = ranks_below(launcher)
        if living is None:
            return None
        all_begun = self.local == self.ranks and self._has_begun_all(launcher)
        missing = {rank for rank in range(self.ranks) if all_begun and rank not in living}
        # twice: a process that becomes another program shows no rank for a moment
        for rank in sorted(missing & self.missing):
            return f"rank {rank} ended before it had met the others", rank
        self.missing = missing
        for rank, one in living.items():
            if one.state not in "Tt":
                self.stopped.pop(rank, None)
            elif now - self.stopped.setdefault(rank, now) > _STOPPED:
                return f"rank {rank} stalls: its process is stopped (SIGSTOP)", rank
        return None

    def _has_begun_all(self, launcher: int) -> bool:
        """Whether a launcher has begun all that it is to: it waits, or got a core to do so on."""
        state = stat_of(str(launcher))
        spent = int(state[11]) + int(state[12]) if state else 0  # ticks of CPU time
        had_a_core, self.spent = spent > self.spent, spent
        return (had_a_core or state[:1] == ["S"]) and not is_beginning(launcher)


class Living(NamedTuple):
    """A rank's state, stopped where it or its guardian is, and the processes that are it."""

    state: str
    processes: tuple[int, ...]


def ranks_below(launcher: int) -> dict[int, Living] | None:
    """The ranks that are children of a launcher, guarded or not; None where no /proc tells."""
    if not os.path.isdir("/proc/self"):
        return None
    found: dict[int, Living] = {}
    for name in os.listdir("/proc"):
        fields = stat_of(name) if name.isdecimal() else []
        if not fields or int(fields[1]) != launcher or fields[0] in "ZX":
            continue
        rank, process = _rank_of(name)
        state = "".join(stat_of(process)[:1])
        if rank >= 0 and state not in ("", "Z", "X"):
            state = fields[0] if fields[0] in "Tt" else state
            found[rank] = Living(state, (int(name), int(process)))
    return found


def is_beginning(launcher: int) -> bool:
    """Whether a process that a launcher began is not the program yet that it is to be."""
    own = _words_of(str(launcher))
    names = filter(str.isdecimal, os.listdir("/proc"))
    return any(stat_of(n)[1:2] == [str(launcher)] and _words_of(n) == own for n in names)


def _words_of(process: str) -> bytes:
    try:
        with open(f"/proc/{process}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""


def _kill_one(process: int) -> None:
    try:
        os.kill(process, signal.SIGKILL)
    except ProcessLookupError:
        return  # it is gone already


def _rank_of(process: str) -> tuple[int, str]:
    """The rank that a process is, or the guardian of, and the process of the rank; -1 for none."""
    try:
        with open(f"/proc/{process}/cmdline", "rb") as file:
            words = file.read().decode(errors="replace").split("\0")
        with open(f"/proc/{process}/environ", "rb") as file:
            variables = file.read().split(b"\0")
    except OSError:
        return -1, process
    if any(word.endswith("guardian.py") for word in words[:4]) and len(words) > 6:
        return int(words[-4]), words[-6]
    ranks = [v.partition(b"=")[2] for v in variables if v.startswith(_RANK)]
    return (int(ranks[0]), process) if ranks else (-1, process)


def stat_of(process: str) -> list[str]:
    """The fields of a process from its state on; none where it is gone."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


if __name__ == "__main__":
    os._exit(Guardian(*map(int, sys.argv[1:])).run())
