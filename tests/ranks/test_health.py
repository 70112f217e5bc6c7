"""The health check, and the parts around it that need no second process."""

from __future__ import annotations

import mmap
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from irc.backends.ranks import process as processes
from irc.backends.ranks.environment import Place, find_place
from irc.backends.ranks.frames import ERR, OUT, FrameReader
from irc.backends.ranks.health import (
    ENDED,
    PAUSED,
    RUNNING,
    TRANSFERRING,
    WAITING,
    Heartbeat,
    Peer,
    find_failure,
)
from irc.backends.ranks.process import (
    DISK,
    Activity,
    ProcessState,
    RankProcess,
    own_process,
    remove_stale_shared_memory,
    state_of,
)

NOW, LIMIT = 100.0, 5.0
HERE = RankProcess("here", 7, "linux 1", 1, 1)
WHO = "rank 1 (process 7 on here)"


def peer(
    rank: int,
    state: str,
    awaits: tuple[int, ...] = (),
    heard: float = 0,
    moved: float = 0,
    call: str = "",
) -> Peer:
    """A rank, heard and moved so many seconds ago."""
    text = (call or f"call {rank}") if state in (WAITING, TRANSFERRING) else ""
    beat = Heartbeat(rank, HERE, state, call=text, awaits=awaits)
    return Peer(beat, NOW - heard, NOW - moved)


def failure(*peers: Peer, states: dict[int, ProcessState | None] | None = None) -> str:
    found = find_failure(0, dict(enumerate(peers)), states or {}, LIMIT, NOW)
    return found.text if found is not None else ""


@pytest.mark.parametrize(
    ("peers", "sentence"),
    [
        # nothing is wrong
        ([peer(0, WAITING, (1,)), peer(1, RUNNING)], ""),
        ([peer(0, RUNNING), peer(1, WAITING, (0,), moved=90)], ""),
        ([peer(0, WAITING, (1,), moved=90), peer(1, PAUSED, moved=90)], ""),
        ([peer(0, WAITING, (1,), moved=9), peer(1, WAITING, (2,), moved=9), peer(2, RUNNING)], ""),
        ([peer(0, TRANSFERRING, (1,), moved=50), peer(1, TRANSFERRING, (0,), moved=50)], ""),
        ([peer(0, WAITING, (1,), moved=9), peer(1, TRANSFERRING, (0,), moved=9)], ""),
        ([peer(0, WAITING, (1,), moved=9), peer(1, WAITING, (0,), moved=1)], ""),
        ([peer(i, WAITING, (1 - i,), moved=50, call="one") for i in range(2)], ""),
        ([peer(0, RUNNING), peer(1, TRANSFERRING, (0,), heard=50)], ""),
        # something is
        ([peer(0, RUNNING), peer(1, RUNNING, heard=6)], f"{WHO} stalls"),
        ([peer(0, RUNNING), peer(1, TRANSFERRING, (0,), heard=61)], f"{WHO} stalls"),
        ([peer(0, WAITING, (1,)), peer(1, RUNNING, moved=6)], f"{WHO} is stuck"),
        (
            [peer(0, WAITING, (1,)), peer(1, WAITING, (2,)), peer(2, RUNNING, moved=6)],
            "rank 2 (process 7 on here) is stuck",
        ),
        (
            [peer(0, WAITING, (1,), moved=6), peer(1, WAITING, (2,), moved=6), peer(2, ENDED)],
            "rank 0 is at call 0, but rank 2 has finished",
        ),
        (
            [peer(0, WAITING, (1,), moved=6), peer(1, WAITING, (0,), moved=6)],
            "rank 0 is at call 0, rank 1 at call 1",
        ),
        (
            [peer(0, TRANSFERRING, (1,), moved=61), peer(1, TRANSFERRING, (0,), moved=61)],
            "nothing has arrived at rank 0 for 61 s",
        ),
        (
            [peer(i, WAITING, (1 - i,), moved=61, call="one") for i in range(2)],
            f"which is at one and waits for {WHO}",
        ),
    ],
)
def test_failures_are_found(peers: list[Peer], sentence: str) -> None:
    assert sentence in failure(*peers)
    assert bool(sentence) == bool(failure(*peers))


