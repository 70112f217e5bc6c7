"""Linear layers with quantized weights and inputs, written as quantize and dequantize.

Codes are stored in the order of the weight, [outputs, inputs], not in that of a kernel. A bias is
added once, after the sum over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any, cast

import numpy as np

from ....errors import Error
from ....quantization.formats import encode, format_called
from ....source import here
from ... import functional as F
from ...tensor import Tensor as Inner
from ..context import current_session
from ..module import Module, Parameter
from ..quantization import QuantConfig, QuantMode
from ..tensor import Tensor, unwrap
from .attention import Attention
from .embedding import Embedding
from .linear import Linear, LinearBase, RowLinear
from .mlp import MLP, FusedGatedMLP, GatedMLP
from .moe import MixtureOfExperts


@dataclass(frozen=True)
class Recipe:
    """How a layer is quantized: a format, and the names of parameters.

    `scales` are those of the weight, one in all, per output, or per group of `group` inputs.
    Inputs have a scale per "token", or the one in the parameter `inputs`. Before, they are
    multiplied by the parameter `factors`, or divided by it if `divides`. `zero` are offsets per
    output and group, `alpha` the scale of the result of inputs in FP8. `row` says that scales and
    factors are [1, N], not [N].
    """

    format: str
    scales: str
    group: int = 0
    per_output: bool = True
    inputs: str = ""
    factors: str = ""
    divides: bool = False
    zero: str = ""
    alpha: str = ""
    clamp: Sequence[float] = ()
    row: bool = False


_NO_MODE = QuantMode(0)
_FRONT = "in_features out_features bias dtype tp_group tp_size"
_GROUPS = (
    "in_features out_features group_size pre_quant_scale zero bias dtype tp_group tp_size tp_rank"
)
_OPTIONS = "group_size pre_quant_scale zero use_w4a8_awq use_int8_weight quant_mode clamp_val"
_IGNORED = "transa transb alpha tp_rank"  # alpha is a parameter, set like the others


class QuantizedLinear(LinearBase):
    """What quantized linear layers have; `recipe_of` makes the recipe from the options."""

    order = ""  # the names of the positional arguments
    biased = True  # whether there is a bias unless told
    recipe_of: Callable[..., Recipe]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        names = self.order.split()
        given: dict[str, Any] = dict(zip(names, args, strict=False))
        if len(args) > len(names) or given.keys() & kwargs:
            raise Error(
                f"{type(self).__name__}: expected each argument once, and by position at most "
                f"{', '.join(names)}; found {len(args)} by position, and by name {[*kwargs]}",
                loc=here(),
            )
        given = {"bias": self.biased} | given | kwargs
        options = {name: given.pop(name) for name in _OPTIONS.split() if name in given}
        for name in _IGNORED.split():
            given.pop(name, None)
        accepted = signature(type(self).recipe_of).parameters
        self.recipe = type(self).recipe_of(**{k: v for k, v in options.items() if k in accepted})
        super().__init__(**given)

    def make_weight(self) -> Parameter:
        """The codes; scales and factors are set beside them."""
        how, n, k = self.recipe, self.out_features, self.in_features
        if how.group and k % how.group:
            raise Error(
                f"{type(self).__name__}: groups of {how.group} do not divide the {k} inputs of one "
                "rank; choose a group_size that does, or a smaller tp_size",
                loc=here(),
            )
        front = (1,) if how.row else ()
        per_group = self.make((k // how.group, n), "f32", 1, 0) if how.group else None
        per_output = self.make((*front, n), "f32", len(front))
        scales = per_group or (per_output if how.per_output else self.make((*front, 1), "f32"))
        setattr(self, how.scales, scales)
        if how.zero:
            setattr(self, how.zero, self.make((k // how.group, n), "f32", 1, 0))
        if how.factors:
            setattr(self, how.factors, self.make((*front, k), "f32", None, len(front)))
        for name in (how.inputs.removeprefix("token"), how.alpha):
            if name:
                setattr(self, name, self.make((*front, 1), "f32"))
        return self.make((n, k), format_called(how.format).codes, 0, 1)

    def value(self, name: str) -> Inner:
        """A parameter as a tensor."""
        return unwrap(getattr(self, name).value)

    def multiply(self, x: Inner) -> Inner:
        how, kind = self.recipe, cast("Any", x.dtype)
        x = self.rounded(self.smoothed(x))
        scales = self.value(how.scales)
        scales = scales.transpose(0, 1) if how.group else scales.reshape(-1, 1)
        y = F.linear(x, F.dequantize(self.value("weight"), scales, dtype=kind))
        if how.zero:  # offset * (sum of the group)
            sums = x.reshape((*x.shape[:-1], self.in_features // how.group, how.group)).sum(-1)
            y = y + F.linear(sums, self.value(how.zero).cast(kind).transpose(0, 1))
        return y * self.value(how.alpha).cast(kind) if how.alpha else y

    def smoothed(self, x: Inner) -> Inner:
        """x times its factors, and clamped."""
        how = self.recipe
        if how.factors:
            factors = self.value(how.factors).cast(x.dtype).reshape(-1)
            x = x / factors if how.divides else x * factors
        return F.clip(x, low=how.clamp[0], high=how.clamp[1]) if how.clamp else x

    def rounded(self, x: Inner) -> Inner:
        """x as codes and scales represent it."""
        how = self.recipe
        if not how.inputs and not how.alpha:
            return x
        kind: Any = x.dtype
        codes: Any = "f8e4m3" if how.alpha else format_called(how.format).codes
        scale = F.full(1.0, shape=(1,) * x.ndim, dtype="f32")
        if how.inputs == "token":
            scale = F.dynamic_scale(x, dtype=codes)
        elif how.inputs:
            scale = self.value(how.inputs).reshape((1,) * x.ndim)
        return F.dequantize(F.quantize(x, scale, dtype=codes), scale, dtype=kind)

    def load(self, weight: Any) -> None:
        """Quantize an array, this rank's weight in floats, to the nearest codes."""
        how = self.recipe
        block = (1 if how.per_output else 0, how.group)
        found = encode(np.asarray(weight), how.format, block)
        scales: Parameter = getattr(self, how.scales)
        self.weight.value = found.codes
        scales.value = np.asarray(found.scales, np.float32).T.reshape(scales.shape)


