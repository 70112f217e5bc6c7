"""GPTQ as AutoGPTQ and GPTQModel store it (https://github.com/ModelCloud/GPTQModel).

qweight i32 [K/8, N], qzeros i32 [K/group, N/8], scales [K/group, N], g_idx i32 [K], the group of
every input feature. The format "gptq" stores zeros less 1, "gptq_v2" as they are.
"""

from __future__ import annotations

from ...models.config_reader import ConfigReader
from .method import Method
from .parts import FLOATS, Layer, Sizes, Tensors
from .scales import in_groups, spread

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
        bias = f"{name}.bias"
        if bias in tensors and tensors.read(bias).any():
            tensors.used.discard(bias)  # zeros, which AutoGPTQ adds, need no model that adds them
        scales = tensors.take(f"{name}.scales", *FLOATS).transposed()
        tensors.check_scales(f"{name}.scales")
        block = (1, self.group if self.group > 0 else k)
        kind = f"{'i' if self.symmetric else 'u'}{self.bits}"
        codes = tensors.words(f"{name}.qweight", "rows", kind, (k, n)).transposed()
        codes, order = in_groups(tensors, f"{name}.g_idx", codes, block[1])
        stored = tensors.words(f"{name}.qzeros", self.zeros, kind, (scales.shape[1], n))
        zeros = None if self.symmetric else spread(stored.transposed(), shape, block)
        return Layer(codes, spread(scales, shape, block), zeros, order=order)