def test_what_the_kernel_reports_counts() -> None:
    ranks = [peer(0, RUNNING), peer(1, RUNNING, heard=6)]
    silent = ranks[1]
    gone: dict[int, ProcessState | None] = {1: ProcessState(False)}
    assert "died" in failure(peer(0, RUNNING), peer(1, RUNNING), states=gone)
    assert "(SIGSTOP)" in failure(*ranks, states={1: ProcessState(True, stopped=True)})
    computes = ProcessState(True, ticks=30)
    assert failure(*ranks, states={1: computes}) == "", "it computes, but sends no heartbeat"
    assert (silent.heard, silent.moved) == (NOW, NOW)
    silent.heard -= 6
    assert failure(*ranks, states={1: replace(computes, runnable=True)}) == "", "others compute"
    silent.heard -= 6
    assert "uses no CPU" in failure(*ranks, states={1: computes})


def test_a_rank_that_waits_for_a_disk_has_more_time() -> None:
    on_disk: dict[int, ProcessState | None] = {1: ProcessState(True, on_disk=True)}
    for seconds in (6, DISK):
        one = peer(1, RUNNING, heard=seconds, moved=seconds)
        assert failure(peer(0, WAITING, (1,)), one, states=on_disk) == ""
    late = peer(1, RUNNING, heard=DISK + 1)
    text = failure(peer(0, RUNNING), late, states=on_disk)
    assert "for 61 s, as it waits for a disk or a driver" in text


def test_a_rank_that_computes_moves() -> None:
    one = Peer(Heartbeat(1, HERE, activity=100), NOW, NOW)
    one.hear(Heartbeat(1, HERE, activity=105), NOW + 1)
    assert (one.heard, one.moved) == (NOW + 1, NOW)
    one.hear(Heartbeat(1, HERE, activity=125), NOW + 2)
    assert one.moved == NOW + 2, "small steps add up"
    one.hear(Heartbeat(1, HERE, WAITING, progress=1), NOW + 3)
    assert one.moved == NOW + 3
    stuck = Peer(Heartbeat(1, HERE), NOW, NOW)  # its driver's threads use a little CPU time
    for beat in range(1, 21):
        stuck.hear(Heartbeat(1, HERE, activity=3 * beat), NOW + beat / 2)
    assert stuck.moved == NOW


def test_the_state_of_a_process() -> None:
    own = own_process()
    assert own.process == os.getpid()
    found = state_of(own)
    assert found is not None and (found.exists, found.stopped) == (True, False)
    assert state_of(replace(own, kernel="another")) is None
    assert state_of(replace(own, began=own.began + 1)) == ProcessState(False)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    began = int(processes.stat_fields(child.pid)[19])
    there = replace(own, process=child.pid, began=began)
    for number, wanted in (
        (0, ProcessState(True)),
        (signal.SIGSTOP, ProcessState(True, stopped=True)),
        (signal.SIGKILL, ProcessState(False)),  # and nobody has waited for it
    ):
        os.kill(child.pid, number)
        until = time.monotonic() + 60
        while replace(state_of(there) or wanted, ticks=0, runnable=False, on_disk=False) != wanted:
            assert time.monotonic() < until, state_of(there)
            time.sleep(0.01)
    child.communicate()


