"""Judging from signs of life, and the parts around it that need no second process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from irc.backends.mpi import guardian
from irc.backends.mpi import process as processes
from irc.backends.mpi.guardian import Guardian
from irc.backends.mpi.process import DISK, Glance, Home, Life, glance, own_home
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
    assert (ranks[1].heard, ranks[1].moved) == (NOW, NOW)
    ranks[1].heard -= 6
    assert judged(*ranks, glances={1: Glance(True, ticks=3, ready=True)}) == "", "others compute"
    ranks[1].heard -= 6
    assert judged(*ranks, glances={1: Glance(True, ticks=3, on_disk=True)}) == ""
    ranks[1].heard -= 6
    assert "uses no CPU" in judged(*ranks, glances={1: Glance(True, ticks=3)})


def test_a_rank_that_waits_for_a_disk_has_more_time() -> None:
    one = seen(1, WORKS)
    on_disk: dict[int, Glance | None] = {1: Glance(True, on_disk=True)}
    for _ in range(int(DISK) // 6):
        one.heard, one.moved = NOW - 6, NOW - 6
        assert judged(seen(0, WAITS, (1,)), one, glances=on_disk) == ""
    one.heard -= 6
    assert "for 65 s, as it waits for a disk or a driver" in judged(
        seen(0, WORKS), one, glances=on_disk
    )
    one.hear(Sign(1, HERE), NOW)
    one.heard -= 6
    assert judged(seen(0, WORKS), one, glances=on_disk) == "", "it has been heard since"


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
    began = int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19])
    there = Home(home.host, home.kernel, child.pid, began, 1)
    for number, seen in (
        (0, Glance(True)),
        (signal.SIGSTOP, Glance(True, stopped=True)),
        (signal.SIGKILL, Glance(False)),  # and nobody has waited for it
    ):
        os.kill(child.pid, number)
        until = time.monotonic() + 60
        while replace(glance(there) or seen, ticks=0, ready=False, on_disk=False) != seen:
            assert time.monotonic() < until, glance(there)
            time.sleep(0.01)
    child.communicate()


def test_a_process_that_computes_is_ready(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def seen(leader: str, other: str) -> Glance | None:
        for task, state in (("7", leader), ("8", other)):
            fields = [task, "(a b)", state, *["1"] * 10, "5", "6", *["1"] * 6, "44"]
            (tmp_path / "task" / task).mkdir(parents=True, exist_ok=True)
            (tmp_path / "task" / task / "stat").write_text(" ".join(fields))
        return glance(Home("a", "k", 7, 44, 1))

    monkeypatch.setattr(processes, "_kernel", lambda: "k")
    monkeypatch.setattr(processes, "_PROC", tmp_path)
    (tmp_path / "7").symlink_to(tmp_path)
    (tmp_path / "stat").symlink_to(tmp_path / "task" / "7" / "stat")
    assert [seen(*states) for states in ("RS", "SR", "DS", "SD", "DR", "SS", "TT", "ZS")] == [
        *[Glance(True, ticks=11, ready=True)] * 2,
        *[Glance(True, ticks=11, on_disk=True)] * 2,
        Glance(True, ticks=11, ready=True, on_disk=True),
        Glance(True, ticks=11),
        Glance(True, stopped=True, ticks=11),
        Glance(False),
    ]


def test_computing_is_life_and_waiting_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        processes, "_task_states", lambda process: set()
    )  # pytest's threads may run
    life = Life()

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
    # the kernel may read something from the disk meanwhile, but not always
    assert any(abs(grown(lambda: time.sleep(0.1))) < 20 for _ in range(5))


def guardian_of(ranks: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Guardian, dict[str, Any]]:
    """A guardian, and what it sees: the ranks, the launcher's state and ticks, one that begins."""
    world: dict[str, Any] = {"living": range(ranks), "state": "S", "ticks": 0, "begins": False}

    def stat(process: str) -> list[str]:
        return [world["state"], *["0"] * 10, "3", str(world["ticks"])]

    found = {rank: guardian.Living("S", (rank,)) for rank in range(ranks)}
    living = lambda launcher: {rank: found[rank] for rank in world["living"]}  # noqa: E731
    monkeypatch.setattr(guardian, "ranks_below", living)
    monkeypatch.setattr(guardian, "is_beginning", lambda launcher: world["begins"])
    monkeypatch.setattr(guardian, "stat_of", stat)
    return Guardian(0, 0, 0, ranks, ranks), world


def test_a_rank_that_has_ended_is_missed_at_the_second_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    guard, world = guardian_of(3, monkeypatch)
    gone = "rank 1 ended before it had met the others", 1
    assert [guard.problem(NOW) for _ in range(3)] == [None] * 3
    world["living"] = [0, 2]
    assert [guard.problem(NOW) for _ in range(2)] == [None, gone]


def test_a_rank_that_has_not_begun_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    guard, world = guardian_of(2, monkeypatch)
    guard.problem(NOW)
    world |= {"living": [0], "state": "R"}
    assert [guard.problem(NOW) for _ in range(9)] == [None] * 9, "the launcher gets no core"
    world |= {"ticks": 5, "begins": True}
    assert [guard.problem(NOW) for _ in range(9)] == [None] * 9, "a process is yet to begin"
    world |= {"begins": False}
    assert [guard.problem(NOW) for _ in range(9)] == [None] * 9, "it got none since"
    found: list[object] = []
    for world["ticks"] in (6, 7):
        found.append(guard.problem(NOW))
    assert found == [None, ("rank 1 ended before it had met the others", 1)]


FORK = """
import os, sys, time
if not os.fork():
    print("there", flush=True)
    sys.stdin.readline()
    os.execvp(sys.executable, [sys.executable, "-c", "input()"])
os.wait()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_process_that_is_no_program_yet_is_seen() -> None:
    command = [sys.executable, "-c", FORK]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as launcher:
        assert launcher.stdin is not None and launcher.stdout is not None
        assert launcher.stdout.readline() == b"there\n"
        assert guardian.is_beginning(launcher.pid)
        launcher.stdin.write(b"now\n")
        launcher.stdin.flush()
        until = time.monotonic() + 60
        while guardian.is_beginning(launcher.pid):
            assert time.monotonic() < until
            time.sleep(0.01)


def test_a_thread_that_may_run_is_life() -> None:
    over = threading.Event()

    def spin() -> None:
        while not over.is_set():
            sum(range(1000))

    thread = threading.Thread(target=spin)
    thread.start()
    until = time.monotonic() + 60
    while "R" not in processes._task_states("self"):
        assert time.monotonic() < until
    over.set()
    thread.join()


def test_a_disk_that_never_answers_is_no_life() -> None:
    life = Life()
    assert life._goes_on({"S", "D"}, NOW) and life._goes_on({"D"}, NOW + DISK - 1)
    assert not life._goes_on({"D"}, NOW + DISK)
    assert life._goes_on({"D", "R"}, NOW + DISK), "another thread computes"
    assert not life._goes_on({"S"}, NOW + DISK)
    assert life._goes_on({"D"}, NOW + DISK), "it waits anew"


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
