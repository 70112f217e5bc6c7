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
from ....weights import Ref
from ...huggingface.binding import check_fits, suggested
from ...huggingface.config import checkpoint_dtype, is_of_tensorrt_llm, read_config
from ...models.family import Dims
from ..quantization import QuantConfig
from .config import layout_of, transformers_model
from .quantized import Joined, quantize
from .ranks import Ranks
from .weights import Weights

_CACHE = "*_cache*_scaling_factor"  # the scales of KV caches, which stay in the compute dtype here
_BUFFERS = ("*.rotary_inv_freq", "*.embed_positions*", "*.kv_orig_quant_scale", "*.kv_quant_orig_*")


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
    ranks = Ranks(Path(folder), layout_of(config), int(config.get("num_hidden_layers", 0)))
    tied = "lm_head.weight" not in ranks.of_stage(ranks.layout.pp - 1)[0]
    model = transformers_model(config, tied, ignore)
    module = model.trace(_compute_dtype(config, dtype), dims)
    weights = Weights(ranks, model.config, QuantConfig.from_dict(config.get("quantization") or {}))
    found = {name: weights.find(weight) for name, weight in module.weights.items()}
    _check(module, weights, ignore)
    for name, ref in found.items():
        if isinstance(ref, Ref):
            module.weights[name].ref = ref
    layers = {name: ref for name, ref in found.items() if isinstance(ref, Joined)}
    quantize(module, layers)
    module.files.update(_used_files(module, ranks))
    _note_quantization(weights, bool(layers))
    return module


def scheme_of_floats(folder: str | os.PathLike[str]) -> str:
    """The scheme of a folder whose float weights are to be quantized, "" for any other."""
    config = read_config(folder)
    quantized = QuantConfig.from_dict(config.get("quantization") or {})
    if quantized.quant_algo not in ("W8A16", "W4A16") or not is_of_tensorrt_llm(config):
        return ""
    ranks = Ranks(Path(folder), layout_of(config), int(config.get("num_hidden_layers", 0)))
    scaled = any(key.endswith(".per_channel_scale") for key in ranks.unused())
    return "" if scaled else quantized.scheme() or ""


def trace(config: dict[str, Any], dtype: str | None = None, ignore: Sequence[str] = ()) -> Module:
    """The model of a config.json, its weights unbound."""
    model = transformers_model(config, bool(config.get("tie_word_embeddings")), ignore)
    return model.trace(_compute_dtype(config, dtype))


def _compute_dtype(config: dict[str, Any], dtype: str | None) -> str:
    dtype = dtype or checkpoint_dtype(config)
    if dtype not in ("f32", "f16", "bf16"):
        raise Error(f"the compute dtype is f32, f16 or bf16, not {dtype}")
    return dtype


def _check(module: Module, weights: Weights, ignore: Sequence[str]) -> None:
    """One Error about all tensors that are missing, unused, or of a wrong shape or dtype."""
    ranks = weights.ranks
    patterns = (*_BUFFERS, _CACHE, *ignore)
    unused = [key for key in ranks.unused() if not any(fnmatchcase(key, p) for p in patterns)]
    check_fits(
        f"the checkpoint {ranks.folder}",
        module,
        weights.missing_lines(unused),
        suggested(unused, weights.missing),
        list(dict.fromkeys(weights.misfits)),
    )


def _used_files(module: Module, ranks: Ranks) -> dict[str, str]:
    names = dict.fromkeys(name for weight in module.weights.values() for name in weight.ref.files())
    return {name: (ranks.folder / f"{name}.safetensors").as_posix() for name in names}


def _note_quantization(weights: Weights, has_layers: bool) -> None:
    """Warn where config.json asks for a quantization that this module does not have."""
    quantized, folder = weights.quantized, weights.ranks.folder
    if quantized.quant_algo is not None and not has_layers:
        warnings.warn(
            f"config.json has quant_algo={quantized.quant_algo}, but the weights in {folder} are "
            f"floats; give --quantize {quantized.scheme()} to quantize them",
            stacklevel=4,
        )
    if quantized.kv_cache_quant_algo is not None:
        warnings.warn(
            f"{folder}: config.json has kv_cache_quant_algo={quantized.kv_cache_quant_algo}; the "
            "caches stay in the compute dtype. --kv-cache quantizes them with scales of a "
            "calibration",
            stacklevel=4,
        )
