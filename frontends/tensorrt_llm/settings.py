"""The settings of settings.toml: `PluginConfig`, `BuildConfig` and flags; defaults by version."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

from ...errors import did_you_mean
from ...json_files import read_object
from .api import api, release, rows
from .api import fields as fields_of
from .context import current_session
from .dtypes import DataType, str_dtype
from .errors import ArgumentError, ScriptError

Use = Literal["honoured", "ignored", "refused", "fixed"]
_DTYPES = ("auto", "float16", "float32", "bfloat16", "int32", "fp8", "nvfp4", "disable")


@dataclass(frozen=True)
class Setting:
    """A row of settings.toml; `of` says whether it is of "plugin", "build" or "flag"."""

    name: str
    of: tuple[str, ...]
    takes: str
    use: Use
    why: str

    @property
    def words(self) -> tuple[str, ...]:
        """The values that a flag takes, if these are some words."""
        words = {"SWITCH": ("enable", "disable"), "DTYPE": _DTYPES}.get(self.takes)
        return words or (tuple(self.takes.split("|")) if "|" in self.takes else ())

    def checked(self, value: Any) -> Any:
        """`value` as an attribute has it: words become bools; an Error where it is none of them."""
        value = str_dtype(value) if isinstance(value, DataType) else value
        if self.takes in ("SWITCH", "DTYPE"):
            off, values = (False, (True,)) if self.takes == "SWITCH" else (None, self.words)
            value = {"enable": True, "disable": off}.get(value, value)
            if value not in (None, False, *values):
                expected = " or ".join(self.words)
                raise ArgumentError(f"{self.name} is {value!r}; expected {expected}")
        if self.use == "refused" and value:
            raise ScriptError(f"{self.name} is not supported; {self.why}")
        return value


def settings(of: str) -> dict[str, Setting]:
    """The settings of "plugin", "build" or "flag" by name."""
    return {name: row for name, row in _table().items() if of in row.of}


@cache
def _table() -> dict[str, Setting]:
    table = tomllib.loads((Path(__file__).parent / "settings.toml").read_text(encoding="utf-8"))
    return {
        name: Setting(name, tuple(of.split()), *row)
        for of, rows in table.items()
        for name, row in rows.items()
    }


def _off(of: str) -> dict[str, Any]:
    """Values that ask for nothing, as the session's release writes them."""
    kinds: dict[str, Any] = {"SWITCH": False, "-": False, "DTYPE": False if release() < 8 else None}
    if of == "plugin":
        kinds["INT"] = 0
    return {name: kinds.get(row.takes) for name, row in settings(of).items()}


@api("plugin.plugin.ContextFMHAType")
class ContextFMHAType(IntEnum):
    """How attention of prompts sums; backends choose their kernels."""

    disabled, enabled, enabled_with_fp32_acc = range(3)


# method -> the switches that it sets, where the name of the method does not say so
_NORMS = ("rmsnorm_quantization_plugin", "layernorm_quantization_plugin")
_TENSORS = ("quantize_per_token_plugin", "quantize_tensor_plugin")
_METHODS: dict[str, tuple[str, ...]] = {
    "enable_qk_half_accum": ("attention_qk_half_accumulation",),
    "enable_mmha_multi_block_mode": ("multi_block_mode",),
    "enable_xqa_optimization": ("enable_xqa",),
    "set_context_fmha": ("context_fmha_type",),
    "set_paged_context_fmha": ("use_paged_context_fmha",),
    "set_context_fmha_for_generation": ("use_context_fmha_for_generation",),
    "set_smooth_quant_plugins": ("smooth_quant_gemm_plugin", *_NORMS, *_TENSORS),
    "set_fp8_rowwise_quant_plugins": ("fp8_rowwise_gemm_plugin", *_NORMS, *_TENSORS),
    "set_qserve_plugins": ("qserve_gemm_plugin", *_NORMS, *_TENSORS),
}