def _layers(
    name: str,
    recipe: Callable[..., Recipe],
    row_recipe: Callable[..., Recipe] | None = None,
    order: str = f"{_FRONT} gather_output quant_mode",
    row_order: str = f"{_FRONT} quant_mode",
    biased: bool = True,
) -> tuple[Any, Any]:
    """The classes of a column and a row layer, with the order of their positional arguments."""
    column: dict[str, Any] = {"order": order, "recipe_of": staticmethod(recipe), "biased": biased}
    column["__module__"] = __name__
    row = {"order": row_order, "recipe_of": staticmethod(row_recipe or recipe)}
    return (
        type(f"{name}Linear", (QuantizedLinear, Linear), column),
        type(f"{name}RowLinear", (QuantizedLinear, RowLinear), column | row),
    )


def _weight_only(quant_mode: QuantMode = QuantMode.INT8_WEIGHTS) -> Recipe:
    """Weights of 8 or 4 bits with a scale per output."""
    return Recipe("int4" if quant_mode.is_int4_weight_only() else "int8", "per_channel_scale")


def _groupwise(
    group_size: int = 128,
    pre_quant_scale: bool = False,
    zero: bool = False,
    use_w4a8_awq: bool = False,
    use_int8_weight: bool = False,
) -> Recipe:
    """Weights of 4 or 8 bits with a scale per group of inputs (AWQ, GPTQ): codes * scale + zero.

    With use_w4a8_awq inputs are in FP8 and the result is times alpha.
    """
    return Recipe(
        "int8" if use_int8_weight else "int4",
        "weights_scaling_factor",
        group=group_size,
        factors="prequant_scaling_factor" if pre_quant_scale else "",
        zero="zero" if zero else "",
        alpha="alpha" if use_w4a8_awq else "",
        row=True,
    )


