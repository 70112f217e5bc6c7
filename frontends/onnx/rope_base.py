"""Which `rope` a table of frequencies belongs to: found by trying, and true to the last bit.

A file has the frequencies only. What is found gives the very same ones; where several kinds or
numbers do, which of them the author wrote cannot be told, and makes no difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, TypeAlias

import numpy as np

from irc.errors import Error
from irc.frontends.onnx.entry import shortest
from irc.ops import Rope
from irc.ops.rope import inverse_frequencies

Attributes: TypeAlias = dict[str, Any]
_BASES = (1e4, 5e5, 1e6)  # of known models, where stretching leaves no frequency as it was
_LENGTHS = tuple(1 << n for n in range(4, 21))  # positions before stretching


def known_base(found: np.ndarray, factor: float, given: Attributes) -> Attributes | None:
    """The attributes that, with those given, make these frequencies and this attention factor."""
    if found.ndim != 1 or not np.all(found > 0) or 2 * len(found) != _turned(given):
        return None
    for tried in _candidates(found.astype(np.float64), factor):
        if _gives(found, factor, given | tried):
            return {k: v for k, v in tried.items() if v != Rope.attribute_defaults[k]}
    return None


def _turned(given: Attributes) -> int:
    return given.get("rotary_dim") or given["head_dim"]


def _candidates(found: np.ndarray, factor: float) -> Iterator[Attributes]:
    """What is likely, the plainest first."""
    bases = _bases(found)
    for theta in bases:
        yield {"theta": theta}
    for theta in bases:
        yield {"theta": theta, "kind": "linear", "factor": shortest(1 / found[0])}
    for theta, length in product(bases, _LENGTHS):
        plain = theta ** -(np.arange(len(found)) / len(found))
        stretch = shortest(plain[-1] / found[-1])
        for number in dict.fromkeys((float(round(stretch)), round(stretch, 2))):
            rest = {"theta": theta, "factor": number, "original_positions": length}
            yield {"kind": "llama3", **rest}
            for truncate in (True, False):
                yield {"kind": "yarn", **rest, "truncate": truncate}
                yield {"kind": "yarn", **rest, "truncate": truncate, "attention_factor": factor}


def _bases(found: np.ndarray) -> list[float]:
    """theta, from the first two frequencies and from the last; then those of known models."""
    if len(found) < 2:
        return [1e4]
    roots = [
        (found[0] / found[1]) ** len(found),
        (found[0] / found[-1]) ** (len(found) / (len(found) - 1)),
    ]
    near = [float(f"{root:.{digits}g}") for root in roots for digits in range(1, 8)]
    return [theta for theta in dict.fromkeys((*near, *_BASES)) if 1 < theta <= 1e12]


def _gives(found: np.ndarray, factor: float, attributes: Attributes) -> bool:
    rope: Any = object.__new__(Rope)
    for name in Rope.attribute_types:
        setattr(rope, name, attributes.get(name, Rope.attribute_defaults.get(name)))
    try:
        with np.errstate(all="ignore"):
            tried, scale = inverse_frequencies(rope)
    except (Error, ArithmeticError, ValueError):
        return False
    return bool(np.float32(scale) == np.float32(factor)) and np.array_equal(
        np.asarray(tried, np.float32), found
    )
