"""Ranks over MPI: every collective, and every way in which a rank can fail."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from irc.backends.ranks import heartbeat
from irc.backends.ranks.mpi import LIMIT
from tests.fresh import session_seed
from tests.ranks.worlds import Outcome, World, needs_mpi, outcomes, program, started

pytestmark = needs_mpi
Found = dict[int, Outcome]
SOON = 60  # seconds; six on an idle machine

# name -> (ranks, the ranks without a message, the message of every other rank)
FAILING = {
    "dies": (3, {1}, r"rank 1 (process"),
    "first_dies": (2, {0}, "rank 0 (process"),
    "stops": (3, {1}, "stalls: it has given no sign of life for 5 s, as its process is stopped"),
    "first_stops": (2, {0}, "stalls: it has given no sign of life for 5 s"),
    "supervisor_stops": (2, set[int](), "which started it, is stopped"),
    "is_stuck": (2, {1}, "is stuck: for 5 s it has neither computed nor read anything, while"),
    "is_stuck_in_c": (2, {1}, "stalls: it has given no sign of life for 5 s, and it uses no CPU"),
    "waits_in_a_ring": (3, set[int](), "the ranks make different calls: rank "),
    "raises_while_others_compute": (2, {0}, "KeyError: 'surprise'"),
}
# failures that are found at once: program -> the message of all ranks
DISAGREEING = {
    "differs": "the ranks differ in the artifact: rank 0 has sha256:good, rank 1 has sha256:bad",
    "other_call": "all_reduce (sum) of float32[5] in layers.0 (model.py:3)",
    "skips": "the comparison of the result",
    "leaves_early": "at the end",
    "raises": "KeyError: 'surprise'",
}


def run(name: str, ranks: int, folder: Path) -> tuple[Found, tuple[int, str, str]]:
    session_seed()
    with started(program(ranks, name, folder)) as world:
        ended = world.end()
    return outcomes(folder), ended


@pytest.mark.parametrize(
    ("name", "ranks"), [*[("collectives", ranks) for ranks in (2, 3, 4)], ("mail", 3), ("alone", 1)]
)
def test_collectives_and_transfers_mean_what_they_say(
    name: str, ranks: int, tmp_path: Path
) -> None:
    found, ended = run(name, ranks, tmp_path)
    assert {r: each.outcome for r, each in found.items()} == dict.fromkeys(range(ranks), "done"), (
        ended
    )


@pytest.mark.parametrize("name", DISAGREEING)
def test_ranks_that_disagree_stop_at_once(name: str, tmp_path: Path) -> None:
    """Not by the silence of a rank (see LIMITS)."""
    found, (status, _, err) = run(name, 3, tmp_path)
    assert status == 1
    assert sorted(found) == [0, 1, 2]
    for rank, each in found.items():
        assert DISAGREEING[name] in each.outcome, found
        assert "rank 1" in each.outcome or rank == 1
    assert err == "", "the program reports the failure, and the library does not"


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[World, Path]]]:
    """Runs that mostly wait, all at the same time."""
    ranks_of = {"works": 2} | {name: each[0] for name, each in FAILING.items()}
    with ExitStack() as stack:
        worlds: dict[str, tuple[World, Path]] = {}
        for name, ranks in ranks_of.items():
            folder = tmp_path_factory.mktemp(name)
            worlds[name] = stack.enter_context(started(program(ranks, name, folder))), folder
        yield worlds


@pytest.mark.parametrize("name", FAILING)
def test_every_rank_stops_and_names_the_one_that_failed(
    name: str, slow: dict[str, tuple[World, Path]]
) -> None:
    world, folder = slow[name]
    status, _, err = world.end()
    found = outcomes(folder)
    ranks, silent, sentence = FAILING[name]
    assert status == 1, (found, err)
    assert sorted(found) == [rank for rank in range(ranks) if rank not in silent], err
    for each in found.values():
        assert sentence in each.outcome
        assert each.seconds < SOON
    if name == "raises_while_others_compute":
        assert err == "error: rank 1 failed: KeyError: 'surprise'\n"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exits_early", "rank 1 ended before all ranks had met"),
        ("dies_early", "rank 1 ended before all ranks had met"),
        ("stops_early", "rank 1 stalls: its process is stopped (SIGSTOP)"),
    ],
)
def test_a_rank_that_never_starts_mpi_is_named(name: str, message: str, tmp_path: Path) -> None:
    """MPI itself would wait for it."""
    found, (status, _, err) = run(name, 3, tmp_path)
    assert (status != 0, found) == (True, {})
    assert err == f"error: {message}\n"


def test_a_lost_rank_is_reported_within_ten_seconds() -> None:
    """The longest time from the last heartbeat to the message."""
    assert LIMIT + heartbeat.EVERY + heartbeat.LISTEN + heartbeat.GRACE < 10


def test_a_slow_rank_never_times_out(slow: dict[str, tuple[World, Path]]) -> None:
    world, folder = slow["works"]
    assert world.end()[0] == 0
    assert {rank: each.outcome for rank, each in outcomes(folder).items()} == {0: "done", 1: "done"}
