"""Where ranks meet: what the variables of launchers say, and who is let in."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

import pytest

from irc.backends.processes import meeting
from irc.backends.processes.communicator import HubCommunicator, wait_until
from irc.backends.processes.hub import Hub
from irc.backends.processes.meeting import Address, meet
from irc.errors import Error
from tests.ports import HOST, held_port, listener, port_of

SOON = 120.0  # seconds: what would never happen has not happened by then
TORCHRUN = {"MASTER_ADDR": "node7", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("variables", "host", "port"),
    [
        (TORCHRUN, "node7", 29500),
        (TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"}, "node7", 29501),
        ({"SLURM_JOB_NODELIST": "gpu[003-007,9]", "SLURM_JOB_ID": "5"}, "gpu003", 20035),
        ({"SLURM_JOB_NODELIST": "a,b", "SLURM_STEP_NODELIST": "b,c"}, "b", 20000),
    ],
)
def test_addresses(variables: dict[str, str], host: str, port: int) -> None:
    found = Address.of(variables)
    assert (found.host, found.port) == (host, port)
    assert Address.of(variables).key == found.key
    assert Address.of(variables | {"IRC_WORLD_KEY": "secret"}).key != found.key


def test_no_address() -> None:
    with pytest.raises(Error, match="set MASTER_ADDR to the host of rank 0"):
        Address.of({})
    with pytest.raises(Error, match="MASTER_PORT is 'x'"):
        Address.of({"MASTER_ADDR": "a", "MASTER_PORT": "x"})


@pytest.fixture
def address(port: int) -> Address:
    return Address(HOST, port, b"key")


@pytest.fixture
def door(address: Address) -> Iterator[meeting._Door]:
    """Rank 0's, of two ranks; nobody goes in or out by itself."""
    made = meeting._Door(address, Hub(2), 2)
    yield made
    made.close()
    made._hub.close(0.0)


def all_of(address: Address, ranks: list[tuple[int, int]]) -> list[HubCommunicator | Error]:
    """What (rank, ranks) get that meet at an address."""
    found: dict[int, Any] = {}

    def one(number: int, rank: int, count: int) -> None:
        try:
            found[number] = meet(address, rank, count, patience=SOON)
        except Error as error:
            found[number] = error

    threads = [
        threading.Thread(target=one, args=(number, *each), daemon=True)
        for number, each in enumerate(ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[number] for number in range(len(ranks))]


def close_all(found: list[HubCommunicator | Error]) -> None:
    """Ranks that have met take leave."""
    met = [each for each in found if isinstance(each, HubCommunicator)]
    assert len(met) == len(found), found
    closing = [threading.Thread(target=each.close, daemon=True) for each in met]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join(SOON)
    assert not any(each.failed for each in met)


def patience_of(connection: Connection[Any, Any]) -> bytes:
    """How long a read may last; zeros for ever."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        return end.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.calcsize("ll"))


def test_ranks_meet(address: Address) -> None:
    found = all_of(address, [(2, 3), (0, 3), (1, 3)])
    met = [each for each in found if isinstance(each, HubCommunicator)]
    assert [each.rank for each in met] == [2, 0, 1]
    # the limit of the handshake holds no longer
    ends = [each._connection for each in met]
    ends += [each.connection for c in met if c._hub for each in c._hub._members.values()]
    assert [patience_of(each) for each in ends] == [struct.pack("ll", 0, 0)] * 6
    close_all(found)


def test_ranks_meet_where_only_ipv6_is() -> None:
    with ExitStack() as stack:
        try:
            port = stack.enter_context(held_port("::1"))
        except OSError:
            pytest.skip("no IPv6 on this machine")
        close_all(all_of(Address("::1", port, b"key"), [(1, 2), (0, 2)]))


def test_another_key(door: meeting._Door, port: int) -> None:
    with pytest.raises(Error, match="give all ranks the same, and a port of their own"):
        meet(Address(HOST, port, b"other"), 1, 2, patience=SOON)
    assert (door._hub.missing(), door.refused) == ([0, 1], "")


def test_another_world(address: Address) -> None:
    first, _ = all_of(address, [(0, 2), (1, 3)])
    assert "says that it is rank 1 of 3, and there are 2 here" in str(first)


def test_a_port_that_is_taken() -> None:
    with listener() as server:
        address = Address(HOST, port_of(server), b"key")
        with pytest.raises(Error, match="set MASTER_ADDR to this host and MASTER_PORT to a free"):
            meet(address, 0, 2, patience=SOON)


def test_a_listener_that_stays_silent() -> None:
    with (
        listener() as server,
        pytest.raises(Error, match=r"rank 1 did not reach rank 0 at .* within 1 s"),
    ):
        meet(Address(HOST, port_of(server), b"key"), 1, 2, patience=1)


def test_a_listener_that_says_something_else() -> None:
    def answer() -> None:
        accepted, _ = server.accept()
        with accepted:
            accepted.sendall(b"\0\0\0\5hello")
            accepted.recv(1)

    with listener() as server:
        answering = threading.Thread(target=answer, daemon=True)
        answering.start()
        with pytest.raises(Error, match="is not rank 0 of this run"):
            meet(Address(HOST, port_of(server), b"key"), 1, 2, patience=SOON)
        answering.join(SOON)


def until_closed(stranger: socket.socket) -> None:
    """Read until rank 0 ends the connection; a TimeoutError where it does not."""
    stranger.settimeout(SOON)
    try:
        while stranger.recv(100):
            pass
    except ConnectionError:
        return  # it has not read all that it was sent


def test_a_stranger_is_not_waited_for(
    door: meeting._Door, address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "_HANDSHAKE", 1.0)
    with socket.create_connection((HOST, address.port)) as silent:
        until_closed(silent)
    assert (door._hub.missing(), door.refused) == ([0, 1], "")


def test_a_stranger_changes_nothing(door: meeting._Door, address: Address) -> None:
    with socket.create_connection((HOST, address.port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        until_closed(stranger)
    assert (door._hub.missing(), door.refused) == ([0, 1], "")
    connection = meeting._connected(address, 1, 2, SOON)
    assert wait_until(lambda: door._hub.missing() == [0], SOON), "a rank comes in as ever"
    connection.close()
