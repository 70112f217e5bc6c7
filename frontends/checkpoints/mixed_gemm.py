"""Weight-only codes of 8 and 4 bits as TensorRT-LLM quantizes and stores them.

A weight [K, N], whose columns are the outputs of a layer, has a scale per column: the largest
absolute value is code 128 (8 for four bits), which is clamped to 127 (7). Kernels of compute
capability 9.0 read the codes column by column, so that the bytes are those of the transposed codes
[N, K], of four bits the even one in the low half. The array has the shape [K, N * bits / 8] all the
same. Older GPUs read the codes plus 128 (plus 8), interleaved over columns.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, Any]


def quantize_columns(weight: Array, bits: int) -> tuple[Array, Array]:
    """Codes i8 [..., K, N] and scales f32 [..., N] of a float weight [..., K, N]."""
    values = weight.astype(np.float32)
    most = 1 << (bits - 1)
    scales = np.abs(values).max(-2) / np.float32(most)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.nan_to_num(values / scales[..., None, :])
    codes = np.trunc(ratio + np.copysign(np.float32(0.5), ratio))  # halves away from zero
    return np.clip(codes, -most, most - 1).astype(np.int8), scales


def pack(codes: Array, bits: int) -> Array:
    """The stored bytes, i8 [..., K, N * bits / 8], of codes [..., K, N]."""
    *outer, rows, columns = codes.shape
    stored = np.ascontiguousarray(codes.astype(np.int8).swapaxes(-1, -2))
    if bits == 4:
        low, high = stored.view(np.uint8)[..., ::2], stored.view(np.uint8)[..., 1::2]
        stored = ((low & 15) | (high << 4)).view(np.int8)
    return stored.reshape(*outer, rows, columns * bits // 8)


def unpack(stored: Array, bits: int) -> Array:
    """The codes, i8 [..., K, N], of stored bytes [..., K, N * bits / 8]."""
    *outer, rows, width = stored.shape
    codes = _elements(np.ascontiguousarray(stored), bits)
    return codes.reshape(*outer, width * 8 // bits, rows).swapaxes(-1, -2)


def is_interleaved(stored: Array, bits: int) -> bool:
    """Whether most codes are nearer to the ends of the signed range than to zero: codes plus 128
    (plus 8), as GPUs before compute capability 9.0 read them."""
    codes = _elements(np.ascontiguousarray(stored), bits)
    return bool(np.abs(codes.astype(np.int16)).mean() > 1 << (bits - 2))


def _elements(stored: Array, bits: int) -> Array:
    """The codes in the order of the bytes, flat."""
    flat = stored.view(np.int8).reshape(-1)
    return flat if bits == 8 else (np.stack((flat << 4, flat), -1) >> 4).reshape(-1)
