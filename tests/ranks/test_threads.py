"""Ranks as threads: collectives, transfers, and how all stop when one fails, differs or stalls."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from irc.backends.ranks import threads
from irc.backends.ranks.combine import perform
from irc.backends.ranks.communicator import CollectiveCall, Communicator, PeerError
from irc.backends.ranks.threads import ThreadWorld
from irc.errors import Error
from irc.ops.collective_names import OPERATIONS
from tests.fresh import session_seed
from tests.ranks import programs
from tests.ranks.collectives import check_all, meant
from tests.ranks.test_mpi import DISAGREEING, EVERY_FAILURE

Work = Callable[[Communicator], Any]


def call(
    c: Communicator, operation: str, x: np.ndarray, group: tuple[int, ...] = (), place: str = "here"
) -> np.ndarray:
    """The result of one collective."""
    group = group or tuple(range(c.ranks))
    reduces = "reduce" in operation
    what = CollectiveCall(operation, "sum" if reduces else "none", group, len(group) - 1, place)
    result = np.full(what.result_shape(x.shape), 7, x.dtype)
    c.collective(what, x, result)
    return result


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_collectives_compute_what_the_operations_mean(ranks: int) -> None:
    """Bit for bit, as they add in the order of the group."""
    seed = session_seed()
    assert ThreadWorld(ranks).run(lambda c: check_all(c, seed, exact=True)) == [[]] * ranks


def test_shares_are_the_whole_and_do_not_overlap() -> None:
    for operation in OPERATIONS:
        operands = [np.arange(12.0).reshape(6, 2) + 100 * rank for rank in range(3)]
        what = CollectiveCall(operation, "sum", (0, 1, 2), 2)
        for order in ((0, 1, 2), (2, 0, 1)):
            results = [np.full(what.result_shape((6, 2)), np.nan) for _ in operands]
            for position in order:
                before = [np.isnan(result).sum() for result in results]
                perform(what, position, operands, results)
                assert [np.isnan(result).sum() for result in results] != before
            for got, want in zip(results, meant(what, operands), strict=True):
                np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("operation", ["reduce_scatter", "all_to_all", "scatter"])
def test_an_operand_that_cannot_be_divided(operation: str) -> None:
    what = CollectiveCall(operation, "none", (0, 1, 2), place="layers.0 (m.py:4)")
    with pytest.raises(Error, match=r"dimension 0 of \[4, 2\] into 3 equal shards in layers.0"):
        what.result_shape((4, 2))


# -- what processes do too


def test_values_go_from_rank_to_rank() -> None:
    ThreadWorld(3).run(programs.mail)


@pytest.mark.parametrize("name", [*DISAGREEING, "waits_in_a_ring"])
def test_ranks_that_disagree_stop(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "began", lambda: None)
    sentence = EVERY_FAILURE[name][-1].removeprefix("KeyError: ")
    with pytest.raises((PeerError, KeyError), match=re.escape(sentence)):
        ThreadWorld(3).run(programs.named(name))


# -- failures

SOON = 100.0  # seconds after which a test fails


def stopped(ranks: int, work: Work, world: ThreadWorld | None = None) -> list[str]:
    """The message that every rank raised, or ""; the ranks are threads of the test."""
    world = world or ThreadWorld(ranks, 1e6)
    told = [""] * ranks

    def one(rank: int) -> None:
        communicator = world.communicator(rank)
        try:
            work(communicator)
        except Error as error:
            told[rank] = str(error)
        except ZeroDivisionError as error:
            world.fail(rank, f"rank {rank} failed: {error!r}")
            told[rank] = "crashed"

    every = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in every:
        thread.start()
    for thread in every:
        thread.join(SOON)
    assert not any(thread.is_alive() for thread in every), "a rank waits on"
    return told


def until(ready: Callable[[], bool]) -> None:
    end = time.monotonic() + SOON
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.001)


X = np.ones((6, 4), np.float32)


@pytest.mark.parametrize("where", ["exchange", "receive", "agree"])
def test_a_rank_that_fails_stops_all_others_at_once(where: str) -> None:
    def work(c: Communicator) -> None:
        call(c, "all_reduce", X)
        if c.rank == 1:
            time.sleep(0.05)
            _ = 1 / 0
        if where == "exchange":
            call(c, "all_reduce", X)
        elif where == "receive":
            c.receive(1)
        else:
            c.agree("nothing", "")

    failed = "rank 1 failed: ZeroDivisionError('division by zero')"
    assert stopped(3, work) == [failed, "crashed", failed]


def test_run_raises_what_the_first_rank_raised() -> None:
    def work(c: Communicator) -> None:
        if c.rank == 2:
            raise Error("the disk is full")
        call(c, "all_reduce", X)

    with pytest.raises(Error) as caught:
        ThreadWorld(3).run(work)
    assert str(caught.value) == "the disk is full\n  on rank 2 of 3"


def at(place: str, operation: str = "all_reduce", x: Any = X, group: tuple[int, ...] = ()) -> Work:
    """Makes a call at a place."""
    return lambda c: call(c, operation, x, group, place)


@pytest.mark.parametrize(
    ("mine", "theirs", "told"),
    [
        (
            at("a (m.py:1)"),
            at("b (m.py:2)", "all_gather"),
            r"rank 0 is at all_reduce \(sum\) from 1 of float32\[6, 4\] in a \(m.py:1\), "
            r"rank 1 at all_gather from 1 of float32\[6, 4\] in b \(m.py:2\)",
        ),
        (at("a"), at("b"), "rank 0 .* in a, rank 1 .* in b"),
        (at("a"), at("a", x=X[:4]), r"rank 0 .*\[6, 4\].*, rank 1 .*\[4, 4\].*"),
        (at("a"), at("a", x=X.astype(np.int32)), "rank 0 .*float32.*, rank 1 .*int32.*"),
        (at("a"), at("b", group=(1, 0)), "rank 0 .* in a, rank 1 .* in b"),
        (at("a"), lambda c: c.receive(0), "rank 0 .* in a, rank 1 at the values of rank 0"),
        (
            lambda c: c.agree("the sizes", "S=3"),
            at("b"),
            "rank 0 is at the comparison of the sizes, rank 1 .* in b",
        ),
    ],
)
def test_ranks_that_do_something_else_are_named(mine: Work, theirs: Work, told: str) -> None:
    for first in (0, 1):  # whoever comes first

        def work(c: Communicator, first: int = first) -> None:
            time.sleep(0.05 * (c.rank != first))
            (mine if c.rank == 0 else theirs)(c)

        found = stopped(2, work)
        assert found[0] == found[1]
        assert re.match(f"the ranks make different calls: {told};", found[0])


def test_a_rank_that_stalls_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_TURN", 0.05)
    world = ThreadWorld(3, 1e6)

    def work(c: Communicator) -> None:
        if c.rank == 1:
            until(lambda: len(world._waits) == 2)
            world.timeout = 0.2
            until(lambda: world._failed is not None)
        call(c, "all_reduce", X, place="line 3")

    found = stopped(3, work, world)
    assert found[0] == found[1] == found[2]
    assert found[0].startswith("rank 1 did not come to all_reduce (sum)")
    assert "in line 3: no rank has moved for 0.2 s; if it only takes long, give" in found[0]


def test_ranks_may_wait_as_long_as_others_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_TURN", 0.02)
    world = ThreadWorld(3, 1.0)

    def work(c: Communicator) -> None:
        if c.rank != 2:
            for _ in range(20):
                time.sleep(0.1)
                call(c, "all_reduce", X, (0, 1))
        call(c, "all_reduce", X)

    assert stopped(3, work, world) == [""] * 3
