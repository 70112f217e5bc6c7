"""`BuildConfig` and `EngineConfig`: what scripts ask of an engine, and what its folder says."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, cast

from ...errors import Error, did_you_mean
from ...json_files import read_object
from ...source import here
from .network import PluginConfig


class KVCacheType(StrEnum):
    """How KV caches lie in memory; irc's are contiguous."""

    CONTINUOUS = "continuous"
    PAGED = "paged"
    DISABLED = "disabled"

    @classmethod
    def from_string(cls, text: str) -> KVCacheType:
        """The member of a name in any case."""
        return cls(text.lower())


@dataclass
class BuildConfig:
    """Limits of an engine, which become ranges of its dimensions, and switches.

    `irc build --help` says of each which effect it has; fields of other names are an Error.
    """

    max_input_len: int = 1024
    max_seq_len: int | None = None
    opt_batch_size: int = 8
    max_batch_size: int = 2048
    max_beam_width: int = 1
    max_num_tokens: int = 8192
    opt_num_tokens: int | None = None
    max_prompt_embedding_table_size: int = 0
    kv_cache_type: KVCacheType | None = None
    gather_context_logits: bool = False
    gather_generation_logits: bool = False
    strongly_typed: bool = True
    force_num_profiles: int | None = None
    profiling_verbosity: str = "layer_names_only"
    enable_debug_output: bool = False
    max_draft_len: int = 0
    speculative_decoding_mode: Any = None
    use_refit: bool = False
    input_timing_cache: str | None = None
    output_timing_cache: str | None = "model.cache"
    lora_config: Any = None
    auto_parallel_config: Any = None
    weight_sparsity: bool = False
    weight_streaming: bool = False
    plugin_config: PluginConfig = field(default_factory=PluginConfig)
    use_strip_plan: bool = False
    max_encoder_input_len: int = 1024
    use_fused_mlp: bool = True
    dry_run: bool = False
    visualize_network: Any = None
    monitor_memory: bool = False
    use_mrope: bool = False

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], plugin_config: Any = None) -> BuildConfig:
        """The config of a table, such as that of a JSON file."""
        found = cls()
        found.update_from_dict(dict(config))
        if plugin_config is not None:
            found.plugin_config = plugin_config
        return found

    @classmethod
    def from_json_file(cls, config_file: Any, plugin_config: Any = None) -> BuildConfig:
        """The config of a JSON file."""
        return cls.from_dict(read_object(Path(config_file)), plugin_config)

    def update_from_dict(self, config: dict[str, Any]) -> None:
        """Set these fields."""
        known = [each.name for each in fields(self)]
        for name, given in config.items():
            value: Any = given
            if name not in known:
                near = did_you_mean(name, known)
                raise Error(f"BuildConfig has no field {name!r}{near}", loc=here())
            if name == "plugin_config" and isinstance(value, Mapping):
                value = PluginConfig.from_dict(cast("dict[str, Any]", value))
            if name == "kv_cache_type" and value is not None:
                value = KVCacheType.from_string(str(getattr(value, "value", value)))
            setattr(self, name, value)

    def update(self, **fields: Any) -> None:
        """Set these fields."""
        self.update_from_dict(fields)

    def to_dict(self) -> dict[str, Any]:
        """The fields as config.json has them."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        return {**found, "plugin_config": self.plugin_config.to_dict()}


@dataclass
class EngineConfig:
    """What the config.json in the folder of an engine says."""

    pretrained_config: Any
    build_config: Any
    version: str = "0.16.0"

    def to_dict(self) -> dict[str, Any]:
        """As config.json has it."""
        return {
            "version": self.version,
            "pretrained_config": _table(self.pretrained_config),
            "build_config": _table(self.build_config),
        }

    @classmethod
    def from_json_file(cls, path: str | os.PathLike[str]) -> EngineConfig:
        """The config of a file."""
        found = read_object(Path(path))
        build = BuildConfig.from_dict(found.get("build_config", {}))
        return cls(found.get("pretrained_config", {}), build, found.get("version", ""))


def _table(config: Any) -> Any:
    return config.to_dict() if hasattr(config, "to_dict") else config
