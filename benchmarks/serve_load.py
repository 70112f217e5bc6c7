"""What a server of `irc serve` holds under full load: memory, file descriptors, threads.

    python -m benchmarks.serve_load DIR [--minutes 10] [--clients 64]

Clients stream completions, read whole ones, leave in mid-stream and send what is refused, without
a pause. A row per minute; memory that grows without end, or descriptors and slots that remain taken
when the clients have gone, are leaks.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from random import Random
from typing import Any

import psutil

KINDS = ("streamed", "whole", "left", "refused", "schema")
SCHEMA = (
    '{"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": false}'
)


class Client(threading.Thread):
    """Sends requests until `over` is set; `done` counts them by kind."""

    def __init__(self, port: int, seed: int, over: threading.Event, done: Counter[str]) -> None:
        super().__init__()
        self.port, self.random, self.over, self.done = port, Random(seed), over, done

    def run(self) -> None:
        """One request after the other, each on its own connection."""
        while not self.over.is_set():
            kind = self.random.choice(KINDS)
            self.ask(kind)
            self.done[kind] += 1

    def ask(self, kind: str) -> None:
        """One request; an AssertionError where its status is not the expected one."""
        words = " ".join(self.random.choice(["the", "is", "better"]) for _ in range(40))
        body: dict[str, Any] = {"prompt": f"{self.random.random()} {words}", "temperature": 1}
        body["max_tokens"] = 10**9 if kind == "refused" else self.random.randrange(1, 120)
        body["stream"] = kind in ("streamed", "left")
        if kind == "schema":
            body["json_schema"] = SCHEMA
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        assert answer.status == (400 if kind == "refused" else 200), answer.read()
        answer.read(20 if kind == "left" else None)
        connection.close()


def metric(port: int, name: str) -> float:
    """The value of a sample of /metrics."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    return float(dict(line.rsplit(" ", 1) for line in text.splitlines()).get(name, 0))


def row(what: str, process: psutil.Process, port: int, seconds: float, tokens: float) -> float:
    """Print what the server holds, and the tokens/s since `tokens`; the tokens so far."""
    with process.oneshot():
        held = f"{process.memory_info().rss / 1e6:8.1f} {process.num_fds():12} "
        held += f"{process.num_threads():8}"
    now = metric(port, "irc_completion_tokens_total")
    print(f"{what:>8} {held} {(now - tokens) / seconds:9.0f}", flush=True)
    return now


def main() -> None:
    """Start a server, load it, print the table."""
    parser = argparse.ArgumentParser(description="Load a server and watch it.")
    parser.add_argument("folder")
    parser.add_argument("--minutes", type=int, default=10)
    parser.add_argument("--clients", type=int, default=64)
    args = parser.parse_args()
    command = [sys.executable, "-m", "irc", "serve", args.folder, "--port", "0"]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=quiet, text=True) as server:
        assert server.stdout is not None
        match = re.search(r":(\d+)$", server.stdout.readline().strip())
        assert match, "the server has not started"
        port, process = int(match[1]), psutil.Process(server.pid)
        print(f"{'minute':>8} {'RSS in MB':>8} {'descriptors':>12} {'threads':>8} {'tokens/s':>9}")
        tokens = row("idle", process, port, 1, 0)
        over, done = threading.Event(), Counter[str]()
        clients = [Client(port, seed, over, done) for seed in range(args.clients)]
        for client in clients:
            client.start()
        for minute in range(1, args.minutes + 1):
            time.sleep(60)
            tokens = row(str(minute), process, port, 60, tokens)
        over.set()
        for client in clients:
            client.join()
        time.sleep(2)
        row("after", process, port, 2, tokens)
        taken = {name: metric(port, f"irc_requests_{name}") for name in ("running", "waiting")}
        print(f"requests: {dict(done)}; taken afterwards: {taken}")
        server.terminate()
        print(f"exit status after SIGTERM: {server.wait()}")


if __name__ == "__main__":
    main()
