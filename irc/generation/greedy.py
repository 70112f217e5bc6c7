"""Greedy decoding: prefill in one or more calls, then the likeliest token at each step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from ..backends.base import Program, Stream
from ..errors import Error
from ..results import NEXT_TOKENS
from .checks import checked
from .inputs import cache_capacity, cache_sizes, multiple_of, rounded

Stop: TypeAlias = Literal["end", "count", "capacity"]


@dataclass(frozen=True)
class Summary:
    """What a generation did: the new tokens, why it stopped, and how long each phase took."""

    tokens: tuple[int, ...]
    prompt_tokens: int
    stop: Stop
    prefill_seconds: float
    decode_seconds: float

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second."""
        return self.prompt_tokens / max(self.prefill_seconds, 1e-9)

    @property
    def decode_rate(self) -> float:
        """Tokens per second after the first new one, which prefill made; 0 if there are none."""
        return max(len(self.tokens) - 1, 0) / max(self.decode_seconds, 1e-9)

    def as_json(self) -> dict[str, Any]:
        """Everything, for a program to read."""
        rates = {"prefill_rate": self.prefill_rate, "decode_rate": self.decode_rate}
        return asdict(self) | {"tokens": list(self.tokens)} | rates


def greedy(
    program: Program,
    prompt: Sequence[int],
    most: int,
    ends: Sequence[int] = (),
    dims: Mapping[str, Any] | None = None,
    emit: Callable[[int], None] = lambda token: None,
) -> Summary:
    """Continue `prompt` by up to `most` tokens; `emit` gets each as it is chosen.

    `dims` are the ranges the model was compiled for: they bound the cache and the length of one
    call. A token of `ends` stops the text and is not part of it.
    """
    dims = dims or {}
    capacity = _checked_capacity(program, prompt, dims)
    step = _call_multiple(program)
    room = rounded(-(-(len(prompt) + max(most, 1)) // step) * step, capacity)
    session = _Session(program, room, dims)
    began = time.perf_counter()
    token = session.prefill(prompt)
    first = time.perf_counter()
    tokens: list[int] = []
    stop: Stop = "count"
    while len(tokens) < most:
        if token in ends:
            stop = "end"
            break
        tokens.append(token)
        emit(token)
        if len(tokens) == most:
            break
        if session.length + session.multiple > room:
            stop = "capacity"
            break
        token = session.step([token])
    done = time.perf_counter()
    return Summary(tuple(tokens), len(prompt), stop, first - began, done - first)


class _Session:
    """One conversation: the stream, and how many tokens its caches hold."""

    def __init__(self, program: Program, room: int, dims: Mapping[str, Any]) -> None:
        self.program, self.names = program, {port.name for port in program.ports.inputs}
        self.multiple = _call_multiple(program)
        self.chunk = _longest_call(program, dims) or room // self.multiple * self.multiple
        self.rows = _ids_dim(program, 0, "rows")[1]
        self.stream: Stream = program.open(cache_sizes(program.ports.states, self.rows, room))
        self.length = 0

    def prefill(self, prompt: Sequence[int]) -> int:
        """The token after the prompt, which goes in by pieces that the model takes."""
        token = 0
        for start in range(0, len(prompt), self.chunk):
            token = self.step(prompt[start : start + self.chunk])
        return token

    def step(self, ids: Sequence[int]) -> int:
        """Put tokens in; the likeliest next one. Of equal ones the first wins.

        Where a call takes a multiple of some number, token 0 fills it up behind the others; the
        next call overwrites what that leaves in the caches. Where ranks take rows of their own,
        all get the same.
        """
        count = len(ids)
        padded = -(-count // self.multiple) * self.multiple
        offered = {
            "input_ids": np.array([[*ids, *[0] * (padded - count)]], np.int32),
            "positions": np.arange(self.length, self.length + padded, dtype=np.int32)[None],
            "past_lengths": np.array([self.length], np.int32),
            "logit_positions": np.array([[count - 1]], np.int32),
        }
        inputs = {n: a.repeat(self.rows, 0) for n, a in offered.items() if n in self.names}
        results = checked(self.program, self.stream.step(inputs), self.names)
        self.length += count
        if NEXT_TOKENS in results:
            return int(results[NEXT_TOKENS][0, -1])
        return int(results["logits"][0, -1].argmax())


_KNOWN = {"input_ids", "positions", "past_lengths", "logit_positions"}


def _checked_capacity(program: Program, prompt: Sequence[int], dims: Mapping[str, Any]) -> int:
    """The most tokens the caches hold, after the checks that make Errors worth reading."""
    ports = program.ports
    names = [port.name for port in ports.inputs]
    outputs = [port.name for port in ports.outputs]
    answers = "logits" in outputs or NEXT_TOKENS in outputs
    if "input_ids" not in names or not answers or not ports.states:
        raise Error(
            "this model cannot generate: it takes "
            f"{', '.join(names) or 'nothing'} and gives {', '.join(outputs) or 'nothing'}, and a "
            "language model takes input_ids and caches, and gives logits; use irc run"
        )
    strange = [name for name in names if name not in _KNOWN]
    if strange:
        raise Error(f"irc generate cannot fill the input {', '.join(strange)}; use irc run")
    if not prompt:
        raise Error("the prompt has no tokens; give some text")
    size = next((port.shape[-1] for port in ports.outputs if port.name == "logits"), None)
    if isinstance(size, int) and max(prompt) >= size:
        raise Error(f"the prompt has the token {max(prompt)}, and the model knows {size} of them")
    capacity = cache_capacity(ports.states, dims)
    if capacity and len(prompt) > capacity:
        raise Error(
            f"the prompt has {len(prompt)} tokens, and the cache of this model holds {capacity}; "
            "shorten it, or compile with a larger --dims C=min:typical:max"
        )
    return capacity


def _ids_dim(program: Program, at: int, what: str) -> tuple[str, int]:
    """(S, n) where a call takes n*S tokens, or rows."""
    (ids,) = [port for port in program.ports.inputs if port.name == "input_ids"]
    found = multiple_of(ids.shape[at])
    if found is None:
        raise Error(f"this model takes exactly {ids.shape[at]} {what} per call; use irc run")
    return found


def _call_multiple(program: Program) -> int:
    """Of what number a call takes a multiple of tokens."""
    return _ids_dim(program, 1, "tokens")[1]


def _longest_call(program: Program, dims: Mapping[str, Any]) -> int:
    """How many tokens one call may take; 0: any number."""
    name, multiple = _ids_dim(program, 1, "tokens")
    return multiple * int(dims[name][2]) if name in dims else 0
