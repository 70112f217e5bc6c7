"""`QuantMode`, `QuantAlgo` and `QuantConfig`, and the schemes of irc that they mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from enum import EnumType, IntFlag, StrEnum, auto
from fnmatch import fnmatchcase
from typing import Any

from ...errors import Error, did_you_mean
from ...quantization.schemes import scheme_called
from ...source import here
from .api import api, register, release
from .errors import ArgumentError

_MODE = "quantization.mode.QuantMode"


def _flags(names: str) -> QuantMode:
    """The mode with these flags."""
    mode = QuantMode(0)
    for name in names.split():
        mode |= QuantMode[name]
    return mode


def _has(names: str) -> Callable[[QuantMode], bool]:
    """A method of QuantMode: whether it has one of the flags."""
    return lambda mode: bool(mode & _flags(names))


def _only(names: str, group: bool = False) -> Callable[[QuantMode], bool]:
    """A method of QuantMode: whether weights and inputs have these flags, and no other."""
    return lambda mode: (
        mode & mode.WEIGHTS_AND_ACTIVATIONS == _flags(names)
        and (not group or mode.has_per_group_scaling())
    )


def _with(names: str) -> Callable[[QuantMode], QuantMode]:
    """A method of QuantMode: the mode with these flags too."""
    return lambda mode: mode | _flags(names)


class _Counted(EnumType):
    """The members of QuantMode that depend on how many flags the script's release has."""

    @property
    def COUNT(cls) -> Any:
        """The number behind the last flag."""
        return cls(1 << (9 + (release() >= 12) + (release() >= 15)))

    @property
    def VALID_FLAGS(cls) -> Any:
        """All flags."""
        return cls(cls.COUNT - 1)


