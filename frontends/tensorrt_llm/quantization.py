"""`QuantMode`, `QuantAlgo` and `QuantConfig`, and the schemes of irc that they mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from enum import IntFlag, StrEnum, auto
from fnmatch import fnmatchcase
from typing import Any

from ...errors import Error, did_you_mean
from ...source import here
from .errors import ArgumentError


def _has(*names: str) -> Callable[[QuantMode], bool]:
    """A method of QuantMode: whether it has one of the flags."""
    return lambda mode: any(mode & QuantMode[name] for name in names)


class QuantMode(IntFlag):
    """What is quantized, as flags. Their numbers differ between versions of TensorRT-LLM: those
    here are of 0.16, with the later flags behind, so config files should hold names."""

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
    COUNT = auto()
    FP8_1x128_128x128 = auto()
    NVFP4 = auto()
    NVFP4_KV_CACHE = auto()
    W4A8_NVFP4_FP8 = auto()
    W4A8_MXFP4_FP8 = auto()
    W4A8_MXFP4_MXFP8 = auto()
    W4A16_MXFP4 = auto()

    @staticmethod
    def from_description(
        quantize_weights: bool = False,
        quantize_activations: bool = False,
        per_token: bool = False,
        per_channel: bool = False,
        per_group: bool = False,
        use_int4_weights: bool = False,
        use_int8_kv_cache: bool = False,
        use_fp8_kv_cache: bool = False,
        use_fp8_qdq: bool = False,
        use_fp8_rowwise: bool = False,
        use_w4a8_qserve: bool = False,
    ) -> QuantMode:
        """The mode of a description; a ValueError where it contradicts itself."""
        if quantize_activations and not quantize_weights:
            raise ArgumentError(
                "quantize_activations needs quantize_weights: irc multiplies quantized inputs by "
                "quantized weights only",
                loc=here(),
            )
        if (per_token or per_channel) and not (quantize_weights and quantize_activations):
            raise ArgumentError(
                "per_token and per_channel need quantize_weights and quantize_activations: they "
                "say how the scales of both are shared",
                loc=here(),
            )
        weights = QuantMode.INT4_WEIGHTS if use_int4_weights else QuantMode.INT8_WEIGHTS
        rowwise = QuantMode.FP8_ROWWISE | QuantMode.PER_TOKEN | QuantMode.PER_CHANNEL
        flags = (
            (quantize_weights, weights),
            (quantize_activations, QuantMode.ACTIVATIONS),
            (per_channel, QuantMode.PER_CHANNEL),
            (per_token, QuantMode.PER_TOKEN),
            (per_group, QuantMode.PER_GROUP),
            (use_int8_kv_cache, QuantMode.INT8_KV_CACHE),
            (use_fp8_kv_cache, QuantMode.FP8_KV_CACHE),
            (use_fp8_qdq, QuantMode.FP8_QDQ),
            (use_fp8_rowwise, rowwise),
            (use_w4a8_qserve, QuantMode.W4A8_QSERVE),
        )
        mode = QuantMode(0)
        for asked, flag in flags:
            mode |= flag if asked else QuantMode(0)
        return mode

    @staticmethod
    def use_smooth_quant(per_token: bool = False, per_channel: bool = False) -> QuantMode:
        """Weights and inputs in 8 bits."""
        return QuantMode.from_description(True, True, per_token, per_channel)

    @staticmethod
    def use_weight_only(use_int4_weights: bool = False, per_group: bool = False) -> QuantMode:
        """Weights in 4 or 8 bits."""
        return QuantMode.from_description(
            True, per_group=per_group, use_int4_weights=use_int4_weights
        )

    @staticmethod
    def use_qserve(per_group: bool = False) -> QuantMode:
        """Weights in 4 bits with scales of two levels, inputs in 8."""
        return QuantMode.from_description(
            True, True, per_group=per_group, use_int4_weights=True, use_w4a8_qserve=True
        )

    @staticmethod
    def from_quant_algo(
        quant_algo: str | None = None, kv_cache_quant_algo: str | None = None
    ) -> QuantMode:
        """The mode of an algorithm for weights and one for KV caches."""
        mode = QuantMode(0) if quant_algo is None else _ALGOS[QuantAlgo.called(quant_algo)].mode
        if kv_cache_quant_algo is None:
            return mode
        cache = QuantAlgo.called(kv_cache_quant_algo)
        if cache not in _CACHES:
            known = ", ".join(algo.value for algo in _CACHES)
            raise ArgumentError(
                f"KV caches cannot be quantized as {cache.value}; expected {known}", loc=here()
            )
        return mode | _CACHES[cache]

    def _weights_are(self, flags: QuantMode) -> bool:
        return self & (self.INT4_WEIGHTS | self.INT8_WEIGHTS | self.ACTIVATIONS) == flags

    def is_int8_weight_only(self) -> bool:
        """Weights in 8 bits, inputs as they are."""
        return self._weights_are(self.INT8_WEIGHTS)

    def is_int4_weight_only(self) -> bool:
        """Weights in 4 bits, inputs as they are."""
        return self._weights_are(self.INT4_WEIGHTS)

    def is_weight_only(self) -> bool:
        """Weights in 4 or 8 bits, inputs as they are."""
        return self.is_int4_weight_only() or self.is_int8_weight_only()

    def is_int8_weight_only_per_group(self) -> bool:
        """Weights in 8 bits with a scale per group of inputs."""
        return self.is_int8_weight_only() and self.has_per_group_scaling()

    def is_int4_weight_only_per_group(self) -> bool:
        """Weights in 4 bits with a scale per group of inputs."""
        return self.is_int4_weight_only() and self.has_per_group_scaling()

    def has_act_and_weight_quant(self) -> bool:
        """Weights and inputs in 8 bits."""
        return self._weights_are(self.INT8_WEIGHTS | self.ACTIVATIONS)

    is_qserve_w4a8 = _has("W4A8_QSERVE")
    has_per_token_dynamic_scaling = _has("PER_TOKEN")
    has_per_channel_scaling = _has("PER_CHANNEL")
    has_per_group_scaling = _has("PER_GROUP")
    has_int8_kv_cache = _has("INT8_KV_CACHE")
    has_fp8_kv_cache = _has("FP8_KV_CACHE")
    has_kv_cache_quant = _has("INT8_KV_CACHE", "FP8_KV_CACHE")
    has_fp8_qdq = _has("FP8_QDQ")
    has_fp8_rowwise = _has("FP8_ROWWISE")
    has_nvfp4 = _has("NVFP4")

    def has_act_static_scaling(self) -> bool:
        """Scales of inputs by calibration."""
        return not self & (self.PER_TOKEN | self.FP8_ROWWISE)

    def has_any_quant(self, exclude_kv_cache: bool = False) -> bool:
        """Whether anything is quantized."""
        caches = self.INT8_KV_CACHE | self.FP8_KV_CACHE | self.NVFP4_KV_CACHE
        how = self.PER_CHANNEL | self.PER_TOKEN | self.PER_GROUP | self.COUNT
        return bool(self & ~(how | caches if exclude_kv_cache else how))

    def set_int8_kv_cache(self) -> QuantMode:
        """This mode, with KV caches in 8-bit integers."""
        return self | self.INT8_KV_CACHE

    def set_fp8_kv_cache(self) -> QuantMode:
        """This mode, with KV caches in 8-bit floats."""
        return self | self.FP8_KV_CACHE

    def set_fp8_qdq(self) -> QuantMode:
        """This mode, with FP8 and a scale per tensor."""
        return self | self.FP8_QDQ

    def set_fp8_rowwise(self) -> QuantMode:
        """This mode, with FP8 and a scale per output and per token."""
        return self | self.FP8_ROWWISE | self.PER_TOKEN | self.PER_CHANNEL

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


class QuantAlgo(StrEnum):
    """How weights, inputs or KV caches are quantized."""

    NO_QUANT = "NO_QUANT"
    W8A16 = "W8A16"
    W4A16 = "W4A16"
    W4A16_AWQ = "W4A16_AWQ"
    W4A8_AWQ = "W4A8_AWQ"
    W8A16_GPTQ = "W8A16_GPTQ"
    W4A16_GPTQ = "W4A16_GPTQ"
    W8A8_SQ_PER_CHANNEL = "W8A8_SQ_PER_CHANNEL"
    W8A8_SQ_PER_TENSOR_PLUGIN = "W8A8_SQ_PER_TENSOR_PLUGIN"
    W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN = "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN"
    W8A8_SQ_PER_CHANNEL_PER_TENSOR_PLUGIN = "W8A8_SQ_PER_CHANNEL_PER_TENSOR_PLUGIN"
    W8A8_SQ_PER_TENSOR_PER_TOKEN_PLUGIN = "W8A8_SQ_PER_TENSOR_PER_TOKEN_PLUGIN"
    W4A8_QSERVE_PER_GROUP = "W4A8_QSERVE_PER_GROUP"
    W4A8_QSERVE_PER_CHANNEL = "W4A8_QSERVE_PER_CHANNEL"
    FP8 = "FP8"
    FP8_PER_CHANNEL_PER_TOKEN = "FP8_PER_CHANNEL_PER_TOKEN"
    FP8_BLOCK_SCALES = "FP8_BLOCK_SCALES"
    INT8 = "INT8"
    MIXED_PRECISION = "MIXED_PRECISION"
    NVFP4 = "NVFP4"
    W4A8_NVFP4_FP8 = "W4A8_NVFP4_FP8"
    W4A8_MXFP4_FP8 = "W4A8_MXFP4_FP8"
    W4A8_MXFP4_MXFP8 = "W4A8_MXFP4_MXFP8"
    W4A16_MXFP4 = "W4A16_MXFP4"

    @classmethod
    def called(cls, name: str) -> QuantAlgo:
        """The algorithm of a name; an Error names the nearest one."""
        found = cls.__members__.get(str(getattr(name, "value", name)).upper())
        if found is None:
            raise ArgumentError(
                f"there is no QuantAlgo {name!r}{did_you_mean(str(name), cls.__members__)}",
                loc=here(),
            )
        return found


@dataclass(frozen=True)
class _Algo:
    """The flags of an algorithm and irc's scheme for it, or why there is none."""

    mode: QuantMode
    scheme: str = ""
    reason: str = ""


