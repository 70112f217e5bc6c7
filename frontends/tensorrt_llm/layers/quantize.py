"""Replaces layers of a model by quantized ones, and the feed-forwards and attention of these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np

from ....errors import Error
from ....source import here
from ...tensor import Tensor
from ..api import api, release
from ..context import current_session
from ..functional.quantized import quantize_per_token, quantize_tensor
from ..module import Module, Parameter
from ..quantization import QuantConfig, QuantMode
from . import quantized as q
from .attention import Attention
from .linear import Linear, RowLinear
from .mlp import MLP, FusedGatedMLP, GatedMLP
from .moe import MixtureOfExperts
from .norms import LayerNorm, RmsNorm

# -- feed-forwards and attention of quantized layers


class OfCodes(Module):
    """A layer whose last product takes codes i8: of quantization_scaling_factor, or per token."""

    quant_mode: QuantMode

    def add_scale(self) -> None:
        """Make the scale, where scales are static."""
        static = self.quant_mode.has_act_static_scaling()
        scale = Parameter(shape=(1,), dtype="float32") if static else None
        self.quantization_scaling_factor = scale

    def encoded(self, x: Tensor, smoother: Parameter | None = None) -> Any:
        """The codes of x / smoother, or (codes, scales)."""
        x = x if smoother is None else x.cast("f32") / smoother.inner
        if self.quantization_scaling_factor is None:
            return quantize_per_token(x=x)
        return quantize_tensor(x=x, scale=self.quantization_scaling_factor.inner)


@api("quantization.layers.SmoothQuantMLP", inner=True)
@dataclass(eq=False, repr=False)
class SmoothQuantMLP(MLP, OfCodes):
    """MLP of codes i8, or of pairs (codes, scales) per token."""

    linear: ClassVar[Any] = q.SmoothQuantLinear, q.SmoothQuantRowLinear

    def __post_init__(self) -> None:
        super().__post_init__()
        self.add_scale()

    def options(self) -> dict[str, Any]:
        return {"quant_mode": self.quant_mode}

    def to_proj(self, x: Tensor) -> Any:
        return self.encoded(x, self.proj.smoother)


@api("quantization.layers.SmoothQuantGatedMLP", inner=True)
@dataclass(eq=False, repr=False)
class SmoothQuantGatedMLP(GatedMLP, SmoothQuantMLP):
    """GatedMLP of codes i8, or of pairs (codes, scales) per token."""


@api("quantization.layers.SmoothQuantAttention", inner=True)
class SmoothQuantAttention(Attention, OfCodes):
    """Attention of codes i8, or of pairs (codes, scales) per token."""

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        qkv_bias_only: bool = False,
        scale_alibi_bias: bool = False,
        **given: Any,
    ) -> None:
        super().__init__(hidden_size, num_attention_heads, **given)
        self.scale_alibi_bias = self.scale_alibi_bias or scale_alibi_bias
        self.bias = self.bias or qkv_bias_only
        self.make_products()

    @classmethod
    def of(cls, part: Attention, mode: QuantMode) -> SmoothQuantAttention:
        """A layer with the settings of another one, and without weights."""
        smoothed = cls.__new__(cls)
        smoothed.__dict__.update(vars(part), quant_mode=mode | part.quant_mode)
        smoothed.make_products()
        return smoothed

    def make_products(self) -> None:
        """Make the projections, and the scale between them."""
        mode, heads = self.quant_mode, self.heads
        group: Any = {"dtype": self.dtype, "tp_group": self.tp_group, "tp_size": self.tp_size}
        hidden = self.dense.out_features
        # the scales of queries, keys and values are always per output
        own = QuantMode.from_description(True, True, mode.has_per_token_dynamic_scaling(), True)
        outputs, inputs = self.tp_size * sum(heads.sizes), self.tp_size * heads.sizes[0]
        self.qkv = q.SmoothQuantLinear(
            hidden, outputs, bias=self.bias, gather_output=False, quant_mode=own, **group
        )
        self.dense = q.SmoothQuantRowLinear(
            inputs, hidden, bias=self.dense_bias, quant_mode=mode, **group
        )
        self.add_scale()

    def project(self, context: Tensor, all_reduce_params: Any) -> Any:
        codes = self.encoded(context, self.dense.smoother if release() > 7 else None)
        return self.dense(codes, all_reduce_params=all_reduce_params)


@dataclass(eq=False, repr=False)
class RowwiseMLP(MLP):
    """A feed-forward of FP8 layers with scales per output and token."""

    linear: ClassVar[Any] = q.Fp8RowwiseLinear, q.Fp8RowwiseRowLinear
    clamp_val: Any = None

    def options(self) -> dict[str, Any]:
        return {"quant_mode": self.quant_mode, "clamp_val": self.clamp_val}


@api("quantization.layers.Fp8RowwiseMLP", inner=True)
@dataclass(eq=False, repr=False)
class Fp8RowwiseMLP(RowwiseMLP):
    """MLP of FP8 layers with scales per output and token."""


@api("quantization.layers.Fp8RowwiseGatedMLP", inner=True)
@dataclass(eq=False, repr=False)
class Fp8RowwiseGatedMLP(GatedMLP, RowwiseMLP):
    """GatedMLP of FP8 layers with scales per output and token."""


@api("quantization.layers.Fp8RowwiseFusedGatedMLP", inner=True)
@dataclass(eq=False, repr=False)
class Fp8RowwiseFusedGatedMLP(FusedGatedMLP, RowwiseMLP):
    """FusedGatedMLP of FP8 layers with scales per output and token."""


# -- models


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
    raise Error(
        f"no layers for {mode!r}; compile with --quantize SCHEME (`irc compile --help` lists the "
        "schemes)",
        loc=here(),
    )


@api("models.quantize_model")
def quantize_model(
    model: Any,
    quant_mode: Any,
    group_size: int = 128,
    zero: bool = False,
    pre_quant_scale: bool = False,
    exclude_modules: list[str] | None = None,
    use_w4a8_awq: bool = False,
    clamp_val: Any = None,
    classes: Any = None,
) -> Any:
    """The model with its linear layers replaced by those of the mode, but for `exclude_modules`.

    The globs are as in QuantConfig. A weight that is set is quantized to the nearest codes; scales
    of inputs stay unset, and come from a checkpoint. With SmoothQuant the norms, attention and
    feed-forward of each layer are replaced.
    """
    if isinstance(quant_mode, QuantConfig):
        return quantize(model=model, quant_config=quant_mode)
    model.quant_mode = quant_mode
    config = QuantConfig(exclude_modules=exclude_modules)
    for _, part in model.named_modules():
        if isinstance(part, Attention):
            part.quantize_cache(quant_mode)
    if not quant_mode.has_any_quant(exclude_kv_cache=True):
        return model
    if quant_mode.has_act_and_weight_quant() and classes is None:
        return _smoothed(model, quant_mode)
    column, row = classes or _classes(quant_mode)
    more = {
        "group_size": group_size, "zero": zero, "pre_quant_scale": pre_quant_scale,
        "use_w4a8_awq": use_w4a8_awq, "clamp_val": clamp_val, "quant_mode": quant_mode,
        "use_int8_weight": quant_mode.is_int8_weight_only_per_group(),
    }  # fmt: skip
    for path, parent in list(model.named_modules()):
        if isinstance(parent, MixtureOfExperts):
            current_session().note(f"experts keep their floats, which --quantize rounds: {path}")
        for name, part in list(parent.named_children()):
            full = f"{path}.{name}".lstrip(".")
            excluded = config.is_module_excluded_from_quantization(full)
            if type(part) in (Linear, RowLinear) and not excluded:
                kind = column if type(part) is Linear else row
                setattr(parent, name, _replaced(part, kind, more))
    return model


def _replaced(old: Any, kind: Any, options: dict[str, Any]) -> Any:
    """A quantized layer in place of another one, with its bias, and its weight if that is set."""
    names = {*kind.__dataclass_fields__}
    kept = {name: getattr(old, name) for name in ("gather_output", "is_expert") if name in names}
    layer = kind(
        out_features=old.out_features * (old.parts if old.shard_dim == 0 else 1),
        in_features=old.in_features * (old.parts if old.shard_dim == 1 else 1),
        bias=old.bias is not None,
        dtype=old.dtype,
        tp_group=old.tp_group,
        tp_size=old.parts,
        **kept,
        **{name: value for name, value in options.items() if name in names},
    )
    layer.bias = old.bias
    if isinstance(old.weight.bound, np.ndarray):
        layer.load(cast("Any", old.weight.bound))
    elif old.weight.bound is not None:
        raise Error(
            "the weight is a reference to a checkpoint; quantize by the options of the build, such "
            "as --quantize w8a16",
            loc=here(),
        )
    return layer


def _smoothed(model: Any, mode: QuantMode) -> Any:
    """The model with the norms, attention and feed-forward of each layer in codes i8."""
    for _, parent in list(model.named_modules()):
        parts = dict(parent.named_children())
        attention = [part for part in parts.values() if type(part) is Attention]
        for name, part in parts.items() if attention else ():
            if type(part) in (LayerNorm, RmsNorm):
                kind = q.SmoothQuantLayerNorm if type(part) is LayerNorm else q.SmoothQuantRmsNorm
                old = {n: getattr(part, n) for n in ("eps", "elementwise_affine", "dtype")}
                setattr(parent, name, kind(part.normalized_shape, quant_mode=mode, **old))
            elif type(part) in (MLP, GatedMLP, FusedGatedMLP):
                plain = type(part) is MLP
                kind = SmoothQuantMLP if plain else SmoothQuantGatedMLP
                sizes = "hidden_size", "ffn_hidden_size", "hidden_act", "bias", "dtype"
                old = {n: getattr(part, n) for n in (*sizes, "tp_group", "tp_size")}
                setattr(parent, name, kind(quant_mode=mode, **old))
            elif type(part) is Attention:
                setattr(parent, name, SmoothQuantAttention.of(part, mode))
    return model


@api("quantization.quantize.quantize")
def quantize(model: Any, quant_config: Any = None, quant_mode: Any = None) -> Any:
    """The model with layers as the config, or the mode, says; see `quantize_model`."""
    quant_config = quant_mode if quant_config is None else quant_config
    if isinstance(quant_config, QuantMode):
        return quantize_model(model=model, quant_mode=quant_config)
    quant_config.scheme()  # an Error where there is none
    if quant_config.use_meta_recipe:
        raise Error(
            "use_meta_recipe is not supported; give clamp_val and exclude_modules", loc=here()
        )
    algo = quant_config.quant_algo
    int8 = q.Int8SmoothQuantLinear, q.Int8SmoothQuantRowLinear
    return quantize_model(
        model=model,
        quant_mode=quant_config.quant_mode,
        exclude_modules=quant_config.exclude_modules,
        group_size=quant_config.group_size,
        zero=quant_config.has_zero_point,
        pre_quant_scale=quant_config.pre_quant_scale or algo in ("W4A16_AWQ", "W4A8_AWQ"),
        use_w4a8_awq=algo == "W4A8_AWQ",
        clamp_val=quant_config.clamp_val,
        classes=int8 if algo == "W8A8_SQ_PER_CHANNEL" else None,
    )


def quantize_layers(
    model: Any,
    quant_mode: Any = None,
    quant_config: Any = None,
    group_size: int = 128,
    zero: bool = False,
    pre_quant_scale: bool = False,
    exclude_modules: list[str] | None = None,
) -> Any:
    """The model with layers of a mode or config, by the names of some versions."""
    if quant_config is not None:
        return quantize(model=model, quant_config=quant_config)
    return quantize_model(
        model=model,
        quant_mode=quant_mode,
        group_size=group_size,
        zero=zero,
        pre_quant_scale=pre_quant_scale,
        exclude_modules=exclude_modules,
    )


for _kind in ("weight_only", "weight_only_groupwise", "smooth", "fp8"):
    api(f"quantization.quantize.{_kind}_quantize")(quantize_layers)