@api(_MODE)
class QuantMode(IntFlag, metaclass=_Counted):
    """What is quantized, as flags; later releases have more of them."""

    INT4_WEIGHTS = auto()
    INT8_WEIGHTS = auto()
    ACTIVATIONS = auto()
    PER_CHANNEL = auto()
    PER_TOKEN = auto()
    PER_GROUP = auto()
    INT8_KV_CACHE = auto()
    FP8_KV_CACHE = auto()
    FP8_QDQ = auto()
    FP8_ROWWISE = auto()
    W4A8_QSERVE = auto()
    WEIGHTS_AND_ACTIVATIONS = INT4_WEIGHTS | INT8_WEIGHTS | ACTIVATIONS

    @staticmethod
    @api(f"{_MODE}.from_description")
    def from_description(**asked: bool) -> QuantMode:
        """The mode of a description; a ValueError where it contradicts itself."""
        weights = asked.pop("quantize_weights")
        activations = asked.pop("quantize_activations")
        kind = "INT4_WEIGHTS" if asked.pop("use_int4_weights") else "INT8_WEIGHTS"
        is_scaled = activations or asked["per_token"] or asked["per_channel"]
        if is_scaled and not (weights and activations):
            raise ArgumentError(
                "quantize_activations needs quantize_weights, and per_token and per_channel, which "
                "say how scales are shared, need both"
            )
        flags = [kind] * weights + ["ACTIVATIONS"] * activations
        flags += [name.removeprefix("use_").upper() for name in asked if asked[name]]
        mode = _flags(" ".join(flags))
        return mode.set_fp8_rowwise() if mode.has_fp8_rowwise() else mode

    @staticmethod
    @api(f"{_MODE}.use_smooth_quant")
    def use_smooth_quant(per_token: bool = False, per_channel: bool = False) -> QuantMode:
        """Weights and inputs in 8 bits."""
        scales = " PER_TOKEN" * per_token + " PER_CHANNEL" * per_channel
        return _flags("INT8_WEIGHTS ACTIVATIONS" + scales)

    @staticmethod
    @api(f"{_MODE}.use_weight_only")
    def use_weight_only(use_int4_weights: bool = False, per_group: bool = False) -> QuantMode:
        """Weights in 4 or 8 bits."""
        weights = "INT4_WEIGHTS" if use_int4_weights else "INT8_WEIGHTS"
        return _flags(weights + " PER_GROUP" * per_group)

    @staticmethod
    @api(f"{_MODE}.from_quant_algo")
    def from_quant_algo(
        quant_algo: str | None = None, kv_cache_quant_algo: str | None = None
    ) -> QuantMode:
        """The mode of an algorithm for weights and one for KV caches."""
        mode = QuantMode(0) if quant_algo is None else _flags(_ALGORITHMS[_called(quant_algo)])
        if kv_cache_quant_algo is None:
            return mode
        cache = _called(kv_cache_quant_algo)
        if cache not in KV_CACHE_QUANT_ALGO_LIST:
            expected = ", ".join(KV_CACHE_QUANT_ALGO_LIST)
            raise ArgumentError(f"KV caches cannot be quantized as {cache}; expected {expected}")
        return mode | QuantMode[f"{cache}_KV_CACHE"]

    is_int8_weight_only = _only("INT8_WEIGHTS")
    is_int4_weight_only = _only("INT4_WEIGHTS")
    is_int8_weight_only_per_group = _only("INT8_WEIGHTS", group=True)
    is_int4_weight_only_per_group = _only("INT4_WEIGHTS", group=True)
    has_act_and_weight_quant = _only("INT8_WEIGHTS ACTIVATIONS")
    has_act_or_weight_quant = _has("INT4_WEIGHTS INT8_WEIGHTS ACTIVATIONS")
    has_weight_quant = _has("INT4_WEIGHTS INT8_WEIGHTS")
    is_qserve_w4a8 = _has("W4A8_QSERVE")
    has_per_token_dynamic_scaling = _has("PER_TOKEN")
    has_per_channel_scaling = _has("PER_CHANNEL")
    has_per_group_scaling = _has("PER_GROUP")
    has_int8_kv_cache = _has("INT8_KV_CACHE")
    has_fp8_kv_cache = _has("FP8_KV_CACHE")
    has_kv_cache_quant = _has("INT8_KV_CACHE FP8_KV_CACHE")
    has_fp8_qdq = _has("FP8_QDQ")
    has_fp8_rowwise = _has("FP8_ROWWISE")
    set_int8_kv_cache = _with("INT8_KV_CACHE")
    set_fp8_kv_cache = _with("FP8_KV_CACHE")
    set_fp8_qdq = _with("FP8_QDQ")
    set_fp8_rowwise = _with("FP8_ROWWISE PER_TOKEN PER_CHANNEL")

    def _all(self, bits: int, mask: int = -1) -> bool:
        """Whether the flags of a mask, by default all, are exactly `bits`."""
        return int(self) & mask == bits

    def _any(self, bits: int) -> bool:
        """Whether it has one of the flags."""
        return bool(self & bits)

    def is_weight_only(self) -> bool:
        """Weights in 4 or 8 bits, inputs as they are."""
        return self.is_int4_weight_only() or self.is_int8_weight_only()

    def has_act_static_scaling(self) -> bool:
        """Scales of inputs by calibration."""
        return not self & (self.PER_TOKEN | self.FP8_ROWWISE)

    def has_any_quant(self, exclude_kv_cache: bool = False) -> bool:
        """Whether anything is quantized."""
        how = _flags("PER_CHANNEL PER_TOKEN PER_GROUP")
        caches = _flags("INT8_KV_CACHE FP8_KV_CACHE")
        return bool(self & ~(how | caches if exclude_kv_cache else how))

    def to_dict(self) -> dict[str, Any]:
        """The mode as config.json of an engine has it."""
        return {
            "use_smooth_quant": self.has_act_and_weight_quant(),
            "per_channel": self.has_per_channel_scaling(),
            "per_token": self.has_per_token_dynamic_scaling(),
            "per_group": self.has_per_group_scaling(),
            "int8_kv_cache": self.has_int8_kv_cache(),
            "enable_fp8": self.has_fp8_qdq(),
            "enable_fp8_rowwise": self.has_fp8_rowwise(),
            "fp8_kv_cache": self.has_fp8_kv_cache(),
            "use_weight_only": self.is_weight_only(),
            "weight_only_precision": "int8" if self.is_int8_weight_only() else "int4",
        }


# The flags of every algorithm; `irc.quantization.schemes` has the scheme of its name, or the reason
# why there is none.
_ALGORITHMS = {
    "NO_QUANT": "",
    "W8A16": "INT8_WEIGHTS",
    "W4A16": "INT4_WEIGHTS",
    "W4A16_AWQ": "INT4_WEIGHTS PER_GROUP",
    "W4A8_AWQ": "INT4_WEIGHTS PER_GROUP",
    "W8A16_GPTQ": "INT8_WEIGHTS PER_GROUP",
    "W4A16_GPTQ": "INT4_WEIGHTS PER_GROUP",
    "W8A8_SQ_PER_CHANNEL": "INT8_WEIGHTS ACTIVATIONS PER_CHANNEL",
    "W8A8_SQ_PER_TENSOR_PLUGIN": "INT8_WEIGHTS ACTIVATIONS",
    "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN": "INT8_WEIGHTS ACTIVATIONS PER_CHANNEL PER_TOKEN",
    "W8A8_SQ_PER_CHANNEL_PER_TENSOR_PLUGIN": "INT8_WEIGHTS ACTIVATIONS PER_CHANNEL",
    "W8A8_SQ_PER_TENSOR_PER_TOKEN_PLUGIN": "INT8_WEIGHTS ACTIVATIONS PER_TOKEN",
    "W4A8_QSERVE_PER_GROUP": "INT4_WEIGHTS ACTIVATIONS W4A8_QSERVE PER_GROUP",
    "W4A8_QSERVE_PER_CHANNEL": "INT4_WEIGHTS ACTIVATIONS W4A8_QSERVE",
    "FP8": "FP8_QDQ",
    "FP8_PER_CHANNEL_PER_TOKEN": "FP8_ROWWISE PER_CHANNEL PER_TOKEN",
    "INT8": "",  # of KV caches
    "MIXED_PRECISION": "",
}
QuantAlgo: Any = StrEnum("QuantAlgo", {name: name for name in _ALGORITHMS}, module=__name__)
QUANT_ALGO_LIST = [QuantAlgo[name] for name in _ALGORITHMS if name != "INT8"]
KV_CACHE_QUANT_ALGO_LIST = [QuantAlgo.FP8, QuantAlgo.INT8]
for _name in ("QuantAlgo", "QUANT_ALGO_LIST", "KV_CACHE_QUANT_ALGO_LIST"):
    register(f"quantization.mode.{_name}", globals()[_name])


