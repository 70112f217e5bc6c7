"""`greedy`: prefill in one or more calls, then the most likely token at each step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from ..backends.base import Program
from ..ir.core import Module
from .decoding import Decoding, room
from .rows import check_language_model
from .rules import DecodingRules
from .sampling import random_of_row
from .search import Sampled
from .settings import GenerationSettings

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
    ports, dims = program.ports, dims or {}
    check_language_model(ports)
    limit = min(most, room(ports, dims, len(prompt)))
    rules = DecodingRules(GenerationSettings(), limit, ends, scored=False)
    search = Sampled(prompt, rules, random_of_row(0, 0))
    began = first = time.perf_counter()
    for step in Decoding(program, dims, [search], module=module).steps():
        if step == 0:
            first = time.perf_counter()
        if search.finish != "end":
            emit(search.sequences[0][-1])
    done, new = time.perf_counter(), search.sequences[0][len(prompt) :]
    stop: Stop = "count" if len(new) == most else "capacity"
    if search.finish == "end":
        stop, new = "end", new[:-1]
    return Summary(tuple(new), len(prompt), stop, first - began, done - first)
