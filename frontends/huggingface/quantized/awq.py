"""AWQ as AutoAWQ stores it (https://github.com/casper-hansen/AutoAWQ, the version "gemm").

qweight i32 [K, N/8], qzeros i32 [K/group, N/8], scales f16 [K/group, N]: codes u4 with zeros.
"""

from __future__ import annotations

from ...models.config_reader import ConfigReader
from .method import Method
from .parts import FLOATS, Layer, Sizes, Tensors
from .scales import spread


class Awq(Method):
    marks = ("qweight",)

    def __init__(self, config: ConfigReader) -> None:
        self.ignored = config.words("modules_to_not_convert")
        for key in ("version", "format"):
            if config.word(key, "gemm").lower() != "gemm":
                raise config.error(key, "irc reads the layout gemm of AWQ only")
        if config.integer("bits", config.integer("w_bit", 4)) != 4:
            raise config.error("bits", "AWQ has codes of 4 bits")
        self.group = config.integer("group_size", config.integer("q_group_size", 128))

    def layer(self, name: str, tensors: Tensors, shape: Sizes) -> Layer:
        n, k = shape
        scales = tensors.take(f"{name}.scales", *FLOATS).transposed()
        tensors.check_scales(f"{name}.scales")
        block = (1, self.group if self.group > 0 else k)
        codes = tensors.words(f"{name}.qweight", "awq", "u4", (k, n)).transposed()
        groups = (scales.shape[1], n)
        zeros = tensors.words(f"{name}.qzeros", "awq", "u4", groups).transposed()
        return Layer(codes, spread(scales, shape, block), spread(zeros, shape, block))
