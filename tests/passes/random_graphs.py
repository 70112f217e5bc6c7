"""Random small modules that passes can rewrite and that the reference can run."""

from __future__ import annotations

import random

from irc import ops
from irc.errors import Error
from irc.ir.core import Function, Module, Op, Result, Value, Weight
from irc.ir.dims import symbol
from irc.ir.types import TensorType
from irc.weights import RandomRef

B = symbol("B")
NUMBERS = (0.0, -0.0, 1.0, 1, 0, -1.0, 2.0, float("inf"), float("nan"))
BINARY = (ops.Add, ops.Sub, ops.Mul, ops.Div, ops.Maximum, ops.Minimum)
UNARY = (ops.Neg, ops.Abs, ops.Relu, ops.Tanh, ops.Silu, ops.Sigmoid, ops.Exp)


class Graph:
    """Grows a function by random operations on its values."""

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
                continue  # the picked operands do not fit
        last = [v for v in self.values[3:] if self.rng.random() < 0.3] or self.values[-1:]
        self.function.append(ops.Return(last))
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
            raise Error("no value of this dtype yet")
        return self.rng.choice(fitting[-8:])

    def step(self) -> Op:
        rng, x, y = self.rng, self.pick(self.dtype), self.pick(self.dtype)
        match rng.randrange(12):
            case 0 | 1:
                return rng.choice(BINARY)(x, y)
            case 2:
                return rng.choice(UNARY)(x)
            case 3 | 4:
                value = rng.choice(NUMBERS)
                number = ops.Full(value=value, dtype=self.dtype)
                return rng.choice([*BINARY, ops.Pow])(*rng.sample([x, number.result], 2))
            case 5:
                values = tuple(rng.choices(NUMBERS, k=4))
                return ops.Constant(values=values, shape=(4,), dtype=self.dtype)
            case 6:
                return rng.choice([ops.Not, lambda c: ops.Or(c, c)])(self.pick("bool"))
            case 7:
                return rng.choice([ops.Eq, ops.Lt])(x, y)
            case 8:
                return ops.Where(self.pick("bool"), x, y)
            case 9:
                return self.linear(x)
            case 10:
                return ops.Cast(self.pick(), dtype=rng.choice(["f32", "bf16", "f16", self.dtype]))
            case _:
                return self.shape(self.pick())

    def linear(self, x: Value) -> Op:
        weights = self.module.weights
        if self.rng.random() < 0.5:
            return ops.Linear(x, self.rng.choice(list(weights.values())))
        gate, up = ops.Silu(ops.Linear(x, weights["w"])), ops.Linear(x, weights["u"])
        for op in (gate.operands[0].owner, gate, up):
            self.function.append(op)  # type: ignore[arg-type]
        return ops.Mul(*self.rng.sample([gate.result, up.result], 2))

    def shape(self, x: Value) -> Op:
        rng, rank, dims = self.rng, x.type.ndim, x.type.shape
        match rng.randrange(7):
            case 0:
                return ops.Transpose(x, order=tuple(rng.sample(range(rank), rank)))
            case 1:
                return ops.Unsqueeze(x, dims=(rng.randint(0, rank),))
            case 2:
                return ops.Squeeze(x, dims=(rng.randrange(rank + 1),))
            case 3:
                new = (*dims[:-1], 2, 2) if rng.random() < 0.5 else (*dims, 1)
                return ops.Reshape(x, shape=new)
            case 4:
                at = dims.index(4) if 4 in dims else rank
                start = rng.randint(0, 1)
                return ops.Slice(x, dim=at, start=start, stop=4 - start * rng.randint(0, 1))
            case 5:
                parts = ops.Split(x, dim=dims.index(4) if 4 in dims else rank, sizes=(1, 3))
                self.keep(parts)
                return ops.Concat(list(parts.results), dim=parts.dim)
            case _:
                return ops.Expand(x, shape=(rng.choice([1, 3]), *dims[-2:]))


def random_graph(seed: int, dtype: str = "f32") -> Module:
    """The module of a seed: about 30 operations."""
    return Graph(seed, dtype).grow(30)
