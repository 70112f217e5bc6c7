"""How the processes of a run find each other without MPI: at an address that all know.

torchrun says it in MASTER_ADDR and MASTER_PORT, Slurm in the list of its nodes.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from irc.backends.processes.communicator import (
    HubCommunicator,
    complain,
    hello,
    hello_of,
    wait_until,
)
from irc.backends.processes.hub import Hub, pair
from irc.errors import Error

STARTING = 60.0  # seconds until all ranks have met
KEY = "IRC_WORLD_KEY"  # a secret that all ranks are given, where others may reach the port
_PORTS = 20_000  # where Slurm's jobs begin that are given no port
_PAUSE = 0.2
_HANDSHAKE = 10.0  # seconds that the other side has to prove that it knows the key


@dataclass(frozen=True)
class Address:
    """Where rank 0 waits for the others, and what they prove that they belong to it with."""

    host: str
    port: int
    key: bytes

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> Address:
        """The address that the launcher's variables say; an Error where they say none."""
        host = environment.get("MASTER_ADDR") or _first_node(environment)
        port = _port(environment)
        run = environment.get("TORCHELASTIC_RUN_ID") or environment.get("SLURM_JOB_ID", "")
        secret = environment.get(KEY) or f"irc {run} {host}:{port}"
        return cls(host, port, hashlib.sha256(secret.encode()).digest())


def _first_node(environment: Mapping[str, str]) -> str:
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    found = re.match(r"([^,\[]+)(?:\[([^,\-\]]+))?", nodes)
    if found is None:
        raise Error(
            "the ranks do not know where to meet: set MASTER_ADDR to the host of rank 0, and "
            "MASTER_PORT to a free port of it"
        )
    return found[1] + (found[2] or "")


