"""Judging from signs of life, and the parts around it that need no second process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from irc.backends.mpi.process import Glance, Home, glance, life, own_home
from irc.backends.mpi.sign import ENDED, MOVES, PAUSED, SIZE, WAITS, WORKS, Failure, Seen, Sign
from irc.backends.mpi.sign import decoded as sign_of
from irc.backends.mpi.verdict import verdict
from irc.cli.frames import ERR, OUT, FrameReader
from irc.cli.place import Place, place_in_world

NOW, LIMIT = 100.0, 5.0
HERE = Home("here", "linux 1", 7, 1, 1)


def seen(rank: int, state: str, awaits: tuple[int, ...] = (), heard: float = 0, moved: float = 0):
    """A rank, heard and moved so many seconds ago."""
    doing = f"call {rank}" if state in (WAITS, MOVES) else ""
    sign = Sign(rank, HERE, state, doing=doing, awaits=awaits)
    return Seen(sign, NOW - heard, NOW - moved)


def judged(*ranks: Seen, glances: dict[int, Glance | None] | None = None) -> str:
    found = verdict(0, dict(enumerate(ranks)), glances or {}, LIMIT, NOW)
    return found.text if found is not None else ""


@pytest.mark.parametrize(
    ("ranks", "sentence"),
    [
        # nothing is wrong
        ([seen(0, WAITS, (1,)), seen(1, WORKS)], ""),
        ([seen(0, WORKS), seen(1, WAITS, (0,), moved=90)], ""),
        ([seen(0, WAITS, (1,), moved=90), seen(1, PAUSED, moved=90)], ""),
        ([seen(0, WAITS, (1,), moved=9), seen(1, WAITS, (2,), moved=9), seen(2, WORKS)], ""),
        ([seen(0, MOVES, (1,), moved=50), seen(1, MOVES, (0,), moved=50)], ""),
        ([seen(0, WAITS, (1,), moved=9), seen(1, MOVES, (0,), moved=9)], ""),
        ([seen(0, WAITS, (1,), moved=9), seen(1, WAITS, (0,), moved=1)], ""),
        # something is
        ([seen(0, WORKS), seen(1, WORKS, heard=6)], "rank 1 (process 7 on here) stalls"),
        ([seen(0, WAITS, (1,)), seen(1, WORKS, moved=6)], "rank 1 (process 7 on here) is stuck"),
        (
            [seen(0, WAITS, (1,)), seen(1, WAITS, (2,)), seen(2, WORKS, moved=6)],
            "rank 2 (process 7 on here) is stuck",
        ),
        (
            [seen(0, WAITS, (1,), moved=6), seen(1, WAITS, (2,), moved=6), seen(2, ENDED)],
            "rank 0 is at call 0, but rank 2 has finished",
        ),
        (
            [seen(0, WAITS, (1,), moved=6), seen(1, WAITS, (0,), moved=6)],
            "rank 0 is at call 0, rank 1 at call 1",
        ),
        (
            [seen(0, MOVES, (1,), moved=61), seen(1, MOVES, (0,), moved=61)],
            "nothing has arrived at rank 0 for 60 s",
        ),
    ],
)
def test_judgement(ranks: list[Seen], sentence: str) -> None:
    assert sentence in judged(*ranks)
    assert bool(sentence) == bool(judged(*ranks))


def test_what_the_kernel_says_counts() -> None:
    ranks = [seen(0, WORKS), seen(1, WORKS, heard=6)]
    assert "died" in judged(seen(0, WORKS), seen(1, WORKS), glances={1: Glance(False)})
    assert "(SIGSTOP)" in judged(*ranks, glances={1: Glance(True, stopped=True)})
    assert judged(*ranks, glances={1: Glance(True, ticks=3)}) == "", "it computes, but cannot speak"
    assert ranks[1].heard == NOW
    ranks[1].heard -= 6
    assert "uses no CPU" in judged(*ranks, glances={1: Glance(True, ticks=3)})


def test_signs_survive_the_wire() -> None:
    sign = Sign(3, HERE, WAITS, 5, 7, "é" * 5000, (1, 2), Failure("\n" * 5000, (1,)), True)
    data = sign.encoded()
    assert len(data) <= SIZE
    found = sign_of(data)
    assert (found.rank, found.home, found.awaits, found.said) == (3, HERE, (1, 2), True)
    assert found.failure is not None and found.failure.silent == (1,)
    assert sign_of(Sign(0, HERE).encoded()) == Sign(0, HERE)


def test_a_rank_that_computes_moves() -> None:
    one = Seen(Sign(1, HERE, WORKS, life=100), NOW, NOW)
    one.hear(Sign(1, HERE, WORKS, life=105), NOW + 1)
    assert (one.heard, one.moved) == (NOW + 1, NOW)
    one.hear(Sign(1, HERE, WORKS, life=125), NOW + 2)
    assert one.moved == NOW + 2, "small steps add up"
    one.hear(Sign(1, HERE, WAITS, progress=1), NOW + 3)
    assert one.moved == NOW + 3


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_process_is_seen() -> None:
    home = own_home()
    assert home.process == os.getpid()
    found = glance(home)
    assert found is not None and (found.there, found.stopped) == (True, False)
    assert glance(Home(home.host, "another", home.process, home.began, 1)) is None
    assert glance(Home(home.host, home.kernel, home.process, home.began + 1, 1)) == Glance(False)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    child.kill()
    time.sleep(0.1)
    assert glance(Home(home.host, home.kernel, child.pid, 0, 1)) == Glance(False)
    child.communicate()


def test_computing_is_life_and_waiting_is_none() -> None:
    def grown(do: Callable[[], object]) -> int:
        before = life()
        do()
        return life() - before

    def spin() -> None:
        until = time.thread_time() + 0.1
        while time.thread_time() < until:
            pass

    def in_a_thread() -> None:
        thread = threading.Thread(target=spin)
        thread.start()
        thread.join()

    assert grown(in_a_thread) >= 20
    # a thread of the tests' own may run at either end, but not always
    assert any(abs(grown(lambda: time.sleep(0.1))) < 20 for _ in range(5))


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_frames_are_found_however_they_are_cut(step: int) -> None:
    mark = b"\0abc "
    data = b"MPI\0a" + mark + b"out 5\nab\0cd" + mark + b"err 0\n" + b"!" + mark + b"out 2\nxy\0ab"
    reader = FrameReader("abc")
    found: dict[str, bytes] = {}
    for start in range(0, len(data), step):
        for kind, text in reader.feed(data[start : start + step]):
            found[kind] = found.get(kind, b"") + text
    assert found == {"": b"MPI\0a!", OUT: b"ab\0cdxy", ERR: b""}


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({}, None),
        ({"PMI_RANK": "1", "PMI_SIZE": "4"}, Place(1, 4)),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, Place(0, 2)),
        ({"PMIX_RANK": "3", "SLURM_NTASKS": "8"}, Place(3, 8)),
        ({"SLURM_NTASKS": "8"}, None),
        ({"PMI_RANK": "x", "PMI_SIZE": "4"}, None),
    ],
)
def test_the_environment_tells_the_rank(variables: dict[str, str], place: Place | None) -> None:
    assert place_in_world(variables) == place


def test_signs_are_json() -> None:
    assert json.loads(Sign(0, HERE).encoded())["state"] == WORKS
