"""What the processes of these tests do: `python -m tests.mpi.programs NAME FOLDER` on every rank.

Each rank leaves rank{r}.json in the folder: how it ended, and the seconds since the failure began.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from irc.backends.communicator import Exchange
from irc.backends.mpi import collectives as algorithms
from irc.backends.mpi import wire
from irc.backends.mpi.communicator import LIMIT, MpiCommunicator
from irc.backends.mpi.guard import guard
from irc.errors import Error
from tests.mpi.collectives import check_all

Program = Callable[[MpiCommunicator], None]
LIMITS = {"works": 2.5}  # seconds, so that less time passes
# what is found at once is not found by the silence of a rank
LIMITS |= dict.fromkeys(("differs", "other_call", "skips", "leaves_early", "raises"), 1e6)
LARGE = 24 << 20  # bytes; several messages


def reduced(communicator: MpiCommunicator, size: int = 4, place: str = "a model") -> None:
    """One all_reduce over all ranks."""
    operand = np.full(size, 1.0, np.float32)
    result = np.empty_like(operand)
    group = tuple(range(communicator.ranks))
    communicator.exchange(Exchange("all_reduce", "sum", group, 0, place), operand, result)
    assert result[0] == result[-1] == communicator.ranks


def began() -> None:
    """Note when the failure began, for the other ranks' stop watch."""
    mark = Path(sys.argv[2], f"began{os.getpid()}")
    mark.write_text(str(time.monotonic()))
    mark.rename(mark.with_name("began"))


def collectives(communicator: MpiCommunicator) -> None:
    algorithms.WHOLE, wire.CHUNK = 1 << 14, 1 << 12  # so that small arrays go all ways
    wrong = check_all(communicator, int(os.environ["IRC_TEST_SEED"]))
    assert not wrong, "\n".join(wrong)


def some_collectives(communicator: MpiCommunicator) -> None:
    """Fewer, for a slow network, and values around a ring."""
    wrong = check_all(communicator, int(os.environ["IRC_TEST_SEED"]), 7)
    assert not wrong, "\n".join(wrong)
    mail(communicator)


def mail(communicator: MpiCommunicator) -> None:
    """Values of all kinds go around a ring, and several sets of them are underway."""
    here, ranks = communicator.rank, communicator.ranks
    rng = np.random.default_rng(here)
    to, source = (here + 1) % ranks, (here - 1) % ranks
    sent = {"x": rng.random((3, 5), np.float32), "ids": np.arange(7)[::2], "no": np.zeros((0, 4))}
    sent |= {"large": np.full(LARGE // 4, here, np.int32), "one": np.array(3, np.uint8)}
    for _ in range(3):
        communicator.send(to, sent)
    for _ in range(3):
        found = communicator.receive(source)
        assert [*found] == [*sent]
        before = np.random.default_rng(source)
        np.testing.assert_array_equal(found["x"], before.random((3, 5), np.float32))
        np.testing.assert_array_equal(found["ids"], [0, 2, 4, 6])
        assert (found["no"].shape, found["one"].shape) == ((0, 4), ())
        assert (found["large"] == source).all() and found["large"].nbytes == LARGE


def alone(communicator: MpiCommunicator) -> None:
    """One rank is a world, too."""
    reduced(communicator)
    communicator.agree("the step", "7")


def works(communicator: MpiCommunicator) -> None:
    """A rank that only computes, holding the interpreter or not, is waited for."""
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
            time.sleep(3.5)  # the user thinks
    reduced(communicator)


def dies(communicator: MpiCommunicator) -> None:
    reduced(communicator)
    if communicator.rank == 1:
        began()
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        reduced(communicator, LARGE // 4)


def goes_on(communicator: MpiCommunicator) -> None:
    reduced(communicator)
    if communicator.rank == 0:
        began()
    while True:
        reduced(communicator)


def first_dies(communicator: MpiCommunicator) -> None:
    if communicator.rank == 0:
        began()
        os.kill(os.getpid(), signal.SIGKILL)
    reduced(communicator)


def stops(communicator: MpiCommunicator) -> None:
    reduced(communicator)
    if communicator.rank == 1:
        began()
        os.kill(os.getpid(), signal.SIGSTOP)
    while True:
        reduced(communicator, LARGE // 4)


def first_stops(communicator: MpiCommunicator) -> None:
    reduced(communicator)
    if communicator.rank == 0:
        began()
        os.kill(os.getpid(), signal.SIGSTOP)
    reduced(communicator)


def guard_stops(communicator: MpiCommunicator) -> None:
    reduced(communicator)
    if communicator.rank == 1:
        began()
        os.kill(os.getppid(), signal.SIGSTOP)
    while True:
        time.sleep(0.01)
        reduced(communicator)


def is_stuck(communicator: MpiCommunicator) -> None:
    reduced(communicator)
    if communicator.rank == 1:
        began()
        time.sleep(100)
    reduced(communicator)


def raises(communicator: MpiCommunicator) -> None:
    reduced(communicator)
    if communicator.rank == 1:
        began()
        raise KeyError("surprise")
    reduced(communicator)


def raises_while_others_compute(communicator: MpiCommunicator) -> None:
    reduced(communicator)
    if communicator.rank == 1:
        began()
        raise KeyError("surprise")
    while True:
        pass


def differs(communicator: MpiCommunicator) -> None:
    began()
    communicator.agree("the step", "step 7")
    communicator.agree("the artifact", "sha256:bad" if communicator.rank == 1 else "sha256:good")


def other_call(communicator: MpiCommunicator) -> None:
    began()
    reduced(communicator, 4 if communicator.rank != 1 else 5, "layers.0 (model.py:3)")


def skips(communicator: MpiCommunicator) -> None:
    began()
    for _ in range(3 if communicator.rank != 1 else 2):
        reduced(communicator)
    communicator.agree("the result", "same")


def leaves_early(communicator: MpiCommunicator) -> None:
    began()
    if communicator.rank != 1:
        reduced(communicator)


def waits_in_a_ring(communicator: MpiCommunicator) -> None:
    """Nobody ever sends: each waits for the next."""
    began()
    communicator.receive((communicator.rank + 1) % communicator.ranks)


def main() -> None:
    guard(int(os.environ["PMI_RANK"]), int(os.environ["PMI_SIZE"]))
    program: Program = globals()[sys.argv[1]]
    folder = Path(sys.argv[2])
    communicator = MpiCommunicator(LIMITS.get(sys.argv[1], LIMIT))
    place = folder / f"rank{communicator.rank}.json"
    try:
        program(communicator)
        communicator.close()
        record(place, "done")
    except Error as error:
        record(place, str(error), folder)
        communicator.abort(str(error))
        end(communicator)
    except BaseException as error:
        record(place, f"{type(error).__name__}: {error}", folder)
        communicator.abort(f"{type(error).__name__}: {error}")
        end(communicator)


def record(place: Path, outcome: str, folder: Path | None = None) -> None:
    mark = folder / "began" if folder is not None else None
    seconds = (
        time.monotonic() - float(mark.read_text()) if mark is not None and mark.exists() else 0
    )
    facts: dict[str, Any] = {"outcome": outcome, "seconds": seconds}
    place.write_text(json.dumps(facts))


def end(communicator: MpiCommunicator) -> None:
    communicator.claim()
    communicator.leave(1)


if __name__ == "__main__":
    main()
