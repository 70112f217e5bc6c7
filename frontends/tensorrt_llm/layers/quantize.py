"""Replaces the linear layers of a model by quantized ones."""

from __future__ import annotations

from inspect import signature
from typing import Any

from ....weights import Ref
from ..aliases import of_sources
from ..api import api
from ..context import current_session
from ..errors import ScriptError
from ..quantization import QuantConfig, QuantMode
from . import quantized as q
from .attention import Attention
from .linear import Linear, RowLinear
from .moe import MixtureOfExperts


@api("models.quantize_model")
def quantize_model(
    model: Any,
    quant_mode: QuantMode | QuantConfig | None = None,
    quant_config: QuantMode | QuantConfig | None = None,
    group_size: int = 128,
    zero: bool = False,
    pre_quant_scale: bool = False,
    exclude_modules: list[str] | None = None,
) -> Any:
    """The model with its linear layers replaced by those of the mode or config, but for
    `exclude_modules`.

    The globs are as in QuantConfig. A weight that is set is quantized to the nearest codes. A model
    with layers of SmoothQuant is one of the user's copy of TensorRT-LLM.
    """
    given = quant_mode if quant_config is None else quant_config
    if isinstance(given, QuantConfig):
        given.scheme()  # an Error where there is none
        config, mode = given, given.quant_mode
    else:
        config, mode = QuantConfig(None, None, group_size), given or QuantMode(0)
        config.has_zero_point, config.pre_quant_scale = zero, pre_quant_scale
        config.exclude_modules = exclude_modules
    if config.use_meta_recipe:
        raise ScriptError("use_meta_recipe is not supported; give clamp_val and exclude_modules")
    if mode.has_act_and_weight_quant():
        return _smoothed(model, given)
    model.quant_mode = mode
    for _, part in model.named_modules():
        if isinstance(part, Attention):
            part.quantize_cache(mode)
    if mode.has_any_quant(exclude_kv_cache=True):
        _replace_layers(model, mode, config)
    return model


for _name in ("weight_only_quantize", "weight_only_groupwise_quantize", "fp8_quantize"):
    api(f"quantization.quantize.{_name}")(quantize_model)
quantize = api("quantization.quantize.quantize")(quantize_model)


def _smoothed(model: Any, how: Any) -> Any:
    """The model with layers of SmoothQuant, as the user's copy of TensorRT-LLM makes them."""
    if current_session().sources is None:
        raise ScriptError(
            "layers of SmoothQuant come from your copy of TensorRT-LLM: --tensorrt-llm-sources "
            "DIR; or give the folder of transformers to irc compile FOLDER --quantize w8a8_sq "
            "--calibration PATH"
        )
    if hasattr(model, "transformer"):  # a model of a config
        return of_sources("quantization.quantize.quantize")(model, how)
    return of_sources("models.quantized.quant.quantize_model")(model, how)


@api("_utils.get_init_params")
def get_init_params(obj: Any, cls: Any = None) -> dict[str, Any]:
    """The arguments that a constructor takes, that of `cls` or its own, as a layer has them."""
    names = list(signature((cls or type(obj)).__init__).parameters)[1:]
    return {name: getattr(obj, name) for name in names if hasattr(obj, name)}


def _replace_layers(model: Any, mode: QuantMode, config: QuantConfig) -> None:
    """Replace the layers that the config does not exclude."""
    column, row = _classes(mode)
    options = {
        "quant_mode": mode,
        "group_size": config.group_size,
        "zero": config.has_zero_point,
        "pre_quant_scale": config.pre_quant_scale or config.quant_algo in ("W4A16_AWQ", "W4A8_AWQ"),
        "use_w4a8_awq": config.quant_algo == "W4A8_AWQ",
        "use_int8_weight": mode.is_int8_weight_only_per_group(),
        "clamp_val": config.clamp_val,
    }
    for path, parent in list(model.named_modules()):
        if isinstance(parent, MixtureOfExperts):
            current_session().note(f"experts keep their floats, which --quantize rounds: {path}")
        for name, part in list(parent.named_children()):
            full = f"{path}.{name}".lstrip(".")
            excluded = config.is_module_excluded_from_quantization(full)
            if type(part) in (Linear, RowLinear) and not excluded:
                kind = column if type(part) is Linear else row
                setattr(parent, name, _replaced(part, kind, options))


def _classes(mode: QuantMode) -> tuple[Any, Any]:
    """The column and row layers of a mode; an Error where there are none."""
    if mode.is_weight_only() and mode.has_per_group_scaling():
        return q.WeightOnlyGroupwiseQuantLinear, q.WeightOnlyGroupwiseQuantRowLinear
    if mode.is_weight_only():
        return q.WeightOnlyQuantLinear, q.WeightOnlyQuantRowLinear
    if mode.has_fp8_rowwise():
        return q.Fp8RowwiseLinear, q.Fp8RowwiseRowLinear
    if mode.has_fp8_qdq():
        return q.FP8Linear, q.FP8RowLinear
    raise ScriptError(
        f"no layers for {mode!r}; compile with --quantize SCHEME (`irc compile --help` lists the "
        "schemes)"
    )


def _replaced(old: Any, kind: Any, options: dict[str, Any]) -> Any:
    """A quantized layer in place of another one, with its bias, and its weight if that is set."""
    names = {*kind.__dataclass_fields__}
    options = options | {n: getattr(old, n) for n in ("gather_output", "is_expert") if n in names}
    layer = kind(
        out_features=old.out_features * (old.parts if old.shard_dim == 0 else 1),
        in_features=old.in_features * (old.parts if old.shard_dim == 1 else 1),
        bias=old.bias is not None,
        dtype=old.dtype,
        tp_group=old.tp_group,
        tp_size=old.parts,
        **{name: value for name, value in options.items() if name in names},
    )
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
