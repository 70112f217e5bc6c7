"""Ranks that talk through a hub: threads here, each at its end of a pipe."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
import pytest

from irc.backends.communicator import Exchange, PeerError
from irc.backends.mpi.process import Glance, own_home
from irc.backends.processes import communicator as communicators
from irc.backends.processes import hub as hubs
from irc.backends.processes.communicator import HubCommunicator
from irc.backends.processes.hub import Hub, pair
from irc.backends.processes.letters import Letter, decoded
from tests.fresh import fresh

T = TypeVar("T")


SOON = 120  # seconds: what would never happen has not happened by then


class World:
    """A hub, and an end of a pipe per rank; rank 0 comes so many seconds late."""

    def __init__(self, ranks: int, comes: float = 0.0) -> None:
        self.ranks, self.hub = ranks, Hub(ranks)
        self.ends = []
        for rank in range(ranks):
            ours, theirs = pair()
            come = threading.Timer(comes * (1 - rank), self.hub.add, (rank, theirs, own_home()))
            come.start()
            self.ends.append(ours)
        self.hub.start()

    def run(self, work: Callable[[HubCommunicator], T]) -> list[T | BaseException]:
        """What `work` gives or raises on every rank."""
        found: dict[int, Any] = {}
        made: list[HubCommunicator] = []

        def one(rank: int) -> None:
            try:
                communicator = HubCommunicator(self.ends[rank], rank, self.ranks)
                made.append(communicator)
                found[rank] = work(communicator)
            except BaseException as error:
                found[rank] = error

        threads = [
            threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(self.ranks)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SOON)
        for communicator in made:
            communicator._over.set()  # what ends now ends on purpose
        self.hub.close(0.0)
        return [found.get(rank, TimeoutError()) for rank in range(self.ranks)]


def right(found: list[T | BaseException]) -> list[T]:
    """Nothing was raised."""
    kept: list[T] = []
    for each in found:
        if isinstance(each, BaseException):
            raise each
        kept.append(each)
    return kept


@pytest.mark.parametrize("dtype", [np.float32, np.int64, ml_dtypes.bfloat16, np.bool_])
def test_letters(dtype: Any) -> None:
    array = fresh().integers(0, 2, (3, 0, 2) if dtype is np.int64 else (3, 5)).astype(dtype)
    letter = Letter("data", 1, 2, "tag", {"é": [1]}, {"x": array, "y": np.array(3, dtype)})
    back = decoded(letter.encoded())
    assert (back.kind, back.source, back.to, back.tag) == ("data", 1, 2, "tag")
    assert back.facts == {"é": [1]}
    for name, each in letter.arrays.items():
        assert back.arrays[name].dtype == each.dtype
        assert np.array_equal(back.arrays[name], each)


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_collectives(ranks: int) -> None:
    group = tuple(range(ranks))
    xs = fresh().standard_normal((ranks, 2 * ranks, 3)).astype(np.float32)

    def work(c: HubCommunicator) -> list[np.ndarray[Any, Any]]:
        found: list[np.ndarray[Any, Any]] = []
        for operation, reduce_op in (
            ("all_reduce", "sum"),
            ("all_gather", "none"),
            ("reduce_scatter", "max"),
            ("all_to_all", "none"),
            ("broadcast", "none"),
        ):
            what = Exchange(operation, reduce_op, group, ranks - 1 if operation[0] == "b" else 0)
            result = np.empty(what.result_shape(xs[c.rank].shape), np.float32)
            c.exchange(what, xs[c.rank], result)
            found.append(result)
        c.close()
        return found

    for rank, found in enumerate(right(World(ranks).run(work))):
        total, gathered, scattered, turned, first = found
        np.testing.assert_allclose(total, xs.sum(0), rtol=1e-5, atol=1e-5)
        assert np.array_equal(gathered, np.concatenate(list(xs)))
        assert np.array_equal(scattered, xs.max(0)[2 * rank : 2 * rank + 2])
        assert np.array_equal(turned, np.concatenate([x[2 * rank : 2 * rank + 2] for x in xs]))
        assert np.array_equal(first, xs[-1])


def test_arrays_go_from_rank_to_rank_in_order() -> None:
    def work(c: HubCommunicator) -> list[int]:
        c.agree("the artifact", "same")
        following, before = (c.rank + 1) % 3, (c.rank - 1) % 3
        for turn in range(20):
            c.send(following, {"x": np.full(turn, c.rank), "y": np.array(turn)})
        found = [c.receive(before) for _ in range(20)]
        c.close()
        assert all(each["x"].tolist() == [before] * turn for turn, each in enumerate(found))
        assert c.neighbours == 3
        return [int(each["y"]) for each in found]

    assert right(World(3).run(work)) == [list(range(20))] * 3


def said(found: list[T | BaseException], text: str) -> None:
    """Every rank raised an Error with this text."""
    assert all(isinstance(each, PeerError) and text in str(each) for each in found), found


def test_a_rank_that_comes_late() -> None:
    world = World(2, comes=0.5)

    def work(c: HubCommunicator) -> None:
        c.send(1 - c.rank, {"x": np.array(c.rank)})
        assert c.receive(1 - c.rank)["x"] == 1 - c.rank
        c.close()

    right(world.run(work))


def test_facts_that_differ() -> None:
    found = World(3).run(lambda c: c.agree("the artifact", f"sha {c.rank // 2}"))
    said(found, "the ranks differ in the artifact: rank 0 has sha 0, rank 2 has sha 1")


def test_other_collectives() -> None:
    def work(c: HubCommunicator) -> None:
        x = np.zeros(3 + c.rank, np.float32)
        c.exchange(Exchange("all_reduce", "sum", (0, 1), 0, "the sum"), x, x)

    said(World(2).run(work), "rank 1 at all_reduce (sum) of float32[4] in the sum")


def test_ranks_that_wait_for_each_other() -> None:
    found = World(2).run(lambda c: c.receive(1 - c.rank))
    said(found, "the ranks do not do the same: rank 0 is at the values of rank 1, rank 1 at")


def test_ranks_that_wait_for_each_other_when_another_has_finished() -> None:
    def work(c: HubCommunicator) -> object:
        if c.rank < 2:
            return c.receive(1 - c.rank)
        c._over.set()
        c._write(Letter("end", 2))
        return None

    first, second, _ = World(3).run(work)
    said([first, second], "rank 0 is at the values of rank 1, rank 1 at the values of rank 0")


def test_a_rank_that_has_finished() -> None:
    def work(c: HubCommunicator) -> object:
        if c.rank == 0:
            return c.receive(1)
        c._over.set()
        c._write(Letter("end", 1))
        return None

    first, _ = World(2).run(work)
    assert "rank 0 is at the values of rank 1, but rank 1 has finished" in str(first)


class Told:
    """A hub of two ranks that is told letter by letter, and judges `away` seconds after each."""

    def __init__(self) -> None:
        self.hub, self.away = Hub(2), 0.0
        self.ends = [pair() for _ in range(2)]
        for rank, (_, theirs) in enumerate(self.ends):
            self.hub.add(rank, theirs, own_home())

    def hears(self, letter: Letter) -> str:
        """Of what the run has failed then."""
        self.hub._take(letter.source, letter.encoded())
        self.hub._judge(time.monotonic() + self.away)
        return self.hub.failure

    def waits(self, rank: int, arrived: int) -> str:
        """A sign of life: a rank waits for the other one, and had so many letters then."""
        facts = {"waits": f"call {rank}", "source": 1 - rank, "arrived": arrived}
        return self.hears(Letter("beat", rank, facts=facts))

    def close(self) -> None:
        self.hub.close(0.0)
        for ours, _ in self.ends:
            ours.close()


@pytest.fixture
def told() -> Iterator[Told]:
    made = Told()
    yield made
    made.close()


def test_a_sign_of_life_may_be_older_than_the_answer(told: Told) -> None:
    """Rank 1 waits for rank 0, which answers and ends, before the sign of life is read."""
    assert told.waits(1, 0) == ""
    assert told.hears(Letter("data", 0, 1)) == ""
    assert told.hears(Letter("end", 0)) == ""
    assert told.waits(1, 0) == "", "it was written before the answer came"
    assert told.waits(1, 1) == "rank 1 is at call 1, but rank 0 has finished"


def test_both_may_wait_while_a_letter_is_underway(told: Told) -> None:
    assert told.hears(Letter("data", 0, 1)) == ""
    assert told.waits(0, 0) == ""
    assert told.waits(1, 0) == ""
    assert told.hears(Letter("data", 1, 0)) == ""
    assert told.waits(1, 1) == ""
    assert "rank 0 is at call 0, rank 1 at call 1" in told.waits(0, 1)


def test_the_last_letter_of_a_process_that_is_gone_is_read(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = {own_home(): Glance(False)}
    monkeypatch.setattr(hubs, "glance", seen.get)
    told.hub._judge(time.monotonic())
    assert told.hub.failure == "", "its pipe may hold its end yet"
    told.away = 1.0
    assert told.hears(Letter("end", 0)) == ""
    told.away = 3.0
    assert "rank 1 (process" in told.hears(Letter("end", 0)) and "died" in told.hub.failure


def test_a_rank_that_gets_no_core_is_not_lost(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    monkeypatch.setattr(hubs, "glance", lambda home: Glance(True, ready=True))
    told.hub._judge(now + 60)
    assert told.hub.failure == ""
    monkeypatch.setattr(hubs, "glance", lambda home: Glance(True, ticks=7))
    told.hub._judge(now + 120)
    assert told.hub.failure == "", "it has computed meanwhile"
    told.hub._judge(now + 180)
    assert "stalls: it has given no sign of life for 60 s" in told.hub.failure


def test_a_rank_that_waits_for_a_disk_has_more_time(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    monkeypatch.setattr(hubs, "glance", lambda home: Glance(True, on_disk=True))
    for seconds in range(0, 60, 10):
        told.hub._judge(now + seconds)
    assert told.hub.failure == ""
    assert told.hears(Letter("beat", 0, facts={"waits": ""})) == ""
    told.hub._members[0].heard += 60
    told.hub._judge(now + 70)
    assert "rank 1" in told.hub.failure, "rank 0 has been heard since"
    assert "no sign of life for 70 s, as it waits for a disk or a driver" in told.hub.failure


def test_a_rank_is_heard_once_its_disk_has_answered(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    for seconds, seen in ((50, Glance(True, on_disk=True)), (54, Glance(True))):
        monkeypatch.setattr(hubs, "glance", lambda home, seen=seen: seen)
        told.hub._judge(now + seconds)
        assert told.hub.failure == "", "its sign of life may be underway"
    told.hub._judge(now + 56)
    assert "no sign of life for 56 s" in told.hub.failure


def test_a_rank_that_comes_after_the_end_is_sent_away(told: Told) -> None:
    told.hub.close(0.0)
    ours, theirs = pair()
    told.hub.add(0, theirs, own_home())
    with ours, pytest.raises(EOFError):
        ours.recv_bytes()


def test_a_rank_that_stops_within_a_letter_holds_up_nobody(told: Told) -> None:
    told.hub.start()
    for rank, (ours, _) in enumerate(told.ends):
        half = Letter("beat", rank, facts={"waits": ""}).encoded()
        os.write(ours.fileno(), len(half).to_bytes(4, "big") + half[: len(half) // (1 + rank)])
    told.ends[0][0].send_bytes(Letter("fail", 0, facts={"text": "rank 0 failed"}).encoded())
    assert communicators.wait_until(lambda: bool(told.hub.failure), SOON)


def test_a_rank_that_gives_up() -> None:
    told: list[int] = []

    def work(c: HubCommunicator) -> object:
        c.on_failure(lambda: told.append(c.rank))
        c.agree("waiting to be told", "yes")
        if c.rank == 1:
            c.abort("its GPU is gone")
            c._check()
        return c.receive(1)

    said(World(3).run(work), "rank 1 failed: its GPU is gone")
    assert communicators.wait_until(lambda: sorted(told) == [0, 1, 2], SOON)


def test_a_pipe_that_ends() -> None:
    world = World(3)

    def work(c: HubCommunicator) -> object:
        if c.rank == 2:
            with socket.socket(fileno=os.dup(world.ends[2].fileno())) as end:
                end.shutdown(socket.SHUT_RDWR)
        return c.receive(2)

    first, second, _ = world.run(work)
    said([first, second], "rank 2 (process")
    assert "died" in str(first)
