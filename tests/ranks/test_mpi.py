"""Ranks over MPI: every collective, and how all ranks stop when one dies, hangs or differs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
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

Run = Callable[[str, int], tuple[dict[int, Outcome], int, str]]
SOON = 60  # seconds; nine on an idle machine

# program -> (ranks, the ranks without a message, the message of every other rank)
FAILING = {
    "dies": (3, {1}, "rank 1 (process"),
    "first_dies": (2, {0}, "rank 0 (process"),
    "stops": (3, {1}, "stalls: it has sent no heartbeat for 5 s, as its process is stopped"),
    "is_stuck": (2, {1}, "is stuck: for 5 s it has neither computed nor read anything, while"),
    "is_stuck_in_c": (2, {1}, "stalls: it has sent no heartbeat for 5 s, as it idles with Python"),
    "waits_in_a_ring": (3, set[int](), "the ranks make different calls: rank 0 is at the values"),
    "raises_while_others_compute": (2, {0}, "KeyError: 'surprise'"),
}
# found at once, not by the silence of a rank
DISAGREEING = {
    "differs": (3, set(), "the ranks differ in the artifact: rank 0 has sha256:good, rank 1 has"),
    "other_call": (3, set(), "all_reduce (sum) of float32[5] in layers.0 (model.py:3)"),
    "skips": (3, set(), "rank 1 at the end"),
    "raises": (3, set(), "KeyError: 'surprise'"),
}
EVERY_FAILURE = FAILING | DISAGREEING
WORKING = {"collectives": 3, "two": 2, "alone": 1, "works": 2}  # program -> ranks


@pytest.fixture(scope="module")
def waiting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[World, Path]]]:
    """Runs that mostly wait, all at the same time."""
    ranks_of = {"works": WORKING["works"]} | {name: row[0] for name, row in FAILING.items()}
    with ExitStack() as stack:
        worlds: dict[str, tuple[World, Path]] = {}
        for name, ranks in ranks_of.items():
            folder = tmp_path_factory.mktemp(name)
            worlds[name] = stack.enter_context(started(program(ranks, name, folder))), folder
        yield worlds


@pytest.fixture
def run(waiting: dict[str, tuple[World, Path]], tmp_path: Path) -> Run:
    """How the ranks of a program ended, its exit status, and standard error."""

    def ended(name: str, ranks: int) -> tuple[dict[int, Outcome], int, str]:
        if name in waiting:
            world, folder = waiting[name]
            status, _, err = world.end()
            return outcomes(folder), status, err
        session_seed()
        with started(program(ranks, name, tmp_path)) as world:
            status, _, err = world.end()
        return outcomes(tmp_path), status, err

    return ended


@needs_mpi
@pytest.mark.parametrize("name", WORKING)
def test_collectives_transfers_and_slow_ranks(name: str, run: Run) -> None:
    ends, status, err = run(name, WORKING[name])
    texts = {rank: end.outcome for rank, end in ends.items()}
    assert (status, texts) == (0, dict.fromkeys(range(WORKING[name]), "done")), err


@needs_mpi
@pytest.mark.parametrize("name", EVERY_FAILURE)
def test_every_rank_stops_and_names_the_one_that_failed(name: str, run: Run) -> None:
    ranks, silent, sentence = EVERY_FAILURE[name]
    ends, status, err = run(name, ranks)
    assert status == 1, (ends, err)
    assert sorted(ends) == [rank for rank in range(ranks) if rank not in silent], err
    for end in ends.values():
        assert sentence in end.outcome
        assert end.seconds < SOON
    if name == "raises_while_others_compute":
        assert err == "error: rank 1 failed: KeyError: 'surprise'\n"
    if name in DISAGREEING:
        assert all("rank 1" in end.outcome for rank, end in ends.items() if rank != 1), ends
        assert err == "", "the program reports the failure, and the library does not"


@needs_mpi
def test_a_rank_that_dies_before_mpi_starts_is_named(run: Run) -> None:
    """MPI itself would wait for it."""
    ends, status, err = run("dies_early", 3)
    assert (status != 0, ends) == (True, {})
    assert "error: rank 1 died before MPI had started on all ranks: Killed\n" in err


def test_a_lost_rank_is_reported_within_ten_seconds() -> None:
    """The longest time from the last heartbeat to the message, and to the end of all."""
    report = watcher.LIMIT + 2 * watcher.EVERY + watcher.LISTEN + watcher.GRACE
    assert report + watcher.END < 10


# -- the health check

NOW, LIMIT = 100.0, 5.0
WHO = r"rank 1 \(process 7 on there\) "


def peer(
    state: str = RUNNING,
    awaits: tuple[int, ...] = (),
    heard: float = 0,
    idle: float = 0,
    call: str = "a",
    kernel: str = "",
) -> Peer:
    """A rank, heard so many seconds ago; of this host where its kernel is known."""
    return Peer(RankProcess("there", 7, kernel), NOW - heard, Heartbeat(state, idle, call, awaits))


@pytest.mark.parametrize(
    ("peers", "sentence"),
    [
        # nothing is wrong
        ([peer(WAITING, (1,)), peer()], ""),
        ([peer(), peer(WAITING, (0,), idle=10)], ""),
        ([peer(WAITING, (1,), idle=10), peer(PAUSED, idle=10)], ""),
        ([peer(WAITING, (1,), idle=91), peer(WAITING, (2,), idle=91, call="b"), peer()], ""),
        ([peer(TRANSFERRING, (1,), idle=50), peer(TRANSFERRING, (0,), idle=50)], ""),
        ([peer(WAITING, (1,), idle=91), peer(WAITING, (0,), idle=1, call="b")], ""),
        ([peer(WAITING, (1,), idle=50), peer(WAITING, (0,), idle=50)], ""),
        ([peer(), peer(TRANSFERRING, (0,), heard=50)], ""),
        # something is
        ([peer(), peer(heard=6)], f"{WHO}stalls: it has sent no heartbeat for 6 s"),
        ([peer(), peer(TRANSFERRING, (0,), heard=61)], f"{WHO}stalls"),
        ([peer(WAITING, (1,)), peer(idle=6)], f"{WHO}is stuck: .* rank 0 waits .* at a"),
        (
            [peer(WAITING, (1,), idle=6), peer(WAITING, (0,), idle=6, call="b")],
            "different calls: rank 0 is at a, rank 1 at b",
        ),
    ],
)
def test_failures_are_found(peers: list[Peer], sentence: str) -> None:
    failure = find_failure(0, dict(enumerate(peers)), LIMIT, NOW)
    assert bool(failure) == bool(sentence)
    assert failure is None or re.search(sentence, failure.text)


@pytest.mark.parametrize(
    ("state", "heard", "sentence"),
    [
        ("X", 0, f"{WHO}died: its process is gone"),
        ("T", 4, ""),
        ("T", 6, r"as its process is stopped \(SIGSTOP\)"),
        ("S", 6, "as it idles with Python's lock"),
        ("R", 6, ""),  # it computes, and keeps Python's lock meanwhile
    ],
)
def test_what_the_kernel_reports_counts(
    state: str, heard: float, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watcher, "process_state", lambda process: state)
    peers = {0: peer(kernel="linux"), 1: peer(heard=heard, kernel="linux")}
    failure = find_failure(0, peers, LIMIT, NOW)
    assert bool(failure) == bool(sentence)
    assert failure is None or re.search(sentence, failure.text)


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