_NONE = QuantMode(0)
_QSERVE = "its two-level scales are not supported; use W4A16_AWQ or W4A8_AWQ"
_SQ = QuantMode.use_smooth_quant
_GROUPS = {bits: QuantMode.use_weight_only(bits == 4, per_group=True) for bits in (4, 8)}
_ALGOS = {
    QuantAlgo.NO_QUANT: _Algo(_NONE),
    QuantAlgo.W8A16: _Algo(QuantMode.use_weight_only(), "w8a16"),
    QuantAlgo.W4A16: _Algo(QuantMode.use_weight_only(True), "w4a16"),
    QuantAlgo.W4A16_AWQ: _Algo(_GROUPS[4], "w4a16_awq"),
    QuantAlgo.W4A8_AWQ: _Algo(_GROUPS[4], "w4a8_awq"),
    QuantAlgo.W8A16_GPTQ: _Algo(_GROUPS[8], "w8a16_gptq"),
    QuantAlgo.W4A16_GPTQ: _Algo(_GROUPS[4], "w4a16_gptq"),
    QuantAlgo.W8A8_SQ_PER_CHANNEL: _Algo(_SQ(False, True), "w8a8_sq_per_channel"),
    QuantAlgo.W8A8_SQ_PER_TENSOR_PLUGIN: _Algo(_SQ(), "w8a8_sq"),
    QuantAlgo.W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN: _Algo(
        _SQ(True, True), "w8a8_sq_per_channel_per_token"
    ),
    QuantAlgo.W8A8_SQ_PER_CHANNEL_PER_TENSOR_PLUGIN: _Algo(_SQ(False, True), "w8a8_sq_per_channel"),
    QuantAlgo.W8A8_SQ_PER_TENSOR_PER_TOKEN_PLUGIN: _Algo(_SQ(True), "w8a8_sq_per_token"),
    QuantAlgo.W4A8_QSERVE_PER_GROUP: _Algo(QuantMode.use_qserve(True), reason=_QSERVE),
    QuantAlgo.W4A8_QSERVE_PER_CHANNEL: _Algo(QuantMode.use_qserve(), reason=_QSERVE),
    QuantAlgo.FP8: _Algo(QuantMode.from_description(use_fp8_qdq=True), "fp8"),
    QuantAlgo.FP8_PER_CHANNEL_PER_TOKEN: _Algo(
        QuantMode.from_description(use_fp8_rowwise=True), "fp8_rowwise"
    ),
    QuantAlgo.FP8_BLOCK_SCALES: _Algo(QuantMode.FP8_1x128_128x128, "fp8_block"),
    QuantAlgo.INT8: _Algo(_NONE, reason="it is for KV caches; give it as kv_cache_quant_algo"),
    QuantAlgo.MIXED_PRECISION: _Algo(
        _NONE, reason="every layer has its own; quantize from a table of layers and schemes"
    ),
    QuantAlgo.NVFP4: _Algo(QuantMode.NVFP4, "nvfp4"),
    QuantAlgo.W4A8_NVFP4_FP8: _Algo(QuantMode.W4A8_NVFP4_FP8, "w4a8_nvfp4_fp8"),
    QuantAlgo.W4A8_MXFP4_FP8: _Algo(QuantMode.W4A8_MXFP4_FP8, "w4a8_mxfp4_fp8"),
    QuantAlgo.W4A8_MXFP4_MXFP8: _Algo(QuantMode.W4A8_MXFP4_MXFP8, "w4a8_mxfp4_mxfp8"),
    QuantAlgo.W4A16_MXFP4: _Algo(QuantMode.W4A16_MXFP4, "w4a16_mxfp4"),
}
QUANT_ALGO_LIST = [algo for algo in _ALGOS if algo is not QuantAlgo.INT8]
KV_CACHE_QUANT_ALGO_LIST = [QuantAlgo.FP8, QuantAlgo.INT8]
_CACHES = {QuantAlgo.INT8: QuantMode.INT8_KV_CACHE, QuantAlgo.FP8: QuantMode.FP8_KV_CACHE}

