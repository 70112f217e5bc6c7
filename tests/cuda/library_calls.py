"""The meaning of library calls in numpy, for plans that run on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from irc.backends.cuda.plan.product import Product
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
