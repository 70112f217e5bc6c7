"""`greedy`: prefill in one or more calls, then the most likely token at each step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from ..backends.base import Program, Stream
from ..errors import Error
from ..ir.core import Module
from ..ir.result_names import NEXT_TOKENS
from ..ops import Rope
from .checks import checked
from .inputs import cache_capacity, cache_sizes, multiple_of, rounded, vocabulary
from .rows import Rows, has_engine_tensors, most_slots

Stop: TypeAlias = Literal["end", "count", "capacity"]


@dataclass(frozen=True)
class Summary:
    """The new tokens of a generation, why it stopped, and the seconds of each phase."""

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
        """Tokens per second after the first new one, which prefill computes."""
        return max(len(self.tokens) - 1, 0) / max(self.decode_seconds, 1e-9)

    def as_json(self) -> dict[str, Any]:
        """All fields and rates, for JSON."""
        rates = {"prefill_rate": self.prefill_rate, "decode_rate": self.decode_rate}
        return asdict(self) | {"tokens": list(self.tokens)} | rates


def greedy(
    program: Program,
    prompt: Sequence[int],
    most: int,
    ends: Sequence[int] = (),
    dims: Mapping[str, Any] | None = None,
    emit: Callable[[int], None] = lambda token: None,
    module: Callable[[], Module] | None = None,
) -> Summary:
    """Continue `prompt` by up to `most` tokens; `emit` is called with each new token.

    `dims` are the ranges that the model was compiled for, which limit the cache and the length of
    a call. A token of `ends` stops generation and is not part of the result. `module` is called
    for a prompt in pieces; it gives the module of the program, whose rope may depend on the length.
    """
    dims = dims or {}
    capacity = _checked_capacity(program, prompt, dims)
    step = _ids_dim(program, 1, "tokens")[1]
    slots = rounded(-(-(len(prompt) + max(most, 1)) // step) * step, capacity)
    if has_engine_tensors(program.ports):
        session = _Engine(program, slots, dims)
        piece = len(prompt)
    else:
        session = _Session(program, slots, dims)
        piece = session.chunk
        if len(prompt) > piece and module is not None and _by_length(module(), len(prompt)):
            piece = session.piece_with_padding(len(prompt))
    began = time.perf_counter()
    token = session.prefill(prompt, piece)
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
        if session.length + session.multiple > slots:
            stop = "capacity"
            break
        token = session.step([token])
    done = time.perf_counter()
    return Summary(tuple(tokens), len(prompt), stop, first - began, done - first)


class _Session:
    """One sequence: the stream, and the number of tokens in its caches."""

    def __init__(self, program: Program, slots: int, dims: Mapping[str, Any]) -> None:
        self.program, self.names = program, {port.name for port in program.ports.inputs}
        name, self.multiple = _ids_dim(program, 1, "tokens")
        longest = int(dims[name][2]) if name in dims else slots // self.multiple
        self.chunk = longest * self.multiple
        self.rows = _ids_dim(program, 0, "rows")[1]
        self.stream: Stream = program.open(cache_sizes(program.ports.states, self.rows, slots))
        self.length = 0

    def prefill(self, prompt: Sequence[int], piece: int) -> int:
        """The token after the prompt, which is processed in pieces that the model accepts.

        Pieces smaller than a chunk are padded to it, except the last.
        """
        token = 0
        for start in range(0, len(prompt), piece):
            last = start + piece >= len(prompt)
            token = self.step(prompt[start : start + piece], 0 if last else self.chunk, len(prompt))
        return token

    def piece_with_padding(self, total: int) -> int:
        """The tokens of a piece of a prompt that leave room for padding in a chunk."""
        if self.chunk == self.multiple:
            raise Error(
                f"the prompt has {total} tokens, but a call takes {self.chunk}, and the rope of "
                "this model depends on the length of the prompt, for which a call needs padding; "
                f"compile with a larger --dims S=min:typical:max, at best max={total}"
            )
        return self.chunk - self.multiple

    def step(self, ids: Sequence[int], least: int = 0, total: int = 0) -> int:
        """The most likely token after `ids`; the smallest of equally likely ones.

        A call is padded with token 0 to `least` tokens and the multiple that the model requires;
        the next call overwrites the padding in the caches. The position of padding is the last of
        the prompt (`total` tokens) or of `ids`, because a rope may depend on the largest position
        (dynamic, longrope). Data-parallel replicas all get the same row.
        """
        count = len(ids)
        padded = -(-max(count, least) // self.multiple) * self.multiple
        end = self.length + count
        at = [*range(self.length, end), *[max(end, total) - 1] * (padded - count)]
        every = {
            "input_ids": np.array([[*ids, *[0] * (padded - count)]], np.int32),
            "positions": np.array([at], np.int32),
            "past_lengths": np.array([self.length], np.int32),
            "logit_positions": np.array([[count - 1]], np.int32),
        }
        inputs = {n: a.repeat(self.rows, 0) for n, a in every.items() if n in self.names}
        results = checked(self.program, self.stream.step(inputs), self.names)
        self.length += count
        if NEXT_TOKENS in results:
            return int(results[NEXT_TOKENS][0, -1])
        return int(results["logits"][0, -1].argmax())


class _Engine:
    """One sequence in a network of TensorRT-LLM, whose prompt is one call."""

    multiple = 1

    def __init__(self, program: Program, slots: int, dims: Mapping[str, Any]) -> None:
        self.program, self.dims, self.chunk = program, dims, slots
        self.length = 0

    def prefill(self, prompt: Sequence[int], piece: int) -> int:
        """The token after the prompt."""
        self.rows = Rows(self.program, self.dims, [prompt], self.chunk)
        return self.step(prompt)

    def step(self, ids: Sequence[int]) -> int:
        """The most likely token after `ids`; the smallest of equally likely ones."""
        self.length += len(ids)
        return int(self.rows.step([ids])[0].argmax())


_KNOWN = {"input_ids", "positions", "past_lengths", "logit_positions"}


def _checked_capacity(program: Program, prompt: Sequence[int], dims: Mapping[str, Any]) -> int:
    """The capacity of the caches in tokens; an Error if the model or prompt does not fit."""
    ports = program.ports
    names = [port.name for port in ports.inputs]
    outputs = [port.name for port in ports.outputs]
    has_tokens = "logits" in outputs or NEXT_TOKENS in outputs
    is_engine = has_engine_tensors(ports)
    if "input_ids" not in names or not has_tokens or not (ports.states or is_engine):
        raise Error(
            "this model is no language model, which has the input input_ids, caches, and the "
            f"output logits: its inputs are {', '.join(names) or 'none'} and its outputs "
            f"{', '.join(outputs) or 'none'}; use irc run"
        )
    unknown = [name for name in names if name not in _KNOWN]
    if unknown and not is_engine:
        raise Error(f"irc generate has no value for the input {', '.join(unknown)}; use irc run")
    if not prompt:
        raise Error("the prompt has no tokens; expected at least one")
    size = vocabulary(ports)
    if size is not None and max(prompt) >= size:
        raise Error(f"the prompt has the token {max(prompt)}, but the model has {size} tokens")
    capacity = most_slots(ports, dims) if is_engine else cache_capacity(ports.states, dims)
    if capacity and len(prompt) > capacity:
        raise Error(
            f"the prompt has {len(prompt)} tokens, but the cache of this model holds {capacity}; "
            "shorten it, or compile with a larger --dims C=min:typical:max"
        )
    return capacity


def _by_length(module: Module, length: int) -> bool:
    """Whether a rope of the module turns a sequence of this length otherwise than its pieces."""
    ropes = [op for op in module.ops() if isinstance(op, Rope)]
    return any(rope.by_length and rope.original_positions < length for rope in ropes)


def _ids_dim(program: Program, at: int, what: str) -> tuple[str, int]:
    """(S, n) if a call takes n*S tokens, or rows."""
    (ids,) = [port for port in program.ports.inputs if port.name == "input_ids"]
    found = multiple_of(ids.shape[at])
    if found is None:
        raise Error(f"this model takes exactly {ids.shape[at]} {what} per call; use irc run")
    return found
