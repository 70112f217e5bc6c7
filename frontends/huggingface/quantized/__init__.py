"""Checkpoints that are already quantized: their weights become `dequantize` operations.

`quantization_config` of config.json names the method; a file here per method reads its tensors. The
bytes stay in the checkpoint wherever their layout is one of irc's.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from ....errors import Error, did_you_mean
from ....ir.core import Module
from ....json_files import read_object
from ....weights import ConcatRef, Ref, UnboundRef, Unsqueeze
from ...models.config_reader import ConfigReader
from ..files import INDEX, SINGLE, Checkpoint
from .auto_round import AutoRound
from .awq import Awq
from .compressed_tensors import CompressedTensors
from .fp8 import Fp8
from .gptq import Gptq
from .graph import insert as insert
from .method import Method as Method
from .modelopt import ModelOpt
from .mxfp4 import Mxfp4
from .parts import Layer as Layer
from .parts import Tensors as Tensors
from .parts import stacked

METHODS: Mapping[str, type[Method]] = {
    "awq": Awq,
    "auto-round": AutoRound,
    "gptq": Gptq,
    "compressed-tensors": CompressedTensors,
    "modelopt": ModelOpt,
    "fp8": Fp8,
    "mxfp4": Mxfp4,
}
KEYS = ("quantization_config", "compression_config")  # in config.json
_CACHE = (".k_scale", ".v_scale", ".q_scale", ".k_proj.output_scale", ".v_proj.output_scale")
_CACHE_PLACE = re.compile(r"layers\.(\d+)\.[^.]*\.([kv])_")
_MARKS = ("qweight", "weight_packed", "weight_scale", "weight_scale_inv", "weight.absmax")


def read_method(folder: str | os.PathLike[str]) -> Method | None:
    """The method of a checkpoint folder; None if it is not quantized."""
    return method_of(_configs(folder))


def _configs(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """What the files of a folder that may describe its quantization say."""
    values: dict[str, Any] = {}
    for name in ("config.json", "hf_quant_config.json"):
        path = Path(folder) / name
        values |= read_object(path) if path.exists() else {}
    return values


def method_of(config: Mapping[str, Any]) -> Method | None:
    """The method that a config.json, or the hf_quant_config.json of ModelOpt, describes."""
    values = _described(config)
    if not values:
        return None
    title = "quantization_config"
    values.setdefault("quant_method", "modelopt" if "quant_algo" in values else None)
    name = ConfigReader(values, title).word("quant_method")
    methods = ", ".join(METHODS)
    if name == "bitsandbytes":
        raise Error(
            f"{title} sets quant_method='bitsandbytes', whose codes are indices into tables that "
            f"irc has no operation for; compile the original checkpoint with --quantize, or one of "
            f"{methods}"
        )
    if name not in METHODS:
        hint = did_you_mean(str(name), METHODS)
        raise Error(f"{title} sets quant_method={name!r}{hint}; irc reads {methods}")
    return METHODS[name](ConfigReader(values, title))


def _described(config: Mapping[str, Any]) -> dict[str, Any]:
    """The object of a config that describes its quantization; empty if there is none."""
    key = next((key for key in KEYS if config.get(key)), "quantization")
    values = ConfigReader(config).inner(key)
    return values | ConfigReader(values, key).inner("quantization")  # ModelOpt nests its own


def find_layers(
    module: Module, refs: Mapping[str, Ref], tensors: Tensors, method: Method | None
) -> dict[str, Layer]:
    """Weight -> the tensors of its layer, for the weights that a checkpoint has quantized."""
    by_name: dict[str, Layer] = {}
    for name, ref in refs.items():
        shape = tuple(size for size in module.weights[name].type.shape if isinstance(size, int))
        if len(shape) == 3 and method and (layer := method.experts(ref, tensors, shape)):
            by_name[name] = layer
            continue
        sources = [source for source in ref.sources() if isinstance(source, UnboundRef)]
        quantized = [source for source in sources if _is_quantized(source.key, tensors, method)]
        if not quantized:
            continue
        assert method is not None
        if len(quantized) < len(sources) or not _is_stack(ref):
            raise Error(
                f"the weight {name} is {ref}, of which {quantized[0].key} is quantized; irc reads "
                "complete weights, and stacks of them"
            )
        layers = [method.layer(_layer_name(s.key), tensors, shape[-2:]) for s in quantized]
        by_name[name] = stacked(layers) if isinstance(ref, ConcatRef) else layers[0]
    return by_name


def cache_keys(checkpoint: Checkpoint) -> list[str]:
    """The scales of quantized KV caches, with a warning that the caches are floats."""
    scales = [key for key in checkpoint if key.endswith(_CACHE)]
    if scales:
        warnings.warn(
            f"{checkpoint.folder}: {scales[0]} is the scale of a quantized KV cache; the caches "
            "stay in the compute dtype, unless --kv-cache fp8 (or int8) stores them with it",
            stacklevel=4,
        )
    return scales


def cache_scales(folder: str | os.PathLike[str], kind: str) -> dict[str, float]:
    """By the argument of a cache, such as k0: its scale in a folder whose caches are of `kind`."""
    if not any((Path(folder) / name).exists() for name in (SINGLE, INDEX)):
        return {}
    checkpoint = Checkpoint(folder)
    places = {key: _CACHE_PLACE.search(key) for key in checkpoint if key.endswith(_CACHE)}
    keys = {f"{place[2]}{place[1]}": key for key, place in places.items() if place is not None}
    if not keys or _cache_kind(folder) != kind:
        return {}
    tensors = Tensors(checkpoint, str)
    return {name: tensors.number(key) for name, key in keys.items()}


def _cache_kind(folder: str | os.PathLike[str]) -> str:
    """int8 or fp8, by the config; an Error where zero points or other bits make it another."""
    values = _described(_configs(folder))
    scheme: Any = values.get("kv_cache_scheme")
    scheme = cast("dict[str, Any]", scheme) if isinstance(scheme, dict) else {}  # may be "static"
    config = ConfigReader(scheme, "kv_cache_scheme")
    if not config.flag("symmetric", True) or config.integer("num_bits", 8) != 8:
        raise Error(f"{folder}: irc stores caches in INT8 and FP8 without zero points")
    names = config.word("type", "float"), str(values.get("kv_cache_quant_algo"))
    return "int8" if any(name.lower().startswith("int") for name in names) else "fp8"


def _is_stack(ref: Ref) -> bool:
    """Whether a reference is a tensor, or tensors along a new first dimension."""
    if not isinstance(ref, ConcatRef):
        return not ref.steps
    return ref.dim == 0 and all(part.steps == (Unsqueeze(0),) for part in ref.parts)


def _layer_name(key: str) -> str:
    return key.removesuffix(".weight")


def _is_quantized(key: str, tensors: Tensors, method: Method | None) -> bool:
    """Whether a weight is quantized in the checkpoint; an Error where the config differs."""
    name = _layer_name(key)
    marks = [mark for mark in _MARKS if f"{name}.{mark}" in tensors]
    if not marks:
        return False
    tensor = f"{name}.{marks[0]}"
    if method is None:
        raise Error(f"the checkpoint has {tensor}, but config.json has no quantization_config")
    if not set(marks) <= set(method.marks):
        raise Error(
            f"the checkpoint mixes formats: {tensor} is none of {', '.join(method.marks)}, the "
            "tensors of its quant_method"
        )
    if method.ignores(name):
        raise Error(f"quantization_config leaves {name} as it was, but the checkpoint has {tensor}")
    if key in tensors and marks[0] in ("qweight", "weight_packed"):
        raise Error(f"the checkpoint mixes formats: it has both {key} and {tensor}")
    return True
