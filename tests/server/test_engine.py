"""The engine: every answer is the answer alone, whatever else runs, ends and fails."""

from __future__ import annotations

import math
import time
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irc
from irc.backends.base import Arrays, Port, Ports
from irc.errors import Error
from irc.generation.model import Model
from irc.generation.rows import Rows
from irc.generation.settings import GenerationSettings
from irc.ir.dims import symbol
from irc.server import engine as engine_module
from irc.server.engine import (
    Engine,
    Event,
    FinishEvent,
    QueueFull,
    Request,
    TokenEvent,
    Unavailable,
)
from tests.fresh import fresh
from tests.models.cases import cases

B, S, T, C = map(symbol, "BSTC")
VOCABULARY, END, CAPACITY = 64, 63, 40
PORTS = Ports(
    (
        Port("input_ids", "i32", (B, S)),
        Port("past_lengths", "i32", (B,)),
        Port("lengths", "i32", (B,)),
        Port("logit_positions", "i32", (B, T)),
    ),
    (Port("k0", "f32", (B, 1, C, 8), True), Port("h0", "f32", (B, 8), True, fixed=True)),
    (Port("logits", "f32", (B, T, VOCABULARY)),),
)


def following(tokens: Sequence[int]) -> int:
    """The token after others: a checksum."""
    return zlib.crc32(bytes(tokens)) % VOCABULARY


def answer(prompt: Sequence[int], most: int) -> list[int]:
    """The tokens after a prompt, up to an end token or `most`."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + most and (len(tokens) == len(prompt) or tokens[-1] != END):
        tokens.append(following(tokens))
    return tokens[len(prompt) :]


class Counting:
    """A program whose next token is `following` the tokens that are the state of a row.

    `calls` are (first row, tokens of each row). `broken` rows have NaN as logits; calls of the
    names in `fails` raise.
    """

    def __init__(self, ports: Ports = PORTS) -> None:
        self.ports = ports
        self.rows: list[list[int]] = []
        self.calls: list[tuple[int, list[int]]] = []
        self.broken: set[int] = set()
        self.fails: set[str] = set()

    def run(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        raise AssertionError("an engine calls step, not run")

    def open(self, sizes: Mapping[str, int]) -> Counting:
        assert sizes["C"] == CAPACITY
        self.rows = [[] for _ in range(sizes["B"])]
        return self

    def step(self, inputs: Mapping[str, np.ndarray], first: int = 0) -> Arrays:
        self.check("step")
        ids, counts = inputs["input_ids"], inputs["lengths"].tolist()
        self.calls.append((first, counts))
        logits = np.zeros((len(ids), 1, VOCABULARY), np.float32)
        for row, (tokens, count) in enumerate(zip(ids.tolist(), counts, strict=True)):
            state = self.rows[first + row]
            assert inputs["past_lengths"][row] == len(state)
            state += tokens[:count]
            assert count and len(state) <= CAPACITY
            logits[row, 0, following(state)] = 1
            logits[row] += np.nan if first + row in self.broken else 0
        return {"logits": logits}

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.check("copy_rows")
        copies = [list(self.rows[source]) for source in sources]
        for target, copy in zip(targets, copies, strict=True):
            self.rows[target] = copy

    def clear_rows(self, rows: Sequence[int]) -> None:
        self.check("clear_rows")
        for row in rows:
            self.rows[row] = []

    def check(self, name: str) -> None:
        if name in self.fails:
            raise OSError("no such luck")


def engine_of(program: Counting, *arguments: Any, **options: Any) -> Engine:
    """An engine of a program for up to 8 rows, and 6 tokens of a row in a call."""
    dims = {"B": (1, 2, 8), "S": (1, 1, 6), "T": (1, 1, 6), "C": (1, 8, CAPACITY)}
    return Engine(Model(program, dims, Path(), [END]), *arguments, **options)


@dataclass
class Asked:
    """A request with its events, up to those that its receiver has `refused`."""

    prompt: list[int]
    settings: GenerationSettings
    receives: float = math.inf
    refused: int = 0
    events: list[Event] = field(default_factory=list[Event])
    request: Request = field(init=False)

    def receive(self, event: Event) -> None:
        if len(self.events) >= self.receives:
            self.refused += 1
            raise KeyError("the client is gone")
        self.events.append(event)

    @property
    def tokens(self) -> list[int]:
        return [event.token for event in self.events if isinstance(event, TokenEvent)]

    @property
    def finish(self) -> FinishEvent:
        """The last event, which alone is one."""
        *tokens, last = self.events
        assert isinstance(last, FinishEvent)
        assert all(isinstance(event, TokenEvent) for event in tokens)
        assert (last.prompt_tokens, last.completion_tokens) == (len(self.prompt), len(tokens))
        return last


def ask(
    engine: Engine,
    prompt: list[int],
    most: int,
    deadline: float = math.inf,
    receives: float = math.inf,
    **settings: Any,
) -> Asked:
    asked = Asked(prompt, GenerationSettings(max_new_tokens=most, **settings), receives)
    asked.request = engine.submit(prompt, asked.settings, asked.receive, deadline)
    return asked


def drain(engine: Engine) -> None:
    """Go on until there is nothing to do."""
    while engine.stats.running or engine.stats.waiting:
        engine.turn()


class Clock:
    """Time that the test lets pass."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize(("slots", "piece"), [(1, 1), (3, 4), (8, 256)])