def _smooth(quant_mode: QuantMode = _NO_MODE, row: bool = False) -> Recipe:
    """Weights and inputs of 8 bits: `act_scale` is that of inputs, or each token has one. Inputs
    of a row layer are divided by `smoother` before."""
    return Recipe(
        "int8",
        "per_channel_scale",
        per_output=quant_mode.has_per_channel_scaling(),
        inputs="token" if quant_mode.has_per_token_dynamic_scaling() else "act_scale",
        factors="smoother" if row else "",
        divides=True,
        row=True,
    )


def _int8_smooth() -> Recipe:
    """Weights and inputs of 8 bits, as ModelOpt exports them."""
    scales = "weights_scaling_factor", "activation_scaling_factor", "prequant_scaling_factor"
    return Recipe("int8", scales[0], inputs=scales[1], factors=scales[2])


def _fp8() -> Recipe:
    """Weights and inputs in FP8, a scale each."""
    scales = "weights_scaling_factor", "activation_scaling_factor"
    return Recipe("fp8", scales[0], per_output=False, inputs=scales[1])


def _rowwise(clamp_val: Sequence[float] | None = None) -> Recipe:
    """Weights in FP8 with a scale per output; inputs, clamped to clamp_val, with one per token."""
    return Recipe("fp8", "per_channel_scale", inputs="token", clamp=tuple(clamp_val or ()))


WeightOnlyQuantLinear, WeightOnlyQuantRowLinear = _layers(
    "WeightOnlyQuant", _weight_only, row_order=f"{_FRONT} tp_rank quant_mode"
)
WeightOnlyGroupwiseQuantLinear, WeightOnlyGroupwiseQuantRowLinear = _layers(
    "WeightOnlyGroupwiseQuant",
    _groupwise,
    order=f"{_GROUPS} gather_output use_w4a8_awq use_int8_weight",
    row_order=f"{_GROUPS} use_w4a8_awq use_int8_weight",
    biased=False,
)
SmoothQuantLinear, SmoothQuantRowLinear = _layers(
    "SmoothQuant", _smooth, partial(_smooth, row=True)
)
Int8SmoothQuantLinear, Int8SmoothQuantRowLinear = _layers("Int8SmoothQuant", _int8_smooth)
FP8Linear, FP8RowLinear = _layers("FP8", _fp8)
Fp8RowwiseLinear, Fp8RowwiseRowLinear = _layers("Fp8Rowwise", _rowwise)


class SmoothQuantMLP(MLP):
    """MLP of SmoothQuant layers."""

    column, row, takes_mode = SmoothQuantLinear, SmoothQuantRowLinear, True


class SmoothQuantGatedMLP(GatedMLP):
    """GatedMLP of SmoothQuant layers."""

    column, row, takes_mode = SmoothQuantLinear, SmoothQuantRowLinear, True


class Fp8RowwiseMLP(MLP):
    """MLP of FP8 layers with scales per output and token."""

    column, row, takes_mode = Fp8RowwiseLinear, Fp8RowwiseRowLinear, True


class Fp8RowwiseGatedMLP(GatedMLP):
    """GatedMLP of FP8 layers with scales per output and token."""

    column, row, takes_mode = Fp8RowwiseLinear, Fp8RowwiseRowLinear, True


class Fp8RowwiseFusedGatedMLP(FusedGatedMLP):
    """FusedGatedMLP of FP8 layers with scales per output and token."""

    column, row, takes_mode = Fp8RowwiseLinear, Fp8RowwiseRowLinear, True


class WeightOnlyQuantEmbedding(Embedding):
    """An embedding table of 8 bits, with a factor per row in `per_token_scale` [num_embeddings]."""

    codes = "i8"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("quant_mode", None)
        super().__init__(*args, **kwargs)
        self.per_token_scale = Parameter(shape=(self.num_embeddings,), dtype=self.dtype)

    def forward(self, x: Tensor, workspace: Tensor | None = None) -> Tensor:
        return self.look_up(x, self.per_token_scale.value)


