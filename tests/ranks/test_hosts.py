"""Ranks on two hosts, which are network namespaces of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.runner import works
from tests.fresh import session_seed
from tests.ranks.hosts import Hosts, two_hosts, why_not
from tests.ranks.worlds import irc, needs_mpi, outcomes, program, started

pytestmark = needs_mpi


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    if reason := why_not():
        pytest.skip(reason)
    with two_hosts(tmp_path_factory.mktemp("hosts")) as hosts:
        yield hosts


def on(hosts: Hosts, command: list[str]) -> list[str]:
    """A command on the first host."""
    settings = [f"{name}={value}" for name, value in hosts.settings.items()]
    return [*hosts.enter, "env", *settings, *command]


@pytest.mark.parametrize("ranks", [2, 4])
def test_collectives_between_hosts(ranks: int, hosts: Hosts, tmp_path: Path) -> None:
    session_seed()
    mpiexec, *rest = program(ranks, "some_collectives", tmp_path)
    where = ["-launcher", "ssh", "-hosts", ",".join(hosts.addresses), "-ppn", str(ranks // 2)]
    with started(on(hosts, [mpiexec, *where, *rest])) as world:
        ended = world.end()
    ends = {rank: end.outcome for rank, end in outcomes(tmp_path).items()}
    assert ends == dict.fromkeys(range(ranks), "done"), ended


def test_irc_generates_on_two_hosts(hosts: Hosts, four_ranks: Path) -> None:
    words = ["generate", four_ranks, "--prompt", "The Python", "--max-new-tokens", "8"]
    command = irc(*words, "--hosts", ",".join(hosts.addresses))
    with started(on(hosts, command)) as world:
        status, out, err = world.end()
    assert (status, out) == (0, works(*words).out), err
