"""`BuildConfig` and `EngineConfig`: what scripts ask of an engine, and what its folder says."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, cast

from ...errors import Error, did_you_mean
from ...json_files import read_object
from ...source import here
from .aliases import VERSIONS
from .errors import ArgumentError
from .network import PluginConfig


class KVCacheType(StrEnum):
    """How KV caches lie in memory; irc's are contiguous."""

    CONTINUOUS = "continuous"
    PAGED = "paged"
    DISABLED = "disabled"

    @classmethod
    def from_string(cls, text: str) -> KVCacheType:
        """The member of a name in any case."""
        if text.lower() not in [*cls]:
            near = did_you_mean(text, cls, f"expected {', '.join(cls)}")
            raise ArgumentError(f"no KV cache type is called {text!r}{near}", loc=here())
        return cls(text.lower())


_FIELDS: Mapping[str, Any] = {
    "max_input_len": 1024,
    "max_seq_len": None,
    "opt_batch_size": 8,
    "max_batch_size": 2048,
    "max_beam_width": 1,
    "max_num_tokens": 8192,
    "opt_num_tokens": None,
    "max_prompt_embedding_table_size": 0,
    "max_encoder_input_len": 1024,
    "max_draft_len": 0,
    "kv_cache_type": None,
    "gather_context_logits": False,
    "gather_generation_logits": False,
    "enable_debug_output": False,
    "use_refit": False,
    "use_strip_plan": False,
    "use_fused_mlp": True,
    "use_mrope": False,
    "weight_streaming": False,
    "dry_run": False,
}
# Accepted without effect, None by default; `irc build --help` says why.
_UNUSED = """
    auto_parallel_config force_num_profiles input_timing_cache lora_config monitor_memory
    output_timing_cache profiling_verbosity speculative_decoding_mode strongly_typed
    visualize_network weight_sparsity
"""


class BuildConfig:
    """Limits of an engine, which become ranges of its dimensions, and switches, as attributes."""

    def __init__(self, **given: Any) -> None:
        self.plugin_config = PluginConfig()
        vars(self).update({**_FIELDS, **dict.fromkeys(_UNUSED.split())})
        self.update(**given)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"BuildConfig has no field {name!r}{did_you_mean(name, vars(self))}")

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], plugin_config: Any = None) -> BuildConfig:
        """The config of a table, such as that of a JSON file."""
        found = cls(**config)
        found.plugin_config = plugin_config or found.plugin_config
        return found

    @classmethod
    def from_json_file(cls, config_file: Any, plugin_config: Any = None) -> BuildConfig:
        """The config of a JSON file."""
        return cls.from_dict(read_object(Path(config_file)), plugin_config)

    def update(self, **given: Any) -> None:
        """Set these fields."""
        for name in given:
            if name not in vars(self):
                near = did_you_mean(name, vars(self))
                raise Error(f"BuildConfig has no field {name!r}{near}", loc=here())
        plugins: Any = given.get("plugin_config", self.plugin_config)
        if plugins is None or isinstance(plugins, Mapping):
            given["plugin_config"] = PluginConfig.from_dict(cast("Any", plugins) or {})
        elif not isinstance(plugins, PluginConfig):
            raise Error(
                f"plugin_config is {plugins!r}; expected a PluginConfig, or a table of switches",
                loc=here(),
            )
        if isinstance(kind := given.get("kv_cache_type"), str):
            given["kv_cache_type"] = KVCacheType.from_string(kind)
        vars(self).update(given)

    def update_from_dict(self, config: Mapping[str, Any]) -> None:
        """Set these fields."""
        self.update(**config)

    def to_dict(self) -> dict[str, Any]:
        """The fields as config.json has them."""
        return {**vars(self), "plugin_config": self.plugin_config.to_dict()}


@dataclass
class EngineConfig:
    """What the config.json in the folder of an engine says."""

    pretrained_config: Any
    build_config: Any
    version: str = VERSIONS["B"]

    def to_dict(self) -> dict[str, Any]:
        """As config.json has it."""
        return {k: x.to_dict() if hasattr(x, "to_dict") else x for k, x in vars(self).items()}

    @classmethod
    def from_json_file(cls, path: str | os.PathLike[str]) -> EngineConfig:
        """The config of a file."""
        found = read_object(Path(path))
        build = BuildConfig.from_dict(found.get("build_config", {}))
        return cls(found.get("pretrained_config", {}), build, found.get("version", ""))
