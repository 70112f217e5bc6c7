"""Rotary position embedding: every pair of features of a head turns by an angle per position.

Su et al., 2021. The kinds differ only in the angle per position of each pair, which
`inverse_frequencies` gives; lowerings use the same function. The formulas are those of
transformers' `modeling_rope_utils`, which the models were trained or extended with.
"""

from __future__ import annotations

import math
from typing import Any, Literal, TypeAlias

import numpy as np

from ..errors import Error
from ..ir.core import Op
from ..ir.declare import Operand, operation
from ..ir.dims import exact_divide
from ..ir.types import TensorType
from .shapes import float_operand, index_operand

Kind: TypeAlias = Literal[
    "default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"
]
Array: TypeAlias = Any  # a numpy array
BY_LENGTH = ("dynamic", "longrope")  # their frequencies depend on the length of the call
_STRETCHED = ("dynamic", "llama3", "yarn", "longrope")
_FAR = 1e6  # no model has a factor as large; keeps every formula within f32


@operation("rope")
class Rope(Op):
    """The pairs of x's features turned by position * inverse frequency, head by head.

    x [B, S, H*head_dim], positions i32|i64 [B, S], result as x. The first `rotary_dim` features of
    a head turn (0: all of them), the rest stay. A pair is (i, i + rotary_dim/2), or (2i, 2i+1) if
    `interleaved`. `theta` is the base of the frequencies. The kinds:

    * `default`; `linear`: positions divided by `factor`;
    * `dynamic` (NTK): a larger theta once the length passes `original_positions`;
    * `llama3`: `factor`, `low_freq_factor`, `high_freq_factor`, `original_positions`;
    * `yarn` (Peng et al., 2023): `factor`, `original_positions`, `beta_fast`, `beta_slow`,
      `mscale`, `mscale_all_dim`, `truncate`;
    * `longrope` (Ding et al., 2024): `short_factors` up to `original_positions`, then
      `long_factors`, one number per pair each;
    * `proportional` (Gemma 4): pairs span the head, of which those of the first `rotary_dim` / 2
      turn, with frequencies as of whole heads; positions are divided by `factor`.

    The length of `dynamic` and `longrope` is the largest position of the call plus one, over all
    rows, so batch and sequence must be replicated; a call with a piece of a prompt holds the last
    position of the prompt too, as that of padding behind the piece. `attention_factor` (yarn,
    longrope) multiplies the turned features; none derives it from the others. Angles are f32.
    """

    x: Operand
    positions: Operand
    head_dim: int
    theta: float = 10000.0
    kind: Kind = "default"
    rotary_dim: int = 0
    interleaved: bool = False
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    attention_factor: float | None = None
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    @property
    def turned(self) -> int:
        """How many features of a head are paired."""
        return self.head_dim if self.kind == "proportional" else self.rotary_dim or self.head_dim

    @property
    def by_length(self) -> bool:
        """Whether the frequencies depend on the length of the call."""
        return self.kind in BY_LENGTH

    def infer(self) -> TensorType:
        x, positions = float_operand("rope", self.x), index_operand("rope", self.positions)
        _check_numbers(self)
        if x.ndim != 3 or exact_divide(x.shape[2], self.head_dim) is None:
            raise Error(f"rope takes x [batch, tokens, heads*{self.head_dim}], not {x}")
        if positions.shape != x.shape[:2]:
            raise Error(f"rope: positions is {positions}, but x has the batch and tokens of {x}")
        return x.replicated

    def sharding_rule(self) -> str:
        return "b! s! h, b s -> b s h" if self.by_length else "b s h, b s -> b s h"

    def evaluate(self, x: Array, positions: Array) -> Array:
        length = int(positions.max(initial=0)) + 1 if self.by_length else None
        frequencies, factor = inverse_frequencies(self, length)
        angles = positions[..., None, None].astype(np.float32) * frequencies
        cos, sin = np.cos(angles) * np.float32(factor), np.sin(angles) * np.float32(factor)
        heads = x.reshape(*x.shape[:2], x.shape[2] // self.head_dim, self.head_dim)
        turning, still = heads[..., : self.turned], heads[..., self.turned :]
        done = _turned_pairs(turning, cos, sin) if self.interleaved else _turned(turning, cos, sin)
        return np.concatenate([done, still], axis=-1).reshape(x.shape)


def _turned(x: Array, cos: Array, sin: Array) -> Array:
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _turned_pairs(x: Array, cos: Array, sin: Array) -> Array:
    a, b = x[..., 0::2], x[..., 1::2]
    return np.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x.shape)


