"""Linear layers with weight-only codes of 8 or 4 bits, in the order of TensorRT-LLM's kernels, and
models whose linear layers are replaced by them.

Layers of SmoothQuant, AWQ and GPTQ come from the user's copy of TensorRT-LLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from inspect import signature
from typing import Any

import numpy as np

from ....ir.dtypes import numpy_dtype
from ....weights import Ref
from ...checkpoints.mixed_gemm import pack, quantize_columns
from ...tensor import Tensor
from ..aliases import of_sources
from ..api import api, register, release
from ..context import current_session
from ..errors import ScriptError
from ..functional import quantized as q
from ..quantization import QuantConfig, QuantMode
from .attention import Attention
from .linear import Linear, LinearBase, RowLinear
from .mlp import MixtureOfExperts


@dataclass(eq=False, repr=False)
class WeightOnly(LinearBase):
    """x · codes * scales: per rank weight [inputs, outputs * bits / 8] of i8, the same bytes as f32
    in 0.5, and per_channel_scale [outputs]. A bias is added once, after the sum over ranks."""

    quant_mode: QuantMode = QuantMode.INT8_WEIGHTS

    def make_parameters(self) -> None:
        self.bits = 4 if self.quant_mode.is_int4_weight_only() else 8
        self.weight_only_quant_mode = 8 // self.bits
        kind, several = ("float32", 32 // self.bits) if release() < 6 else ("int8", 8 // self.bits)
        shape = self.in_features, self.out_features // several
        self.weight = q.PackedWeight(shape, self.bits, kind)
        self.weight.sharded = self.parameter((1, 1), "int8", 0, 1).sharded
        self.per_channel_scale = self.parameter((self.out_features,), self.dtype, 0)

    def load(self, weight: Any) -> None:
        """Quantize an array, this rank's weight in floats, to the nearest codes."""
        codes, scales = quantize_columns(np.asarray(weight).T, self.bits)
        self.weight.value = pack(codes, self.bits).view(self.weight.stored)
        self.per_channel_scale.value = scales.astype(numpy_dtype(self.per_channel_scale.type.dtype))

    def multiply(self, x: Tensor) -> Tensor:
        return q.weight_only_quant_matmul(
            input=x,
            weights=self.weight.inner,
            scales=self.per_channel_scale.inner,
            weightTypeId=self.weight_only_quant_mode,
        )


@api("quantization.layers.WeightOnlyQuantLinear", inner=True)
@dataclass(eq=False, repr=False)
class WeightOnlyQuantLinear(WeightOnly, Linear):
    """Its outputs are sharded over the group."""


@api("quantization.layers.WeightOnlyQuantRowLinear", inner=True)
@dataclass(eq=False, repr=False)
class WeightOnlyQuantRowLinear(WeightOnly, RowLinear):
    """Its inputs are sharded over the group."""


register("quantization.layers.WeightOnlyQuantColumnLinear", WeightOnlyQuantLinear)


# -- models


@api("models.quantize_model")
def quantize_model(
    model: Any,
    quant_mode: QuantMode | QuantConfig | None = None,
    quant_config: QuantMode | QuantConfig | None = None,
    exclude_modules: list[str] | None = None,
    **groups: Any,
) -> Any:
    """The model with its linear layers replaced by those of the mode or config, but for
    `exclude_modules`.

    The globs are as in QuantConfig. A weight that is set is quantized to the nearest codes. Layers
    that are not weight-only with a scale per output are made by the user's copy of TensorRT-LLM, to
    which alone `groups`, other options of its function, are given.
    """
    how = quant_mode if quant_config is None else quant_config
    if isinstance(how, QuantConfig):
        how.scheme()  # an Error where there is none
        config, mode = how, how.quant_mode
    else:
        config, mode = QuantConfig(exclude_modules=exclude_modules), how or QuantMode(0)
    has_layers = mode.is_weight_only() and not mode.has_per_group_scaling()
    if mode.has_any_quant(exclude_kv_cache=True) and not has_layers:
        more = groups if exclude_modules is None else {"exclude_modules": exclude_modules, **groups}
        return _by_sources(model, how, mode, more)
    if groups:
        raise ScriptError(f"quantize_model: {', '.join(groups)} need a mode with scales per group")
    model.quant_mode = mode
    for path, part in list(model.named_modules()):
        if isinstance(part, Attention):
            part.quantize_cache(mode)
        if isinstance(part, MixtureOfExperts) and has_layers:
            current_session().note(f"experts keep their floats, which --quantize rounds: {path}")
        for name, layer in list(part.named_children()) if has_layers else ():
            is_excluded = config.is_module_excluded_from_quantization(f"{path}.{name}".lstrip("."))
            if type(layer) in (Linear, RowLinear) and not is_excluded:
                setattr(part, name, _replaced(layer, mode))
    return model


api("quantization.quantize.weight_only_quantize")(quantize_model)
quantize = api("quantization.quantize.quantize")(quantize_model)


def _by_sources(model: Any, how: Any, mode: QuantMode, options: dict[str, Any]) -> Any:
    """The model with layers as the user's copy of TensorRT-LLM makes them."""
    if current_session().sources is None or mode.has_fp8_qdq() or mode.has_fp8_rowwise():
        raise ScriptError(
            f"quantize makes no layers of {mode!r}; give the folder of transformers to irc compile "
            "FOLDER --quantize SCHEME (`irc compile --help` lists them), or for SmoothQuant, "
            "AWQ and GPTQ your copy of TensorRT-LLM: --tensorrt-llm-sources DIR"
        )
    if hasattr(model, "transformer"):  # a model of a config
        return of_sources("quantization.quantize.quantize")(model, how, **options)
    return of_sources("models.quantized.quant.quantize_model")(model, how, **options)


@api("_utils.get_init_params")
def get_init_params(obj: Any, cls: Any = None) -> dict[str, Any]:
    """The arguments that a constructor takes, that of `cls` or its own, as a layer has them."""
    names = list(signature((cls or type(obj)).__init__).parameters)[1:]
    return {name: getattr(obj, name) for name in names if hasattr(obj, name)}


def _replaced(old: Any, mode: QuantMode) -> WeightOnly:
    """A quantized layer in place of another one, with its bias, and its weight if that is set."""
    kind: Any = WeightOnlyQuantLinear if type(old) is Linear else WeightOnlyQuantRowLinear
    names = ("in_features", "out_features", "dtype", "tp_group", "gather_output", "is_expert")
    options = {name: getattr(old, name) for name in names if hasattr(old, name)}
    options["out_features" if old.shard_dim == 0 else "in_features"] *= old.parts
    layer = kind(**options, bias=False, tp_size=old.parts, quant_mode=mode)
    layer.bias = old.bias
    weight: Any = old.weight.bound
    if isinstance(weight, Ref):
        raise ScriptError(
            "the weight is a reference to a checkpoint; quantize by the options of the build, such "
            "as --quantize w8a16"
        )
    if weight is not None:
        layer.load(weight)
    return layer
