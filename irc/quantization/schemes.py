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
    for other in SCHEMES.values():
        for name in other.keys & scheme.keys:
            raise Error(f"a quantization scheme called {name!r} is registered already")
    caller = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    _MODULES[scheme.name] = str(caller.f_globals.get("__name__", ""))
    return SCHEMES.setdefault(scheme.name, scheme)


def scheme_called(name: str) -> Scheme:
    """The scheme of a name, or of one of TensorRT-LLM's; an Error names the nearest one."""
    key = _key(name)
    named = next((scheme for scheme in SCHEMES.values() if key in scheme.keys), None)
    if named is not None:
        return named
    if key in _REFUSED:
        raise Error(f"no quantization scheme {name}: {_REFUSED[key]}")
    names = ", ".join(SCHEMES)
    raise Error(f"no quantization scheme {name!r}{did_you_mean(name, SCHEMES)}; known are {names}")


def _key(name: str) -> str:
    """A name with equal letters, and its flags in order: INT8_WEIGHTS|ACTIVATIONS has two."""
    text = name.strip().lower().replace("-", "_")
    flags = [flag.strip().removeprefix("quantmode.") for flag in text.split("|")]
    return "|".join(sorted(flag.removeprefix("quantalgo.") for flag in flags))


_QSERVE = "QServe's two-level int4 is not supported; use w4a16_awq or w4a8_awq"
_CACHES = "it is for caches; give kv, --kv-cache or kv_cache_quant_algo"
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

for _scheme in (
    Scheme("w8a16", ("int8", ROW), doc="8-bit weights", aliases="int8_wo int8_weights"),
    Scheme("w4a16", ("int4", GROUP), doc="4-bit weights in groups",
           aliases="int4_wo int4_weights int4_weights|per_group"),
    Scheme("w4a16_asym", ("uint4", GROUP), doc="4-bit weights in groups with zero points"),
    Scheme("w4a8_int8", ("int4", GROUP), "block", "int8",
           doc="4-bit weights and INT8 inputs in groups"),
    Scheme("w4a16_awq", ("int4", GROUP), algorithm="awq",
           doc="4-bit weights scaled by what their inputs need (AWQ)", aliases="int4_awq"),
    Scheme("w4a16_gptq", ("int4", GROUP), algorithm="gptq",
           doc="4-bit weights with compensated errors (GPTQ)", aliases="int4_gptq"),
    Scheme("w8a16_gptq", ("int8", GROUP), algorithm="gptq",
           doc="8-bit weights with compensated errors (GPTQ)", aliases="int8_gptq"),
    Scheme("w4a8_awq", ("int4", GROUP), "tensor", "fp8", algorithm="awq",
           doc="AWQ, and inputs in FP8"),
    Scheme("w8a8_sq", ("int8", TENSOR), "tensor", "int8", algorithm="smoothquant",
           doc="SmoothQuant, a scale per tensor",
           aliases="int8_weights|activations w8a8_sq_per_tensor_plugin"),
    Scheme("w8a8_sq_per_channel", ("int8", ROW), "tensor", "int8", algorithm="smoothquant",
           doc="SmoothQuant, a scale per output",
           aliases="int8_sq int8_weights|activations|per_channel "
           "w8a8_sq_per_channel_per_tensor_plugin"),
    Scheme("w8a8_sq_per_token", ("int8", TENSOR), "token", "int8", algorithm="smoothquant",
           doc="SmoothQuant, a scale per token",
           aliases="int8_weights|activations|per_token w8a8_sq_per_tensor_per_token_plugin"),
    Scheme("w8a8_sq_per_channel_per_token", ("int8", ROW), "token", "int8",
           algorithm="smoothquant", doc="SmoothQuant, a scale per output and per token",
           aliases="int8_weights|activations|per_channel|per_token "
           "w8a8_sq_per_channel_per_token_plugin"),
    Scheme("fp8", ("fp8", TENSOR), "tensor", "fp8", doc="FP8, a scale per tensor",
           aliases="fp8_qdq"),
    Scheme("fp8_rowwise", ("fp8", ROW), "token", "fp8",
           doc="FP8, a scale per output and per token",
           aliases="fp8_per_channel_per_token fp8_pc_pt"),
    Scheme("fp8_block", ("fp8", (128, 128)), "block", "fp8", doc="FP8 in blocks",
           aliases="fp8_block_scales fp8_1x128_128x128 fp8_pb_wo"),
    Scheme("w8a16_fp8", ("fp8", ROW), doc="FP8 weights", aliases="fp8_wo"),
    Scheme("mxfp8", ("mxfp8", (1, 32)), "block", "mxfp8", doc="MXFP8 weights and inputs"),
    Scheme("mxfp4", ("mxfp4", (1, 32)), "block", "mxfp4", algorithm="smoothquant", optional=True,
           doc="MXFP4 weights and inputs, SmoothQuant if calibrated"),
    Scheme("w4a16_mxfp4", ("mxfp4", (1, 32)), doc="MXFP4 weights"),
    Scheme("w4a8_mxfp4_mxfp8", ("mxfp4", (1, 32)), "block", "mxfp8",
           doc="MXFP4 weights, MXFP8 inputs"),
    Scheme("w4a8_mxfp4_fp8", ("mxfp4", (1, 32)), "tensor", "fp8", doc="MXFP4 weights, FP8 inputs"),
    Scheme("nvfp4", ("nvfp4", (1, 16)), "block", "nvfp4", algorithm="smoothquant",
           doc="NVFP4 weights and inputs, SmoothQuant"),
    Scheme("w4a16_nvfp4", ("nvfp4", (1, 16)), doc="NVFP4 weights"),
    Scheme("w4a8_nvfp4_fp8", ("nvfp4", (1, 16)), "tensor", "fp8", doc="NVFP4 weights, FP8 inputs"),
):  # fmt: skip
    register_scheme(_scheme)
