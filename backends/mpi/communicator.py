"""One rank's side of a world of processes: the Communicator over MPI."""

from __future__ import annotations

import json
import sys
from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from typing import Any, NoReturn, TypeAlias

import numpy as np

from irc.backends.communicator import Exchange, PeerError
from irc.backends.mpi.board import Board
from irc.backends.mpi.calls import HEADER, Call, ExchangeCall, number_of, same, text_of
from irc.backends.mpi.collectives import Scratch, rounds
from irc.backends.mpi.process import Home, own_home
from irc.backends.mpi.pulse import Pulse
from irc.backends.mpi.sign import MOVES, WAITS, WORKS, Failure
from irc.backends.mpi.start import start
from irc.backends.mpi.verdict import disagreement
from irc.backends.mpi.wire import Wire, flat
from irc.errors import Error

Array: TypeAlias = np.ndarray[Any, Any]

LIMIT = 5.0  # seconds without a sign of life after which a rank counts as lost
_HEADER, _DATA, _FACT, _MAIL, _MAILED = 2, 3, 4, 5, 6  # tags
_UNDERWAY = 8  # sets of arrays to one rank that may be underway


def complain(text: str) -> None:
    """Say on standard error why the run failed."""
    print(f"error: {text}", file=sys.__stderr__, flush=True)


