"""One rank's side of a run whose processes talk through a hub; see Communicator."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any, NoReturn, TypeAlias

import numpy as np

from irc.backends.communicator import Exchange, PeerError
from irc.backends.mpi.communicator import complain
from irc.backends.mpi.process import Home, own_home
from irc.backends.processes.hub import Hub
from irc.backends.processes.letters import BEAT, DATA, END, FAIL, HELLO, Letter, decoded
from irc.backends.ranks.combine import perform

Array: TypeAlias = np.ndarray[Any, Any]

EVERY = 1.0  # seconds between two signs of life
GRACE = 3.0  # seconds that the working thread has to notice a failure
_ENDING = 3.0  # seconds that a hub of this process has to tell the others
_MAIL = "mail"


class HubCommunicator:
    """See Communicator. `connection` leads to the hub, which is `hub` where it runs here.

    `launched`: whether the hub runs in the irc that started the ranks, which tells the user of a
    failure where rank 0 cannot; else the first rank that lives does. `say` tells it when the
    working thread is stuck.
    """

    def __init__(
        self,
        connection: Connection[Any, Any],
        rank: int,
        ranks: int,
        hub: Hub | None = None,
        launched: bool = False,
        say: Callable[[str], None] = complain,
    ) -> None:
        self.rank, self.ranks = rank, ranks
        self._connection, self._hub, self._launched, self._say = connection, hub, launched, say
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._boxes: dict[tuple[int, str], deque[Letter]] = {}
        self._failure: tuple[str, int | None] | None = None
        self._watchers: list[Callable[[], None]] = []
        self._numbers: dict[tuple[int, ...], int] = {}
        self._waits: tuple[str, int, deque[Letter]] | None = None  # what, of whom, and where
        self._arrived = 0  # letters
        self._over = threading.Event()
        self._said = False
        self._start()
        home = json.dumps(asdict(own_home()))
        self.homes = [Home(**json.loads(each)) for each in self._facts("the start", home)]
        here = self.homes[rank].host
        self.neighbours = sum(each.host == here for each in self.homes)

    def _start(self) -> None:
        for work, name in ((self._read, "irc reader"), (self._beat, "irc pulse")):
            threading.Thread(target=work, name=name, daemon=True).start()

    def on_failure(self, work: Callable[[], None]) -> None:
        """Do something at once when the run has failed, such as ending what this rank waits for."""
        with self._changed:
            self._watchers.append(work)
            late = self._failure is not None
        if late:
            work()

    def exchange(self, what: Exchange, operand: Array, result: Array) -> None:
        """Take part in a collective: read `operand`, write `result`, both contiguous."""
        group, text = what.group, what.described(operand)
        tag = self._tag(group)
        if self.rank != group[0]:
            self._post(group[0], tag, {"text": text}, {"x": operand})
            result[...] = self._take(group[0], tag, text).arrays["x"].reshape(result.shape)
            return
        operands = [operand]
        for other in group[1:]:
            letter = self._take(other, tag, text)
            self._compare(text, other, letter.facts["text"])
            operands.append(letter.arrays["x"].reshape(operand.shape))
        results = [result, *(np.empty_like(result) for _ in group[1:])]
        for position in range(len(group)):
            perform(what, position, operands, results)
        for other, each in zip(group[1:], results[1:], strict=True):
            self._post(other, tag, {}, {"x": each})

    def send(self, to: int, arrays: Mapping[str, Array]) -> None:
        """Hand named arrays to another rank, which receives them by the same names."""
        self._post(to, _MAIL, {}, arrays)

    def receive(self, source: int) -> dict[str, Array]:
        """The arrays that `source` sent."""
        return dict(self._take(source, _MAIL, f"the values of rank {source}").arrays)

    def agree(self, what: str, fact: str) -> None:
        """A PeerError on every rank where the ranks do not all give the same `fact`."""
        facts = self._facts(f"the comparison of {what}", fact)
        for rank, each in enumerate(facts):
            if each != facts[0]:
                self._fail(
                    f"the ranks differ in {what}: rank 0 has {facts[0]}, rank {rank} has {each}"
                )

    def abort(self, reason: str) -> None:
        """Tell the other ranks that this one cannot go on."""
        self._fail_all(f"rank {self.rank} failed: {reason}", self.rank)

    def close(self) -> None:
        """Give up what is held; every rank calls it once, at the end."""
        self._facts("the end", "")
        self._over.set()
        self._write(Letter(END, self.rank))
        if self._hub is not None:
            self._hub.close(_ENDING)

    @contextmanager
    def paused(self) -> Generator[None]:
        """While this rank waits for the user; a rank that is not waited for may take its time."""
        yield

    @property
    def failed(self) -> bool:
        """Whether the run cannot go on."""
        return self._failure is not None

    def claim(self) -> bool:
        """After a failure: whether this rank is to tell the user. True once, on one rank."""
        failure = self._failure
        if failure is None or self._said:
            return False
        first = 1 if failure[1] == 0 and _is_death(failure[0]) and not self._launched else 0
        self._said = self.rank == first
        return self._said

    def leave(self, status: int) -> NoReturn:
        """End this process after a failure, once the others know."""
        self._over.set()
        self._write(Letter(END, self.rank))
        if self._hub is not None:
            self._hub.close(_ENDING)
        os._exit(status)

    def _tag(self, group: tuple[int, ...]) -> str:
        number = self._numbers.get(group, 0)
        self._numbers[group] = number + 1
        return f"{','.join(map(str, group))}:{number}"

    def _facts(self, what: str, fact: str) -> list[str]:
        """What all ranks say."""
        everyone = tuple(range(self.ranks))
        tag = self._tag(everyone)
        mine = {"text": what, "fact": fact}
        if self.rank:
            self._post(0, tag, mine, {})
            return list(self._take(0, tag, what).facts["every"])
        facts = [fact]
        for other in everyone[1:]:
            letter = self._take(other, tag, what)
            self._compare(what, other, letter.facts["text"])
            facts.append(letter.facts["fact"])
        for other in everyone[1:]:
            self._post(other, tag, {"every": facts}, {})
        return facts

    def _compare(self, here: str, other: int, there: str) -> None:
        if here != there:
            self._fail(
                f"the ranks do not do the same: rank {self.rank} is at {here}, rank {other} at "
                f"{there}; all need the same artifact and the same inputs"
            )

    def _post(
        self, to: int, tag: str, facts: Mapping[str, Any], arrays: Mapping[str, Array]
    ) -> None:
        if not 0 <= to < self.ranks or to == self.rank:
            raise ValueError(f"rank {self.rank} of {self.ranks} has no other rank {to}")
        self._check()
        self._write(Letter(DATA, self.rank, to, tag, facts, arrays))

    def _take(self, source: int, tag: str, text: str) -> Letter:
        with self._changed:
            box = self._boxes.setdefault((source, tag), deque())
            self._waits = text, source, box
            try:
                while not box:
                    self._check()
                    self._changed.wait()
            finally:
                self._waits = None
            letter = box.popleft()
            if not box:
                del self._boxes[source, tag]
            return letter

    def _check(self) -> None:
        if self._failure is not None:
            raise PeerError(self._failure[0])

    def _fail(self, text: str) -> NoReturn:
        self._fail_all(text, None)
        raise PeerError(text)

    def _fail_all(self, text: str, rank: int | None) -> None:
        self._write(Letter(FAIL, self.rank, facts={"text": text}))
        self._failed(text, rank)

    def _failed(self, text: str, rank: int | None) -> None:
        with self._changed:
            if self._failure is not None:
                return
            self._failure = text, rank
            self._changed.notify_all()
            known = tuple(self._watchers)
        threading.Thread(target=self._end_alone, args=(known,), daemon=True).start()

    def _end_alone(self, known: Sequence[Callable[[], None]]) -> None:
        """End what the working thread waits for; where it does not come back, end the process."""
        for work in known:
            work()
        if self._over.wait(GRACE):
            return
        assert self._failure is not None
        if self.claim():
            self._say(self._failure[0])
        self._write(Letter(END, self.rank))
        if self._hub is not None:
            self._hub.close(_ENDING)
        os._exit(1)

    def _write(self, letter: Letter) -> None:
        data = letter.encoded()
        with self._sending, suppress(OSError):  # who reads finds out that the hub is gone
            self._connection.send_bytes(data)

    def _read(self) -> None:
        while True:
            try:
                letter = decoded(self._connection.recv_bytes())
            except (EOFError, OSError):
                if not self._over.is_set():
                    self._failed(*self._lost())
                return
            if letter.kind == FAIL:
                self._failed(letter.facts["text"], letter.facts["rank"])
                continue
            with self._changed:
                self._boxes.setdefault((letter.source, letter.tag), deque()).append(letter)
                self._arrived += 1
                self._changed.notify_all()

    def _lost(self) -> tuple[str, int | None]:
        """The hub is gone: the process that it runs in has ended."""
        if self._launched:
            return "the irc that started the ranks is gone", None
        return "rank 0, through which all ranks talk, died: the connection to it ended", 0

    def _beat(self) -> None:
        while not self._over.is_set():
            self._write(Letter(BEAT, self.rank, facts=self._state()))
            self._over.wait(EVERY)

    def _state(self) -> dict[str, Any]:
        """What this rank waits for, and how many letters had arrived by then."""
        with self._changed:
            what, source, box = self._waits or ("", 0, ())
            waits = "" if box else what
            return {"waits": waits, "source": source, "arrived": self._arrived}


def hello(connection: Connection[Any, Any], rank: int, ranks: int) -> None:
    """Say which rank this process is: the first letter to the hub."""
    facts = {"ranks": ranks, "home": asdict(own_home())}
    connection.send_bytes(Letter(HELLO, rank, facts=facts).encoded())


def hello_of(data: bytes) -> tuple[int, int, Home]:
    """(rank, ranks, process) of a first letter."""
    letter = decoded(data)
    if letter.kind != HELLO:
        raise ValueError("this is not how a rank begins")
    return letter.source, int(letter.facts["ranks"]), Home(**letter.facts["home"])


def _is_death(text: str) -> bool:
    return " died" in text or " stalls" in text


def wait_until(ready: Callable[[], bool], seconds: float) -> bool:
    """Whether something is so within so many seconds."""
    until = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True
