"""`listen` and `run`: a socket, and the application on it until a signal or a failure ends it."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
from types import FrameType

import uvicorn

from ..errors import Error
from .app import Server

_READING_SECONDS = 2  # beyond the grace, for clients to read the rest


def listen(host: str, port: int) -> socket.socket:
    """A socket that clients can connect to, port 0: any free one; an Error where that fails."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        where, reason = f"{host}, port {port}", error.strerror or error
        is_host = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        flag = "--host" if is_host else "--port"
        raise Error(f"cannot listen on {where}: {reason}; give another {flag}") from None


def run(server: Server, listening: socket.socket, grace: float) -> None:
    """Answer requests until SIGTERM or SIGINT; those that run then have `grace` seconds to end.

    A second signal ends at once. Raises what made the engine fail.
    """
    config = uvicorn.Config(
        server,
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=int(grace) + _READING_SECONDS,
    )
    _Uvicorn(config, server, grace).run([listening])
    if server.failure is not None:
        raise server.failure


class _Uvicorn(uvicorn.Server):
    """Also stops the engine, and ends when that has failed."""

    def __init__(self, config: uvicorn.Config, server: Server, grace: float) -> None:
        super().__init__(config)
        self.server, self.grace = server, grace

    async def on_tick(self, counter: int) -> bool:
        """Whether to end."""
        return await super().on_tick(counter) or self.server.failure is not None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let the running requests end, while nothing new is accepted."""
        ending = asyncio.create_task(asyncio.to_thread(self.server.stop, self.grace))
        await super().shutdown(sockets)
        await ending

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End, by a second signal at once, as a command does."""
        if self.should_exit:
            signal.default_int_handler(sig, frame)
        self.should_exit = True
