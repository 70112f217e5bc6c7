"""Integers of 4 or 8 bits packed in words of 32 bits, as checkpoints of other libraries have them.

A packing says along which dimension the elements of a word follow each other, and in which order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import Error, did_you_mean
from ..ir.dtypes import dtype as dtype_called


@dataclass(frozen=True)
class Packing:
    """Element i of a word along `dim` is at place `places[i]`, the lowest bits being place 0.

    `plus` is added to every code, modulo the number of codes.
    """

    dim: int
    places: tuple[int, ...] = tuple(range(8))
    plus: int = 0

    def words(self, picks: range, dtype: str) -> range:
        """The words that hold the elements at `picks`."""
        count = _per_word(dtype)
        return range(picks[0] // count, picks[-1] // count + 1)


PACKINGS = {
    "rows": Packing(0),  # GPTQ's qweight [K/8, N], the zero points of compressed-tensors
    "columns": Packing(1),  # weight_packed of compressed-tensors [N, K/8], the zeros of GPTQ 2
    "columns-less-1": Packing(1, plus=1),  # the zeros of GPTQ 1, stored less 1
    "awq": Packing(1, places=(0, 4, 1, 5, 2, 6, 3, 7)),  # qweight [K, N/8] and qzeros of AWQ
}


def packing(name: str) -> Packing:
    """The packing called `name`; an Error names the nearest one."""
    row = PACKINGS.get(name)
    if row is None:
        names = ", ".join(PACKINGS)
        raise Error(f"no packing called {name!r}{did_you_mean(name, PACKINGS)}; there are {names}")
    return row


def words_shape(name: str, dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the words of a matrix, of which the last ones may be partly empty."""
    if dtype not in ("i4", "u4", "i8", "u8") or len(shape) != 2:
        raise Error(f"words of 32 bits hold matrices of i4, u4, i8 or u8, not {dtype}{[*shape]}")
    count, dim = _per_word(dtype), packing(name).dim
    return tuple(-(-size // count) if i == dim else size for i, size in enumerate(shape))


def _per_word(dtype: str) -> int:
    return 32 // dtype_called(dtype).bits


def unpack(words: Any, first: int, picks: range, packed: Packing, dtype: str) -> Any:
    """The elements at `picks` of the packed dimension, from the words that begin with `first`.

    Codes of i4 and i8 are stored plus 8 and 128.
    """
    kind = dtype_called(dtype)
    count = _per_word(dtype)
    index = np.array(picks)
    shifts = np.uint32(kind.bits) * np.array(packed.places, np.uint32)[index % count]
    chosen = np.take(words.view(np.uint32), index // count - first, axis=packed.dim)
    chosen >>= shifts if packed.dim else shifts[:, None]
    chosen += np.uint32(packed.plus)
    codes = chosen.astype(np.uint8)  # the lowest eight bits
    if kind.kind == "int":
        codes -= np.uint8(1 << (kind.bits - 1))  # modulo 256, which gives the bits of a signed code
    codes &= np.uint8((1 << kind.bits) - 1)
    return codes.view(kind.numpy)
