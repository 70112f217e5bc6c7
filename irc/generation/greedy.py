"""`greedy`: prefill in one or more calls, then the most likely token at each step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from ..backends.base import Program
from ..errors import Error
from ..ir.core import Module
from ..ops import Rope
from .inputs import Range, cache_range, check_prompt, multiple_of, rounded, vocabulary
from .rows import Rows, check_language_model, has_engine_tensors, row_dim

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
    limits = _checked_capacity(program, prompt, dims)
    step = _ids_dim(program, 1, "tokens")[1]
    slots = rounded(-(-(len(prompt) + max(most, 1)) // step) * step, limits)
    session = _Session(program, prompt, slots, dims)
    piece = session.chunk
    if has_engine_tensors(program.ports):
        piece = len(prompt)  # their inputs tell prompts from single tokens
    elif len(prompt) > piece and module is not None and _by_length(module(), len(prompt)):
        piece = session.piece_with_padding(len(prompt))
    began = time.perf_counter()
    token = session.prefill(prompt, piece)
    first = time.perf_counter()
    tokens: list[int] = []
    stop: Stop = "count"
    following = session.following(token, min(most - 1, slots - session.length))
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
        token = next(following)
    done = time.perf_counter()
    return Summary(tuple(tokens), len(prompt), stop, first - began, done - first)


class _Session:
    """One sequence: its rows, which are equal on all data-parallel replicas, and its length."""

    def __init__(
        self, program: Program, prompt: Sequence[int], slots: int, dims: Mapping[str, Any]
    ) -> None:
        name, self.multiple = _ids_dim(program, 1, "tokens")
        longest = int(dims[name][2]) if name in dims else slots // self.multiple
        self.chunk = longest * self.multiple
        self.copies = _ids_dim(program, 0, "rows")[1]
        self.rows = Rows(program, dims, [prompt] * self.copies, slots)
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

    def following(self, token: int, count: int) -> Iterator[int]:
        """The tokens after `token`, of which the caller takes at most `count`."""
        ahead = self.rows.ahead(token, count)
        for tokens in ahead or ():
            self.length += 1
            yield int(tokens[0])
        while ahead is None:
            token = self.step([token])
            yield token

    def step(self, ids: Sequence[int], least: int = 0, total: int = 0) -> int:
        """The most likely token after `ids`, see `Rows.next_tokens`."""
        self.length += len(ids)
        return int(self.rows.next_tokens([ids] * self.copies, least, total)[0])


def _checked_capacity(program: Program, prompt: Sequence[int], dims: Mapping[str, Any]) -> Range:
    """The `cache_range` of a model; an Error if the model or prompt does not fit."""
    ports = program.ports
    check_language_model(ports)
    check_prompt(prompt, vocabulary(ports))
    limits = cache_range(ports.states, dims)
    if limits[1] and len(prompt) > limits[1]:
        raise Error(
            f"the prompt has {len(prompt)} tokens, but the cache of this model holds {limits[1]}; "
            "shorten it, or compile with a larger --dims C=min:typical:max"
        )
    return limits


def _by_length(module: Module, length: int) -> bool:
    """Whether a rope of the module turns a sequence of this length otherwise than its pieces."""
    ropes = [op for op in module.ops() if isinstance(op, Rope)]
    return any(rope.by_length and rope.original_positions < length for rope in ropes)


def _ids_dim(program: Program, at: int, what: str) -> tuple[str, int]:
    """(S, n) if a call takes n*S tokens, or rows."""
    (ids,) = [port for port in program.ports.inputs if port.name == "input_ids"]
    dim = row_dim(ids, program.ports.inputs)[1] if at == 0 else ids.shape[-1]
    multiple = multiple_of(dim)
    if multiple is None:
        raise Error(f"this model takes exactly {dim} {what} per call; use irc run")
    return multiple
