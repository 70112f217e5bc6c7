"""The time that irc adds to each step of a model at one rank, which is here a stub.

Prints microseconds of the processor, the best of several runs: python -m benchmarks.generation_loop
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from irc.backends.base import Port, Ports
from irc.generation.decoding import Decoding
from irc.generation.rules import DecodingRules
from irc.generation.sampling import random_of_row
from irc.generation.search import Sampled
from irc.generation.settings import GenerationSettings
from irc.ir.dims import symbol

VOCAB, STEPS, RUNS = 32, 1000, 7
B, S, C = map(symbol, "BSC")
INPUTS = {"input_ids": (B, S), "positions": (B, S), "past_lengths": (B,)}


class Stub:
    """A language model of no layers."""

    ports = Ports(
        tuple(Port(name, "i32", dims) for name, dims in INPUTS.items()),
        (Port("k0", "f32", (B, 1, C, 8), True),),
        (Port("logits", "f32", (B, S, VOCAB)),),
    )

    def __init__(self, rows: int) -> None:
        self.logits = np.random.default_rng(0).standard_normal((rows, 1, VOCAB), np.float32)

    def open(self, sizes: Mapping[str, int]) -> Stub:
        """The stub itself: it keeps nothing."""
        return self

    def step(self, inputs: Mapping[str, Any], first: int = 0) -> dict[str, Any]:
        """The same logits for any inputs."""
        return {"logits": self.logits}


def microseconds(rows: int, **settings: Any) -> float:
    """Per step of a batch of `rows` prompts."""
    best, chosen = float("inf"), GenerationSettings(**settings)
    for _ in range(RUNS):
        rules = DecodingRules(chosen, STEPS + 1, scored=False)
        searches = [Sampled([1, 2, 3], rules, random_of_row(0, row)) for row in range(rows)]
        stub: Any = Stub(rows)
        steps = Decoding(stub, {}, searches).steps()
        next(steps)
        began = time.process_time()
        for _ in steps:
            pass
        best = min(best, (time.process_time() - began) / STEPS)
    return best * 1e6


if __name__ == "__main__":
    for rows in (1, 16):
        print(f"{rows} rows, greedy: {microseconds(rows):.1f} us a step")
        print(f"{rows} rows, temperature 1: {microseconds(rows, temperature=1.0):.1f} us a step")
