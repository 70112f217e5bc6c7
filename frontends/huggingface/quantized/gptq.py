"""GPTQ as AutoGPTQ and GPTQModel store it (https://github.com/ModelCloud/GPTQModel).

qweight i32 [K/8, N], qzeros i32 [K/group, N/8], scales [K/group, N], g_idx i32 [K], the group of
every input feature. The format "gptq" stores zeros less 1, "gptq_v2" as they are.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ....errors import Error
from ....weights import SortingRef, TakenRef
from ...models.config_reader import ConfigReader
from .method import Method
from .parts import FLOATS, Layer, Part, Sizes, Tensors
from .scales import spread

_ZEROS = {"gptq": "columns-less-1", "gptq_v2": "columns"}


class Gptq(Method):
    marks = ("qweight",)

    def __init__(self, config: ConfigReader) -> None:
        self.ignored = config.words("modules_to_not_convert")
        self.bits, self.group = config.integer("bits"), config.integer("group_size", 128)
        self.symmetric = config.flag("sym", True)
        if self.bits not in (4, 8):
            raise config.error("bits", "irc reads GPTQ with 4 and 8 bits")
        form = config.word("checkpoint_format", config.word("format", "gptq"))
        if form not in _ZEROS:
            raise config.error("checkpoint_format", f"irc reads {' and '.join(_ZEROS)}")
        self.zeros = _ZEROS[form]
        self.orders: dict[bytes, Part] = {}
        if any(not key.startswith("-:") for key in config.inner("dynamic")):
            raise config.error("dynamic", "irc reads one number of bits for all layers")

    def layer(self, name: str, tensors: Tensors, shape: Sizes) -> Layer:
        n, k = shape
        scales = tensors.take(f"{name}.scales", *FLOATS).transposed()
        size = self.group if self.group > 0 else k
        kind = f"{'i' if self.symmetric else 'u'}{self.bits}"
        codes = tensors.words(f"{name}.qweight", "rows", kind, (k, n))
        order = self._order(f"{name}.g_idx", tensors, k, size)
        if order is not None:
            codes = replace(codes, ref=TakenRef(codes.ref, order.ref, 0))
        stored = tensors.words(f"{name}.qzeros", self.zeros, kind, (scales.shape[1], n))
        zeros = None if self.symmetric else spread(stored.transposed(), shape, (1, size))
        scales = spread(scales, shape, (1, size))
        return Layer(codes.transposed(), scales, zeros, order=order)

    def _order(self, key: str, tensors: Tensors, k: int, size: int) -> Part | None:
        """The order in which groups are adjacent; None if they are. Equal ones are one part."""
        if key not in tensors:
            return None
        groups = tensors.read(key)
        if np.array_equal(groups, np.arange(k) // size):
            return None
        if not np.array_equal(np.sort(groups), np.arange(k) // size) or k % size:
            raise Error(
                f"{key} has groups of unequal sizes, expected {size} input features in each; irc "
                "reads those of desc_act=true only where group_size divides the input features"
            )
        ref = SortingRef(tensors.take(key, "i32").ref)
        return self.orders.setdefault(groups.tobytes(), Part(ref, "i32", (k,)))