class _Settings:
    """Attributes that are settings; an Error about other names."""

    _values: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in self._values:
            raise AttributeError(self._unknown(name))
        return self._values[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._values:
            raise ArgumentError(self._unknown(name))
        self._values[name] = value

    def _unknown(self, name: str) -> str:
        near = did_you_mean(name, self._values, "leave it out")
        return f"{type(self).__name__} has no setting {name!r}{near}"

    def update(self, **values: Any) -> None:
        """Set these; "enable" and "disable" of switches stand for True, and for False or None."""
        for name, value in values.items():
            setattr(self, name, value)

    def to_dict(self) -> dict[str, Any]:
        """All settings as config.json has them."""
        return dict(self._values)


class PluginConfig(_Settings):
    """The switches of plugins: attributes, `set_NAME(value)`, `enable_NAME()`.

    irc chooses kernels itself, so that most have no effect; settings.toml says what each does. A
    switch in no row is an Error. Inputs are packed, and caches paged, only where the script says
    so, whatever the default of its release.
    """

    def __init__(self, **fields: Any) -> None:
        vars(self)["_values"] = _off("plugin") | {"dtype": "float16"} | fields_of(_PATH) | fields
        self._values.update(dict.fromkeys(("remove_input_padding", "paged_kv_cache"), False))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") and name[1:] in settings("plugin"):
            return self._values[name[1:]]  # as it was set, "auto" too
        if name == "context_fmha_type":
            is_wide = self.context_fmha_fp32_acc or self.bert_context_fmha_fp32_acc
            return ContextFMHAType((1 + bool(is_wide)) if self.context_fmha else 0)
        value = super().__getattr__(name)
        return self._values["dtype"] if value == "auto" else value

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "context_fmha_type":
            self.context_fmha, self.context_fmha_fp32_acc = bool(value), int(value) == 2
            return
        if name == "dtype" and value in (None, False, "auto"):
            raise ArgumentError(f"dtype is {value!r}; expected that of the model")
        row = settings("plugin").get(name)
        if row is not None and row.use == "fixed" and value:
            current_session().note(f"{name} has no effect: {row.why}")
            return
        super().__setattr__(name, value if row is None else row.checked(value))

    def to_legacy_setting(self) -> None:
        """Every plugin and feature off."""
        off = {"SWITCH": False, "DTYPE": None}
        rows = [row for row in settings("plugin").values() if row.takes in off]
        self.update(**{row.name: off[row.takes] for row in rows if row.name != "dtype"})

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> PluginConfig:
        """A config with these switches."""
        plugins = cls()
        plugins.update(**config)
        return plugins


def _setter(method: str) -> Any:
    """`set_NAME(dtype)` or `enable_NAME()`, as the rows of api.toml have it."""
    switches = _METHODS.get(method, (method.partition("_")[2],))

    def call(self: Any, **fields: Any) -> Any:
        value = fields.pop("dtype", fields.pop("context_fmha_type", None) or True)
        for name in switches:
            row = settings("plugin").get(name)
            setattr(self, name, True if row is not None and row.takes == "SWITCH" else value)
        self.update(**fields)
        return self

    call.__name__, call.__qualname__ = method, f"PluginConfig.{method}"
    call.__doc__ = f"Set {', '.join(switches)}."
    return call


_PATH = "plugin.plugin.PluginConfig"
for _row in rows():
    _name = _row.removeprefix(f"{_PATH}.")
    if _name != _row and _name.startswith(("set_", "enable_")):
        setattr(PluginConfig, _name, _setter(_name))
api(_PATH)(PluginConfig)


@api("bindings.KVCacheType")
@api("llmapi.kv_cache_type.KVCacheType")
class KVCacheType(StrEnum):
    """How KV caches lie in memory; irc's are contiguous."""

    CONTINUOUS = "continuous"
    PAGED = "paged"
    DISABLED = "disabled"

    @classmethod
    def from_string(cls, text: str) -> KVCacheType:
        """The member of a name in any case."""
        if text.lower() not in [*cls]:
            near = did_you_mean(text, map(str, cls), f"expected {', '.join(cls)}")
            raise ArgumentError(f"no KV cache type is called {text!r}{near}")
        return cls(text.lower())


@api("models.modeling_utils.get_kv_cache_type_from_legacy")
def get_kv_cache_type_from_legacy(use_cache: bool, paged_kv_cache: bool) -> KVCacheType:
    """The kind of cache that two switches of older versions mean."""
    if not use_cache:
        return KVCacheType.DISABLED
    return KVCacheType.PAGED if paged_kv_cache else KVCacheType.CONTINUOUS


@api("builder.BuildConfig")
class BuildConfig(_Settings):
    """Limits of an engine, which become ranges of its dimensions, and switches, as attributes."""

    plugin_config: PluginConfig
    kv_cache_type: Any

    def __init__(self, **fields: Any) -> None:
        vars(self)["_values"] = {**_off("build"), "plugin_config": None}
        self.update(**{"plugin_config": None, **fields})

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "plugin_config" and not isinstance(value, PluginConfig):
            if value is not None and not isinstance(value, Mapping):
                expected = "expected a PluginConfig, or a table of switches"
                raise ArgumentError(f"plugin_config is {value!r}; {expected}")
            value = PluginConfig.from_dict(cast("Mapping[str, Any]", value or {}))
        if name == "kv_cache_type" and isinstance(value, str):
            value = KVCacheType.from_string(value)
        super().__setattr__(name, value)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], plugin_config: Any = None) -> BuildConfig:
        """The config of a table, such as that of a JSON file."""
        own = cls(**config)
        own.plugin_config = plugin_config or own.plugin_config
        return own

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "plugin_config": self.plugin_config.to_dict()}


@api("builder.EngineConfig")
@dataclass
class EngineConfig:
    """What the config.json in the folder of an engine says."""

    pretrained_config: Any
    build_config: Any
    version: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As config.json has it."""
        return {k: x.to_dict() if hasattr(x, "to_dict") else x for k, x in vars(self).items()}

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> EngineConfig:
        """The config of a table."""
        build = BuildConfig.from_dict(config.get("build_config") or {})
        return cls(config.get("pretrained_config") or {}, build, config.get("version", ""))

    @classmethod
    def from_json_file(cls, config_file: str | Path) -> EngineConfig:
        """The config of a file."""
        return cls.from_dict(read_object(Path(config_file)))