def test_stale_files_of_mpich_are_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Those that are old, and that no process maps."""
    monkeypatch.setattr("irc.backends.ranks.process.SHM", tmp_path)
    names = ("mpich_shm_old", "mpich_shm_mapped", "mpich_shm_new", "other")
    for name in names:
        (tmp_path / name).write_bytes(bytes(9))
    for name in ("mpich_shm_old", "mpich_shm_mapped", "other"):
        os.utime(tmp_path / name, (0, 0))
    with (
        (tmp_path / "mpich_shm_mapped").open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ),
    ):
        remove_stale_shared_memory()
    assert {path.name for path in tmp_path.iterdir()} == {*names} - {"mpich_shm_old"}
    monkeypatch.setattr("irc.backends.ranks.process.SHM", tmp_path / "missing")
    remove_stale_shared_memory()


def test_the_threads_of_a_process_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def state(leader: str, other: str) -> ProcessState | None:
        for task, each in (("7", leader), ("8", other)):
            fields = [task, "(a b)", each, *["1"] * 10, "5", "6", *["1"] * 6, "44"]
            (tmp_path / "task" / task).mkdir(parents=True, exist_ok=True)
            (tmp_path / "task" / task / "stat").write_text(" ".join(fields))
        return state_of(RankProcess("a", 7, "k", 44, 1))

    monkeypatch.setattr(processes, "_kernel", lambda: "k")
    monkeypatch.setattr(processes, "PROC", tmp_path)
    (tmp_path / "7").symlink_to(tmp_path)
    (tmp_path / "stat").symlink_to(tmp_path / "task" / "7" / "stat")
    alive = ProcessState(True, ticks=11)
    assert [state(*each) for each in ("RS", "SR", "DS", "DR", "SS", "TT", "ZS")] == [
        *[replace(alive, runnable=True)] * 2,
        replace(alive, on_disk=True),
        replace(alive, runnable=True, on_disk=True),
        alive,
        replace(alive, stopped=True),
        ProcessState(False),
    ]


def test_computing_is_activity_and_sleeping_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    # pytest's threads may run
    monkeypatch.setattr(processes, "_thread_states", lambda process: set())
    activity = Activity()

    def grown(do: Callable[[], object]) -> int:
        before = activity()
        do()
        return activity() - before

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


def test_a_disk_that_never_answers_is_no_activity() -> None:
    activity = Activity()
    assert activity.is_busy({"S", "D"}, NOW) and activity.is_busy({"D"}, NOW + DISK - 1)
    assert not activity.is_busy({"D"}, NOW + DISK)
    assert activity.is_busy({"D", "R"}, NOW + DISK), "another thread computes"
    assert not activity.is_busy({"S"}, NOW + DISK)
    assert activity.is_busy({"D"}, NOW + DISK), "it waits anew"


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_frames_are_found_in_any_pieces(step: int) -> None:
    mark = b"\0abc "
    data = b"MPI\0a" + mark + b'["out", "a\\u0000\\nb"]\n' + mark + b'["err", ""]\n!\n'
    # a frame in which another one, or the launcher's words, begin
    data += mark + b'["out", "lo' + mark + b'["out", "x"]\n' + mark + b'["out", "MPI\nab'
    reader = FrameReader("abc")
    found: dict[str, str] = {}
    for start in range(0, len(data), step):
        for kind, text in reader.feed(data[start : start + step]):
            found[kind] = found.get(kind, "") + text
    lost = '\0abc ["out", "lo'
    assert found == {"": f"MPI\0a!\n{lost}", OUT: "a\0\nbx", ERR: ""}


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}
SLURM = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"}


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({}, None),
        ({"PMI_RANK": "1", "PMI_SIZE": "4"}, Place(1, 4)),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, Place(0, 2)),
        ({"PMIX_RANK": "3", "SLURM_NTASKS": "8"}, Place(3, 8)),
        ({"PMI_RANK": "0", "PMI_SIZE": "2", **TORCHRUN}, Place(0, 2)),
        ({"SLURM_NTASKS": "8"}, None),
        ({**SLURM, "SLURM_NTASKS": "1"}, None),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, None),  # a batch script
        ({"PMI_RANK": "x", "PMI_SIZE": "4"}, None),
    ],
)
def test_the_environment_names_the_rank(variables: dict[str, str], place: Place | None) -> None:
    assert find_place(variables) == place


@pytest.mark.parametrize(
    ("variables", "instead"),
    [(TORCHRUN, "torchrun started .* mpirun -n 2 irc"), (SLURM, r"with srun --mpi=pmi2")],
)
def test_other_launchers_are_refused(variables: dict[str, str], instead: str) -> None:
    place = find_place(variables)
    assert place is not None and re.search(instead, place.refusal)
