"""Quantization schemes: how weights and activations are rounded. `register_scheme` adds one."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

from irc.errors import Error, did_you_mean
from irc.extensions.user_files import watch
from irc.quantization.formats import format_called

Granularity = Literal["", "tensor", "token", "block"]
Block = tuple[int, int]  # outputs and inputs of a weight that share a scale; 0 is all of them

TENSOR, ROW, GROUP = (0, 0), (1, 0), (1, 128)


@dataclass(frozen=True)
class Scheme:
    """How the weights of a site, and with an `activation` its inputs, are quantized.

    `weight` is a format of irc.quantization.formats and the block that shares a scale. Inputs have
    one scale each by calibration ("tensor"), or scales computed when the model runs: per "token",
    or per "block" of as many inputs as the weight. `algorithm` says how codes are found: "round"
    to nearest, or a name of algorithms.py, which needs a calibration unless it is `optional`: then
    codes are rounded to nearest without one. `aliases` are other names, with spaces between them.
    """

    name: str
    weight: tuple[str, Block]
    activation: Granularity = ""
    activation_format: str = ""
    algorithm: str = "round"
    doc: str = ""
    aliases: str = ""
    optional: bool = False

    @property
    def keys(self) -> set[str]:
        """The names, spelled alike."""
        return {_key(name) for name in (self.name, *self.aliases.split())}


SCHEMES: dict[str, Scheme] = {}
_MODULES: dict[str, str] = {}  # by scheme, the module that registered it
watch("scheme", SCHEMES, lambda scheme: {_MODULES[scheme.name]})


def register_scheme(scheme: Scheme) -> Scheme:
    """Add a scheme; an Error where one of its names is taken, or a format is not known."""
    for format in filter(None, (scheme.weight[0], scheme.activation_format)):
        format_called(format)
    for known in SCHEMES.values():
        for name in known.keys & scheme.keys:
            raise Error(f"a quantization scheme called {name!r} is registered already")
    _MODULES[scheme.name] = str(sys._getframe(1).f_globals.get("__name__", ""))
    return SCHEMES.setdefault(scheme.name, scheme)


def scheme_called(name: str) -> Scheme:
    """The scheme of a name, or of one of TensorRT-LLM's; an Error names the nearest one."""
    key = _key(name)
    found = next((scheme for scheme in SCHEMES.values() if key in scheme.keys), None)
    if found is not None:
        return found
    if key in _REFUSED:
        raise Error(f"no quantization scheme {name}: {_REFUSED[key]}")
    known = ", ".join(SCHEMES)
    raise Error(f"no quantization scheme {name!r}{did_you_mean(name, SCHEMES)}; known are {known}")


def _key(name: str) -> str:
    """A name with equal letters, and its flags in order: INT8_WEIGHTS|ACTIVATIONS has two."""
    text = name.strip().lower().replace("-", "_")
    flags = [flag.strip().removeprefix("quantmode.") for flag in text.split("|")]
    return "|".join(sorted(flag.removeprefix("quantalgo.") for flag in flags))


_QSERVE = "QServe's two-level int4 is not supported; use w4a16_awq or w4a8_awq"
_CACHES = "it is for caches; give kv, or --kv-cache int8 or fp8"
_REFUSED = {
    "w4a8_qserve": _QSERVE,
    "w4a8_qserve_per_group": _QSERVE,
    "w4a8_qserve_per_channel": _QSERVE,
    "int8": _CACHES,
    "int8_kv_cache": _CACHES,
    "fp8_kv_cache": _CACHES,
    "nvfp4_kv_cache": _CACHES,
    "mixed_precision": "give a table of scopes and schemes, as JSON",
    "no_quant": "leave the option out to keep all weights",
}

