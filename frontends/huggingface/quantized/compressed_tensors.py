"""compressed-tensors (https://github.com/vllm-project/compressed-tensors).

`config_groups` says how the weights and inputs of which layers are quantized. pack-quantized has
`weight_packed` i32 [N, K/8], codes plus 8 (4 bits) or 128 (8 bits), and zeros packed along the
rows; int-quantized and float-quantized have `weight` i8 or f8e4m3; nvfp4-pack-quantized has
`weight_packed` u8 [N, K/2], scales f8e4m3 and `weight_global_scale`, by which they are divided.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ....errors import Error
from ....quantization.sites import FakeQuantize
from ....weights import ReciprocalRef
from ...models.config_reader import ConfigReader
from .method import Method, names
from .parts import Layer, Sizes, Tensors
from .scales import in_groups, take_scales


class CompressedTensors(Method):
    marks = ("weight_packed", "weight_scale")

    def __init__(self, config: ConfigReader) -> None:
        self.ignored = config.words("ignore")
        self.groups = [ConfigReader(group) for group in config.inner("config_groups").values()]
        if config.inner("transform_config"):
            raise config.error("transform_config", "irc does not rotate weights and inputs")

    def layer(self, name: str, tensors: Tensors, shape: Sizes) -> Layer:
        group = self._group(name)
        if group.inner("output_activations"):
            raise group.error("output_activations", "irc does not quantize outputs of layers")
        weights = ConfigReader(group.inner("weights"), f"{name}: weights")
        unread = ("weight_shape", "weight_zero_point", "input_zero_point")  # where symmetric
        tensors.used.update(f"{name}.{key}" for key in unread)
        activation = _activation(name, tensors, group.inner("input_activations"))
        if f"{name}.weight_packed" not in tensors:
            return _plain(name, tensors, shape, weights, activation)
        if tensors.info(f"{name}.weight_packed").dtype == "u8":
            return _floats(name, tensors, shape, activation)
        return _words(name, tensors, shape, weights, activation)

    def _group(self, name: str) -> ConfigReader:
        """The group whose targets name a layer, or else its class."""
        targets = [(group, group.words("targets")) for group in self.groups]
        named = [group for group, words in targets if any(names(word, name) for word in words)]
        groups = named or [group for group, words in targets if "Linear" in words]
        if not groups:
            raise Error(f"config_groups of the quantization_config have no target for {name}")
        return groups[0]


def _plain(
    name: str, tensors: Tensors, shape: Sizes, args: ConfigReader, activation: FakeQuantize | None
) -> Layer:
    """Codes of eight bits under the name of the weight."""
    kind = "i8" if args.word("type", "int") == "int" else "f8e4m3"
    codes = tensors.view(f"{name}.weight", kind, shape)
    block = tuple(map(int, args.numbers("block_structure"))) or None
    scales = take_scales(tensors, f"{name}.weight_scale", shape, block)
    if args.flag("symmetric", True):
        return Layer(codes, scales, activation=activation)
    zeros = tensors.view(f"{name}.weight_zero_point", kind, scales.shape)
    return Layer(codes, scales, zeros, activation=activation)


def _words(
    name: str, tensors: Tensors, shape: Sizes, args: ConfigReader, activation: FakeQuantize | None
) -> Layer:
    """Integers in words of 32 bits, in place where rows end with a word and zeros are stored."""
    bits, symmetric = args.integer("num_bits"), args.flag("symmetric", True)
    if bits not in (4, 8):
        raise args.error("num_bits", "irc reads integers of 4 and 8 bits")
    kind = f"{'i' if symmetric else 'u'}{bits}"
    key = f"{name}.weight_packed"
    if symmetric or shape[1] % (32 // bits):
        codes = tensors.words(key, "columns", kind, shape)
    else:
        codes = tensors.view(key, kind, shape)
    scales = take_scales(tensors, f"{name}.weight_scale", shape)
    group = shape[1] // scales.shape[1]
    codes, order = in_groups(tensors, f"{name}.weight_g_idx", codes, group)
    zeros = None
    if not symmetric:
        zeros = tensors.words(f"{name}.weight_zero_point", "rows", kind, scales.shape)
    return Layer(codes, scales, zeros, activation=activation, order=order)


def _floats(name: str, tensors: Tensors, shape: Sizes, activation: FakeQuantize | None) -> Layer:
    """Codes of four bits in bytes, with scales of one level (MXFP4) or two (NVFP4)."""
    codes = tensors.view(f"{name}.weight_packed", "f4e2m1", shape)
    scales, whole = take_scales(tensors, f"{name}.weight_scale", shape), None
    if f"{name}.weight_global_scale" in tensors:
        tensors.check_scales(f"{name}.weight_global_scale")
        divisor = tensors.view(f"{name}.weight_global_scale", "f32", (1, 1))
        whole = replace(divisor, ref=ReciprocalRef(divisor.ref))
    return Layer(codes, scales, tensor_scale=whole, activation=activation)


def _activation(name: str, tensors: Tensors, values: Mapping[str, Any]) -> FakeQuantize | None:
    """How the inputs of a layer are quantized."""
    if not values:
        return None
    args = ConfigReader(values, f"{name}: input_activations")
    kind, bits = args.word("type", "int"), args.integer("num_bits", 8)
    dtype = {("int", 8): "i8", ("float", 8): "f8e4m3", ("float", 4): "f4e2m1"}.get((kind, bits))
    if dtype is None:
        raise args.error("num_bits", "irc quantizes inputs to int8, FP8 and FP4")
    strategy, symmetric = args.word("strategy", "tensor"), args.flag("symmetric", True)
    if strategy == "tensor_group":
        scale = 1 / tensors.number(f"{name}.input_global_scale")
        block = args.integer("group_size", 16)
        return FakeQuantize(dtype, block=block, scales="f8e4m3", tensor_scale=scale)
    if not values.get("dynamic"):
        zero = 0 if symmetric else int(tensors.read(f"{name}.input_zero_point").reshape(()))
        return FakeQuantize(dtype, tensors.number(f"{name}.input_scale"), zero)
    if not symmetric:
        raise args.error("symmetric", "irc finds dynamic scales of symmetric codes only")
    if strategy not in ("token", "group"):
        raise args.error("strategy", "irc finds dynamic scales per token and per group")
    block = args.integer("group_size") if strategy == "group" else 0
    is_power = str(values.get("scale_dtype")).endswith("uint8")
    return FakeQuantize(dtype, block=block, scales="f8e8m0" if is_power else "f32")