def _classes(mode: QuantMode) -> tuple[type[QuantizedLinear], type[QuantizedLinear]]:
    """The column and row layers of a mode; an Error where there are none."""
    if mode.is_weight_only() and mode.has_per_group_scaling():
        return WeightOnlyGroupwiseQuantLinear, WeightOnlyGroupwiseQuantRowLinear
    if mode.is_weight_only():
        return WeightOnlyQuantLinear, WeightOnlyQuantRowLinear
    if mode.has_act_and_weight_quant():
        return SmoothQuantLinear, SmoothQuantRowLinear
    if mode.has_fp8_rowwise():
        return Fp8RowwiseLinear, Fp8RowwiseRowLinear
    if mode.has_fp8_qdq():
        return FP8Linear, FP8RowLinear
    raise Error(
        f"there are no layers for {mode!r}; quantize by the options of the build, such as "
        "--quantize nvfp4, which lists what there is",
        loc=here(),
    )


def quantize_model(model: Module, quant_mode: QuantMode | QuantConfig, **options: Any) -> Module:
    """The model with its linear layers replaced by those of the mode, but for `exclude_modules`.

    The globs are as in QuantConfig. A weight that is set is quantized to the nearest codes; scales
    of inputs stay unset, and come from a checkpoint. Other options are those of the layers.
    """
    if isinstance(quant_mode, QuantConfig):
        return quantize(model, quant_mode, **options)
    config = QuantConfig(exclude_modules=options.pop("exclude_modules", None))
    for _, part in model.named_modules():
        if isinstance(part, Attention):
            part.quantize_cache(quant_mode)
    if not quant_mode.has_any_quant(exclude_kv_cache=True):
        return model
    column, row = options.pop("classes", None) or _classes(quant_mode)
    int8_groups = quant_mode.is_int8_weight_only_per_group()
    chosen = {"use_int8_weight": int8_groups, "quant_mode": quant_mode} | options
    for path, parent in list(model.named_modules()):
        if isinstance(parent, MixtureOfExperts):
            current_session().note(f"experts keep their floats, which --quantize rounds: {path}")
        for name, part in list(parent.named_children()):
            full = f"{path}.{name}".lstrip(".")
            excluded = config.is_module_excluded_from_quantization(full)
            if type(part) in (Linear, RowLinear) and not excluded:
                kind = column if type(part) is Linear else row
                setattr(parent, name, _replaced(part, kind, chosen))
    return model


def _replaced(
    old: Linear | RowLinear, kind: type[QuantizedLinear], options: dict[str, Any]
) -> QuantizedLinear:
    """A quantized layer in place of another one, with its bias, and its weight if that is set."""
    sizes = [old.out_features, old.in_features]
    sizes[old.shard_dim] *= old.parts
    kept = ["gather_output"] if isinstance(old, Linear) else ["is_expert", "instance_id"]
    found = kind(
        out_features=sizes[0],
        in_features=sizes[1],
        bias=old.bias is not None,
        dtype=old.dtype,
        tp_group=old.tp_group,
        tp_size=old.parts,
        **{name: getattr(old, name) for name in kept},
        **options,
    )
    found.bias = old.bias
    if isinstance(old.weight.bound, np.ndarray):
        found.load(old.weight.bound)
    elif old.weight.bound is not None:
        raise Error(
            "the weight is a reference to a checkpoint; quantize by the options of the build, such "
            "as --quantize w8a16",
            loc=here(),
        )
    return found


def quantize(model: Module, quant_config: QuantConfig, **options: Any) -> Module:
    """The model with layers as the config says; see `quantize_model`."""
    quant_config.scheme()  # an Error where there is none
    if quant_config.use_meta_recipe:
        raise Error(
            "use_meta_recipe is not supported; give clamp_val and exclude_modules", loc=here()
        )
    algo = quant_config.quant_algo
    if algo == "W8A8_SQ_PER_CHANNEL":
        options["classes"] = Int8SmoothQuantLinear, Int8SmoothQuantRowLinear
    return quantize_model(
        model,
        quant_config.quant_mode,
        exclude_modules=quant_config.exclude_modules,
        group_size=quant_config.group_size,
        zero=quant_config.has_zero_point,
        pre_quant_scale=quant_config.pre_quant_scale or algo in ("W4A16_AWQ", "W4A8_AWQ"),
        use_w4a8_awq=algo == "W4A8_AWQ",
        clamp_val=quant_config.clamp_val,
        **options,
    )


# the names of older versions, for the kinds of QuantMode
weight_only_quantize = weight_only_groupwise_quantize = quantize_model
smooth_quantize = fp8_quantize = quantize_model
