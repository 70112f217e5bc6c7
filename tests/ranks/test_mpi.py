"""Ranks over MPI: every collective, and how all ranks stop when one dies, hangs or differs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from irc.backends.ranks import watcher
from irc.backends.ranks.launch import LaunchedRank, find_launched_rank
from irc.backends.ranks.watcher import (
    PAUSED,
    RUNNING,
    TRANSFERRING,
    WAITING,
    Heartbeat,
    Peer,
    RankProcess,
    find_failure,
)
from tests.fresh import session_seed
from tests.ranks.worlds import Outcome, World, needs_mpi, outcomes, program, started

SOON = 60  # seconds; nine on an idle machine

# name -> (ranks, the ranks without a message, the message of every other rank)
FAILING = {
    "dies": (3, {1}, r"rank 1 (process"),
    "first_dies": (2, {0}, "rank 0 (process"),
    "stops": (3, {1}, "stalls: it has sent no heartbeat for 5 s, as its process is stopped"),
    "is_stuck": (2, {1}, "is stuck: for 5 s it has neither computed nor read anything, while"),
    "is_stuck_in_c": (2, {1}, "stalls: it has sent no heartbeat for 5 s, and it uses no CPU"),
    "waits_in_a_ring": (3, set[int](), "the ranks make different calls: rank 0 is at the values"),
    "raises_while_others_compute": (2, {0}, "KeyError: 'surprise'"),
}
# failures that are found at once: program -> the message of all ranks
DISAGREEING = {
    "differs": "the ranks differ in the artifact: rank 0 has sha256:good, rank 1 has sha256:bad",
    "other_call": "all_reduce (sum) of float32[5] in layers.0 (model.py:3)",
    "skips": "rank 1 at the end",
    "raises": "KeyError: 'surprise'",
}


def run(name: str, ranks: int, folder: Path) -> tuple[dict[int, Outcome], tuple[int, str, str]]:
    session_seed()
    with started(program(ranks, name, folder)) as world:
        ended = world.end()
    return outcomes(folder), ended


@needs_mpi
@pytest.mark.parametrize(
    ("name", "ranks"), [("collectives", 2), ("collectives", 3), ("mail", 3), ("alone", 1)]
)
def test_collectives_and_transfers_mean_what_they_say(
    name: str, ranks: int, tmp_path: Path
) -> None:
    ends, ended = run(name, ranks, tmp_path)
    assert {r: end.outcome for r, end in ends.items()} == dict.fromkeys(range(ranks), "done"), ended


@needs_mpi
@pytest.mark.parametrize("name", DISAGREEING)
def test_ranks_that_disagree_stop_at_once(name: str, tmp_path: Path) -> None:
    """Not by the silence of a rank (see LIMITS)."""
    ends, (status, _, err) = run(name, 3, tmp_path)
    assert status == 1
    assert sorted(ends) == [0, 1, 2]
    for rank, end in ends.items():
        assert DISAGREEING[name] in end.outcome, ends
        assert "rank 1" in end.outcome or rank == 1
    assert err == "", "the program reports the failure, and the library does not"


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[World, Path]]]:
    """Runs that mostly wait, all at the same time."""
    ranks_of = {"works": 2} | {name: ranks for name, (ranks, _, _) in FAILING.items()}
    with ExitStack() as stack:
        worlds: dict[str, tuple[World, Path]] = {}
        for name, ranks in ranks_of.items():
            folder = tmp_path_factory.mktemp(name)
            worlds[name] = stack.enter_context(started(program(ranks, name, folder))), folder
        yield worlds


@needs_mpi
@pytest.mark.parametrize("name", FAILING)
def test_every_rank_stops_and_names_the_one_that_failed(
    name: str, slow: dict[str, tuple[World, Path]]
) -> None:
    world, folder = slow[name]
    status, _, err = world.end()
    ends = outcomes(folder)
    ranks, silent, sentence = FAILING[name]
    assert status == 1, (ends, err)
    assert sorted(ends) == [rank for rank in range(ranks) if rank not in silent], err
    for end in ends.values():
        assert sentence in end.outcome
        assert end.seconds < SOON
    if name == "raises_while_others_compute":
        assert err == "error: rank 1 failed: KeyError: 'surprise'\n"


@needs_mpi
def test_a_slow_rank_never_times_out(slow: dict[str, tuple[World, Path]]) -> None:
    world, folder = slow["works"]
    assert world.end()[0] == 0
    assert {rank: end.outcome for rank, end in outcomes(folder).items()} == {0: "done", 1: "done"}


@needs_mpi
def test_a_rank_that_dies_before_mpi_starts_is_named(tmp_path: Path) -> None:
    """MPI itself would wait for it."""
    ends, (status, _, err) = run("dies_early", 3, tmp_path)
    assert (status != 0, ends) == (True, {})
    assert "error: rank 1 died before MPI had started on all ranks: Killed\n" in err


def test_a_lost_rank_is_reported_within_ten_seconds() -> None:
    """The longest time from the last heartbeat to the message, and to the end of all."""
    report = watcher.LIMIT + watcher.EVERY + watcher.LISTEN + watcher.GRACE
    assert report + watcher.END < 10


# -- the health check

NOW, LIMIT = 100.0, 5.0
WHO = r"rank 1 \(process 7 on there\) "


def peer(
    state: str,
    awaits: tuple[int, ...] = (),
    heard: float = 0,
    moved: float = 0,
    call: str = "a",
    kernel: str = "",
) -> Peer:
    """A rank, heard and moved so many seconds ago; of this host where its kernel is known."""
    beat = Heartbeat(state, call=call, awaits=awaits)
    return Peer(RankProcess("there", 7, kernel), NOW - heard, NOW - moved, beat)


@pytest.mark.parametrize(
    ("peers", "sentence"),
    [
        # nothing is wrong
        ([peer(WAITING, (1,)), peer(RUNNING)], ""),
        ([peer(RUNNING), peer(WAITING, (0,), moved=90)], ""),
        ([peer(WAITING, (1,), moved=90), peer(PAUSED, moved=90)], ""),
        ([peer(WAITING, (1,), moved=9), peer(WAITING, (2,), moved=9, call="b"), peer(RUNNING)], ""),
        ([peer(TRANSFERRING, (1,), moved=50), peer(TRANSFERRING, (0,), moved=50)], ""),
        ([peer(WAITING, (1,), moved=9), peer(WAITING, (0,), moved=1, call="b")], ""),
        ([peer(WAITING, (1,), moved=50), peer(WAITING, (0,), moved=50)], ""),
        ([peer(RUNNING), peer(TRANSFERRING, (0,), heard=50)], ""),
        # something is
        ([peer(RUNNING), peer(RUNNING, heard=6)], f"{WHO}stalls: it has sent no heartbeat for 6 s"),
        ([peer(RUNNING), peer(TRANSFERRING, (0,), heard=61)], f"{WHO}stalls"),
        ([peer(WAITING, (1,)), peer(RUNNING, moved=6)], f"{WHO}is stuck: .* rank 0 waits .* at a"),
        (
            [peer(WAITING, (1,), moved=6), peer(WAITING, (0,), moved=6, call="b")],
            "different calls: rank 0 is at a, rank 1 at b",
        ),
    ],
)
def test_failures_are_found(peers: list[Peer], sentence: str) -> None:
    failure = find_failure(0, dict(enumerate(peers)), LIMIT, NOW)
    assert bool(failure) == bool(sentence)
    assert failure is None or re.search(sentence, failure.text)


@pytest.mark.parametrize(
    ("stat", "heard", "sentence"),
    [
        (("X", 0), 0, f"{WHO}died: its process is gone"),
        (("T", 5), 6, r"as its process is stopped \(SIGSTOP\)"),
        (("S", 5), 6, "and it uses no CPU"),
        (("R", 99), 6, ""),  # it computes, and keeps Python's lock meanwhile
    ],
)
def test_what_the_kernel_reports_counts(
    stat: tuple[str, int], heard: float, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watcher, "process_stat", lambda process: stat)
    own, other = peer(RUNNING, kernel="linux"), peer(RUNNING, heard=heard, kernel="linux")
    failure = find_failure(0, {0: own, 1: other}, LIMIT, NOW)
    assert bool(failure) == bool(sentence)
    assert failure is None or re.search(sentence, failure.text)


def test_a_rank_that_computes_moves() -> None:
    one = Peer(RankProcess("here", 7, ""), NOW, NOW, Heartbeat(activity=100), 100)
    one.record_heartbeat(Heartbeat(activity=103), NOW + 1)
    assert (one.heard, one.moved) == (NOW + 1, NOW)
    one.record_heartbeat(Heartbeat(activity=125), NOW + 2)
    assert one.moved == NOW + 2, "small steps add up"
    one.record_heartbeat(Heartbeat(WAITING, progress=1), NOW + 3)
    assert one.moved == NOW + 3
    stuck = Peer(RankProcess("here", 7, ""), NOW, NOW)  # its driver's threads use a little CPU time
    for beat in range(1, 21):
        stuck.record_heartbeat(Heartbeat(activity=3 * beat), NOW + beat / 2)
    assert stuck.moved == NOW


# -- the environment

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}
SLURM = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"}


@pytest.mark.parametrize(
    ("variables", "rank"),
    [
        ({}, None),
        ({"PMI_RANK": "1", "PMI_SIZE": "4"}, LaunchedRank(1, 4)),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, LaunchedRank(0, 2)),
        ({"PMIX_RANK": "3", "SLURM_NTASKS": "8"}, LaunchedRank(3, 8)),
        ({"PMI_RANK": "0", "PMI_SIZE": "2", **TORCHRUN}, LaunchedRank(0, 2)),
        ({"SLURM_NTASKS": "8"}, None),
        ({**SLURM, "SLURM_NTASKS": "1"}, None),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, None),  # a batch script
        ({"PMI_RANK": "x", "PMI_SIZE": "4"}, None),
    ],
)
def test_the_environment_names_the_rank(
    variables: dict[str, str], rank: LaunchedRank | None
) -> None:
    assert find_launched_rank(variables) == rank


@pytest.mark.parametrize(
    ("variables", "instead"),
    [(TORCHRUN, "torchrun started .* mpirun -n 2 irc"), (SLURM, r"with srun --mpi=pmi2")],
)
def test_other_launchers_are_refused(variables: dict[str, str], instead: str) -> None:
    rank = find_launched_rank(variables)
    assert rank is not None and re.search(instead, rank.refusal)
