"""Cases of quantized Hugging Face folders: their configs with packers of layers, and one layer."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import irc
from irc.frontends import huggingface
from irc.frontends.layers import Linear
from irc.frontends.module import Module

from ..models.golden import write_safetensors
from .packed_layers import (
    F4,
    F8,
    Packed,
    awq,
    by_block,
    by_token,
    float8,
    gptq,
    int_quantized,
    mx,
    nvfp4,
    pack_quantized,
    row_pairs,
    static8,
    static_of,
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