DEFAULT_EXCLUDE = (
    "*lm_head",
    "*router",
    "*vocab_embedding",
    "*position_embedding",
    "*block_embedding",
    "*shared_expert_gate",
)


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
        if self.quant_algo is not None:
            self.quant_algo = QuantAlgo.called(self.quant_algo)
        if self.kv_cache_quant_algo is not None:
            self.kv_cache_quant_algo = QuantAlgo.called(self.kv_cache_quant_algo)

    @property
    def quant_mode(self) -> QuantMode:
        """The flags of the algorithms."""
        return QuantMode.from_quant_algo(self.quant_algo, self.kv_cache_quant_algo)

    layer_quant_mode = quant_mode

    @property
    def requires_calibration(self) -> bool:
        """Whether data are needed to find the scales."""
        return self.quant_algo not in (None, QuantAlgo.W8A16, QuantAlgo.W4A16, QuantAlgo.NO_QUANT)

    def is_module_excluded_from_quantization(self, name: str) -> bool:
        """Whether a glob of `exclude_modules` has the name of a module."""
        globs = DEFAULT_EXCLUDE if self.exclude_modules is None else self.exclude_modules
        return any(fnmatchcase(name, glob) for glob in globs)

    def scheme(self) -> str | None:
        """The name of irc's quantization scheme, None where weights are not quantized."""
        if self.quant_algo is None:
            return None
        algo = _ALGOS[QuantAlgo.called(self.quant_algo)]
        if algo.reason:
            raise Error(f"{QuantAlgo.called(self.quant_algo).value}: {algo.reason}", loc=here())
        if algo.scheme == "w4a16" and self.has_zero_point:
            return "w4a16_asym"
        return algo.scheme or None

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> QuantConfig:
        """The `quantization` of a checkpoint's config.json; what irc does not use is left out."""
        return cls(**{name: table[name] for name in cls.__dataclass_fields__ if name in table})

    def to_dict(self) -> dict[str, Any]:
        """The fields as config.json has them."""
        return asdict(self)
