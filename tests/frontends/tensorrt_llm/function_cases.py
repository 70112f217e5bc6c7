"""Examples of elementwise functions of TensorRT-LLM, each with its meaning in PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.frontends.tensorrt_llm.traced import Bound

torch: Any = pytest.importorskip("torch")
T = torch.nn.functional
F = Bound("functional")
Size = int | str  # a string is a dynamic size


@dataclass(frozen=True)
class Arg:
    """A random input; integers are from `low` to `high - 1`, floats from `low` to `high`.

    Floats differ from each other, so that there is one order of them.
    """

    dtype: str
    shape: tuple[Size, ...]
    low: float = -2
    high: float = 2


@dataclass(frozen=True)
class Case:
    """A function: how it is called in a network, and the same in PyTorch."""

    name: str
    call: Callable[..., Any]
    meaning: Callable[..., Any]
    args: tuple[Arg, ...]
    version: str = "0.16"

    def __str__(self) -> str:
        return self.name


def same(name: str, meaning: Callable[..., Any], args: Any, *rest: Any, **options: Any) -> Case:
    """A function that takes what PyTorch's takes: tensors, then `rest` and `options`."""
    call = getattr(F, name)
    return Case(
        name,
        lambda *tensors: call(*tensors, *rest, **options),
        lambda *tensors: meaning(*tensors, *rest, **options),
        args if isinstance(args, tuple) else (args,),
    )


def f(*shape: Size, low: float = -2, high: float = 2) -> Arg:
    """Floats."""
    return Arg("float32", shape, low, high)


def i(high: int, *shape: Size, low: int = 0, dtype: str = "int32") -> Arg:
    """Integers."""
    return Arg(dtype, shape, low, high)


def b(*shape: Size) -> Arg:
    """True and false."""
    return Arg("bool", shape)


VERSIONS: tuple[str, ...] = ("0.7", "0.16")
X = f("B", 5, "S", 6)
XY = (X, f(5, "S", 1))
BOOLS = (b("B", 6), b(6))
INTS = i(40, "B", 5, 7, low=-40)
DIVIDED = (INTS, i(6, 5, 1, low=1))
NEGATIVE = (INTS, i(0, 5, 1, low=-6))
SMALL = (i(3, "B", 7), i(3, 7))


def _halves(x: Any, act: Callable[[Any], Any]) -> Any:
    first, second = x.chunk(2, -1)
    return first * act(second)


def _gelu(x: Any) -> Any:
    return T.gelu(x, approximate="tanh")


def _quick_gelu(x: Any) -> Any:
    return x * torch.sigmoid(1.702 * x)


def _gegelu(x: Any, limit: float = math.inf) -> Any:
    even, odd = x[..., ::2].clamp(max=limit), x[..., 1::2].clamp(-limit, limit)
    return _quick_gelu(even) * (odd + 1)


def _truncated(x: Any, y: Any) -> Any:
    return torch.div(x, y, rounding_mode="trunc")


def _minus_infinity(mask: Any) -> Any:
    return torch.where(mask, torch.tensor(-math.inf), torch.tensor(0.0))


ARITHMETIC = [
    *(same(name, getattr(torch, name), XY) for name in ("add", "sub", "mul")),
    *(same(name, getattr(torch, name), XY) for name in ("minimum", "maximum", "lt", "gt")),
    Case("add", lambda x: F.add(x, 1) + 2.5, lambda x: x + 3.5, (X,)),
    Case("add", F.add, torch.add, (INTS, i(9, 7, dtype="int64"))),
    *(Case("add", lambda x: x + F.shape(x, 0), lambda x: x + len(x), (INTS,), d) for d in VERSIONS),
    Case("add", lambda x: x + (1 << 40), lambda x: x.long() + (1 << 40), (INTS,)),
    Case("sub", lambda x: 2 - x, lambda x: 2 - x, (INTS,)),
    Case("sub", lambda x: -x, lambda x: -x, (X,)),
    same("div", torch.div, (X, f(6, low=1))),
    same("div", _truncated, DIVIDED),
    same("div", _truncated, NEGATIVE),
    Case("div", lambda x: x / 7, lambda x: _truncated(x, torch.tensor(7)), (INTS,)),
    same("floordiv", torch.floor_divide, DIVIDED),
    same("floordiv", torch.floor_divide, NEGATIVE),
    same("modulo", torch.remainder, NEGATIVE),
    Case("modulo", lambda x: x % 5, lambda x: x % 5, (INTS,)),
    same("pow", torch.pow, (f("B", 5, 7, low=0.1), f(7))),
    Case("pow", lambda x: x**3 + F.pow(x, 2), lambda x: x**3 + x**2, (INTS,)),
    same("eq", torch.eq, SMALL),
    Case("eq", lambda x, y: x == y, torch.eq, SMALL),
    Case("eq", lambda x: x != 1, lambda x: x != 1, SMALL[:1]),
    Case("gt", lambda x: x >= 0.0, lambda x: x >= 0, (X,)),
    same("op_and", torch.logical_and, BOOLS),
    same("op_or", torch.logical_or, BOOLS),
    same("op_xor", torch.logical_xor, BOOLS),
    same("not_op", torch.logical_not, BOOLS[:1]),
    same("round", torch.round, f("B", 9, low=-9, high=9)),
    same("sqrt", torch.sqrt, f("B", 9, low=0)),
    same("log", torch.log, f("B", 9, low=0.1)),
    *(same(name, getattr(torch, name), X) for name in ("exp", "sin", "cos", "abs")),
]

ACTIVATIONS = [
    *(same(name, getattr(torch, name), X) for name in ("relu", "tanh", "sigmoid")),
    same("silu", T.silu, X),
    same("gelu", _gelu, X),
    same("quick_gelu", _quick_gelu, X),
    same("squared_relu", lambda x: torch.relu(x) ** 2, X),
    same("swiglu", lambda x: _halves(x, T.silu), X),
    same("geglu", lambda x: _halves(x, _gelu), X),
    same("gegelu", _gegelu, X),
    same("gegelu", _gegelu, X, 1.0),
    same("softplus", T.softplus, X, 2.0, 1.5),
    same("clip", torch.clamp, X, -0.5, 1.0),
    Case("clip", lambda x: F.clip(x, -math.inf, 1), lambda x: x.clamp(max=1), (INTS,)),
    same("identity", lambda x: x, X),
]

CONVERSIONS = [
    Case("cast", lambda x: F.cast(x, "int32"), lambda x: x.int(), (f("B", 9, low=-9, high=9),)),
    Case("cast", lambda x: x.cast("bool"), lambda x: x.bool(), SMALL[:1]),
    Case("cast", lambda x: F.cast(x, "float16"), lambda x: x.half(), (X,)),
    same("where", torch.where, (b("B", 1, 6), f("B", 5, 6), f(6))),
    same("where", torch.where, (b(6), i(9, "B", 6)), 0),
    Case("where", lambda mask: F.where(mask, -math.inf, 0.0), _minus_infinity, BOOLS[:1]),
]

ELEMENTWISE = [*ARITHMETIC, *ACTIVATIONS, *CONVERSIONS]
