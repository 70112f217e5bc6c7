"""Ranks on two hosts, which are network namespaces of this machine."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cli.runner import works
from tests.fresh import session_seed
from tests.ranks.hosts import Hosts, two_hosts, why_not
from tests.ranks.worlds import World, irc, needs_mpi, outcomes, program, started

pytestmark = needs_mpi
# After the loss of a host MPI itself may abort before irc names the rank.
alone = pytest.mark.skipif(
    "IRC_TEST_HOSTS" not in os.environ,
    reason="losing a host depends on timing; IRC_TEST_HOSTS=1 on a quiet machine runs it",
)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    if reason := why_not():
        pytest.skip(reason)
    with ExitStack() as stack:
        try:
            found = stack.enter_context(two_hosts(tmp_path_factory.mktemp("hosts")))
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine cannot connect network namespaces: {error.cmd}")
        yield found


def on(hosts: Hosts, command: list[str]) -> list[str]:
    """A command on the first host."""
    settings = [f"{name}={value}" for name, value in hosts.settings.items()]
    return [*hosts.enter, "env", *settings, *command]


def over_both(hosts: Hosts, ranks: int, name: str, folder: Path) -> list[str]:
    """A program of tests/ranks/programs.py with its ranks on both hosts."""
    session_seed()
    mpiexec, *rest = program(ranks, name, folder)
    where = ["-launcher", "ssh", "-hosts", ",".join(hosts.addresses), "-ppn", str(ranks // 2)]
    return on(hosts, [mpiexec, *where, *rest])


# what rank 1, on the second host, does -> the message on rank 0
FAILING = {"stops": "it has given no sign of life", "dies": "died, or the network to it broke"}


@pytest.mark.parametrize(
    ("ranks", "name"), [(2, "some_collectives"), (4, "some_collectives"), (2, "ends_late")]
)
def test_collectives_between_hosts(ranks: int, name: str, hosts: Hosts, tmp_path: Path) -> None:
    with started(over_both(hosts, ranks, name, tmp_path)) as world:
        ended = world.end()
    found = {rank: each.outcome for rank, each in outcomes(tmp_path).items()}
    assert found == dict.fromkeys(range(ranks), "done"), ended


def test_irc_generates_on_two_hosts(hosts: Hosts, four_ranks: Path) -> None:
    words = ["generate", four_ranks, "--prompt", "The Python", "--max-new-tokens", "8"]
    command = irc(*words, "--hosts", ",".join(hosts.addresses))
    with started(on(hosts, command)) as world:
        status, out, err = world.end()
    assert (status, out) == (0, works(*words).out), err


@alone
@pytest.mark.parametrize("name", FAILING)
def test_a_rank_of_the_other_host_fails(name: str, hosts: Hosts, tmp_path: Path) -> None:
    with started(over_both(hosts, 2, name, tmp_path)) as world:
        status, _, err = world.end()
    found = outcomes(tmp_path)
    assert (status, [*found]) == (1, [0]), err
    assert found[0].outcome.startswith("rank 1 (process ")
    assert f"on h{hosts.addresses[1]}" in found[0].outcome
    assert FAILING[name] in found[0].outcome
    assert found[0].seconds < 10


@alone
def test_the_link_between_hosts_is_cut(hosts: Hosts, tmp_path: Path) -> None:
    """Each side finds the other silent, and stops."""
    with started(over_both(hosts, 2, "goes_on", tmp_path)) as world:
        wait_for(world, tmp_path / "began")
        began = time.monotonic()
        hosts.link("down")
        try:
            while len(outcomes(tmp_path)) < 2 and time.monotonic() < began + 10:
                time.sleep(0.1)
        finally:
            hosts.link("up")
        found = outcomes(tmp_path)
    assert {rank: each.outcome[:6] for rank, each in found.items()} == {0: "rank 1", 1: "rank 0"}


def wait_for(world: World, file: Path) -> None:
    until = time.monotonic() + 120
    while not file.exists():
        assert world.process.poll() is None and time.monotonic() < until, "nothing has begun"
        time.sleep(0.05)
