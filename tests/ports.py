"""Ports of this host that nobody else is given while a test uses them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

HOST = "localhost"


def family(host: str = HOST) -> socket.AddressFamily:
    """How this host reaches itself: by IPv4, else by IPv6."""
    found = {each[0] for each in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    for kind in sorted(found, key=lambda each: each != socket.AF_INET):
        with suppress(OSError), socket.socket(kind) as one:
            one.bind((host, 0))
            return kind
    raise OSError(f"nothing can listen at {host}")


def listener() -> socket.socket:
    """A server at a port of its own."""
    return socket.create_server((HOST, 0), family=family())


def port_of(server: socket.socket) -> int:
    """The port that a socket has."""
    return int(server.getsockname()[1])


@contextmanager
def held_port(host: str = HOST) -> Iterator[int]:
    """A port that is bound here, so that no other program gets it, and may be listened at."""
    with socket.socket(family(host)) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, 0))
        yield port_of(holder)
