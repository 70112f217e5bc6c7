"""TensorRT-LLM checkpoint folders: config.json and rank0.safetensors, rank1.safetensors, ...

A folder holds weights sharded for its own mapping. They are joined to references of the complete
weights, in the model of irc that config.json describes, which then runs on any mesh.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ....errors import Error
from ....ir.core import Module
from ...huggingface.binding import bind_tensors
from ...huggingface.config import compute_dtype, is_of_tensorrt_llm, read_config
from ...huggingface.quantized.modelopt import ModelOpt
from ...models.config_reader import ConfigReader
from ...models.family import Dims
from ..quantization import QuantConfig
from .config import layout_of, transformers_model
from .ranks import PLACES, JoinedTensors, Ranks

_UNREAD = (
    *("*.rotary_inv_freq", "*.embed_positions*", "*.kv_orig_quant_scale", "*.kv_quant_orig_*"),
    "*_cache*_scaling_factor",  # of KV caches, which stay in the compute dtype here
)
_INTERLEAVED = ("W4A16", "W4A16_GPTQ", "W8A16_GPTQ")  # always, like W8A16 of the converters


def load(
    folder: str | os.PathLike[str],
    dtype: str | None = None,
    dims: Dims | None = None,
    ignore: Sequence[str] = (),
) -> Module:
    """The model of a folder, whose weights refer to complete tensors, joined from all ranks.

    `dtype` is the compute dtype, by default that of config.json; `dims` replaces ranges of symbols;
    `ignore` names keys of config.json that do not matter, and patterns of tensors without use. An
    Error lists the tensors that are missing, unused or of a wrong shape.
    """
    config = read_config(folder)
    quantized = QuantConfig.from_dict(config.get("quantization") or {})
    ranks = Ranks(Path(folder), layout_of(config))
    model = transformers_model(config, "lm_head.weight" not in ranks, ignore)
    module = model.trace(compute_dtype(config, dtype), dims)
    _check_order(ranks, quantized)
    method = None
    if quantized.quant_algo and any(key.endswith(".weight_scale") for key in ranks):
        keys = {"quant_algo": str(quantized.quant_algo), "clamp_val": quantized.clamp_val}
        method = ModelOpt(ConfigReader(keys, "config.json: quantization"))
    unread = (*_UNREAD, *ignore)
    try:
        bind_tensors(module, JoinedTensors(ranks), ranks.paths, method, {}, unread)
    except Error as error:
        error.add_note(f"the ranks have {_names_of_ranks()}")
        raise
    _note_quantization(ranks, quantized, method is not None)
    return module


def scheme_of_floats(folder: str | os.PathLike[str]) -> str:
    """The scheme of a folder whose float weights are to be quantized, "" for any other."""
    config = read_config(folder)
    quantized = QuantConfig.from_dict(config.get("quantization") or {})
    if quantized.quant_algo not in ("W8A16", "W4A16") or not is_of_tensorrt_llm(config):
        return ""
    scaled = any(key.endswith(".weight_scale") for key in Ranks(Path(folder), layout_of(config)))
    return "" if scaled else quantized.scheme() or ""


def trace(config: dict[str, Any], dtype: str | None = None, ignore: Sequence[str] = ()) -> Module:
    """The model of a config.json, its weights unbound."""
    model = transformers_model(config, bool(config.get("tie_word_embeddings")), ignore)
    return model.trace(compute_dtype(config, dtype))


def is_unread(key: str) -> bool:
    """Whether models need no tensor of this name."""
    return any(fnmatchcase(key, pattern) for pattern in _UNREAD)


def _check_order(ranks: Ranks, quantized: QuantConfig) -> None:
    """An Error where codes are in the order of a kernel of one GPU."""
    algorithm = quantized.quant_algo
    for key, whole in ranks.wholes.items():
        if not key.endswith(".weight_scale"):
            continue
        rows = whole.end == "per_channel_scale" and algorithm != "FP8_PER_CHANNEL_PER_TOKEN"
        codes = whole.ranks[0].info(f"{whole.owner}.weight")
        if rows or algorithm in _INTERLEAVED or codes.dtype in ("f16", "bf16", "f32"):
            raise Error(
                f"{whole.owner}.weight is {codes.dtype}{[*codes.shape]}: codes of {algorithm} in "
                "the order that the GEMM plugin of one kind of GPU reads, which the checkpoint "
                "does not name. Convert the original checkpoint without quantization, or compile "
                f"it as it is, and give irc --quantize {quantized.scheme()}"
            )


def _names_of_ranks() -> str:
    """The names of transformers by those of the ranks, where these differ."""
    return ", ".join(f"{' and '.join(n)} in {own}" for own, (n, _) in PLACES.items() if n != (own,))


def _note_quantization(ranks: Ranks, quantized: QuantConfig, has_layers: bool) -> None:
    """Warn where config.json asks for a quantization that this module does not have."""
    scheme = None if has_layers else quantized.scheme()
    if scheme:
        warnings.warn(
            f"config.json has quant_algo={quantized.quant_algo}, but the weights in {ranks.folder} "
            f"are floats; give --quantize {scheme} to quantize them",
            stacklevel=4,
        )
    if quantized.kv_cache_quant_algo is not None:
        warnings.warn(
            f"{ranks.folder}: config.json has kv_cache_quant_algo={quantized.kv_cache_quant_algo}; "
            "the caches stay in the compute dtype. --kv-cache quantizes them with scales of a "
            "calibration",
            stacklevel=4,
        )