# name; weight format and block; activation granularity and format; algorithm; aliases; doc
_ROWS: tuple[tuple[str, str, Block, Granularity, str, str, str, str], ...] = (
    ("w8a16", "int8", ROW, "", "", "round", "int8_wo int8_weights", "8-bit weights"),
    ("w4a16", "int4", GROUP, "", "", "round", "int4_wo int4_weights int4_weights|per_group",
     "4-bit weights in groups"),
    ("w4a16_asym", "uint4", GROUP, "", "", "round", "",
     "4-bit weights in groups with zero points"),
    ("w4a16_awq", "int4", GROUP, "", "", "awq", "int4_awq",
     "4-bit weights scaled by what their inputs need (AWQ)"),
    ("w4a16_gptq", "int4", GROUP, "", "", "gptq", "int4_gptq",
     "4-bit weights with compensated errors (GPTQ)"),
    ("w8a16_gptq", "int8", GROUP, "", "", "gptq", "int8_gptq",
     "8-bit weights with compensated errors (GPTQ)"),
    ("w4a8_awq", "int4", GROUP, "tensor", "fp8", "awq", "",
     "AWQ, and inputs in FP8"),
    ("w8a8_sq", "int8", TENSOR, "tensor", "int8", "smoothquant",
     "int8_weights|activations w8a8_sq_per_tensor_plugin", "SmoothQuant, a scale per tensor"),
    ("w8a8_sq_per_channel", "int8", ROW, "tensor", "int8", "smoothquant",
     "int8_sq int8_weights|activations|per_channel w8a8_sq_per_channel_per_tensor_plugin",
     "SmoothQuant, a scale per output"),
    ("w8a8_sq_per_token", "int8", TENSOR, "token", "int8", "smoothquant",
     "int8_weights|activations|per_token w8a8_sq_per_tensor_per_token_plugin",
     "SmoothQuant, a scale per token"),
    ("w8a8_sq_per_channel_per_token", "int8", ROW, "token", "int8", "smoothquant",
     "int8_weights|activations|per_channel|per_token w8a8_sq_per_channel_per_token_plugin",
     "SmoothQuant, a scale per output and per token"),
    ("fp8", "fp8", TENSOR, "tensor", "fp8", "round", "fp8_qdq", "FP8, a scale per tensor"),
    ("fp8_rowwise", "fp8", ROW, "token", "fp8", "round", "fp8_per_channel_per_token fp8_pc_pt",
     "FP8, a scale per output and per token"),
    ("fp8_block", "fp8", (128, 128), "block", "fp8", "round",
     "fp8_block_scales fp8_1x128_128x128 fp8_pb_wo", "FP8 in blocks"),
    ("w8a16_fp8", "fp8", ROW, "", "", "round", "fp8_wo", "FP8 weights"),
    ("mxfp8", "mxfp8", (1, 32), "block", "mxfp8", "round", "", "MXFP8 weights and inputs"),
    ("mxfp4", "mxfp4", (1, 32), "block", "mxfp4", "smoothquant", "",
     "MXFP4 weights and inputs, SmoothQuant if calibrated"),
    ("w4a16_mxfp4", "mxfp4", (1, 32), "", "", "round", "", "MXFP4 weights"),
    ("w4a8_mxfp4_mxfp8", "mxfp4", (1, 32), "block", "mxfp8", "round", "",
     "MXFP4 weights, MXFP8 inputs"),
    ("w4a8_mxfp4_fp8", "mxfp4", (1, 32), "tensor", "fp8", "round", "",
     "MXFP4 weights, FP8 inputs"),
    ("nvfp4", "nvfp4", (1, 16), "block", "nvfp4", "smoothquant", "",
     "NVFP4 weights and inputs, SmoothQuant if calibrated"),
    ("w4a16_nvfp4", "nvfp4", (1, 16), "", "", "round", "", "NVFP4 weights"),
    ("w4a8_nvfp4_fp8", "nvfp4", (1, 16), "tensor", "fp8", "round", "",
     "NVFP4 weights, FP8 inputs"),
)  # fmt: skip

for _name, _format, _block, _per, _inputs, _algorithm, _aliases, _doc in _ROWS:
    _optional = _name in ("mxfp4", "nvfp4")
    _rest = (_algorithm, _doc, _aliases, _optional)
    register_scheme(Scheme(_name, (_format, _block), _per, _inputs, *_rest))
