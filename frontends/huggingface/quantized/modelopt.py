"""NVIDIA ModelOpt (https://github.com/NVIDIA/Model-Optimizer), its Hugging Face checkpoints.

FP8: `weight` f8e4m3, `weight_scale` and `input_scale` f32. NVFP4: `weight` u8 [N, K/2],
`weight_scale` f8e4m3 [N, K/16] times `weight_scale_2`, and `input_scale`, the tensor's scale. AWQ:
`weight` u8 [N/2, K], a byte of which has codes of two rows, and `weight_scale` [N, K/group].
`pre_quant_scale` [K] multiplies the input of a layer; `clamp_val` of the config limits the inputs
of FP8_PER_CHANNEL_PER_TOKEN.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from ....errors import Error
from ....quantization.sites import FakeQuantize
from ....weights import ConcatRef, Cyclic, Slice
from ...models.config_reader import ConfigReader
from .method import Method
from .parts import FLOATS, Layer, Part, Sizes, Tensors
from .scales import take_scales

# algorithm -> (dtype of codes, dtype to which inputs are quantized)
ALGORITHMS = {
    "FP8": ("f8e4m3", "f8e4m3"),
    "FP8_PER_CHANNEL_PER_TOKEN": ("f8e4m3", "f8e4m3"),
    "FP8_PB_WO": ("f8e4m3", ""),
    "W8A16": ("i8", ""),
    "W8A8_SQ_PER_CHANNEL": ("i8", "i8"),
    "W4A16_AWQ": ("i4", ""),
    "W4A8_AWQ": ("i4", "f8e4m3"),
    "NVFP4": ("f4e2m1", "f4e2m1"),
    "W4A16_NVFP4": ("f4e2m1", ""),
}


class ModelOpt(Method):
    marks = ("weight_scale",)

    def __init__(self, config: ConfigReader) -> None:
        self.ignored = [*config.words("ignore"), *config.words("exclude_modules")]
        self.layers: Mapping[str, Any] = config.inner("quantized_layers")
        self.algorithm = config.word("quant_algo").upper()
        self.clamp = config.numbers("clamp_val")
        if len(self.clamp) not in (0, 2):
            raise config.error("clamp_val", "expected the lowest and the highest input")
        for name, layer in self.layers.items():
            if not isinstance(layer, dict):
                why = f"{name} is {layer!r}; expected an object with quant_algo"
                raise config.error("quantized_layers", why)
        if not self.layers and self.algorithm not in ALGORITHMS:
            raise config.error("quant_algo", f"irc reads {', '.join(ALGORITHMS)}")

    def layer(self, name: str, tensors: Tensors, shape: Sizes) -> Layer:
        algorithm = cast("str", self.layers.get(name, {}).get("quant_algo", self.algorithm))
        if algorithm not in ALGORITHMS:
            raise Error(f"{name} has quant_algo={algorithm}; irc reads {', '.join(ALGORITHMS)}")
        kind, inputs = ALGORITHMS[algorithm]
        key = f"{name}.weight"
        pairs = kind == "i4"
        codes = pairs_of_rows(tensors, key, shape) if pairs else tensors.view(key, kind, shape)
        block = (128, 128) if algorithm == "FP8_PB_WO" else None
        scales = take_scales(tensors, f"{name}.weight_scale", shape, block)
        whole, key = None, f"{name}.weight_scale_2"
        if kind == "f4e2m1":
            tensors.check_scales(key)
            whole = tensors.view(key, "f32", (1, 1))
        elif key in tensors:
            tensors.used.add(key)  # of W4A8_AWQ: how kernels store the scales
        factors, key = None, f"{name}.pre_quant_scale"
        if key in tensors:
            factors = tensors.shared(key, tensors.take(key, *FLOATS))
        if algorithm == "FP8_PER_CHANNEL_PER_TOKEN":
            activation = FakeQuantize(inputs, clamp=self.clamp)
        else:
            activation = _activation(name, tensors, inputs, shape[1] // scales.shape[1])
        return Layer(codes, scales, tensor_scale=whole, activation=activation, factors=factors)


def _activation(name: str, tensors: Tensors, dtype: str, block: int) -> FakeQuantize | None:
    """How the inputs of a layer are quantized, by scales of a calibration."""
    if not dtype:
        return None
    level = tensors.number(f"{name}.input_scale")
    if dtype != "f4e2m1":
        return FakeQuantize(dtype, level)
    return FakeQuantize(dtype, block=block, scales="f8e4m3", tensor_scale=level)


def pairs_of_rows(tensors: Tensors, key: str, shape: Sizes) -> Part:
    """Codes of four bits: a byte has those of two rows, the even one in its low half."""
    n, k = shape
    pairs = tensors.view(key, "i4", (n // 2, 2 * k)).ref.then(Cyclic(1, 2))
    halves = (pairs.then(Slice((None, (0, k)))), pairs.then(Slice((None, (k, 2 * k)))))
    return Part(ConcatRef(halves, 0).then(Cyclic(0, n // 2)), "i4", shape)
