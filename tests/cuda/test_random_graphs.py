"""Random graphs of what fusions look for: plans with them on the host, against the reference.

IRC_TEST_GRAPHS is the number of graphs.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from irc import ops
from irc.backends.cuda.backend import backend
from irc.backends.cuda.plan.regime import Target
from irc.driver.build import run_passes
from irc.ir.core import Value
from irc.ir.dims import symbol
from irc.pipeline.instruments import random_inputs
from irc.testing.draw import Arg, Draw
from irc.testing.wanted import Wanted
from irc.text import parse_module
from tests.cuda.run_plan import HostProgram

NUMBER = int(os.environ.get("IRC_TEST_GRAPHS", "4"))
CAPACITY = 40
CODES = {"i8": 40.0, "i4": 3.0, "u4": 15.0, "f8e4m3": 100.0}
TOLERANCE = {"f32": 1e-4, "f16": 4e-3, "bf16": 2e-2}


class Graph(Draw):
    """A graph whose widths kernels of products and attention take, most of the time."""

    def size(self) -> int:
        return self.rng.choice((3, 64, 64, 128))

    def step(self) -> None:
        self.rng.choice((super().step, self.layer, self.cached, self.feed_forward, self.rows))()

    def matrix(self, rows: int, columns: int, role: str) -> Value:
        """A weight, at times of codes."""
        if self.rng.random() < 0.5:
            return self.weight(rows, columns, spread=columns**-0.5, role=role)
        kind = self.rng.choice(list(CODES))
        blocks = self.rng.choice([1, *(n for n in (2, 4) if columns % n == 0)])
        codes = self.weight(rows, columns, dtype=kind, spread=CODES[kind])
        scales = self.weight(rows, blocks, spread=columns**-0.5 / CODES[kind])
        zero = self.weight(rows, blocks, dtype=kind, spread=15.0) if kind == "u4" else None
        return self.put(ops.Dequantize(codes, scales, zero=zero))

    def normed(self) -> tuple[Value, Value]:
        """A value, and its norm."""
        x = self.pick(2)
        return x, self.put(ops.RmsNorm(x, self.weight(self.last(x)), eps=1e-5))

    def layer(self) -> None:
        """The norm of a value, a product or several, and the value added."""
        x, normed = self.normed()
        for _ in range(self.rng.randint(0, 1)):
            self.linear(normed, self.size())
        self.put(ops.Add(*self.rng.sample([x, self.linear(normed, self.last(x))], 2)))

    def feed_forward(self) -> None:
        """The norm of a value, a gate, the way back, and the value added."""
        x, normed = self.normed()
        hidden, width = self.size(), self.last(x)
        gate, up = (self.put(ops.Linear(normed, self.matrix(hidden, width, r))) for r in "gu")
        act = self.rng.choice((ops.Silu, ops.Gelu, ops.Relu, ops.Sigmoid))
        inner = self.put(ops.Mul(*self.rng.sample([self.put(act(gate)), up], 2)))
        self.put(ops.Add(x, self.put(ops.Linear(inner, self.matrix(width, hidden, "d")))))

    def cached(self) -> None:
        """Attention over caches: norms and ropes of heads, updates, the product behind."""
        rng, x = self.rng, self.pick(3)
        short = x.type.ndim == 3 and x.type.shape[1] in range(1, CAPACITY // 2)
        if not short or rng.random() < 0.5:
            x = self.argument(Arg((symbol("B"), 1, 64)))
        rows, tokens, width = x.type.shape
        assert isinstance(width, int)
        keys, head = rng.choice((1, 2)), rng.choice((4, 16, 32))
        heads = keys * rng.choice((1, 2))
        q, k, v = (self.linear(x, n * head) for n in (heads, keys, keys))
        if rng.random() < 0.5:
            q, k = self.head_norm(q, head), self.head_norm(k, head)
        if rng.random() < 0.7:
            at = self.argument(Arg((rows, tokens), "i32"))
            q, k = (self.put(ops.Rope(each, at, head_dim=head)) for each in (q, k))
        past = self.argument(Arg((rows,), "i32"))
        caches = [self.argument(Arg((rows, keys, CAPACITY, head))) for _ in "kv"]
        k, v = (
            self.put(ops.CacheUpdate(cache, new, past))
            for cache, new in zip(caches, (k, v), strict=True)
        )
        options: dict[str, Any] = {"window": rng.choice((0, 3)), "softcap": rng.choice((0.0, 5.0))}
        mixed = self.put(ops.Attention(q, k, v, past=past, head_dim=head, causal=True, **options))
        self.put(ops.Add(self.linear(mixed, width), x))

    def rows(self) -> None:
        """Rows of numbers: softmax, norms of sums, running sums."""
        x = self.pick(2)
        match self.rng.randrange(4):
            case 0:
                self.put(ops.Softmax(x, dim=self.rng.randrange(x.type.ndim)))
            case 1:
                self.put(ops.LayerNorm(self.put(ops.Add(x, x)), weight=self.weight(self.last(x))))
            case 2:
                self.put(ops.Cumsum(x, dim=-1))
            case _:
                self.put(ops.Mul(x, self.put(ops.ReduceMean(x, dims=(-1,), keep=True))))


@pytest.mark.parametrize("number", range(NUMBER))
def test_fused_plans_agree(number: int, rng: np.random.Generator) -> None:
    seed, dtype = int(rng.integers(1 << 30)), str(rng.choice(list(TOLERANCE)))
    graph = Graph(seed, dtype, steps=12)
    sizes = {"B": int(rng.choice([1, 2, 5, 17]))}
    inputs = random_inputs(graph.module, sizes, seed)
    wanted = Wanted.of(graph.module, inputs, TOLERANCE[dtype])
    if not wanted.stable:
        pytest.skip("noise in the inputs makes results infinite or NaN")
    module = parse_module(str(graph.module))
    run_passes(module, backend.default_pipeline)
    program = HostProgram(module, fused=True, target=Target(multiprocessors=4))
    wanted.check_all(program.run(inputs), f"seed {seed} in {dtype} at {sizes}:\n{module}")
