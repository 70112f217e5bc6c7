"""The next token of every row, drawn by its logits: the same one in numpy and on GPUs."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from ..errors import Error
from ..ir.core import Op, Value
from ..ir.declare import Operand, operation
from ..ir.types import TensorType
from .shapes import float_operand, index_operand

Array: TypeAlias = np.ndarray[Any, Any]

STEPS = 19  # bits of a distance behind the point
NEVER = 32 << STEPS  # the distance of a token that is never drawn
LARGEST = 1 << 31  # the weight of the likeliest tokens
# 2**-y = 1 + POWERS[0] * y + POWERS[1] * y**2 + ... for y from 0 to 1, but for 2e-7 of it
POWERS = tuple(
    float(np.float32(number))
    for number in (-0.69314706, 0.24022436, -0.05549076, 0.00957918, -0.00127475, 0.00010902)
)
LOG2_E = float(np.float32(1.442695))
_ROUNDS, _FACTORS = 10, (0xD2511F53, 0xCD9E8D57)
_STEP_OF_KEYS = (0x9E3779B9, 0xBB67AE85)
_32_BITS = (1 << 32) - 1


@operation("sample", sharding="b v!, b, b, b, b, b, b -> b", bounded="always", reads="many")
class Sample(Op):
    """One token of each row of logits [B, V], drawn by their softmax: i32 [B].

    temperature f32 [B] divides the logits. Of the tokens, the top_k i32 [B] likeliest are kept (0:
    all), of these the likeliest that have the probability top_p f32 [B] together, and of these the
    ones of min_p f32 [B] times the largest probability; tokens as likely as the last one that is
    kept are kept, too. Where the temperature is 0, or top_k 1, the token is the first of the
    likeliest. The random numbers are those of Philox 4x32-10 (Salmon et al., 2011) with the key
    seed i64 [B] and the counter position, i32 or i64 [B]: the same ones give the same token.

    All is computed in integers. The distance of a token is log2(largest / its probability), in
    multiples of 2**-19; from 32 on it is never drawn. Its weight is 2**31 / 2**distance. Sums of
    weights are exact, so that no result depends on their order. NaN counts as -infinity; where
    there is nothing else, all tokens are equally likely.
    """

    logits: Operand
    temperature: Operand
    top_k: Operand
    top_p: Operand
    min_p: Operand
    seed: Operand
    position: Operand

    def infer(self) -> TensorType:
        logits = float_operand(self.opname, self.logits)
        if logits.ndim != 2:
            raise Error(f"sample: takes logits [rows, tokens], not {logits}")
        if not isinstance(logits.shape[1], int) or logits.shape[1] == 0:
            raise Error(f"sample: the number of tokens must be known and not 0, not {logits}")
        for name, dtype in (
            *(("temperature", "f32"), ("top_k", "i32"), ("top_p", "f32"), ("min_p", "f32")),
            *(("seed", "i64"), ("position", "")),
        ):
            value: Value = getattr(self, name)
            given = value.type if dtype else index_operand(self.opname, value)
            if given.shape != logits.shape[:1] or dtype not in ("", given.dtype):
                kind = TensorType(dtype or given.dtype, logits.shape[:1])
                raise Error(f"sample: {name} is {kind}, a number for each row, not {given}")
        return TensorType("i32", logits.shape[:1])

    def evaluate(
        self,
        logits: Array,
        temperature: Array,
        top_k: Array,
        top_p: Array,
        min_p: Array,
        seed: Array,
        position: Array,
    ) -> Array:
        temperature = np.where((temperature > 0) & (top_k != 1), temperature, np.float32(0))
        far = distances(logits, temperature)
        kept = kept_tokens(far, top_k, top_p, min_p)
        sums = np.cumsum(np.where(kept, weights(far), 0), axis=1)
        tokens = np.zeros(len(logits), np.int32)
        for row in range(len(logits)):
            bits = random_bits(int(seed[row]), int(position[row])) if temperature[row] else 0
            wanted = int(sums[row, -1]) * bits >> 64
            tokens[row] = np.searchsorted(sums[row], wanted, side="right")
        return tokens


@np.errstate(all="ignore")
def distances(logits: Array, temperature: Array) -> Array:
    """log2(largest probability / that of a token) of logits [B, V], in multiples of 2**-STEPS."""
    x = logits.astype(np.float32)
    x = np.where(np.isnan(x), np.float32(-np.inf), x)
    most = x.max(axis=1, keepdims=True)
    halvings = (most - x) * (np.float32(LOG2_E) / temperature.astype(np.float32))[:, None]
    halvings = np.where(x == most, np.float32(0), halvings)
    near = halvings < 32
    return np.where(
        near, np.rint(np.where(near, halvings, 0) * np.float32(1 << STEPS)), NEVER
    ).astype(np.int64)


def weights(distance: Array) -> Array:
    """LARGEST / 2**distance as i64, rounded to an integer; 0 from NEVER on."""
    y = (distance & (1 << STEPS) - 1).astype(np.float32) * np.float32(2.0**-STEPS)
    power = np.zeros_like(y)
    for number in (*reversed(POWERS), 1.0):
        power = power * y + np.float32(number)
    halvings = np.minimum(distance >> STEPS, 32)
    half = (1 << halvings) >> 1
    return (
        np.where(distance < NEVER, (power * np.float32(LARGEST)).astype(np.int64) + half, 0)
        >> halvings
    )


def kept_tokens(distance: Array, top_k: Array, top_p: Array, min_p: Array) -> Array:
    """Whether each token [B, V] is kept, by its distance."""
    weight, kept = weights(distance), distance < NEVER
    order = np.sort(distance, axis=1)
    for row, (count, part) in enumerate(zip(top_k.tolist(), top_p.tolist(), strict=True)):
        if 0 < count < distance.shape[1]:
            kept[row] &= distance[row] <= order[row, count - 1]
        if part < 1:
            near = np.sort(distance[row, kept[row]])
            sums = np.cumsum(weights(near))
            wanted = max(1, int(sums[-1]) * int(max(part, 0.0) * 2**32) >> 32)
            kept[row] &= distance[row] <= near[np.searchsorted(sums, wanted)]
    least = np.ceil(np.clip(min_p.astype(np.float32), 0, 1) * np.float32(LARGEST))
    return kept & (weight >= np.where(min_p > 0, least, 0)[:, None])


def random_bits(key: int, counter: int) -> int:
    """64 random bits: the first two of the four words of Philox 4x32-10."""
    keys = [key & _32_BITS, key >> 32 & _32_BITS]
    words = [counter & _32_BITS, counter >> 32 & _32_BITS, 0, 0]
    for _ in range(_ROUNDS):
        first, second = _FACTORS[0] * words[0], _FACTORS[1] * words[2]
        words = [
            *(second >> 32 ^ words[1] ^ keys[0], second & _32_BITS),
            *(first >> 32 ^ words[3] ^ keys[1], first & _32_BITS),
        ]
        keys = [(k + step) & _32_BITS for k, step in zip(keys, _STEP_OF_KEYS, strict=True)]
    return words[1] << 32 | words[0]