def _port(environment: Mapping[str, str]) -> int:
    given = environment.get("MASTER_PORT", "")
    if given and not given.isdecimal():
        raise Error(f"MASTER_PORT is {given!r}, and must be the number of a port")
    if not given:
        numbers = [environment.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
        job, step = (int(each) if each.isdecimal() else 0 for each in numbers)
        return _PORTS + (7 * job + step) % _PORTS
    # torchrun's own store listens on the port that it names
    taken = environment.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True"
    return int(given) + taken


def meet(
    address: Address,
    rank: int,
    ranks: int,
    say: Callable[[str], None] = complain,
    patience: float = STARTING,
) -> HubCommunicator:
    """This rank's communicator, once all ranks are there; an Error names those that are not."""
    if rank:
        connection = _connected(address, rank, ranks, patience)
        return HubCommunicator(connection, rank, ranks, say=say)
    hub = Hub(ranks)
    ours, theirs = pair()
    hello(ours, 0, ranks)
    door = _Door(address, hub, ranks)
    door.admit(theirs)
    hub.start()
    if not wait_until(lambda: not hub.missing() or bool(door.refused), patience):
        missing = " and ".join(f"rank {each}" for each in hub.missing())
        door.close()
        hub.fail(f"{missing} did not come")
        hub.close(1.0)
        raise Error(
            f"{missing} did not come to rank 0 at {address} within {patience:g} s; start all "
            f"{ranks} ranks, and let that port through"
        )
    door.close()
    if door.refused:
        hub.fail(door.refused)
        hub.close(1.0)
        raise Error(door.refused)
    return HubCommunicator(ours, 0, ranks, hub, say=say)


class _Door:
    """Lets ranks in that know the key."""

    def __init__(self, address: Address, hub: Hub, ranks: int) -> None:
        self._address, self._hub, self._ranks = address, hub, ranks
        self.refused = ""
        self._socket = _listening(address, ranks)
        self._open = True
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with suppress(OSError):  # the door was closed
            while self._open:
                accepted, _ = self._socket.accept()
                threading.Thread(target=self._receive, args=(accepted,), daemon=True).start()

    def _receive(self, accepted: socket.socket) -> None:
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = Connection(accepted.detach())
        try:
            _limit(connection, _HANDSHAKE)
            deliver_challenge(connection, self._address.key)
            answer_challenge(connection, self._address.key)
            _limit(connection, None)
        except (AuthenticationError, AssertionError, EOFError, OSError):
            connection.close()  # a stranger
            return
        self.admit(connection)

    def admit(self, connection: Connection[Any, Any]) -> None:
        """Add a rank that says which it is."""
        try:
            rank, ranks, home = hello_of(connection.recv_bytes())
        except (ValueError, EOFError, OSError):
            connection.close()
            return
        if ranks != self._ranks or rank not in self._hub.missing():
            self.refused = (
                f"{home} says that it is rank {rank} of {ranks}, and there are {self._ranks} here"
                if ranks != self._ranks
                else f"{home} says that it is rank {rank}, which is there already"
            )
            connection.close()
            return
        self._hub.add(rank, connection, home)

    def close(self) -> None:
        """Let nobody in any more."""
        self._open = False
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _listening(address: Address, ranks: int) -> socket.socket:
    """A socket at the address; on all interfaces where this host has that name only outside."""
    error: OSError | None = None
    backlog = max(ranks, 16)
    for family, host in _places(address.host):
        both = not host and family == socket.AF_INET6
        try:
            return socket.create_server(
                (host, address.port), family=family, backlog=backlog, dualstack_ipv6=both
            )
        except OSError as problem:
            error = error or problem
            if problem.errno == errno.EADDRINUSE:  # whoever has it would be found there
                break
    assert error is not None
    raise Error(
        f"rank 0 cannot wait for the others at {address} ({error.strerror or error}); set "
        "MASTER_ADDR to this host and MASTER_PORT to a free port on all ranks"
    )


def _places(host: str) -> Iterator[tuple[socket.AddressFamily, str]]:
    """Where a host may listen: at its addresses by IPv4 and IPv6, else on all interfaces."""
    with suppress(OSError):
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        for family, *_, place in sorted(found, key=lambda each: each[0] != socket.AF_INET):
            yield family, str(place[0])
    if socket.has_dualstack_ipv6():
        yield socket.AF_INET6, ""
    yield socket.AF_INET, ""


def _connected(address: Address, rank: int, ranks: int, patience: float) -> Connection[Any, Any]:
    until = time.monotonic() + patience
    problem: Exception | None = None
    while (left := until - time.monotonic()) > 0:
        try:
            connection = _knocked(address, min(_HANDSHAKE, left))
            hello(connection, rank, ranks)
            return connection
        except (AuthenticationError, AssertionError):  # Python 3.11 asserts what a challenge is
            raise Error(
                f"what answers at {address} is not rank 0 of this run, or was started with another "
                f"{KEY}; give all ranks the same, and a port of their own (MASTER_PORT)"
            ) from None
        except (OSError, EOFError) as error:
            problem = error
            time.sleep(_PAUSE)
    raise Error(
        f"rank {rank} did not reach rank 0 at {address} within {patience:g} s ({problem}); start "
        "rank 0 as well, and let that port through"
    )


def _knocked(address: Address, seconds: float) -> Connection[Any, Any]:
    """A connection to rank 0; an OSError where it stays silent for so many seconds."""
    opened = socket.create_connection((address.host, address.port), timeout=seconds)
    opened.settimeout(None)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection = Connection(opened.detach())
    try:
        _limit(connection, seconds)
        answer_challenge(connection, address.key)
        deliver_challenge(connection, address.key)
        _limit(connection, None)
    except BaseException:
        connection.close()
        raise
    return connection


def _limit(connection: Connection[Any, Any], seconds: float | None) -> None:
    """Let a read that lasts this long, a second at least, end in an OSError; None: wait on."""
    whole = 0 if seconds is None else max(1, int(seconds))
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", whole, 0))
