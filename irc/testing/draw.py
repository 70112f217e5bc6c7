"""Random modules of the blocks that passes look for, with odd sizes; plans for them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from .. import ops
from ..errors import Error
from ..ir.core import Function, Module, Op, Result, Value, Weight
from ..ir.dims import Dim, DimLike, Shape, symbol
from ..ir.types import Axes, TensorType
from ..weights import RandomRef

SIZES = (1, 2, 3, 4, 5, 6, 7, 12)
B = symbol("B")
BATCHES = {"B": (0, 2, 8)}
# A rounding error in an operand may change these results altogether.
STEPS = frozenset((
    "eq", "ne", "lt", "le", "gt", "ge", "floor", "ceil", "round", "sign", "mod", "floor_div",
    "argmax", "topk", "bitcast", "quantize", "dynamic_scale", "quantize_rows", "moe_slots",
))  # fmt: skip
# These results have the very numbers of their operands, or are exact for exact ones.
COPIES = frozenset((
    "reshape", "transpose", "expand", "squeeze", "unsqueeze", "slice", "split", "concat", "stack",
    "flip", "repeat", "pad", "neg", "abs", "relu", "minimum", "maximum", "where", "clip",
    "embedding", "gather", "not", "and", "or", "eq", "ne", "lt", "le", "gt", "ge", "argmax",
))  # fmt: skip
PARTIAL = (ops.Slice, ops.Split, ops.Topk)  # of some elements of a dimension, by number


@dataclass(frozen=True)
class Arg:
    """One operand. dtype "T" is the dtype that the test varies.

    Floats are drawn from the standard normal distribution, or evenly from `low` to `high`;
    integers evenly from `low` to `high - 1` (0 to 4 unless told); `draw` overrides both. `name` is
    that of an optional operand.
    """

    shape: Shape
    dtype: str = "T"
    low: float | None = None
    high: float | None = None
    name: str = ""
    draw: Callable[[np.random.Generator, tuple[int, ...]], Any] | None = None
    axes: tuple[Axes, ...] = ()
    partial: Axes = ()

    def type(self, dtype: str) -> TensorType:
        """The type where the varied dtype is `dtype`."""
        name = dtype if self.dtype == "T" else self.dtype
        return TensorType(name, self.shape, self.axes, self.partial)


class Draw:
    """One random module without a mesh. What a graph amplifies of its rounding has no bound, so
    that numbers are f64, in which it stays far below any mistake, unless `dtype` says otherwise.
    Without `experts` any inputs are valid. Further `blocks` come before the others and behind them.
    """

    def __init__(
        self,
        seed: int,
        dtype: str = "f64",
        steps: int = 10,
        experts: bool = True,
        blocks: Sequence[Callable[[Draw], object]] = (),
    ) -> None:
        self.rng = random.Random(seed)
        self.dtype, self.has_experts = dtype, experts
        self.module = Module(f"m{seed}", dims=dict(BATCHES))
        self.arguments: dict[str, Arg] = {}
        self.function = Function("forward", [])
        self.values: list[Value] = []
        self.exact: set[Value] = set()
        width, self.tokens = self.size(), self.rng.choice((3, 3, 4))
        for shape in ((B, self.tokens, width), (B, self.tokens, width), (B, width)):
            self.argument(Arg(shape))
        self.module.add_function(self.function)
        own = [partial(block, self) for block in blocks]
        self.put_all(own)
        steps += self.count
        for _ in range(20 * steps):
            if self.count < steps:
                self.put_all([self.step])
        self.put_all(own)
        self.finish()

    @property
    def count(self) -> int:
        """The number of operations."""
        return sum(1 for _ in self.function)

    def put_all(self, blocks: Sequence[Callable[[], object]]) -> None:
        """Those of the blocks whose drawn operands and attributes fit each other."""
        for block in blocks:
            with suppress(Error):
                block()

    def size(self) -> int:
        """A size that may or may not divide."""
        return self.rng.choice(SIZES)

    def argument(self, arg: Arg) -> Value:
        """A new argument of the function."""
        name = f"x{len(self.arguments)}"
        self.arguments[name] = arg
        value = self.function.add_argument(name, arg.type(self.dtype))
        self.values.append(value)
        self.exact.add(value)
        return value

    def weight(
        self, *shape: DimLike, dtype: str = "", spread: float = 0.4, role: str = ""
    ) -> Weight:
        """A new weight of random numbers; the role is the end of its name, which plans know."""
        name = ".".join([f"w{len(self.module.weights)}", *([role] if role else [])])
        type = TensorType(dtype or self.dtype, shape)
        weight = self.module.add_weight(Weight(type, name, RandomRef(name, 5, spread)))
        self.exact.add(weight)
        return weight

    def pick(self, ndim: int = 0) -> Value:
        """A recent value of numbers, of at least so many dimensions."""
        fitting = [v for v in self.values if v.type.dtype == self.dtype and v.type.ndim >= ndim]
        if not fitting:
            raise Error("no value fits")
        return self.rng.choice(fitting[-6:])

    def last(self, value: Value) -> int:
        """The size of the last dimension."""
        size = value.type.shape[-1] if value.type.ndim else symbol("B")
        if not isinstance(size, int):
            raise Error("the last dimension is symbolic")
        return size

    def put(self, op: Op) -> Value:
        """One more operation in the function; its first result."""
        exact = all(v in self.exact for v in op.operands)
        symbolic = isinstance(op, PARTIAL) and isinstance(op.operands[0].type.shape[op.dim], Dim)
        if symbolic or (op.opname in STEPS and not exact):
            op.drop_operands()
            raise Error("rounding or the size of the batch may change this result altogether")
        self.function.append(op)
        self.values += op.results
        if exact and op.opname in COPIES:
            self.exact.update(op.results)
        return op.results[0]

    def step(self) -> None:
        """One more operation, or block of operations."""
        blocks: Sequence[Callable[[], object]] = (
            self.linear, self.linear, self.gated, self.attention, self.residual, self.binary,
            self.shape, self.lookup, self.product, self.number,
            *([self.attention, self.experts] if self.has_experts else []),
        )  # fmt: skip
        self.rng.choice(blocks)()

    def matrix(self, rows: int, columns: int, role: str) -> Value:
        """A weight [rows, columns], at times of codes with a scale per row or per block of it."""
        if self.dtype not in ("f32", "f64") or not columns or self.rng.random() < 0.7:
            return self.weight(rows, columns, role=f"{role}.weight")
        kinds = [("i8", 40.0), ("i4", 3.0), ("u4", 15.0), ("f8e4m3", 100.0)]
        kind, most = self.rng.choice(kinds)
        blocks = self.rng.choice([1, *(n for n in (2, 3) if columns % n == 0)])
        codes = self.weight(rows, columns, dtype=kind, spread=most, role=f"{role}.weight")
        scales = self.weight(rows, blocks, dtype="f32", spread=0.3 / most, role=f"{role}.scale")
        zero = None
        if kind == "u4":
            zero = self.weight(rows, blocks, dtype=kind, spread=most, role=f"{role}.zero")
        real = self.put(ops.Dequantize(codes, scales, zero=zero))
        return real if self.dtype == "f32" else self.put(ops.Cast(real, dtype=self.dtype))

    def linear(self, x: Value | None = None, out: int = 0, role: str = "") -> Value:
        """A linear, with a bias or not."""
        x, out = x or self.pick(1), out or self.size()
        role = role or self.rng.choice(("fc1", "fc2", "lm_head"))
        bias = self.weight(out, role=f"{role}.bias") if self.rng.random() < 0.4 else None
        return self.put(ops.Linear(x, self.matrix(out, self.last(x), role), bias=bias))

    def gated(self) -> None:
        """A gated feed-forward, in one operation or in several, of one weight or of two."""
        x, hidden, kind = self.pick(1), self.size(), self.rng.choice(("one", "two", "merged"))
        width = self.last(x)
        if kind == "merged":
            both = self.put(ops.Linear(x, self.matrix(2 * hidden, width, "gate_up_proj")))
            self.put(split := ops.Split(both, dim=-1, sizes=(hidden, hidden)))
            parts = self.put(ops.Silu(split.results[0])), split.results[1]
            inner = self.put(ops.Mul(*parts))
        else:
            gate, up = (self.matrix(hidden, width, role) for role in ("gate_proj", "up_proj"))
            if kind == "one":
                act: Any = self.rng.choice(["silu", "gelu", "sigmoid", "relu"])
                inner = self.put(ops.GatedMlp(x, gate, up, act=act))
            else:
                first, second = (self.put(ops.Linear(x, weight)) for weight in (gate, up))
                parts = self.put(ops.Silu(first)), second
                inner = self.put(ops.Mul(*self.rng.sample(parts, 2)))
        self.put(ops.Linear(inner, self.matrix(width, hidden, "down_proj")))

    def attention(self) -> None:
        """Attention with its four linears; query heads may share those of keys."""
        rng, x = self.rng, self.pick(3)
        kv, head = rng.choice([1, 2, 3]), rng.choice([2, 4])
        if x.type.ndim != 3:
            raise Error("attention takes [batch, tokens, features]")
        heads, (rows, tokens) = kv * rng.choice([1, 2, 3]), x.type.shape[:2]
        if heads == kv and rng.random() < 0.5:  # in one weight
            merged = self.linear(x, 3 * heads * head, "qkv_proj")
            parts = ops.Split(merged, dim=2, sizes=(heads * head,) * 3)
            self.put(parts)
            q, k, v = parts.results
        else:
            roles = zip("qkv", (heads, kv, kv), strict=True)
            q, k, v = (self.linear(x, n * head, f"{name}_proj") for name, n in roles)
        if rng.random() < 0.3:
            q, k = self.head_norm(q, head), self.head_norm(k, head)
        if rng.random() < 0.3:
            place = self.argument(Arg((rows, tokens), "i32", 0, 40))
            turns: dict[str, Any] = {"head_dim": head, "interleaved": rng.random() < 0.5}
            q, k = (self.put(ops.Rope(each, place, **turns)) for each in (q, k))
        kind, scores = rng.choice(["", "", "mask", "bias"]), {}
        options: dict[str, Any] = {"causal": rng.random() < 0.5, "window": rng.choice([0, 0, 2])}
        options |= {"softcap": rng.choice([0.0, 0.0, 5.0])}
        if rng.random() < 0.2:
            most = tokens if isinstance(tokens, int) else 1
            scores["lengths"] = self.argument(Arg((rows,), "i32", 1, most + 1))
        if kind:
            shape = (rng.choice([1, rows]), rng.choice([1, heads]), rng.choice([1, tokens]), tokens)
            scores[kind] = self.argument(Arg(shape, "bool" if kind == "mask" else "T"))
        mixed = ops.Attention(q, k, v, head_dim=head, **scores, **options)
        self.linear(self.put(mixed), self.last(x), "o_proj")

    def head_norm(self, x: Value, head: int) -> Value:
        """x with the features of each head normed."""
        *outer, width = x.type.shape
        assert isinstance(width, int)
        apart = self.put(ops.Reshape(x, shape=(*outer, width // head, head)))
        normed = self.put(ops.RmsNorm(apart, self.weight(head)))
        return self.put(ops.Reshape(normed, shape=x.type.shape))

    def experts(self) -> None:
        """A mixture of experts of the tokens of a value, by experts and shares that are given."""
        x, count, width = self.pick(2), self.rng.choice([1, 3, 4, 5]), self.size()
        tokens, choices = x.type.shape[0], min(count, 2)
        if x.type.ndim != 2:
            raise Error("experts take [tokens, features]")
        features = self.last(x)
        chosen = self.argument(Arg((tokens, choices), "i32", -1, count + 1))
        shares = self.argument(Arg((tokens, choices)))
        slots = self.put(ops.MoeSlots(chosen, experts=count))
        buffer = self.put(ops.MoeDispatch(x, chosen, slots, experts=count))
        inner = self.put(ops.Silu(self.of_experts(buffer, count, width, features)))
        if self.rng.random() < 0.5:
            inner = self.put(ops.Mul(inner, self.of_experts(buffer, count, width, features)))
        outer = self.of_experts(inner, count, features, width)
        self.put(ops.MoeCombine(outer, chosen, slots, shares))

    def of_experts(self, x: Value, *shape: int) -> Value:
        """The product with a weight [experts, outputs, inputs], maybe with a bias."""
        weight = self.put(ops.Transpose(self.weight(*shape), order=(0, 2, 1)))
        product = self.put(ops.Matmul(x, weight))
        if self.rng.random() < 0.7:
            return product
        return self.put(ops.Add(product, self.weight(shape[0], 1, shape[1])))

    def residual(self) -> None:
        """x plus a linear of x, and a norm of it."""
        x = self.pick(1)
        total = self.put(ops.Add(x, self.linear(x, self.last(x))))
        weight = self.weight(self.last(x))
        kind = ops.RmsNorm if self.rng.random() < 0.6 else ops.LayerNorm
        self.put(kind(total, weight=weight))

    def binary(self) -> None:
        """Two values of which one has the shape, or the last dimension, of the other."""
        x = self.pick()
        shapes = (x.type.shape, x.type.shape[-1:])
        known = (*self.values, *self.module.weights.values())
        others = [v for v in known if v.type.dtype == self.dtype and v.type.shape in shapes]
        kind = self.rng.choice([ops.Add, ops.Add, ops.Sub, ops.Mul, ops.Maximum])
        self.put(kind(*self.rng.sample([x, self.rng.choice(others)], 2)))

    def number(self) -> None:
        """A value and a constant, which rules may simplify."""
        x = self.pick()
        value = self.rng.choice((0.0, -0.0, 1.0, -1.0, 2.0, float("inf"), float("nan")))
        constant = self.put(ops.Full(value=value, dtype=self.dtype))
        kind = self.rng.choice([ops.Add, ops.Sub, ops.Mul, ops.Div, ops.Maximum, ops.Pow])
        self.put(kind(*self.rng.sample([x, constant], 2)))

    def product(self) -> None:
        """x times itself, transposed."""
        x = self.pick(2)
        order = (*range(x.type.ndim - 2), x.type.ndim - 1, x.type.ndim - 2)
        scores = self.put(ops.Matmul(x, self.put(ops.Transpose(x, order=order))))
        self.put(ops.Softmax(scores, dim=-1))

    def shape(self) -> None:
        """Another layout of a value."""
        rng, x = self.rng, self.pick(1)
        dims, ndim = x.type.shape, x.type.ndim
        match rng.randrange(8):
            case 0:
                self.put(ops.Transpose(x, order=tuple(rng.sample(range(ndim), ndim))))
            case 1:
                width = self.last(x)
                parts = next((n for n in (2, 3) if width % n == 0), 1)
                self.put(ops.Reshape(x, shape=(*dims[:-1], parts, width // parts)))
            case 2:
                self.put(ops.Unsqueeze(x, dims=(rng.randint(0, ndim),)))
            case 3:
                self.put(ops.Expand(x, shape=(2, *dims)))
            case 4:
                self.put(ops.Slice(x, dim=-1, start=1, stop=self.last(x)))
            case 5:
                self.put(split := ops.Split(x, dim=-1, sizes=(1, self.last(x) - 1)))
                self.put(ops.Concat([split.results[1], split.results[0]], dim=-1))
            case 6:
                kind = rng.choice([ops.ReduceSum, ops.ReduceMean, ops.ReduceMax])
                self.put(kind(x, dims=(rng.randrange(ndim),), keep=rng.random() < 0.5))
            case _:
                flat = self.put(ops.Reshape(x, shape=(B * self.tokens, self.last(x))))
                self.put(ops.Reshape(flat, shape=(B, self.tokens, self.last(x))))

    def lookup(self) -> None:
        """Rows of a table, which may be a head too; some ids lie outside."""
        ids = next((v for v in self.values if v.type.dtype == "i32" and v.type.ndim == 2), None)
        if ids is None or self.rng.random() < 0.3:
            ids = self.argument(Arg((B, self.tokens), "i32", -2, 14))
        role = self.rng.choice(("embed_tokens.weight", "wpe.weight", ""))
        table = self.weight(self.rng.choice((1, 5, 11, 16)), self.size(), role=role)
        rows = self.put(ops.Embedding(ids, table))
        if self.rng.random() < 0.3:
            self.put(ops.Linear(rows, table))

    def finish(self) -> None:
        """Return the last values that nothing uses, and states; drop the weights without uses."""
        produced = [v for op in self.function for v in op.results]
        numeric = [v for v in produced if v.type.dtype == self.dtype] or [self.values[0]]
        unused = [v for v in produced if not v.users]
        returned = unused[-5:]
        if not any(v.type.dtype == self.dtype for v in returned):
            returned.append(numeric[-1])
        results = [Result(f"r{i}") for i in range(len(returned))]
        for state in self.function.args[:3]:
            same = [v for v in produced if v.type is state.type]
            if same and self.rng.random() < 0.3:
                returned.append(self.rng.choice(same))
                results.append(Result(f"new_{state.name}", state.name))
        self.function.append(ops.Return(returned))
        self.function.results = tuple(results)
        for name in [n for n, w in self.module.weights.items() if not w.users]:
            del self.module.weights[name]

    def plan(self, mesh: str) -> list[str]:
        """The rows of a random plan for the weights, and at times for an argument."""
        axes = [axis.partition("=")[0] for axis in mesh.split(",") if not axis.startswith("pp")]
        if not axes:
            return []
        if self.rng.random() < 0.3:
            return ["megatron"]
        rows = [self._row(n, w.type.ndim, axes) for n, w in self.module.weights.items()]
        if self.rng.random() < 0.3:
            rows.append(f"x0 {self.rng.choice([1, 2])}@{axes[-1]}")
        return rows

    def _row(self, name: str, ndim: int, axes: Sequence[str]) -> str:
        if ndim == 0 or self.rng.random() < 0.25:
            return f"{name} replicated"
        return f"{name} {self.rng.randrange(ndim)}@{self.rng.choice(axes)}"


def random_graph(seed: int, dtype: str = "f32") -> Module:
    """The module of a seed, of 30 operations or a few more, for which any inputs are valid."""
    return Draw(seed, dtype, 30, experts=False).module
