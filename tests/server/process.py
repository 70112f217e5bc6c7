"""A process of `irc serve`, its metrics, and clients of it."""

import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2

from tests.layout import ROOT

_SECONDS = 60


class Serving:
    """A server that has started; `log` is its standard error once it has ended."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process, self.log = process, ""
        assert process.stdout is not None
        line = process.stdout.readline()
        match = re.search(r"(http://127\.0\.0\.1:(\d+))$", line.strip())
        assert match, (line, process.communicate())
        self.url, self.port = match[1], int(match[2])

    def metric(self, name: str) -> float:
        """The value of a sample of /metrics, or the requests that ended for this reason."""
        text = httpx2.get(f"{self.url}/metrics").text
        values = dict(line.rsplit(" ", 1) for line in text.splitlines())
        reason = f'irc_requests_finished_total{{reason="{name}"}}'
        return float(values.get(name, values.get(reason, 0)))

    def connect(self, body: Any) -> socket.socket:
        """A socket on which a request for completions was sent."""
        data = json.dumps(body).encode()
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=_SECONDS)
        connection.sendall(head(f"Content-Length: {len(data)}") + data)
        return connection

    def wait(self) -> int:
        """The exit status."""
        _, self.log = self.process.communicate(timeout=_SECONDS)
        assert "Traceback" not in self.log, self.log
        return self.process.returncode


def head(header: str) -> bytes:
    """The head of a request for completions."""
    lines = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json", header]
    return "\r\n".join([*lines, "", ""]).encode()


def eventually(holds: Callable[[], bool]) -> bool:
    """Whether something holds within some seconds."""
    end = time.monotonic() + _SECONDS
    while not (value := holds()) and time.monotonic() < end:
        time.sleep(0.05)
    return value


@contextmanager
def serving(folder: Path, *words: str, before: str = "") -> Generator[Serving]:
    """A process that serves an artifact; killed at the end, where it still runs.

    `before` is code that it runs first.
    """
    code = f"{before}\nimport sys\nfrom irc.cli.main import main\nsys.exit(main())"
    command = [sys.executable, "-c", code, "serve", str(folder), "--port", "0", *words]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield Serving(process)
        finally:
            process.kill()
