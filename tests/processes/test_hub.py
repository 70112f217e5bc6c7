"""Ranks that talk through a hub: threads here, each at its end of a pipe."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
import pytest

from irc.backends.communicator import Exchange, PeerError
from irc.backends.mpi.process import own_home
from irc.backends.processes import communicator as communicators
from irc.backends.processes.communicator import HubCommunicator
from irc.backends.processes.hub import Hub, pair
from irc.backends.processes.letters import Letter, decoded
from tests.fresh import fresh

T = TypeVar("T")


class World:
    """A hub, and an end of a pipe per rank; rank 0 comes so many seconds late."""

    def __init__(self, ranks: int, limit: float = 5.0, comes: float = 0.0) -> None:
        self.ranks, self.hub = ranks, Hub(ranks, limit=limit)
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
            thread.join(20)
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
    began = time.monotonic()
    found = World(2, limit=1.0).run(lambda c: c.receive(1 - c.rank))
    said(found, "the ranks do not do the same: rank 0 is at the values of rank 1, rank 1 at")
    assert time.monotonic() - began < 8


def test_a_rank_that_has_finished() -> None:
    def work(c: HubCommunicator) -> object:
        if c.rank == 0:
            return c.receive(1)
        c._over.set()
        c._write(Letter("end", 1))
        return None

    first, _ = World(2).run(work)
    assert "rank 0 is at the values of rank 1, but rank 1 has finished" in str(first)


def test_the_end_after_a_long_wait() -> None:
    world = World(2)

    def work(c: HubCommunicator) -> None:
        if c.rank == 0:
            time.sleep(1.3)  # the last beat of rank 1 says that it waits
            c.close()
            return
        c._facts("the end", "")
        time.sleep(0.3)  # the hub hears of the end of rank 0 first
        c._over.set()
        c._write(Letter("end", 1))
        member = world.hub._members[1]
        assert communicators.wait_until(lambda: member.ended, 5)
        world.hub._judge(member.heard + 2.4)  # while the processes go

    right(world.run(work))
    assert not world.hub.failure


def test_a_rank_that_gives_up() -> None:
    told: list[int] = []

    def work(c: HubCommunicator) -> object:
        c.on_failure(lambda: told.append(c.rank))
        if c.rank == 1:
            c.abort("its GPU is gone")
            c._check()
        return c.receive(1)

    said(World(3).run(work), "rank 1 failed: its GPU is gone")
    assert communicators.wait_until(lambda: sorted(told) == [0, 1, 2], 5)


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
