"""The meaning of library calls in numpy, for plans that run on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from irc.backends.cuda.execute.cudnn import layouts_of
from irc.backends.cuda.plan.product import Product, Settings
from irc.ir.dtypes import numpy_dtype

Array: TypeAlias = np.ndarray[Any, Any]


def product_of(product: Product, arrays: Sequence[Array]) -> Array:
    """y of a product of cuBLASLt; `arrays` are what the call reads, in any shapes."""
    operands = product.operands()
    given = {
        each.name: array.reshape(each.shape).astype(np.float32)
        for each, array in zip(operands, arrays, strict=False)
    }
    weight = given["weight"]
    y = np.matmul(given["x"], np.swapaxes(weight, 1, 2) if product.transposed else weight)
    y = y * np.float32(product.alpha)
    if product.x_scale:
        y = y * given["x_scale"].reshape(1, -1, 1)
    if product.weight_scale:
        y = y * given["weight_scale"].reshape(1, 1, -1)
    for name in ("bias", "residual"):
        y = y + given.get(name, np.float32(0))
    if product.activation == "relu":
        y = np.maximum(y, np.float32(0))
    return y.astype(numpy_dtype(product.result))


def attention_of(settings: Settings, arrays: Sequence[Array]) -> Array:
    """The result of an attention of cuDNN, flat; `arrays` are what the call reads."""
    layouts = layouts_of(settings)
    q, k, v = (_laid(array, *layout) for array, layout in zip(arrays[:3], layouts, strict=False))
    batch, heads, queries, keys = *q.shape[:3], k.shape[2]
    k, v = (np.repeat(each, heads // each.shape[1], axis=1) for each in (k, v))
    scores = np.matmul(q, np.swapaxes(k, 2, 3)) * np.float32(str(settings["scale"]))
    used = [np.full(batch, queries), np.full(batch, keys)]
    if len(arrays) > 3:
        used = [array.reshape(-1) for array in arrays[3:]]
    key, query = np.arange(keys), np.arange(queries).reshape(-1, 1)
    for row, (count, length) in enumerate(zip(*used, strict=True)):
        visible = key < length
        if settings["causal"]:
            visible = visible & (key <= query + length - count)
        scores[row][:, np.broadcast_to(~visible, scores.shape[2:])] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    result = np.matmul(weights / weights.sum(axis=-1, keepdims=True), v)
    stored = np.zeros(result.size, numpy_dtype(str(settings["dtype"])))
    sizes, strides = layouts[-1]
    _strided(stored, sizes, strides)[...] = result
    return stored


def _laid(array: Array, sizes: list[int], strides: list[int]) -> Array:
    flat = np.ascontiguousarray(array).reshape(-1).astype(np.float32)
    return _strided(flat, sizes, strides).copy()


def _strided(flat: Array, sizes: list[int], strides: list[int]) -> Array:
    steps = [flat.itemsize * stride for stride in strides]
    assert sum((n - 1) * s for n, s in zip(sizes, strides, strict=True)) < flat.size
    return np.lib.stride_tricks.as_strided(flat, sizes, steps)
