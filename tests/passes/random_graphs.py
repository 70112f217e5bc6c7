"""Random small programs that passes find something to do in, and that the reference can run."""

from __future__ import annotations

import random

from irc.core import Function, Module, Op, Result, Value, Weight
from irc.dims import symbol
from irc.errors import Error
from irc.ops import (
    Add,
    Cast,
    Concat,
    Constant,
    Div,
    Eq,
    Exp,
    Expand,
    Full,
    Linear,
    Lt,
    Maximum,
    Minimum,
    Mul,
    Neg,
    Not,
    Or,
    Pow,
    Relu,
    Reshape,
    Return,
    Sigmoid,
    Silu,
    Slice,
    Split,
    Squeeze,
    Sub,
    Tanh,
    Transpose,
    Unsqueeze,
    Where,
)
from irc.ops.elementwise import Abs
from irc.types import TensorType
from irc.weights import RandomRef

B = symbol("B")
NUMBERS = (0.0, -0.0, 1.0, 1, 0, -1.0, 2.0, float("inf"), float("nan"))


class Graph:
    """Grows a function by random operations on the values that are there."""

    def __init__(self, seed: int, dtype: str) -> None:
        self.rng = random.Random(seed)
        self.dtype = dtype
        self.module = Module(f"r{seed}", dims={"B": (1, 2, 4)})
        for name in ("w", "u"):
            ref = RandomRef(name, seed, 0.5)
            self.module.add_weight(Weight(TensorType(dtype, (4, 4)), name, ref))
        args = [(n, TensorType(dtype, (B, 4))) for n in ("x", "y")]
        args.append(("c", TensorType("bool", (B, 4))))
        self.function = self.module.add_function(Function("forward", args))
        self.values: list[Value] = list(self.function.args)

    def grow(self, count: int) -> Module:
        while sum(1 for _ in self.function) < count:
            try:
                self.keep(self.step())
            except Error:
                continue  # the operands that were picked do not go together
        last = [v for v in self.values[3:] if self.rng.random() < 0.3] or self.values[-1:]
        self.function.append(Return(last))
        self.function.results = tuple(Result(f"r{i}") for i in range(len(last)))
        return self.module

    def keep(self, op: Op) -> None:
        waiting = [v.owner for v in op.operands if isinstance(v.owner, Op) and not v.owner.parent]
        for inner in (*waiting, op):
            self.function.append(inner)
            self.values += inner.results

    def pick(self, dtype: str | None = None) -> Value:
        fitting = [v for v in self.values if dtype is None or v.type.dtype == dtype]
        if not fitting:
            raise Error("nothing of this dtype yet")
        return self.rng.choice(fitting[-8:])

    def step(self) -> Op:
        rng, x, y = self.rng, self.pick(self.dtype), self.pick(self.dtype)
        match rng.randrange(12):
            case 0 | 1:
                return rng.choice([Add, Sub, Mul, Div, Maximum, Minimum])(x, y)
            case 2:
                return rng.choice([Neg, Abs, Relu, Tanh, Silu, Sigmoid, Exp])(x)
            case 3 | 4:
                value = rng.choice(NUMBERS)
                number = Full(value=value, dtype=self.dtype)
                return rng.choice([Add, Sub, Mul, Div, Pow])(*rng.sample([x, number.result], 2))
            case 5:
                return Constant(
                    values=tuple(rng.choices(NUMBERS, k=4)), shape=(4,), dtype=self.dtype
                )
            case 6:
                return rng.choice([Not, lambda c: Or(c, c)])(self.pick("bool"))
            case 7:
                return rng.choice([Eq, Lt])(x, y)
            case 8:
                return Where(self.pick("bool"), x, y)
            case 9:
                return self.linear(x)
            case 10:
                return Cast(self.pick(), dtype=rng.choice(["f32", "bf16", "f16", self.dtype]))
            case _:
                return self.shape(self.pick())

    def linear(self, x: Value) -> Op:
        weights = self.module.weights
        if self.rng.random() < 0.5:
            return Linear(x, self.rng.choice(list(weights.values())))
        gate, up = Silu(Linear(x, weights["w"])), Linear(x, weights["u"])
        for op in (gate.operands[0].owner, gate, up):
            self.function.append(op)  # type: ignore[arg-type]
        return Mul(*self.rng.sample([gate.result, up.result], 2))

    def shape(self, x: Value) -> Op:
        rng, rank, dims = self.rng, x.type.rank, x.type.shape
        match rng.randrange(7):
            case 0:
                return Transpose(x, order=tuple(rng.sample(range(rank), rank)))
            case 1:
                return Unsqueeze(x, dims=(rng.randint(0, rank),))
            case 2:
                return Squeeze(x, dims=(rng.randrange(rank + 1),))
            case 3:
                return Reshape(x, shape=(*dims[:-1], 2, 2) if rng.random() < 0.5 else (*dims, 1))
            case 4:
                at = dims.index(4) if 4 in dims else rank
                start = rng.randint(0, 1)
                return Slice(x, dim=at, start=start, stop=4 - start * rng.randint(0, 1))
            case 5:
                parts = Split(x, dim=dims.index(4) if 4 in dims else rank, sizes=(1, 3))
                self.keep(parts)
                return Concat(list(parts.results), dim=parts.dim)
            case _:
                return Expand(x, shape=(rng.choice([1, 3]), *dims[-2:]))


def random_graph(seed: int, dtype: str = "f32") -> Module:
    """The same program for the same seed: about 30 operations."""
    return Graph(seed, dtype).grow(30)
