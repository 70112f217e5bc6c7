"""GPTQ as AutoGPTQ and GPTQModel store it (https://github.com/ModelCloud/GPTQModel).

qweight i32 [K/8, N], qzeros i32 [K/group, N/8], scales [K/group, N], g_idx i32 [K], the group of
every input feature. The format "gptq" stores zeros less 1, "gptq_v2" as they are.
"""

from __future__ import annotations

import numpy as np

from ....errors import Error
from ...models.config_reader import ConfigReader
from .method import Method
from .parts import FLOATS, Layer, Sizes, Tensors
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
        if any(not key.startswith("-:") for key in config.inner("dynamic")):
            raise config.error("dynamic", "irc reads one number of bits for all layers")

    def layer(self, name: str, tensors: Tensors, shape: Sizes) -> Layer:
        n, k = shape
        scales = tensors.take(f"{name}.scales", *FLOATS).transposed()
        size = self.group if self.group > 0 else k
        self._check_order(name, tensors, k, size)
        kind = f"{'i' if self.symmetric else 'u'}{self.bits}"
        codes = tensors.words(f"{name}.qweight", "rows", kind, (k, n)).transposed()
        stored = tensors.words(f"{name}.qzeros", self.zeros, kind, (scales.shape[1], n))
        zeros = None if self.symmetric else spread(stored.transposed(), shape, (1, size))
        return Layer(codes, spread(scales, shape, (1, size)), zeros)

    @staticmethod
    def _check_order(name: str, tensors: Tensors, k: int, size: int) -> None:
        """An Error unless the groups of a layer are consecutive input features."""
        key = f"{name}.g_idx"
        if key not in tensors:
            return
        if not np.array_equal(tensors.read(key), np.arange(k) // size):
            raise Error(
                f"{key} mixes input features of different groups (desc_act=true), which irc does "
                "not read; quantize with desc_act=false, or the original checkpoint with --quantize"
            )
