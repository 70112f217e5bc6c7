"""Random unsharded graphs with odd sizes, and random meshes and plans to spread them by."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

from irc import ops
from irc.errors import Error
from irc.ir.core import Function, Module, Op, Result, Value, Weight
from irc.ir.dims import symbol
from irc.ir.dtypes import numpy_dtype
from irc.ir.types import TensorType
from irc.weights import RandomRef

SIZES = (1, 3, 4, 5, 6, 7, 12)
MESHES = ("tp=1", "tp=2", "tp=3", "tp=4", "tp=6", "tp=8", "ep=2,tp=2", "ep=2,tp=3", "dp=2,tp=2")
B = symbol("B")


class Sharded:
    """One random case: `module` unsharded, `mesh` and the rows of a `plan` for it.

    What a graph amplifies of its rounding has no bound. In f64 it stays far below any mistake.
    """

    def __init__(self, seed: int, dtype: str = "f64") -> None:
        self.rng = random.Random(seed)
        self.dtype = dtype
        self.mesh = self.rng.choice(MESHES)
        self.module = Module(f"g{seed}", dims={"B": (1, 2, 8)})
        width = self.size()
        args = [
            ("x", TensorType(dtype, (B, 3, width))),
            ("y", TensorType(dtype, (B, 3, width))),
            ("ids", TensorType("i32", (B, 3))),
        ]
        self.function = self.module.add_function(Function("forward", args))
        self.floats: list[Value] = list(self.function.args[:2])
        self.exact: list[Value] = list(self.function.args[:2])  # without rounding so far
        self.others: list[Value] = []
        while sum(1 for _ in self.function) < 14:
            try:
                self.step()
            except Error:
                self.drop()
        self.finish()
        self.plan = [self.row(f"{name}", w.type.ndim) for name, w in self.module.weights.items()]
        if self.rng.random() < 0.3:
            self.plan.append(f"x {self.rng.choice([1, 2])}@tp")

    def size(self) -> int:
        """A size that may or may not divide."""
        return self.rng.choice(SIZES)

    def row(self, name: str, rank: int) -> str:
        """A row of the plan for one weight."""
        axes = [axis.partition("=")[0] for axis in self.mesh.split(",")]
        if self.rng.random() < 0.25:
            return f"{name} replicated"
        axis = self.rng.choice(axes)
        first = f"{self.rng.randrange(rank)}@{axis}"
        return f"{name} {first}"

    def weight(self, *shape: int) -> Weight:
        """A new weight of random numbers."""
        name = f"w{len(self.module.weights)}"
        return self.module.add_weight(
            Weight(TensorType(self.dtype, shape), name, RandomRef(name, 5, 0.4))
        )

    def keep(self, op: Op, exact: bool = False) -> None:
        self.function.append(op)
        for value in op.results:
            if value.type.dtype == self.dtype:
                self.floats.append(value)
                if exact:
                    self.exact.append(value)
            else:
                self.others.append(value)

    def drop(self) -> None:
        """Forget weights that no operation came to use."""
        for name in [n for n, w in self.module.weights.items() if not w.users]:
            del self.module.weights[name]

    def last(self, value: Value) -> int:
        size = value.type.shape[-1]
        if not isinstance(size, int):
            raise Error("the last dimension is symbolic")
        return size

    def step(self) -> None:
        steps: list[Callable[[Value], None]] = [
            self.linear, self.linear, self.linear, self.norm, self.unary, self.binary, self.binary,
            self.reduce, self.shape, self.shape, self.lookup, self.choice, self.gated, self.parts,
            self.product,
        ]  # fmt: skip
        self.rng.choice(steps)(self.rng.choice(self.floats[-6:]))

    def linear(self, x: Value) -> None:
        out = self.size()
        bias = self.weight(out) if self.rng.random() < 0.4 else None
        self.keep(ops.Linear(x, self.weight(out, self.last(x)), bias=bias))

    def gated(self, x: Value) -> None:
        hidden, width = self.size(), self.last(x)
        act = self.rng.choice(["silu", "gelu", "sigmoid", "relu"])
        self.keep(ops.GatedMlp(x, self.weight(hidden, width), self.weight(hidden, width), act=act))  # type: ignore[arg-type]
        self.keep(ops.Linear(self.floats[-1], self.weight(width, hidden)))

    def norm(self, x: Value) -> None:
        weight = self.weight(self.last(x))
        self.keep(
            ops.RmsNorm(x, weight) if self.rng.random() < 0.6 else ops.LayerNorm(x, weight=weight)
        )

    def unary(self, x: Value) -> None:
        self.keep(self.rng.choice([ops.Relu, ops.Silu, ops.Gelu, ops.Sigmoid, ops.Tanh])(x))

    def binary(self, x: Value) -> None:
        others = [v for v in (*self.floats, *self.module.weights.values()) if self.meets(v, x)]
        kind = self.rng.choice([ops.Add, ops.Add, ops.Sub, ops.Mul, ops.Maximum])
        self.keep(kind(x, self.rng.choice(others)))

    def meets(self, value: Value, x: Value) -> bool:
        shape = value.type.shape
        return shape == x.type.shape or shape == x.type.shape[-1:]

    def product(self, x: Value) -> None:
        if x.type.ndim < 2:
            raise Error("a product needs two dimensions")
        order = (*range(x.type.ndim - 2), x.type.ndim - 1, x.type.ndim - 2)
        turned = ops.Transpose(x, order=order)
        self.keep(turned)
        self.keep(ops.Matmul(x, turned))
        self.keep(ops.Softmax(self.floats[-1], dim=-1))

    def reduce(self, x: Value) -> None:
        kind = self.rng.choice([ops.ReduceSum, ops.ReduceSum, ops.ReduceMean, ops.ReduceMax])
        dim = self.rng.randrange(x.type.ndim)
        if not isinstance(x.type.shape[dim], int) or x.type.ndim < 2:
            raise Error("not over the batch")
        self.keep(kind(x, dims=(dim,), keep=self.rng.random() < 0.5))

    def shape(self, x: Value) -> None:
        rng, dims = self.rng, x.type.shape
        match rng.randrange(4):
            case 0:
                self.keep(ops.Transpose(x, order=tuple(rng.sample(range(len(dims)), len(dims)))))
            case 1:
                width = self.last(x)
                group_size = next((n for n in (2, 3) if width % n == 0), 1)
                self.keep(ops.Reshape(x, shape=(*dims[:-1], group_size, width // group_size)))
            case 2:
                self.keep(ops.Unsqueeze(x, dims=(rng.randint(0, len(dims)),)))
            case _:
                self.keep(ops.Expand(x, shape=(2, *dims)))

    def parts(self, x: Value) -> None:
        width = self.last(x)
        if width < 3:
            raise Error("too narrow to cut")
        if self.rng.random() < 0.4:
            self.keep(ops.Slice(x, dim=-1, start=1, stop=width))
            return
        cut = ops.Split(x, dim=-1, sizes=(1, width - 1))
        self.keep(cut)
        self.keep(ops.Concat([cut.results[1], cut.results[0]], dim=-1))

    def lookup(self, x: Value) -> None:
        table = self.weight(self.rng.choice((1, 5, 11, 16)), self.size())
        self.keep(ops.Embedding(self.function.args[2], table), exact=True)

    def choice(self, x: Value) -> None:
        x = self.rng.choice(self.exact)
        if self.rng.random() < 0.5:
            self.keep(ops.Argmax(x, dim=-1, keep=self.rng.random() < 0.5))
        else:
            self.keep(ops.Topk(x, k=min(2, self.last(x)), dim=-1))

    def finish(self) -> None:
        chosen = [v for v in self.floats[2:] if not v.users][-4:] or self.floats[-1:]
        chosen += self.others[-2:]
        wide = ops.Cast(chosen[0], dtype=self.dtype)
        self.function.append(wide)
        self.function.append(ops.Return([wide.result, *chosen[1:]]))
        self.function.results = tuple(Result(f"r{i}") for i in range(len(chosen)))
        self.drop()

    def inputs(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Random inputs; some ids lie outside every table."""
        batch = int(rng.choice([2, 4]))
        width = self.last(self.function.args[0])
        kind = numpy_dtype(self.dtype)
        floats = {n: rng.standard_normal((batch, 3, width)).astype(kind) for n in "xy"}
        return floats | {"ids": rng.integers(-2, 14, (batch, 3)).astype(np.int32)}
