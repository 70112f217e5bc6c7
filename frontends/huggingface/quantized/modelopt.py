"""NVIDIA ModelOpt (https://github.com/NVIDIA/Model-Optimizer), its Hugging Face checkpoints.

FP8: `weight` f8e4m3, `weight_scale` and `input_scale` f32. NVFP4: `weight` u8 [N, K/2],
`weight_scale` f8e4m3 [N, K/16] times `weight_scale_2`, and `input_scale`, the tensor's scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from ....errors import Error
from ....quantization.activations import FakeQuantize
from ...models.config_reader import ConfigReader
from .method import Method
from .parts import Layer, Sizes, Tensors
from .scales import take_scales

_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "W8A16", "NVFP4", "W4A16_NVFP4")


class ModelOpt(Method):
    marks = ("weight_scale",)

    def __init__(self, config: ConfigReader) -> None:
        self.ignored = [*config.words("ignore"), *config.words("exclude_modules")]
        self.layers: Mapping[str, Any] = config.inner("quantized_layers")
        self.algorithm = config.word("quant_algo").upper()
        for name, each in self.layers.items():
            if not isinstance(each, dict):
                why = f"{name} is {each!r}; expected an object with quant_algo"
                raise config.error("quantized_layers", why)
        if not self.layers and self.algorithm not in _ALGORITHMS:
            raise config.error("quant_algo", f"irc reads {', '.join(_ALGORITHMS)}")

    def layer(self, name: str, tensors: Tensors, shape: Sizes) -> Layer:
        algorithm = cast("str", self.layers.get(name, {}).get("quant_algo", self.algorithm))
        if algorithm not in _ALGORITHMS:
            raise Error(f"{name} has quant_algo={algorithm}; irc reads {', '.join(_ALGORITHMS)}")
        if f"{name}.pre_quant_scale" in tensors:
            raise Error(f"{name}.pre_quant_scale scales the input of a layer; irc does not read it")
        fp4 = "NVFP4" in algorithm
        kind = "f4e2m1" if fp4 else "i8" if algorithm == "W8A16" else "f8e4m3"
        codes = tensors.view(f"{name}.weight", kind, shape)
        block = (128, 128) if algorithm == "FP8_PB_WO" else None
        scales = take_scales(tensors, f"{name}.weight_scale", shape, block)
        whole = None
        if fp4:
            tensors.check_scales(f"{name}.weight_scale_2")
            whole = tensors.view(f"{name}.weight_scale_2", "f32", (1, 1))
        activation = None
        if algorithm == "FP8_PER_CHANNEL_PER_TOKEN":
            activation = FakeQuantize(kind)
        elif algorithm in ("FP8", "NVFP4"):
            level = tensors.number(f"{name}.input_scale")
            activation = FakeQuantize(kind, level)
            if fp4:
                size = shape[1] // scales.shape[1]
                activation = FakeQuantize(kind, block=size, scales="f8e4m3", tensor_scale=level)
        return Layer(codes, scales, tensor_scale=whole, activation=activation)
