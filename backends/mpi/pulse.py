"""The second thread of a rank: it tells the others that this one lives, and listens to them.

It needs an MPI that several threads may call. Where the run has failed and the working thread does
not notice, because it computes or is stuck, this thread ends the process.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from irc.backends.mpi.board import Board
from irc.backends.mpi.ending import farewell, orphaned
from irc.backends.mpi.process import glance, is_stopped
from irc.backends.mpi.sign import SIZE, Failure, Seen, Sign, decoded
from irc.backends.mpi.start import Started
from irc.backends.mpi.verdict import verdict

TAG = 1
EVERY = 0.5  # seconds between two signs
LISTEN = 0.05  # seconds between two looks at what came
GRACE = 2.5  # seconds that the working thread has to notice a failure


class Pulse:
    """Signs to and from all other ranks.

    `limit`: how many seconds another rank may be silent. `say` tells the user why the run failed.
    """

    def __init__(
        self, started: Started, board: Board, limit: float, say: Callable[[str], None]
    ) -> None:
        self._mpi, self._comm, self._board = started.mpi, started.comm, board
        self._limit, self._say = limit, say
        own, now = board.sign(), time.monotonic()
        self.seen = {
            rank: Seen(own if rank == board.rank else Sign(rank, board.home), now, now)
            for rank in range(self._comm.Get_size())
        }
        others = [rank for rank in self.seen if rank != board.rank]
        self._heard: set[int] = set()
        self._buffers = {rank: bytearray(SIZE) for rank in others}
        self._receives = {rank: self._receive(rank) for rank in others}
        self._sends: dict[int, Any] = {}
        self._sent, self._ran, self._parent_ran = 0.0, now, now
        self._failed = 0.0
        self._over = False
        self._thread = threading.Thread(target=self._run, name="irc pulse", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End, once all ranks have; what is under way is given up."""
        self._over = True
        self._board.changed.set()
        self._thread.join()
        for request in self._receives.values():
            request.Cancel()
            request.Wait()

    def end(self, status: int) -> NoReturn:
        """End the process after a failure, once the user knows of it."""
        self._board.leaving = status
        self._board.changed.set()
        while True:  # the thread ends the process, whatever signal comes meanwhile
            with suppress(BaseException):
                self._thread.join()

    def _receive(self, rank: int) -> Any:
        return self._comm.Irecv([self._buffers[rank], SIZE, self._mpi.BYTE], rank, TAG)

    def _run(self) -> None:
        try:
            while not self._over:
                self._turn()
                self._board.changed.wait(LISTEN)
                self._board.changed.clear()
        except BaseException as error:
            self._board.fail(Failure(f"rank {self._board.rank} failed: {error!r}"))
            raise

    def _turn(self) -> None:
        board = self._board
        self.listen()
        now = time.monotonic()
        self._forgive(now)
        if board.failure is None and now - self._sent >= EVERY:
            self._judge(now)
        if board.failure is not None and not self._failed:
            self._failed = now
            self.tell()
        if now - self._sent >= EVERY:
            self.tell()
        if board.leaving is not None:
            farewell(self, board, self._mpi, board.leaving)
        if self._failed and now - self._failed > GRACE:
            self._end_alone()

    def _forgive(self, now: float) -> None:
        """While this thread did not run, as when the machine slept, nobody else was silent."""
        gap, self._ran = now - self._ran, now
        if gap > EVERY:
            for one in self.seen.values():
                one.heard += gap
                one.moved += gap

    def _judge(self, now: float) -> None:
        self._look_at_parent(now)
        self.seen[self._board.rank].hear(self._board.sign(), now)
        glances = {rank: glance(self.seen[rank].sign.home) for rank in self._heard}
        failure = verdict(self._board.rank, self.seen, glances, self._limit, now)
        if failure is not None:
            self._board.fail(failure)

    def _look_at_parent(self, now: float) -> None:
        """What the launcher started is a part of this rank: it must not be killed or stopped."""
        board, home = self._board, self._board.home
        who = f"rank {board.rank} ({home})"
        if os.getppid() != home.parent:
            board.fail(Failure(f"{who} died: process {home.parent}, which started it, is gone"))
            orphaned(self)
        if not is_stopped(home.parent):
            self._parent_ran = now
        elif now - self._parent_ran > self._limit:
            board.fail(
                Failure(f"{who} stalls: process {home.parent}, which started it, is stopped")
            )

    def listen(self) -> None:
        """Take in the signs that have come."""
        for rank, request in list(self._receives.items()):
            try:
                while self._arrived(rank, request):
                    request = self._receives[rank] = self._receive(rank)
            except self._mpi.Exception as error:
                self._broken(rank, error)

    def _arrived(self, rank: int, request: Any) -> bool:
        status = self._mpi.Status()
        if not request.Test(status):
            return False
        sign = decoded(bytes(self._buffers[rank][: status.Get_count(self._mpi.BYTE)]))
        self._heard.add(rank)
        self.seen[rank].hear(sign, time.monotonic())
        if sign.failure is not None:
            self._board.fail(sign.failure)
        return True

    def tell(self) -> None:
        """Send a sign to all other ranks, but those that have not taken the last one yet."""
        data = self._board.sign().encoded()
        self._sent = time.monotonic()
        for rank in list(self._receives):
            try:
                before = self._sends.get(rank)
                if before is None or before[0].Test():
                    request = self._comm.Isend([data, len(data), self._mpi.BYTE], rank, TAG)
                    self._sends[rank] = request, data
            except self._mpi.Exception as error:
                self._broken(rank, error)

    def _broken(self, rank: int, error: Exception) -> None:
        """A network whose other end is gone says so itself."""
        self._receives.pop(rank, None)
        home = self.seen[rank].sign.home if rank in self._heard else "not heard of yet"
        self._board.fail(
            Failure(
                f"rank {rank} ({home}) died, or the network to it broke: {line(error)}", (rank,)
            )
        )

    def _end_alone(self) -> NoReturn:
        """The working thread has not come back: this one speaks for it, and ends the process."""
        failure = self._board.failure
        assert failure is not None
        if self._board.claim(len(self.seen)):
            self._say(failure.text)
        farewell(self, self._board, self._mpi, 1)


def line(error: Exception) -> str:
    """The last line of MPI's stack of messages, which says most."""
    return str(error).strip().splitlines()[-1].strip()
