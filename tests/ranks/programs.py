"""The programs of these tests: `python -m tests.ranks.programs NAME FOLDER` on every rank.

Each rank writes rank{r}.json in the folder: how it ended, and the seconds since the failure began.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from irc.backends.ranks.communicator import CollectiveCall, Communicator
from irc.backends.ranks.launch import find_launched_rank, supervise
from irc.backends.ranks.mpi import MpiCommunicator
from irc.backends.ranks.watcher import LIMIT
from irc.errors import Error
from tests.ranks.collectives import check_all

Program = Callable[[Any], None]  # of a communicator
LIMITS = {"works": 2.5}  # seconds, so that less time passes
# failures that are found at once, not by the silence of a rank
LIMITS |= dict.fromkeys(("differs", "other_call", "skips", "raises"), 1e6)
LARGE = 24 << 20  # bytes; several messages


def reduced(communicator: Communicator, size: int = 4, place: str = "a model") -> None:
    """One all_reduce over all ranks."""
    operand = np.full(size, 1.0, np.float32)
    result = np.empty_like(operand)
    group = tuple(range(communicator.ranks))
    communicator.collective(CollectiveCall("all_reduce", "sum", group, 0, place), operand, result)
    assert result[0] == result[-1] == communicator.ranks


def began() -> None:
    """Write the time at which the failure begins."""
    mark = Path(sys.argv[2], f"began{os.getpid()}")
    mark.write_text(str(time.monotonic()))
    mark.rename(mark.with_name("began"))


def collectives(communicator: Communicator) -> None:
    """Every collective, and what goes from rank to rank."""
    wrong = check_all(communicator, int(os.environ["IRC_TEST_SEED"]))
    assert not wrong, "\n".join(wrong)
    mail(communicator)


two = collectives


def mail(communicator: Communicator) -> None:
    """Bytes are broadcast; values of all kinds go around a ring, several sets at the same time."""
    here, ranks = communicator.rank, communicator.ranks
    maps = Path("/proc/self/maps").read_text().splitlines() if Path("/proc/self").exists() else []
    assert not [m for m in maps if "mpich_shm_" in m and not m.endswith("(deleted)")], maps
    for root in range(ranks):
        assert communicator.broadcast(b"\0id\0" * (here == root), root) == b"\0id\0"
    pair = (ranks - 1, 0)
    if here in pair:
        assert communicator.broadcast(b"x" * here, pair[0], pair) == b"x" * pair[0]
    rng = np.random.default_rng(here)
    to, source = (here + 1) % ranks, (here - 1) % ranks
    sent = {"x": rng.random((3, 5), np.float32), "ids": np.arange(7)[::2], "no": np.zeros((0, 4))}
    sent |= {"large": np.full(LARGE // 4, here, np.int32), "one": np.array(3, np.uint8)}
    for _ in range(3):
        communicator.send(to, sent)
    sent["x"][:] = 0  # the sender may overwrite it at once
    for _ in range(3):
        arrays = communicator.receive(source)
        assert [*arrays] == [*sent]
        before = np.random.default_rng(source)
        np.testing.assert_array_equal(arrays["x"], before.random((3, 5), np.float32))
        np.testing.assert_array_equal(arrays["ids"], [0, 2, 4, 6])
        assert (arrays["no"].shape, arrays["one"].shape) == ((0, 4), ())
        assert (arrays["large"] == source).all() and arrays["large"].nbytes == LARGE


def alone(communicator: Communicator) -> None:
    """A run of one rank."""
    reduced(communicator)
    communicator.agree("the step", "7")


def works(communicator: Communicator) -> None:
    """A rank that computes, with or without Python's lock, never times out."""
    if communicator.rank == 1:
        until = time.monotonic() + 2
        while time.monotonic() < until:
            pass
        matrix = np.ones((400, 400))
        while time.monotonic() < until + 2:
            matrix = np.tanh(matrix @ matrix)
    reduced(communicator)
    if communicator.rank == 0:
        with communicator.paused():
            time.sleep(3.5)  # a person thinks
    reduced(communicator)


def raises_surprise() -> None:
    raise KeyError("surprise")


# name -> (the rank that fails in the middle of a run, what it does)
FAULTS: dict[str, tuple[int, Callable[[], Any]]] = {
    "dies": (1, lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "first_dies": (0, lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "stops": (1, lambda: os.kill(os.getpid(), signal.SIGSTOP)),
    "is_stuck": (1, lambda: time.sleep(100)),
    # in C code that keeps Python's lock, so that no other thread of the rank runs
    "is_stuck_in_c": (1, lambda: ctypes.PyDLL(None).sleep(100)),
    "raises": (1, raises_surprise),
    "raises_while_others_compute": (1, raises_surprise),
}


def fails(name: str) -> Program:
    """One rank fails, while the others wait for it or compute."""
    failing, fault = FAULTS[name]

    def program(communicator: Communicator) -> None:
        reduced(communicator)
        if communicator.rank == failing:
            began()
            fault()
        while True:
            if name != "raises_while_others_compute":
                time.sleep(0.01)
                reduced(communicator, LARGE // 4)

    return program


def named(name: str) -> Program:
    """The program with a name."""
    return fails(name) if name in FAULTS else globals().get(name, alone)


def differs(communicator: Communicator) -> None:
    began()
    communicator.agree("the step", "step 7")
    communicator.agree("the artifact", "sha256:bad" if communicator.rank == 1 else "sha256:good")


def other_call(communicator: Communicator) -> None:
    began()
    reduced(communicator, 4 if communicator.rank != 1 else 5, "layers.0 (model.py:3)")


def skips(communicator: Communicator) -> None:
    """Rank 1 ends one call earlier than the others."""
    began()
    for _ in range(3 if communicator.rank != 1 else 2):
        reduced(communicator)


def waits_in_a_ring(communicator: Communicator) -> None:
    """No rank sends: each waits for the next."""
    began()
    communicator.receive((communicator.rank + 1) % communicator.ranks)


def main() -> None:
    launched = find_launched_rank()
    assert launched is not None
    supervise(launched)
    name, folder = sys.argv[1], Path(sys.argv[2])
    if launched.rank == 1 and name == "dies_early":
        FAULTS["dies"][1]()
    program = named(name)
    communicator = MpiCommunicator(LIMITS.get(name, LIMIT))
    file = folder / f"rank{communicator.rank}.json"
    try:
        program(communicator)
        communicator.close()
        record(file, "done")
    except BaseException as error:
        text = str(error) if isinstance(error, Error) else f"{type(error).__name__}: {error}"
        record(file, text)
        communicator.watcher.fail_here(text)
        communicator.watcher.claim_report()
        communicator.watcher.end_process(1)


def record(file: Path, outcome: str) -> None:
    mark = file.with_name("began")
    seconds = time.monotonic() - float(mark.read_text()) if mark.exists() else 0
    file.write_text(json.dumps({"outcome": outcome, "seconds": seconds}))


if __name__ == "__main__":
    main()