def _called(name: str) -> Any:
    """The algorithm of a name; an Error names the nearest one."""
    upper = str(getattr(name, "value", name)).upper()
    if upper not in _ALGORITHMS:
        near = did_you_mean(str(name), _ALGORITHMS)
        raise ArgumentError(f"there is no QuantAlgo {name!r}{near}")
    return QuantAlgo[upper]


DEFAULT_EXCLUDE = (
    "*lm_head",
    "*router",
    "*vocab_embedding",
    "*position_embedding",
    "*block_embedding",
    "*shared_expert_gate",
)
_BY_WEIGHTS = ("NO_QUANT", "W8A16", "W4A16", "FP8_PER_CHANNEL_PER_TOKEN")
_BY_MODELOPT = ("W4A16_AWQ", "W4A8_AWQ", "FP8", "W8A8_SQ_PER_CHANNEL", "MIXED_PRECISION")


@api("models.modeling_utils.QuantConfig")
@dataclass
class QuantConfig:
    """How a model is quantized. `exclude_modules` are globs of module names: None stands for
    DEFAULT_EXCLUDE, and an empty list excludes nothing."""

    quant_algo: str | None = None
    kv_cache_quant_algo: str | None = None
    group_size: int = 128
    smoothquant_val: float = 0.5
    clamp_val: list[float] | None = None
    use_meta_recipe: bool = False
    has_zero_point: bool = False
    pre_quant_scale: bool = False
    exclude_modules: list[str] | None = None

    def __post_init__(self) -> None:
        for name in ("quant_algo", "kv_cache_quant_algo"):
            algorithm = getattr(self, name)
            setattr(self, name, None if algorithm is None else _called(algorithm))
        if isinstance(self.exclude_modules, str):
            raise ArgumentError(
                "exclude_modules: expected a list of globs of module names, found the string "
                f"{self.exclude_modules!r}; put it into a list"
            )

    @property
    def quant_mode(self) -> QuantMode:
        """The flags of the algorithms."""
        return QuantMode.from_quant_algo(self.quant_algo, self.kv_cache_quant_algo)

    layer_quant_mode = quant_mode

    @property
    def requires_calibration(self) -> bool:
        """Whether data are needed to find the scales."""
        needs_scales = self.quant_algo not in (None, *_BY_WEIGHTS)
        return needs_scales or self.kv_cache_quant_algo is not None

    @property
    def requires_modelopt_quantization(self) -> bool:
        """Whether TensorRT-LLM leaves the quantization to ModelOpt."""
        return (self.quant_algo or self.kv_cache_quant_algo) in _BY_MODELOPT

    @property
    def use_plugin_sq(self) -> bool:
        """Whether the algorithm is one of SmoothQuant with plugins."""
        return "SQ_PER" in str(self.quant_algo) and str(self.quant_algo).endswith("_PLUGIN")

    def get_quant_cfg(self, module_name: str | None = None) -> QuantConfig:
        """The quantization of a layer, the same for all."""
        return self

    def is_module_excluded_from_quantization(self, name: str) -> bool:
        """Whether a glob of `exclude_modules` has the name of a module."""
        globs = DEFAULT_EXCLUDE if self.exclude_modules is None else self.exclude_modules
        return any(fnmatchcase(name, glob) for glob in globs)

    def scheme(self) -> str | None:
        """The name of irc's quantization scheme, None where weights are not quantized."""
        if self.quant_algo in (None, "NO_QUANT"):
            return None
        try:
            name = scheme_called(str(self.quant_algo)).name
        except Error as error:
            raise error.at(loc=here()) from None
        return "w4a16_asym" if name == "w4a16" and self.has_zero_point else name

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> QuantConfig:
        """The `quantization` of a checkpoint's config.json; what irc does not use is left out."""
        return cls(**{name: table[name] for name in cls.__dataclass_fields__ if name in table})

    def to_dict(self) -> dict[str, Any]:
        """The fields as config.json has them."""
        return asdict(self)

    asdict = to_dict
