"""FP8 as DeepSeek-V3 stores it: blocks with `weight_scale_inv`, by which codes are multiplied.

Also without blocks: `weight_scale`, and `input_scale` if static (AutoFP8), or `activation_scale`
(transformers).
"""

from __future__ import annotations

from ....quantization.sites import FakeQuantize
from ...models.config_reader import ConfigReader
from .method import Method
from .parts import Layer, Sizes, Tensors
from .scales import take_scales


class Fp8(Method):
    marks = ("weight_scale_inv", "weight_scale")

    def __init__(self, config: ConfigReader) -> None:
        self.ignored = [*config.words("modules_to_not_convert"), *config.words("ignored_layers")]
        if config.word("fmt", "e4m3") != "e4m3":
            raise config.error("fmt", "irc reads e4m3")
        block = tuple(map(int, config.numbers("weight_block_size")))
        self.block = block if block else None
        if len(block) not in (0, 2) or any(size < 1 for size in block):
            raise config.error("weight_block_size", "expected two sizes of at least 1")
        self.static = config.word("activation_scheme", "dynamic") == "static"

    def layer(self, name: str, tensors: Tensors, shape: Sizes) -> Layer:
        key = f"{name}.weight_scale_inv"
        key = key if key in tensors else f"{name}.weight_scale"
        codes = tensors.view(f"{name}.weight", "f8e4m3", shape)
        scales = take_scales(tensors, key, shape, self.block)
        return Layer(codes, scales, activation=self._activation(name, tensors))

    def _activation(self, name: str, tensors: Tensors) -> FakeQuantize:
        if self.static:
            key = f"{name}.activation_scale"
            key = key if key in tensors else f"{name}.input_scale"
            return FakeQuantize("f8e4m3", tensors.number(key))
        return FakeQuantize("f8e4m3", block=self.block[1] if self.block else 0)
