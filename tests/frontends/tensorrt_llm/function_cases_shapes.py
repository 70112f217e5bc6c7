"""Examples of functions of shapes and of indices, each with its meaning in PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.frontends.tensorrt_llm.function_cases import Case, F, T, X, f, i, same, torch

V = F.shape
HIDDEN = f("B", "S", 12)
TABLE = np.random.default_rng().standard_normal(30).astype(np.float32)
LONGS = i(9, "B", dtype="int64")


def _heads(x: Any) -> Any:
    """The idiom of attention: [B, S, heads*size] to [B, heads, S, size]."""
    shaped = x.view(F.concat([V(x, 0), V(x, 1), 3, 4]))
    return shaped.permute([0, 2, 1, 3])


def _joined(x: Any) -> Any:
    """[B, S, 12] as [B*S, 12] by a product of sizes, and back."""
    flat = F.view(x, F.concat([V(x, 0) * V(x, 1), 12]))
    return F.view(flat + 1.0, F.shape(x))


def _asserted(x: Any) -> Any:
    F.assertion(x > 0.0, "positive")
    return x


def _sizes(*sizes: int) -> Any:
    return torch.tensor(sizes)


def _every_second(x: Any) -> Any:
    return F.slice(x, [0, 1, 0], [V(x, 0), 2, 3], [1, 2, 1])


def _reversed(x: Any) -> Any:
    return F.slice(x, [0, 4], F.concat([V(x, 0), 3]), [1, -1])


def _window(x: Any, at: Any) -> Any:
    return x[at[0] : at[0] + 2, at[1] : at[1] + 3]


def _columns(x: Any, at: Any) -> Any:
    """The idiom of positions: a start that one dimension takes from the data."""
    return F.slice(x, F.concat([0, at]), F.concat([V(x, 0), 2]))


def _as_large(x: Any, y: Any) -> Any:
    return F.expand(x, F.concat([V(y, 0), 5, V(y, 2), 6]))


VIEWS = [
    Case("shape", lambda x: F.shape(x), lambda x: _sizes(*x.shape), (X,)),
    Case("shape", lambda x: V(x, -2) * 2 + 1, lambda x: torch.tensor(2 * x.shape[-2] + 1), (X,)),
    Case("shape", lambda x: V(x, 1, "int32", (2, 4)), lambda x: torch.tensor(4).int(), (X,)),
    Case("view", _heads, lambda x: x.unflatten(-1, (3, 4)).transpose(1, 2), (HIDDEN,)),
    Case("view", _joined, lambda x: x + 1, (HIDDEN,)),
    Case("view", lambda x: F.view(x, [0, -1]), lambda x: x.flatten(1), (X,)),
    Case(
        "view", lambda x: x.view(F.concat([-1, V(x, 2) / 3])), lambda x: x.reshape(-1, 4), (HIDDEN,)
    ),
    same("flatten", torch.flatten, X, 1, -2),
    same("flatten", torch.flatten, X),
    same("permute", torch.permute, X, (2, 0, -1, 1)),
    same("transpose", torch.transpose, X, -1, 1),
    Case("expand_dims", lambda x: F.expand_dims(x, [0, 2]), lambda x: x[None, :, None], (X,)),
    same("unsqueeze", torch.unsqueeze, X, -2),
    Case("squeeze", lambda x: F.squeeze(x, [1, -1]), lambda x: x[:, 0], (f("B", 1, 4),)),
    same("squeeze", lambda x: x[0, :, 0], f(1, "S", 1, 3)),
    Case("expand", _as_large, lambda x, y: x.expand_as(y), (f(1, 5, 1, 6), X)),
    same("flip", torch.flip, X, [0, -1]),
]

PARTS = [
    Case("stack", lambda x, y: F.stack([x, y], -1), lambda x, y: torch.stack([x, y], -1), (X, X)),
    Case(
        "concat",
        lambda x, y: F.concat([x, y], -2),
        lambda x, y: torch.cat([x, y], -2),
        (X, f("B", 5, "K", 6)),
    ),
    Case(
        "concat",
        lambda x: F.concat([x, 7, V(x, 0)]),
        lambda x: torch.cat([x, _sizes(7, len(x))]),
        (LONGS,),
    ),
    Case("slice", _every_second, lambda x: x[:, 1:4:2, :3], (f("B", 5, 6),)),
    Case("slice", lambda x, at: F.slice(x, at, [2, 3]), _window, (f(7, 6), i(3, 2))),
    Case("slice", _columns, lambda x, at: x[:, at[0] : at[0] + 2], (f("B", 7), i(5, 1))),
    Case(
        "slice",
        lambda x: F.slice(F.shape(x), [3], [2], [-2]),
        lambda x: _sizes(x.shape[3], x.shape[1]),
        (X,),
    ),
    Case("slice", _reversed, lambda x: x[:, 2:5].flip(1), (f("B", 6),)),
    same("split", torch.split, HIDDEN, 4, dim=-1),
    same("split", torch.split, HIDDEN, [5, 7], 2),
    same("chunk", torch.chunk, HIDDEN, 3, -1),
    same("unbind", torch.unbind, f("B", 4, 3), -1),
    Case("unbind", lambda x: F.concat(F.unbind(F.shape(x))), lambda x: _sizes(*x.shape), (X,)),
    same("repeat", torch.Tensor.repeat, f("B", 4), (2, 1, 3)),
    same("repeat_interleave", torch.repeat_interleave, f("B", 4), 3, -1),
    same("pad", T.pad, X, (1, 2, 0, 3), value=1.5),
    same("pad", T.pad, X, [-2, 1]),
]

MADE = [
    Case(
        "arange",
        lambda x: F.arange(2, V(x, 1), "float32"),
        lambda x: torch.arange(2.0, x.shape[1]),
        (f("B", 7),),
    ),
    Case(
        "arange",
        lambda x: F.arange(0, V(x, 0), "int32"),
        lambda x: torch.arange(len(x)).int(),
        (f("B"),),
    ),
    Case(
        "constant",
        lambda x: x + F.constant(TABLE),
        lambda x: x + torch.from_numpy(TABLE),
        (f("B", 30),),
    ),
    Case(
        "constant",
        lambda x: F.constant(TABLE[:4].reshape(2, 2)),
        lambda x: torch.from_numpy(TABLE[:4].reshape(2, 2)),
        (X,),
    ),
    Case("assertion", _asserted, lambda x: x, (X,)),
]

SHAPES = [*VIEWS, *PARTS, *MADE]
