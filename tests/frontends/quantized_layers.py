"""Layers quantized at random in the layouts of other libraries, each packed as its source does.

A packer takes the shape [N, K] of a weight and gives its tensors, without the name of the layer,
and the weight that they stand for. `Packed.inputs` is what the layer makes of its input. CASES are
the configs of Hugging Face folders with their packers.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import irc
from irc.frontends import huggingface
from irc.frontends.layers import Linear
from irc.frontends.module import Module
from tests.models.golden import write_safetensors

Array = np.ndarray[Any, Any]
F8, F4 = ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn


@dataclass
class Packed:
    tensors: dict[str, Array]
    weight: Array
    inputs: Callable[[Array], Array] = field(default=lambda x: x)


def spread(blocks: Array, shape: tuple[int, ...], size: tuple[int, ...]) -> Array:
    """Every element over its block, the last ones cut off."""
    for dim, count in enumerate(size):
        blocks = np.repeat(blocks, count, axis=dim)
    return blocks[tuple(map(slice, shape))]


def packed_words(codes: Array, bits: int, dim: int) -> Array:
    """pack_to_int32 of compressed-tensors: words along `dim`, the first element in the low bits."""
    codes = np.moveaxis(codes, dim, -1).astype(np.uint32)
    count = 32 // bits
    codes = np.pad(codes, ((0, 0), (0, -codes.shape[1] % count)))
    words = np.zeros((codes.shape[0], codes.shape[1] // count), np.uint32)
    for i in range(count):
        words |= codes[:, i::count] << np.uint32(bits * i)
    return np.ascontiguousarray(np.moveaxis(words, -1, dim)).view(np.int32)


def scales_like(rng: Any, shape: tuple[int, ...], dtype: Any = np.float32) -> Array:
    return (rng.random(shape) / 16 + 1 / 64).astype(dtype)


def awq(rng: Any, n: int, k: int, group: int) -> Packed:
    """WQLinear_GEMM.from_linear of AutoAWQ (awq/modules/linear/gemm.py)."""
    codes, zeros = rng.integers(0, 16, (k, n)), rng.integers(0, 16, (k // group, n))
    scales = scales_like(rng, (k // group, n), np.float16)

    def pack(codes: Array) -> Array:
        words = np.zeros((codes.shape[0], n // 8), np.uint32)
        for col in range(n // 8):
            for i, at in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
                words[:, col] |= codes[:, col * 8 + at].astype(np.uint32) << np.uint32(4 * i)
        return words.view(np.int32)

    weight = (codes - np.repeat(zeros, group, 0)) * np.repeat(scales, group, 0).astype(np.float32)
    tensors = {"qweight": pack(codes), "qzeros": pack(zeros), "scales": scales}
    return Packed(tensors, weight.T)


def gptq(
    rng: Any,
    n: int,
    k: int,
    group: int,
    bits: int = 4,
    sym: bool = False,
    less: int = 1,
    ordered: bool = True,
) -> Packed:
    """QuantLinear.pack of AutoGPTQ (auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py).

    Not `ordered`, its desc_act: groups are made of features that are not adjacent.
    """
    middle, groups = 1 << (bits - 1), -(-k // group)
    codes = rng.integers(0, 2 * middle, (k, n))
    zeros = rng.integers(1, 2 * middle, (groups, n)) if not sym else np.full((groups, n), middle)
    scales, g_idx = scales_like(rng, (groups, n), np.float16), np.arange(k) // group
    g_idx = g_idx if ordered else rng.permutation(g_idx)
    weight = (codes - zeros[g_idx]) * scales.astype(np.float32)[g_idx]
    tensors = {
        "qweight": packed_words(codes, bits, 0),
        "qzeros": packed_words(zeros - less, bits, 1),
        "scales": scales,
        "g_idx": g_idx.astype(np.int32),
    }
    return Packed(tensors, weight.T)


def pack_quantized(
    rng: Any, n: int, k: int, group: int, bits: int = 4, sym: bool = True, ordered: bool = True
) -> Packed:
    """PackedQuantizationCompressor of compressed-tensors; not `ordered`, with its weight_g_idx."""
    middle = 1 << (bits - 1)
    codes = rng.integers(-middle, middle, (n, k))
    zeros = rng.integers(-middle, middle, (n, k // group)) * (not sym)
    scales = scales_like(rng, (n, k // group), ml_dtypes.bfloat16)
    g_idx = np.arange(k) // group if ordered else rng.permutation(np.arange(k) // group)
    weight = (codes - zeros[:, g_idx]) * scales.astype(np.float32)[:, g_idx]
    tensors = {
        "weight_packed": packed_words(codes + middle, bits, 1),
        "weight_scale": scales,
        "weight_shape": np.array([n, k]),
    }
    if not ordered:
        tensors["weight_g_idx"] = g_idx.astype(np.int32)
    if not sym:
        tensors["weight_zero_point"] = packed_words(zeros + middle, bits, 0)
    return Packed(tensors, weight)


def int_quantized(rng: Any, n: int, k: int, static: bool) -> Packed:
    """int-quantized of compressed-tensors: i8 with a scale per row, inputs per token or tensor."""
    codes = rng.integers(-128, 128, (n, k)).astype(np.int8)
    scales = scales_like(rng, (n, 1)) / np.float32(64)
    tensors = {"weight": codes, "weight_scale": scales}
    if not static:
        inputs = by_token(np.int8, 127)
    else:
        tensors["input_scale"] = scales_like(rng, (1,))
        inputs = by_tensor(tensors["input_scale"], np.int8, 127)
    return Packed(tensors, codes * scales, inputs)


def row_pairs(rng: Any, n: int, k: int, group: int) -> Packed:
    """pack_int4_in_uint8 of ModelOpt: the even rows are the low halves of bytes; with factors."""
    codes, scales = rng.integers(-8, 8, (n, k)), scales_like(rng, (n, k // group))
    factors = scales_like(rng, (k,))
    stored = ((codes[::2] & 15) | (codes[1::2] & 15) << 4).astype(np.uint8)
    tensors = {"weight": stored, "weight_scale": scales, "pre_quant_scale": factors}
    return Packed(tensors, codes * np.repeat(scales, group, 1), lambda x: x * factors)


def rounded(x: Array, scale: Array, kind: Any, largest: float) -> Array:
    """x as codes of a format, and back."""
    scaled = np.clip(x / scale, -largest - (kind is np.int8), largest)
    return (np.rint(scaled) if kind is np.int8 else scaled.astype(kind)).astype(np.float32) * scale


def by_tensor(scale: Array, kind: Any, largest: float) -> Callable[[Array], Array]:
    return lambda x: rounded(x, scale, kind, largest)


def by_token(kind: Any, largest: float) -> Callable[[Array], Array]:
    def inputs(x: Array) -> Array:
        return rounded(x, np.abs(x).max(-1, keepdims=True) / np.float32(largest), kind, largest)

    return inputs


def by_block(block: int, kind: Any, largest: float) -> Callable[[Array], Array]:
    """Inputs with a scale per `block` elements."""

    def inputs(x: Array) -> Array:
        apart = x.reshape(*x.shape[:-1], -1, block)
        return by_token(kind, largest)(apart).reshape(x.shape)

    return inputs


def float8(rng: Any, n: int, k: int, scale: str, blocks: tuple[int, int], **more: Any) -> Packed:
    """f8e4m3 with a tensor of scales called `scale`, one per block."""
    codes = rng.standard_normal((n, k)).astype(np.float32).astype(F8)
    shape = tuple(-(-size // block) for size, block in zip((n, k), blocks, strict=True))
    scales = scales_like(rng, shape)
    weight = codes.astype(np.float32) * spread(scales, (n, k), blocks)
    return Packed({"weight": codes, scale: scales}, weight, **more)


def static8(rng: Any, n: int, k: int) -> Packed:
    """FP8 of ModelOpt (modelopt/torch/export): scalars weight_scale and input_scale."""
    return static_of(rng, n, k, "weight_scale", "input_scale")


def static_of(rng: Any, n: int, k: int, weight: str, input: str) -> Packed:
    """FP8 with one scale for the weight and one for the input, of these names."""
    layer = float8(rng, n, k, weight, (n, k))
    layer.tensors[weight] = layer.tensors[weight].reshape(())
    layer.tensors[input] = scale = scales_like(rng, ())
    layer.inputs = by_tensor(scale, F8, 448)
    return layer


def nvfp4(rng: Any, n: int, k: int, library: str, inputs: bool = True) -> Packed:
    """NVFP4 of ModelOpt (scales multiply) and of compressed-tensors (the global one divides)."""
    codes = (rng.standard_normal((n, k)) * 3).astype(np.float32).astype(F4)
    halves = codes.view(np.uint8) & 15
    scales = (rng.random((n, k // 16)) * 200 + 1).astype(np.float32).astype(F8)
    whole, level = (np.float32(2.0 ** rng.integers(-9, -6)) for _ in range(2))
    weight = codes.astype(np.float32) * np.repeat(scales.astype(np.float32) * whole, 16, 1)
    packed = halves[:, ::2] | halves[:, 1::2] << 4
    if library == "modelopt":
        tensors = {"weight": packed, "weight_scale": scales, "weight_scale_2": whole}
        tensors |= {"input_scale": level} if inputs else {}
    else:
        tensors = {"weight_packed": packed, "weight_scale": scales}
        tensors["weight_global_scale"] = np.array([1 / whole])
        tensors |= {"input_global_scale": np.array([1 / level])} if inputs else {}
    arrays = {key: np.asarray(value) for key, value in tensors.items()}

    def quantized(x: Array) -> Array:
        apart = x.reshape(*x.shape[:-1], -1, 16)
        found = np.abs(apart).max(-1, keepdims=True) / np.float32(6) / level
        found = np.minimum(found, 448).astype(F8).astype(np.float32)
        return rounded(apart, np.where(found == 0, 1, found) * level, F4, 6).reshape(x.shape)

    return Packed(arrays, weight, quantized if inputs else lambda x: x)


def mx(rng: Any, n: int, k: int, kind: Any) -> Packed:
    """MXFP4 and MXFP8 of compressed-tensors: exponents plus 127 as bytes, per 32 (OCP MX 1.0)."""
    codes = (rng.standard_normal((n, k)) * 3).astype(np.float32).astype(kind)
    powers = rng.integers(120, 126, (n, k // 32)).astype(np.uint8)
    weight = codes.astype(np.float32) * np.repeat(2.0 ** (powers.astype(np.float32) - 127), 32, 1)
    halves = codes.view(np.uint8) & 15
    packed = {"weight_packed": halves[:, ::2] | halves[:, 1::2] << 4}
    largest, most = (6, 2) if kind is F4 else (448, 8)

    def inputs(x: Array) -> Array:
        apart = x.reshape(*x.shape[:-1], -1, 32)
        exponent = np.floor(np.log2(np.abs(apart).max(-1, keepdims=True))) - most
        return rounded(apart, np.exp2(exponent), kind, largest).reshape(x.shape)

    return Packed(
        (packed if kind is F4 else {"weight": codes}) | {"weight_scale": powers}, weight, inputs
    )


Packer = Callable[[Any, int, int], Packed]


def group(**weights: Any) -> dict[str, Any]:
    """The quantization_config of compressed-tensors for one group."""
    inputs = weights.pop("inputs", None)
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    own = {"quant_method": "compressed-tensors", "ignore": ["lm_head"]}
    return own | {"config_groups": {"group_0": scheme}}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": False, "desc_act": False}
ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 16, "sym": True} | {
    "packing_format": "auto_round:auto_gptq",
    "data_type": "int",
    "extra_config": {"lm_head": {"bits": 16, "data_type": "float"}},
}
FP8 = {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
INTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16, "symmetric": True}
TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
TENSOR = TOKEN | {"strategy": "tensor", "dynamic": False}
FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}
FP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
MX = {"type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
MX_INPUTS = MX | {"dynamic": True}

# name -> (quantization_config, packer); N and K must fit the groups and words of the layout
CASES: dict[str, tuple[dict[str, Any], Packer]] = {
    "awq": (AWQ, lambda r, n, k: awq(r, n, k, 16)),
    "gptq": (GPTQ, lambda r, n, k: gptq(r, n, k, 16)),
    "gptq2": (GPTQ | {"checkpoint_format": "gptq_v2"}, lambda r, n, k: gptq(r, n, k, 16, less=0)),
    "gptq-sym": (GPTQ | {"sym": True}, lambda r, n, k: gptq(r, n, k, 16, sym=True)),
    "gptq-8": (GPTQ | {"bits": 8, "sym": True}, lambda r, n, k: gptq(r, n, k, 16, 8, True)),
    "gptq-rows": (GPTQ | {"group_size": -1}, lambda r, n, k: gptq(r, n, k, k)),
    "gptq-order": (GPTQ | {"desc_act": True}, lambda r, n, k: gptq(r, n, k, 16, ordered=False)),
    "pack": (group(**INTS), lambda r, n, k: pack_quantized(r, n, k, 16)),
    "pack-asym": (
        group(**INTS | {"symmetric": False}),
        lambda r, n, k: pack_quantized(r, n, k, 16, sym=False),
    ),
    "pack-order": (
        group(**INTS | {"symmetric": False, "actorder": "group"}),
        lambda r, n, k: pack_quantized(r, n, k, 16, sym=False, ordered=False),
    ),
    "pack-8": (group(**INTS | {"num_bits": 8}), lambda r, n, k: pack_quantized(r, n, k, 16, 8)),
    "int-token": (
        group(num_bits=8, type="int", strategy="channel", inputs=TOKEN),
        lambda r, n, k: int_quantized(r, n, k, False),
    ),
    "int-static": (
        group(num_bits=8, type="int", strategy="channel", inputs=TENSOR),
        lambda r, n, k: int_quantized(r, n, k, True),
    ),
    "float-rows": (
        group(**FLOAT, strategy="channel", inputs=TOKEN | {"type": "float"}),
        lambda r, n, k: float8(r, n, k, "weight_scale", (1, k), inputs=by_token(F8, 448)),
    ),
    "float-block": (
        group(
            **FLOAT,
            strategy="block",
            block_structure=[16, 16],
            inputs=TOKEN | {"type": "float", "strategy": "group", "group_size": 16},
        ),
        lambda r, n, k: float8(r, n, k, "weight_scale", (16, 16), inputs=by_block(16, F8, 448)),
    ),
    "ct-nvfp4": (
        group(**FP4, inputs=FP4 | {"dynamic": "local"}),
        lambda r, n, k: nvfp4(r, n, k, "compressed-tensors"),
    ),
    "ct-nvfp4a16": (group(**FP4), lambda r, n, k: nvfp4(r, n, k, "compressed-tensors", False)),
    "fp8-static": (FP8 | {"weight_block_size": None, "activation_scheme": "static"}, static8),
    "fp8-transformers": (  # transformers/integrations/finegrained_fp8.py, FP8Linear
        FP8 | {"weight_block_size": None, "activation_scheme": "static"},
        lambda r, n, k: static_of(r, n, k, "weight_scale_inv", "activation_scale"),
    ),
    "auto-round": (ROUND, lambda r, n, k: gptq(r, n, k, 16, sym=True)),
    "auto-round-asym": (ROUND | {"sym": False}, lambda r, n, k: gptq(r, n, k, 16)),
    "auto-round-awq": (
        ROUND | {"packing_format": "auto_round:auto_awq", "sym": False},
        lambda r, n, k: awq(r, n, k, 16),
    ),
    "mxfp4": (group(**MX, num_bits=4, inputs=MX_INPUTS | {"num_bits": 4}), partial(mx, kind=F4)),
    "mxfp8": (group(**MX, num_bits=8, inputs=MX_INPUTS | {"num_bits": 8}), partial(mx, kind=F8)),
    "modelopt-token": (
        MODELOPT | {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        lambda r, n, k: float8(r, n, k, "weight_scale", (1, k), inputs=by_token(F8, 448)),
    ),
    "modelopt-awq": (MODELOPT | {"quant_algo": "W4A16_AWQ"}, lambda r, n, k: row_pairs(r, n, k, 8)),
    "modelopt-fp8": (MODELOPT, static8),
    "modelopt-nvfp4": (
        MODELOPT | {"quant_algo": "NVFP4"},
        lambda r, n, k: nvfp4(r, n, k, "modelopt"),
    ),
    "fp8": (
        FP8,
        lambda r, n, k: float8(r, n, k, "weight_scale_inv", (16, 16), inputs=by_block(16, F8, 448)),
    ),
}


class Layer(Module):
    def __init__(self, n: int, k: int) -> None:
        self.proj = Linear(k, n, bias=False)

    def forward(self, x: Any) -> Any:
        return self.proj(x)


def folder(path: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"quantization_config": config}))
    write_safetensors(path / "model.safetensors", tensors)
    return path


def bound(path: Path, config: dict[str, Any], packed: Packed, **more: np.ndarray) -> irc.Module:
    """y = x · weightᵀ over x f32 [B, K], bound to a folder with the packed layer."""
    tensors = {f"proj.{key}": array for key, array in packed.tensors.items()} | more
    n, k = packed.weight.shape
    module = irc.trace(Layer(n, k), {"x": irc.Spec("f32", ("B", k))})
    return huggingface.bind(module, folder(path, config, tensors))