def test_random_requests_get_the_answers_that_they_get_alone(
    slots: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of steps; the rows with tokens are those of the requests, and the first ones."""
    rng, program, clock = fresh(slots), Counting(), Clock()
    monkeypatch.setattr(engine_module, "time", clock)
    engine = engine_of(program, slots, piece, queue=5)
    everyone: list[Asked] = []
    full = 0
    for _ in range(2500):
        clock.now += 1
        if rng.random() < 0.5:
            prompt = rng.integers(0, END, rng.integers(1, 25)).tolist()
            receives = int(rng.integers(0, 9)) if rng.random() < 0.1 else math.inf
            deadline = clock.now + rng.integers(0, 40) if rng.random() < 0.2 else math.inf
            try:
                everyone.append(ask(engine, prompt, int(rng.integers(1, 16)), deadline, receives))
            except QueueFull:
                full += 1
                assert engine.stats.waiting == 5
        if rng.random() < 0.1 and everyone:
            engine.cancel(everyone[-int(rng.integers(1, min(len(everyone), 12) + 1))].request)
        program.broken = {int(rng.integers(slots))} if rng.random() < 0.02 else set()
        if rng.random() < 0.8:
            engine.turn()
            used = engine.stats.running
            assert all(program.rows[:used]) and not any(program.rows[used:])
    drain(engine)
    assert not any(program.rows) and engine.failure is None and full
    reasons: Counter[str] = Counter()
    for asked in everyone:
        wanted = answer(asked.prompt, asked.settings.max_new_tokens)
        assert asked.tokens == wanted[: len(asked.tokens)]
        assert asked.refused <= 1, "who raises is not called again"
        reason = "refused" if asked.refused else asked.finish.reason
        reasons[reason] += 1
        if reason in ("stop", "length"):
            assert asked.tokens == wanted
            assert reason == ("stop" if wanted[-1] == END else "length")
    assert reasons.keys() == {"stop", "length", "cancelled", "deadline", "error", "refused"}
    stats = engine.stats
    assert sum(stats.finished.values()) == len(everyone)
    assert stats.first_token.count + stats.token_gap.count == stats.completion_tokens


def test_a_long_prompt_stops_nobody() -> None:
    """Each of its pieces is followed by a token of the others; two prompts are read in turn."""
    program = Counting()
    engine = engine_of(program, 4, piece=5)
    endless = [[token] for token in range(END) if END not in answer([token], 30)]
    short = [ask(engine, prompt, 30) for prompt in endless[:2]]
    for _ in range(2):
        engine.turn()
    long = ask(engine, list(range(23)), 4), ask(engine, [4] * 11, 2)
    program.calls.clear()
    drain(engine)
    reading = [counts[0] for _, counts in program.calls[:16:2]]
    decoding = [(first, len(counts)) for first, counts in program.calls[1:16:2]]
    assert reading == [5, 5, 5, 5, 3, 5, 5, 1]
    assert decoding == [(0, 2)] * 5 + [(0, 3)] * 3
    for asked in (*short, *long):
        assert asked.tokens == answer(asked.prompt, asked.settings.max_new_tokens)


@pytest.mark.parametrize("operation", ["step", "copy_rows", "clear_rows"])
def test_after_a_failed_step_nothing_goes_on(operation: str) -> None:
    program = Counting()
    engine = engine_of(program, 2)
    asked = [ask(engine, [number], 8) for number in range(4)]
    assert len(answer([0], 8)) > 4 and len(answer([1], 8)) > 4
    for _ in range(4):
        engine.turn()
    seen = [list(request.events) for request in asked]
    program.fails = {operation}
    engine.cancel(asked[0].request)
    engine.turn()
    assert isinstance(engine.failure, OSError)
    for request, before in zip(asked, seen, strict=True):
        assert request.events[:-1] == before, "the events of the failed step are not delivered"
        assert request.finish.reason == "error" and "no such luck" in request.finish.message
    assert engine.stats.finished == {"error": 4}
    with pytest.raises(Unavailable, match="the server has failed: no such luck"):
        ask(engine, [1], 1)
    program.fails, calls = set(), len(program.calls)
    engine.turn()
    engine.start()
    engine.stop()
    assert len(program.calls) == calls


@pytest.mark.parametrize(
    ("prompt", "most", "message"),
    [
        ([1] * 5, CAPACITY - 4, f"the prompt has 5 tokens and .* holds {CAPACITY} tokens"),
        ([1], 10**9, "max_new_tokens is 1000000000"),
        ([], 1, "the prompt has no tokens"),
        ([VOCABULARY], 1, "the prompt has the token 64, but the model has 64"),
    ],
)
def test_requests_that_cannot_be_answered(prompt: list[int], most: int, message: str) -> None:
    with pytest.raises(Error, match=message):
        ask(engine_of(Counting()), prompt, most)


@pytest.mark.parametrize(
    ("ports", "options", "message"),
    [
        ({}, {"slots": 9}, "of 1 to 9 rows, .* takes 1 to 8; compile with --dims B=1:9:9"),
        ({"inputs": (*PORTS.inputs, Port("pixels", "f32", ()))}, {}, "also has the inputs pixels"),
        ({"outputs": (Port("next_tokens", "i32", (B,)),)}, {}, "compile without --next-tokens"),
        ({"inputs": (Port("input_ids", "i32", (2 * B, S)),)}, {}, "for a mesh without dp"),
    ],
)
def test_programs_that_cannot_be_served(
    ports: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(Error, match=message):
        engine_of(Counting(replace(PORTS, **ports)), **options)


def test_ropes_that_depend_on_the_length_limit_the_capacity() -> None:
    rope = '%x, %p {head_dim=8, kind="dynamic", original_positions=7} : f32[B, S, 8]'
    text = f"func @f(%x: f32[B, S, 8], %p: i32[B, S]) -> (f32[B, S, 8]) {{ %y = rope {rope}\n"
    module = irc.parse(f"module @m {{ {text} return %y\n}} }}")
    model = engine_of(Counting()).model
    model.module = lambda: module
    assert (Engine(model).capacity, Engine(model, capacity=5).capacity) == (7, 5)


def test_stop_lets_requests_finish_within_the_grace() -> None:
    engine = engine_of(Counting(), 2)
    engine.start()
    asked = [ask(engine, [number], 20) for number in range(5)]
    engine.stop(60)
    assert [one.tokens for one in asked] == [answer(one.prompt, 20) for one in asked]
    with pytest.raises(Unavailable, match="about to end"):
        ask(engine, [1], 1)
    engine = engine_of(Counting(), 2)
    asked = [ask(engine, [number], 20) for number in range(5)]
    engine.turn()
    engine.stop()
    engine.start()
    engine.stop()
    assert {request.finish.reason for request in asked} == {"cancelled"}


def alone(model: Model, asked: Asked) -> tuple[list[int], bool]:
    """The tokens that one row gives, up to the first that noise of 1e-3 in the logits changes; and
    whether that is all."""
    prompt, settings = asked.prompt, asked.settings
    search, noisy = model.search(prompt, settings), model.search(prompt, settings)
    rows = Rows.empty(model.program, model.dims, 1, len(prompt) + settings.max_new_tokens)
    noise, tokens = fresh(), prompt
    while not search.done:
        logits = rows.step([tokens])
        search.advance(logits)
        noisy.advance(logits + noise.uniform(-1e-3, 1e-3, logits.shape))
        tokens = search.sequences[0][-1:]
        if noisy.sequences != search.sequences:
            return search.sequences[0][len(prompt) : -1], False
    return search.sequences[0][len(prompt) :], True


def check_answers(folder: Path, **options: int) -> Engine:
    """Forty clients at random times, some of which leave or cannot wait, on four slots."""
    rng, model = fresh(), irc.load(folder).model
    engine = Engine(model, 4, piece=int(rng.integers(1, 9)), **options)
    engine.start()
    everyone: list[Asked] = []
    for number in range(40):
        prompt, most = rng.integers(1, 90, rng.integers(1, 30)).tolist(), int(rng.integers(1, 20))
        deadline = time.monotonic() + rng.exponential(0.1) if rng.random() < 0.2 else math.inf
        sampling = {"temperature": number % 2 * 0.8, "seed": number}
        everyone.append(ask(engine, prompt, most, deadline, **sampling))
        time.sleep(rng.exponential(0.005))
        if rng.random() < 0.2:
            engine.cancel(everyone[-1].request)
    engine.stop(60)
    assert engine.failure is None and not engine.rows.past.any()
    ended = 0
    for asked in everyone:
        tokens, whole = alone(model, asked)
        assert asked.tokens[: len(tokens)] == tokens[: len(asked.tokens)]
        if asked.finish.reason in ("stop", "length"):
            ended += 1
            assert asked.tokens == tokens if whole else len(asked.tokens) > len(tokens)
    assert ended > 10
    return engine


def test_answers_from_a_pool_of_pages(checkpoint: Path, tmp_path: Path) -> None:
    """Requests wait for pages, and give them back; one that never gets enough is refused."""
    irc.compile(checkpoint, tmp_path / "built", backend="reference", page_caches=True)
    engine = check_answers(tmp_path / "built", cache_tokens=128)  # of two requests
    assert engine.rows.pages is not None and engine.rows.pages.pool.free_tokens == 128
    small = Engine(irc.load(tmp_path / "built").model, 4, cache_tokens=64)
    assert small.capacity == 64  # of an answer without a limit, too
    with pytest.raises(Error, match="server holds 64 tokens of a request"):
        ask(small, [1], 64)


@pytest.mark.parametrize("fixture", ["artifact", "two_ranks"])
def test_answers_of_a_model_with_caches(fixture: str, request: pytest.FixtureRequest) -> None:
    check_answers(request.getfixturevalue(fixture))


@pytest.mark.oracle
@pytest.mark.parametrize("mesh", ["", "tp=2"])
def test_answers_of_a_model_with_recurrent_states(mesh: str, tmp_path: Path) -> None:
    cases("DECODERS")["granite_hybrid"].save(tmp_path / "model")
    irc.compile(tmp_path / "model", tmp_path / "built", mesh=mesh)
    check_answers(tmp_path / "built")


@pytest.mark.gpu
def test_answers_on_a_gpu(checkpoint: Path, tmp_path: Path) -> None:
    irc.compile(checkpoint, tmp_path / "built", backend="cuda")
    check_answers(tmp_path / "built")