class MpiCommunicator:
    """See Communicator. Made once per process, on every rank of the world.

    `limit`: how many seconds another rank may give no sign of life, or be waited for while it
    neither computes nor reads. After a failure the process ends within seconds, through `leave`
    where the program calls it; `say` tells the user the reason, on one rank.
    """

    def __init__(self, limit: float = LIMIT, say: Callable[[str], None] = complain) -> None:
        self._started = start()
        self._mpi, comm = self._started.mpi, self._started.comm
        self.rank: int = comm.Get_rank()
        self.ranks: int = comm.Get_size()
        home = own_home()
        self._board = Board(self.rank, home)
        self._pulse = Pulse(self._started, self._board, limit, say)
        self._headers = [bytearray(HEADER) for _ in range(self.ranks)]
        self._numbers: Counter[tuple[int, ...]] = Counter()
        self._calls: dict[Any, ExchangeCall] = {}
        self._scratch = Scratch()
        self._underway: dict[int, deque[tuple[list[Any], object]]] = {}
        self._wire = Wire(self._started, self._board)
        self._pulse.start()
        homes = self._facts("the start", json.dumps(asdict(home)))
        self.homes = [Home(**json.loads(each)) for each in homes]
        self.neighbours = sum(each.host == home.host for each in self.homes)

    def exchange(self, what: Exchange, operand: Array, result: Array) -> None:
        """Take part in a collective: read `operand`, write `result`, both contiguous."""
        key = what, operand.dtype, operand.shape
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = ExchangeCall.of_exchange(self.rank, what, operand)
        call.check(operand, result)
        steps = rounds(call, operand.reshape(-1), result.reshape(-1), self._scratch)
        with self._at(call):
            first = next(steps)
            # what goes out in the first round goes with the headers: nobody waits twice
            sent = self._wire.post_all(first.outgoing, _DATA)
            self._meet(call)
            self._wire.gather(first.incoming, sent, _DATA)
            for each in steps:
                sent = self._wire.post_all(each.outgoing, _DATA)
                self._wire.gather(each.incoming, sent, _DATA)

    def send(self, to: int, arrays: Mapping[str, Array]) -> None:
        """Hand named arrays to another rank, which receives them by the same names.

        The arrays are copied, and this returns before they have arrived.
        """
        self._check_rank(to)
        with self._at(Call.of(self.rank, (self.rank, to), f"handing values to rank {to}")):
            self._board.state = MOVES
            waiting = self._underway.setdefault(to, deque())
            while waiting and (len(waiting) >= _UNDERWAY or self._done(waiting[0][0])):
                self._wire.wait(waiting.popleft()[0], ())
            copies = {name: np.array(array, order="C") for name, array in arrays.items()}
            facts = [(name, _kind(array), array.shape) for name, array in copies.items()]
            note = json.dumps(facts).encode()
            requests = self._wire.post(to, note, _MAIL)
            for array in copies.values():
                if array.size:
                    requests += self._wire.post(to, flat(array), _MAILED)
            waiting.append((requests, (note, copies)))

    def receive(self, source: int) -> dict[str, Array]:
        """The arrays that `source` sent."""
        self._check_rank(source)
        with self._at(Call.of(self.rank, (self.rank, source), f"the values of rank {source}")):
            facts = json.loads(self._wire.message(source, _MAIL))
            self._board.state = MOVES
            arrays = {name: np.empty(shape, np.dtype(kind)) for name, kind, shape in facts}
            for array in arrays.values():
                self._wire.gather([(source, array)], [], _MAILED)
            return arrays

    def agree(self, what: str, fact: str) -> None:
        """A PeerError on every rank where the ranks do not all give the same `fact`."""
        facts = self._facts(f"the comparison of {what}", fact)
        usual, count = Counter(facts).most_common(1)[0]
        if count == self.ranks:
            return
        if facts.count(facts[0]) == count:
            usual = facts[0]
        first = facts.index(usual)
        odd = next(rank for rank, each in enumerate(facts) if each != usual)
        self._fail(
            f"the ranks differ in {what}: rank {first} has {usual}, rank {odd} has {facts[odd]}"
        )

    def abort(self, reason: str) -> None:
        """Tell the other ranks that this one cannot go on."""
        self._board.fail(Failure(f"rank {self.rank} failed: {reason}"))

    def close(self) -> None:
        """Give up what is held; every rank calls it once, at the end."""
        self._board.check()
        call = Call.of(self.rank, tuple(range(self.ranks)), "the end")
        with self._at(call):
            self._meet(call)
            for waiting in self._underway.values():
                for requests, _ in waiting:
                    self._wire.wait(requests, ())
        self._pulse.stop()
        self._started.finish()

    def paused(self) -> AbstractContextManager[None]:
        """While this rank waits for the user, no other one takes it for stuck."""
        return self._board.paused()

    @property
    def failed(self) -> bool:
        """Whether the run cannot go on."""
        return self._board.failure is not None

    def claim(self) -> bool:
        """After a failure: whether this rank is to tell the user. True once, on one rank."""
        return self._board.claim(self.ranks)

    def leave(self, status: int) -> NoReturn:
        """End this process after a failure, and with it every rank that does not end itself."""
        self._pulse.end(status)

    @contextmanager
    def _at(self, call: Call) -> Generator[None]:
        """Be in a call as far as the other ranks can see."""
        board = self._board
        board.check()
        board.doing, board.state = call, WAITS
        try:
            yield
        except self._mpi.Exception as error:
            self._wire.broken(error)
        finally:
            board.doing, board.state = None, WORKS
            board.progress += 1

    def _meet(self, call: Call) -> None:
        """Wait until all ranks of a group are at the same call."""
        wire = self._wire
        number = self._numbers[call.group]
        self._numbers[call.group] = number + 1
        header = call.header(number)
        arriving = [wire.take(rank, self._headers[rank], _HEADER) for rank in call.others]
        leaving = [one for rank in call.others for one in wire.post(rank, header, _HEADER)]
        wire.wait(arriving + leaving, call.others)
        for rank in call.others:
            if not same(self._headers[rank], header):
                self._disagree(call, number, rank)
        self._board.state = MOVES

    def _disagree(self, call: Call, number: int, rank: int) -> NoReturn:
        there, theirs = text_of(self._headers[rank]), number_of(self._headers[rank])
        here = call.text
        if theirs != number:
            here, there = f"{here} (call {number})", f"{there} (call {theirs})"
        self._fail(disagreement(self.rank, here, rank, there))

    def _facts(self, what: str, fact: str) -> list[str]:
        """What all ranks say."""
        call = Call.of(self.rank, tuple(range(self.ranks)), what)
        with self._at(call):
            self._meet(call)
            data = fact.encode()
            requests = [one for rank in call.others for one in self._wire.post(rank, data, _FACT)]
            facts = [
                fact if rank == self.rank else self._wire.message(rank, _FACT).decode()
                for rank in range(self.ranks)
            ]
            self._wire.wait(requests, ())
            return facts

    def _fail(self, text: str) -> NoReturn:
        self._board.fail(Failure(text))
        self._board.check()
        raise PeerError(text)

    def _done(self, requests: list[Any]) -> bool:
        return self._mpi.Request.Testall(requests)

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.ranks or rank == self.rank:
            raise Error(f"rank {self.rank} of {self.ranks} has no other rank {rank}")


def _kind(array: Array) -> str:
    """The text from which numpy makes the dtype again; types of ml_dtypes have names only."""
    return array.dtype.str if array.dtype.type.__module__ == "numpy" else array.dtype.name