def inverse_frequencies(op: Rope, length: int | None = None) -> tuple[Array, float]:
    """(radians per position of every pair, f32 [rotary_dim/2]; the attention factor).

    `length` is the largest position plus one; only kinds with `by_length` look at it, and without
    it they give the frequencies of a short call.
    """
    powers = np.arange(0, op.turned, 2).astype(np.float32) / np.float32(op.turned)
    match op.kind:
        case "linear":
            return _inverse(op.theta, powers) / np.float32(op.factor), 1.0
        case "dynamic":
            return _inverse(_dynamic_theta(op, length), powers), 1.0
        case "llama3":
            return _llama3(op, _inverse(op.theta, powers)), 1.0
        case "yarn":
            return _yarn(op, np.float32(op.theta) ** powers), _yarn_factor(op)
        case "longrope":
            long = length is not None and length > op.original_positions
            factors = np.array(op.long_factors if long else op.short_factors, np.float32)
            return 1 / (factors * np.float32(op.theta) ** powers), _longrope_factor(op)
        case "proportional":
            inverse = _inverse(op.theta, powers) / np.float32(op.factor)
            inverse[(op.rotary_dim or op.head_dim) // 2 :] = 0
            return inverse, 1.0
        case _:
            return _inverse(op.theta, powers), 1.0


def _inverse(theta: float, powers: Array) -> Array:
    return 1 / np.float32(theta) ** powers


def _dynamic_theta(op: Rope, length: int | None) -> float:
    """The base that stretches the slowest pair over the length (bloc97's and emozilla's NTK)."""
    longest = max(length or 0, op.original_positions)
    stretch = op.factor * longest / op.original_positions - (op.factor - 1)
    return op.theta * stretch ** (op.turned / (op.turned - 2))


def _llama3(op: Rope, inverse: Array) -> Array:
    """Long waves are slowed by `factor`, short ones stay, those between are blended."""
    f32 = np.float32
    waves = f32(2 * math.pi) / inverse
    slow = waves > f32(op.original_positions / op.low_freq_factor)
    fast = waves < f32(op.original_positions / op.high_freq_factor)
    width = f32(op.high_freq_factor - op.low_freq_factor) or f32(1)  # none lie between
    blend = (f32(op.original_positions) / waves - f32(op.low_freq_factor)) / width
    slowed = inverse / f32(op.factor)
    between = (1 - blend) * slowed + blend * inverse
    return np.select([slow, fast], [slowed, inverse], between)


def _yarn(op: Rope, powers: Array) -> Array:
    """Pairs that turn often stay, pairs that turn rarely are slowed, with a ramp between."""
    low, high = _yarn_pair(op, op.beta_fast), _yarn_pair(op, op.beta_slow)
    if op.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, op.turned - 1)
    if low == high:
        high += 0.001  # a ramp of no width
    pairs = np.arange(op.turned // 2, dtype=np.float32)
    slowed = np.clip((pairs - np.float32(low)) / np.float32(high - low), 0, 1)
    return 1 / (np.float32(op.factor) * powers) * slowed + 1 / powers * (1 - slowed)


def _yarn_pair(op: Rope, turns: float) -> float:
    """The pair that turns `turns` times within the original positions."""
    wave = op.original_positions / (turns * 2 * math.pi)
    return op.turned * math.log(wave) / (2 * math.log(op.theta))


def _yarn_factor(op: Rope) -> float:
    def scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(op.factor) + 1.0 if op.factor > 1 else 1.0

    if op.attention_factor is not None:
        return op.attention_factor
    if op.mscale and op.mscale_all_dim:
        return scale(op.mscale) / scale(op.mscale_all_dim)
    return scale(1.0)


def _longrope_factor(op: Rope) -> float:
    if op.attention_factor is not None:
        return op.attention_factor
    if op.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(op.factor) / math.log(op.original_positions))


def _check_ranges(op: Rope) -> None:
    """Raise for NaN, infinity, and numbers far from those of any model."""
    if not 1 < op.theta <= _FAR**2 or not 1 / _FAR <= op.factor <= _FAR:
        raise Error(
            f"rope: theta ({op.theta}) must be above 1 and factor ({op.factor}) above 0, "
            "both of a usual size"
        )
    for name in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"):
        if not 1 / _FAR <= getattr(op, name) <= _FAR:
            raise Error(f"rope: {name} ({getattr(op, name)}) must be above 0 and of a usual size")
    for name in ("mscale", "mscale_all_dim"):
        if not 0 <= getattr(op, name) <= _FAR:
            raise Error(f"rope: {name} ({getattr(op, name)}) must be 0 or above")
    if op.attention_factor is not None and not abs(op.attention_factor) <= _FAR:
        raise Error(f"rope: attention_factor ({op.attention_factor}) must be of a usual size")
    for number in (*op.short_factors, *op.long_factors):
        if not 1 / _FAR <= number <= _FAR:
            raise Error(f"rope: the factor {number} of a pair must be above 0")


def _check_numbers(op: Rope) -> None:
    """Raise where an attribute has no meaning, or the kind lacks one.

    What passes gives finite frequencies without overflow on the way.
    """
    _check_ranges(op)
    turned = op.rotary_dim or op.head_dim
    if op.head_dim < 1 or not 0 <= op.rotary_dim <= op.head_dim or turned % 2 or op.turned % 2:
        raise Error(
            f"rope turns pairs of features, so rotary_dim ({turned}) must be even "
            f"and at most head_dim ({op.head_dim})"
        )
    if op.kind in _STRETCHED and op.original_positions < 2:
        raise Error(
            f"rope: kind={op.kind!r} needs original_positions, the length before stretching"
        )
    if op.kind == "dynamic" and (op.turned < 4 or op.factor < 1):
        raise Error(
            "rope: kind='dynamic' needs a rotary_dim of at least 4 and a factor of at least 1"
        )
    if op.kind == "llama3" and op.low_freq_factor > op.high_freq_factor:
        raise Error("rope: kind='llama3' needs low_freq_factor <= high_freq_factor")
    if op.kind == "yarn" and op.beta_slow > op.beta_fast:
        raise Error("rope: kind='yarn' needs beta_slow <= beta_fast")
    pairs = {len(op.short_factors), len(op.long_factors)}
    if op.kind == "longrope" and pairs != {op.turned // 2}:
        raise Error(f"rope: kind='longrope' needs {op.turned // 2} short_factors and long_factors")
