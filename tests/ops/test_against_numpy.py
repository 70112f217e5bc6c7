"""Meanings against second ones: what each operation must compute, written out in numpy again."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from irc.dtypes import dtype as dtype_named
from tests.ops.compare import assert_close, run
from tests.ops.example import Example, inputs_of
from tests.ops.examples import EXAMPLES

Array = Any
Oracle = Callable[..., Any]


def each(function: Callable[[float], float]) -> Oracle:
    """A function of one Python number, applied to every element."""
    return lambda x: np.array([function(v) for v in x.ravel().tolist()]).reshape(x.shape)


def reduction(name: str, empty: float) -> Oracle:
    def apply(x: Array, dims: tuple[int, ...], keep: bool = False) -> Array:
        for dim in sorted((d % x.ndim for d in dims), reverse=True):
            parts = [np.take(x, i, dim) for i in range(x.shape[dim])]
            x = np.full(np.delete(x.shape, dim), empty) if not parts else parts[0]
            for other in parts[1:]:
                x = getattr(np, name)(x, other)
            x = np.expand_dims(x, dim)
        return x if keep else np.squeeze(x, dims)

    return apply


def mean(x: Array, dims: tuple[int, ...], keep: bool = False) -> Array:
    return np.mean(x, axis=dims, keepdims=keep)


def softmax(x: Array, dim: int = -1) -> Array:
    return np.exp(x) / np.exp(x).sum(dim, keepdims=True)


def cumsum(x: Array, dim: int = -1, exclusive: bool = False) -> Array:
    x = np.moveaxis(x, dim, 0)
    sums = [x[: i + (not exclusive)].sum(0) for i in range(len(x))]
    return np.moveaxis(np.array(sums).reshape(x.shape), 0, dim)


def topk(x: Array, k: int, dim: int = -1) -> list[Array]:
    x = np.moveaxis(x, dim, -1)
    order = np.lexsort((np.broadcast_to(np.arange(x.shape[-1]), x.shape), -x))[..., :k]
    values = np.take_along_axis(x, order, -1)
    return [np.moveaxis(values, -1, dim), np.moveaxis(order, -1, dim)]


def embedding(ids: Array, table: Array, inside: bool = False, sentinel: bool = False) -> Array:
    known = (ids >= 0) & (ids < len(table))
    return np.where(known[..., None], table[np.clip(ids, 0, len(table) - 1)], 0)


def scatter(x: Array, ids: Array, updates: Array, dim: int, reduction: str = "none") -> Array:
    combine = {"none": lambda a, b: b, "add": np.add, "mul": np.multiply}
    combine |= {"max": np.maximum, "min": np.minimum}
    x = x.copy()
    for place in np.ndindex(*ids.shape):
        to = list(place)
        to[dim] = ids[place]
        x[tuple(to)] = combine[reduction](x[tuple(to)], updates[place])
    return x


def cut(x: Array, dim: int, start: int, stop: int, step: int = 1) -> Array:
    return np.take(x, range(start, stop, step), dim)


def split(x: Array, dim: int, sizes: tuple[int, ...]) -> list[Array]:
    ends = np.cumsum((0, *sizes))
    return [np.take(x, range(a, b), dim) for a, b in pairwise(ends.tolist())]


def pad(x: Array, before: Any, after: Any, value: float = 0) -> Array:
    sizes = [a + n + b for a, n, b in zip(before, x.shape, after, strict=True)]
    out = np.full(sizes, float(value))
    out[tuple(slice(a, a + n) for a, n in zip(before, x.shape, strict=True))] = x
    return out


def gelu(x: Array, approximate: str = "none") -> Array:
    if approximate == "none":
        return each(lambda v: v * math.erfc(-v / math.sqrt(2)) / 2)(x)
    return each(lambda v: v / (1 + math.exp(-2 * math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))))(
        x
    )


def linear(x: Array, weight: Array, bias: Array = 0.0) -> Array:
    return np.einsum("...k,nk->...n", x, weight) + bias


ORACLES: dict[str, Oracle] = {
    "add": lambda x, y: y + x,
    "sub": lambda x, y: x + -y,
    "mul": lambda x, y: y * x,
    "div": lambda x, y: x * (1 / y),
    "floor_div": lambda x, y: np.floor(x / y),
    "mod": lambda x, y: x - y * np.floor(x / y),
    "pow": lambda x, y: np.exp(y * np.log(x)),
    "minimum": lambda x, y: np.where(x < y, x, y),
    "maximum": lambda x, y: np.where(x > y, x, y),
    "neg": lambda x: 0 - x,
    "abs": lambda x: np.where(x < 0, -x, x),
    "sign": lambda x: (x > 0) * 1.0 - (x < 0),
    "sqrt": each(math.sqrt),
    "rsqrt": each(lambda v: v**-0.5),
    "reciprocal": each(lambda v: v**-1.0),
    "exp": each(math.exp),
    "log": each(math.log),
    "sin": each(math.sin),
    "cos": each(math.cos),
    "erf": each(math.erf),
    "round": each(round),
    "floor": each(math.floor),
    "ceil": each(math.ceil),
    "clip": lambda x, low=-math.inf, high=math.inf: np.minimum(np.maximum(x, low), high),
    "sigmoid": each(lambda v: 1 / (1 + math.exp(-v))),
    "tanh": each(math.tanh),
    "relu": each(lambda v: max(v, 0)),
    "softplus": each(lambda v: math.log(1 + math.exp(v))),
    "silu": each(lambda v: v / (1 + math.exp(-v))),
    "quick_gelu": each(lambda v: v / (1 + math.exp(-1.702 * v))),
    "squared_relu": each(lambda v: max(v, 0) ** 2),
    "gelu": gelu,
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: ~(x == y),
    "lt": lambda x, y: y > x,
    "le": lambda x, y: ~(x > y),
    "gt": lambda x, y: y < x,
    "ge": lambda x, y: ~(x < y),
    "and": lambda x, y: x & y,
    "or": lambda x, y: x | y,
    "not": lambda x: ~x,
    "where": lambda c, x, y: c * x + ~c * y,
    "reshape": lambda x, shape: np.array(x.ravel()).reshape(shape),
    "expand": lambda x, shape: x + np.zeros(shape, x.dtype),
    "squeeze": lambda x, dims: x.reshape(np.delete(x.shape, dims)),
    "unsqueeze": lambda x, dims: np.expand_dims(x, dims),
    "transpose": lambda x, order: np.moveaxis(x, order, range(x.ndim)),
    "slice": cut,
    "split": split,
    "concat": lambda *xs, dim: np.concatenate(xs, dim),
    "stack": lambda *xs, dim=0: np.stack(xs, dim),
    "flip": lambda x, dims: np.flip(x, dims),
    "repeat": lambda x, dim, count: np.take(x, np.arange(x.shape[dim] * count) // count, dim),
    "pad": pad,
    "reduce_sum": reduction("add", 0),
    "reduce_mean": mean,
    "reduce_max": reduction("maximum", -math.inf),
    "reduce_min": reduction("minimum", math.inf),
    "reduce_prod": reduction("multiply", 1),
    "argmax": lambda x, dim=-1, keep=False: np.argmax(x, dim, keepdims=keep),
    "topk": topk,
    "cumsum": cumsum,
    "softmax": softmax,
    "log_softmax": lambda x, dim=-1: np.log(softmax(x, dim)),
    "embedding": embedding,
    "gather": lambda x, ids, dim=0: np.take(x, ids, dim),
    "gather_elements": lambda x, ids, dim: np.take_along_axis(x, ids, dim),
    "scatter_elements": scatter,
    "one_hot": lambda ids, size, dtype="f32": ids[..., None] == np.arange(size),
    "matmul": lambda x, y: np.einsum("...mk,...kn->...mn", x, y),
    "linear": linear,
    "iota": lambda size, dtype="i32": np.array(range(size)),
}
CASES = [
    pytest.param(example, dtype, id=f"{example}-{dtype}")
    for op in ORACLES
    for example in EXAMPLES[op]
    for dtype in example.dtypes
    if not (dtype_named(dtype).is_integer and 0 in example.args[0].shape)
]


@pytest.mark.parametrize(("example", "dtype"), CASES)
def test_meaning(example: Example, dtype: str, rng: np.random.Generator) -> None:
    """The reference agrees with the second meaning, computed in f64."""
    bound = example.bound()
    inputs = inputs_of(bound, dtype, rng)
    wide = {
        name: array if array.dtype.kind in "iub" else array.astype(np.float64)
        for name, array in inputs.items()
    }
    optional = {arg.name: wide.pop(arg.name) for arg in bound.args if arg.name}
    wanted = ORACLES[example.op](*wide.values(), **optional, **bound.attributes)
    found = run(bound, dtype, inputs)
    wanted = wanted if isinstance(wanted, list) else [wanted]
    for got, want in zip(found, wanted, strict=True):
        assert_close(got, np.asarray(want).astype(got.dtype), example.op)
