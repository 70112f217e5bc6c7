"""Where ranks meet: what the variables of launchers say, and who is let in."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from typing import Any

import pytest

from irc.backends.processes import meeting
from irc.backends.processes.communicator import HubCommunicator, wait_until
from irc.backends.processes.meeting import Address, meet
from irc.errors import Error

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


def free_address(key: bytes = b"key") -> Address:
    with socket.create_server(("localhost", 0)) as server:
        return Address("localhost", int(server.getsockname()[1]), key)


def all_of(
    address: Address, ranks: list[tuple[int, int, bytes]], patience: float
) -> list[HubCommunicator | Error]:
    """What (rank, ranks, key) get that meet at an address."""
    found: dict[int, Any] = {}

    def one(number: int, rank: int, count: int, key: bytes) -> None:
        try:
            place = Address(address.host, address.port, key)
            found[number] = meet(place, rank, count, patience=patience)
        except Error as error:
            found[number] = error

    threads = [
        threading.Thread(target=one, args=(number, *each)) for number, each in enumerate(ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[number] for number in range(len(ranks))]


def test_ranks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_HANDSHAKE", 2.0)
    found = all_of(free_address(), [(2, 3, b"key"), (0, 3, b"key"), (1, 3, b"key")], 20)
    assert sorted(c.rank for c in found if isinstance(c, HubCommunicator)) == [0, 1, 2]
    time.sleep(2.3)  # the limit of the handshake holds no longer
    assert not any(c.failed for c in found if isinstance(c, HubCommunicator))
    closing = [threading.Thread(target=c.close) for c in found if isinstance(c, HubCommunicator)]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join()


def test_another_key() -> None:
    first, second = all_of(free_address(), [(0, 2, b"key"), (1, 2, b"other")], 0.8)
    assert "rank 1 did not come to rank 0" in str(first)
    assert "give all ranks the same, and a port of their own" in str(second)


def test_another_world() -> None:
    first, _ = all_of(free_address(), [(0, 2, b"key"), (1, 3, b"key")], 3)
    assert "says that it is rank 1 of 3, and there are 2 here" in str(first)


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("", 0)) as server:
        address = Address("localhost", int(server.getsockname()[1]), b"key")
        with pytest.raises(Error, match="set MASTER_ADDR to this host and MASTER_PORT to a free"):
            meet(address, 0, 2, patience=1)


def test_a_listener_that_stays_silent() -> None:
    with socket.create_server(("localhost", 0)) as server:
        address = Address("localhost", int(server.getsockname()[1]), b"key")
        found: list[list[HubCommunicator | Error]] = []
        rank = threading.Thread(
            target=lambda: found.append(all_of(address, [(1, 2, b"key")], 1)), daemon=True
        )
        rank.start()
        rank.join(6)
    assert not rank.is_alive()
    assert "rank 1 did not reach rank 0 at" in str(found[0][0])


def test_a_listener_that_says_something_else() -> None:
    def answer() -> None:
        accepted, _ = server.accept()
        with accepted:
            accepted.sendall(b"\0\0\0\5hello")
            accepted.recv(1)

    with socket.create_server(("localhost", 0)) as server:
        address = Address("localhost", int(server.getsockname()[1]), b"key")
        answering = threading.Thread(target=answer)
        answering.start()
        with pytest.raises(Error, match="is not rank 0 of this run"):
            meet(address, 1, 2, patience=3)
        answering.join()


def test_a_stranger_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_HANDSHAKE", 1.0)
    address = free_address()
    closed: list[bool] = []

    def knock() -> None:
        with socket.socket() as silent:
            if not wait_until(lambda: not silent.connect_ex((address.host, address.port)), 5):
                return
            silent.settimeout(4)
            with suppress(TimeoutError):
                while silent.recv(100):
                    pass
                closed.append(True)

    stranger = threading.Thread(target=knock)
    stranger.start()
    with pytest.raises(Error, match="rank 1 did not come"):
        meet(address, 0, 2, patience=0.5)
    stranger.join()
    assert closed == [True]


def test_a_stranger_changes_nothing() -> None:
    address = free_address()

    def knock() -> None:
        for _ in range(200):
            try:
                with socket.create_connection((address.host, address.port), 0.2) as stranger:
                    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
                return
            except OSError:
                continue

    stranger = threading.Thread(target=knock)
    stranger.start()
    with pytest.raises(Error, match="rank 1 did not come"):
        meet(address, 0, 2, patience=0.5)
    stranger.join()
