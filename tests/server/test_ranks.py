"""A server whose ranks are processes: its answers, long rests, its end, and the death of a rank."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx2
import pytest

from irc.backends.ranks.watcher import LIMIT
from irc.driver import compile, load
from irc.generation.settings import GenerationSettings
from tests.gpu_ranks import needs_gpus
from tests.ranks.worlds import SOON, World, irc, needs_mpi, started

PROMPTS = ["the other", "a", "there and then", "the"]


def command(folder: Path) -> list[str]:
    return irc("serve", folder, "--launcher", "mpi", "--port", "0", "--slots", "2", "--piece", "3")


def url(world: World) -> str:
    """Where the server listens, once it does."""
    until = time.monotonic() + SOON
    while time.monotonic() < until:
        if match := re.search(rb"http://\S+\n", world.printed()):
            return match[0].decode().strip()
        assert world.process.poll() is None, world.end()
        time.sleep(0.05)
    raise AssertionError("the server does not listen")


def answers(address: str) -> list[str]:
    """What all prompts get that are asked at once."""

    def ask(prompt: str) -> str:
        body = {"prompt": prompt, "max_tokens": 20, "temperature": 0}
        answer = httpx2.post(f"{address}/v1/completions", json=body, timeout=SOON)
        return answer.json()["choices"][0]["text"]

    with ThreadPoolExecutor() as pool:
        return list(pool.map(ask, PROMPTS))


def alone(folder: Path) -> list[str]:
    """What each prompt gets alone, by the reference."""
    model, settings = load(folder).reference, GenerationSettings(max_new_tokens=20)
    return [model.completions([prompt], settings)[0][0].text for prompt in PROMPTS]


@pytest.mark.gpu
def test_answers_of_two_gpus(checkpoint: Path, tmp_path: Path) -> None:
    needs_gpus(2)
    compile(checkpoint, tmp_path / "built", backend="cuda", mesh="tp=2")
    with started(command(tmp_path / "built")) as world:
        assert answers(url(world)) == alone(tmp_path / "built")


@needs_mpi
def test_answers_after_a_long_rest_and_a_graceful_end(two_ranks: Path) -> None:
    with started(command(two_ranks)) as world:
        assert answers(address := url(world)) == (wanted := alone(two_ranks))
        time.sleep(LIMIT + 2)
        assert answers(address) == wanted
        world.process.send_signal(signal.SIGTERM)
        status, _, err = world.end()
    assert status == 0
    assert err.count("POST /v1/completions 200") == 2 * len(PROMPTS)
    assert "error" not in err and "failed" not in err, err


@needs_mpi
@pytest.mark.parametrize(("busy", "rank"), [(False, 1), (True, 1), (True, 0)])
def test_a_rank_that_dies_ends_the_server_with_one_message(
    busy: bool, rank: int, two_ranks: Path
) -> None:
    ended = threading.Event()

    def ask_always(address: str) -> None:
        with suppress(httpx2.HTTPError, KeyError):
            while not ended.is_set():
                answers(address)

    with ThreadPoolExecutor() as pool, started(command(two_ranks)) as world:
        address = url(world)
        assert answers(address) == alone(two_ranks)
        if busy:
            pool.submit(ask_always, address)
            time.sleep(0.2)
        os.kill(world.ranks(2)[rank], signal.SIGKILL)
        status, _, err = world.end()
        ended.set()
    assert status == 1
    (message,) = [line for line in err.splitlines() if "error:" in line]
    assert message.startswith(f"error: rank {rank} (process")
    assert message.endswith("died: its process is gone")
    assert "Traceback" not in err
