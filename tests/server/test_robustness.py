"""A server process under hostile and absent clients, signals, and failures of the engine."""

import json
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPResponse
from pathlib import Path

import httpx2
import pytest

from tests.cli.runner import refused
from tests.server.process import Serving, eventually, head, serving

LONG = {"prompt": "It", "max_tokens": 500, "stream": True}
FAILING = """\
from irc.errors import Error
from irc.generation.rows import Rows

step, calls = Rows.step, [0]

def failing(self, tokens, first=0):
    calls[0] += 1
    if calls[0] > 5:
        raise Error("the device is gone")
    return step(self, tokens, first)

Rows.step = failing
"""


def post(server: Serving, **body: object) -> httpx2.Response:
    """The answer to a completion."""
    return httpx2.post(f"{server.url}/v1/completions", json=body, timeout=60)


def works(server: Serving) -> bool:
    """Whether a server still answers, and nobody has a slot."""
    answers = post(server, prompt="Beautiful is", max_tokens=3).status_code == 200
    return answers and eventually(lambda: server.metric("irc_requests_running") == 0)


def refuses(server: Serving) -> bool:
    """Whether a server no longer accepts connections, since it received a signal."""
    try:
        socket.create_connection(("127.0.0.1", server.port)).close()
    except ConnectionRefusedError:
        return True
    return False


def send(server: Serving, data: bytes) -> tuple[int, bytes]:
    """The status and the body of the answer to bytes on a socket."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(data)
        answer = HTTPResponse(connection)
        answer.begin()
        return answer.status, answer.read()


def test_bodies_that_are_too_large_are_refused_by_length_and_by_count(server: Serving) -> None:
    chunk = b"100000\r\n" + b"x" * 0x100000 + b"\r\n"
    for header, data in (
        ("Content-Length: 99999999999", b""),
        ("Transfer-Encoding: chunked", chunk),
    ):
        status, body = send(server, head(header) + data * 5)
        assert status == 413 and json.loads(body)["error"]["code"] == "body_too_large"
    for length in ("-1", "1e3", "9" * 500, "x"):
        assert send(server, head(f"Content-Length: {length}"))[0] in (400, 413)
    for data in (b"\x16\x03\x01\x02\x00", b"GET / HTTP/9\r\n\r\n", b"\0" * 70000):
        with suppress(ConnectionResetError):  # it may close before all of the data was sent
            assert send(server, data + b"\r\n\r\n")[0] == 400
    assert works(server)


def test_clients_that_die_leave_no_slot_taken(server: Serving) -> None:
    before = server.metric("cancelled")
    connections = [server.connect(LONG) for _ in range(20)]  # more than there are slots
    connections += [server.connect({**LONG, "stream": False, "n": 8})]
    for connection in connections[:6]:
        assert connection.recv(10)
    for at, connection in enumerate(connections):
        if at % 2:  # a reset in place of an orderly end
            linger = b"\1\0\0\0\0\0\0\0"
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        connection.close()
    assert eventually(lambda: server.metric("irc_requests_waiting") == 0) and works(server)
    assert server.metric("cancelled") > before + 15


def test_a_reader_that_does_not_read_stops_nobody(server: Serving) -> None:
    with server.connect({**LONG, "n": 4, "logprobs": 20}):
        assert works(server)


def test_slow_bodies_and_long_answers_end_with_the_time(folder: Path) -> None:
    with serving(folder, "--timeout", "1") as server:
        status, body = send(server, head("Content-Length: 100") + b"{")
        assert status == 408 and json.loads(body)["error"]["code"] == "timeout"
        answer = post(server, **{**LONG, "stream": False}, n=100)
        assert answer.status_code == 504 and answer.json()["error"]["code"] == "timeout"
        assert works(server)


def test_a_signal_lets_running_requests_end(folder: Path) -> None:
    with serving(folder) as server, httpx2.Client(timeout=60) as client:
        with client.stream("POST", f"{server.url}/v1/completions", json=LONG) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert server.wait() == 0
        assert server.log.count("\n") == 1 and " 200 " in server.log
        with pytest.raises(httpx2.ConnectError):
            client.get(server.url)


def test_requests_that_outlive_the_grace_end_with_an_error(folder: Path) -> None:
    with serving(folder, "--grace", "0") as server, ThreadPoolExecutor() as pool:
        future = pool.submit(post, server, **{**LONG, "stream": False}, n=100)
        assert eventually(lambda: server.metric("irc_requests_running") > 0)
        server.process.send_signal(signal.SIGINT)
        assert future.result().status_code == 503 and server.wait() == 0


def test_a_second_signal_ends_at_once(folder: Path) -> None:
    with serving(folder, "--grace", "60") as server, server.connect({**LONG, "n": 100}) as reader:
        assert reader.recv(10)
        begin = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert eventually(lambda: refuses(server))
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() != 0 and time.monotonic() - begin < 20


def test_a_failure_of_the_engine_ends_the_server_with_one_message(folder: Path) -> None:
    with serving(folder, before=FAILING) as server:
        answer = post(server, **{**LONG, "stream": False})
        assert answer.status_code == 500 and "the device is gone" in answer.text
        assert server.wait() == 1
    errors = [line for line in server.log.splitlines() if "the device is gone" in line]
    assert len(errors) == 1 and errors[0].startswith("error:")


def test_what_stands_in_the_way_of_a_start_is_one_line(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        message = refused("serve", folder, "--port", str(other.getsockname()[1]))
    assert "in use" in message and "--port" in message and message.count("\n") == 1
    code = "import sys; sys.modules['starlette'] = None; from irc.cli.main import main; "
    words = [sys.executable, "-c", f"{code} sys.exit(main(['serve', {str(folder)!r}]))"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "pip install '.[serve]'" in done.stderr, done.stderr
