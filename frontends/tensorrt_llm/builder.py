"""`Builder` and `build`: from a network or a model to an engine of irc."""

from __future__ import annotations

import inspect
import json
import os
from copy import deepcopy
from pathlib import Path
from typing import Any

from ...json_files import read_object
from .aliases import WithoutEffect
from .api import RELEASES, api, fields, implemented, release
from .context import current_session
from .engines import Engine as Engine
from .engines import EngineBuffer, register
from .errors import ScriptError
from .network import Network, OptimizationProfile, net_guard
from .settings import BuildConfig as BuildConfig
from .settings import EngineConfig as EngineConfig
from .settings import KVCacheType as KVCacheType
from .settings import settings


class TensorrtConfig(WithoutEffect):
    """TensorRT's own config: what a script asks of it has no effect but optimization profiles."""

    def __init__(self) -> None:
        why = "irc has no builder of TensorRT in a script"
        super().__init__("trt_builder_config", why)
        self.profiles: list[OptimizationProfile] = []

    def add_optimization_profile(self, profile: OptimizationProfile) -> int:
        """Take the ranges of inputs without `dim_range`; returns the number of the profile."""
        self.profiles.append(profile)
        return len(self.profiles) - 1


@api("builder.BuilderConfig")
class BuilderConfig:
    """The fields that `create_builder_config` was called with, as attributes."""

    def __init__(self, **given: Any) -> None:
        self.plugin_config: Any = None
        self.trt_builder_config = TensorrtConfig()
        vars(self).update(given)

    def to_dict(self) -> dict[str, Any]:
        """As `save_config` writes it."""
        own = {name: value for name, value in vars(self).items() if name != "trt_builder_config"}
        plugins: Any = own.pop("plugin_config")
        return {"builder_config": own, "plugin_config": plugins.to_dict() if plugins else {}}

    to_legacy_dict = to_dict


@api("builder.Builder")
class Builder:
    """Makes networks, and engines of them."""

    strongly_typed = True

    @property
    def trt_builder(self) -> TensorrtBuilder:
        """TensorRT's own builder."""
        return TensorrtBuilder()

    def create_network(self) -> Network:
        """An empty network; its plugins are those of the script's version."""
        return Network()

    def create_builder_config(self, **fields: Any) -> BuilderConfig:
        """A config whose attributes are the arguments; operations compute in the dtypes of their
        tensors, whatever `precision` says."""
        return BuilderConfig(**fields)

    def build_engine(self, network: Network, builder_config: BuilderConfig) -> EngineBuffer:
        """Bytes that name the engine of this rank; its artifact is compiled with the last rank."""
        if not network.outputs:
            raise ScriptError(
                "expected a network with outputs, found none; call mark_output() on a tensor"
            )
        builder_config.plugin_config = network.plugin_config
        network.add_profiles(builder_config.trt_builder_config.profiles)
        return register(network, builder_config, str(getattr(builder_config, "name", "")))

    def refit_engine(self, network: Network, engine_buffer: bytes) -> EngineBuffer:
        """The engine of a network that differs from another one's by its weights: a new one."""
        return self.build_engine(network, BuilderConfig())

    @staticmethod
    def save_timing_cache(builder_config: BuilderConfig, out_path: Any) -> bool:
        """Without effect: irc keeps whole engines."""
        current_session().note("save_timing_cache has no effect: irc keeps whole engines")
        return True

    @staticmethod
    def save_config(builder_config: BuilderConfig, config_path: str | os.PathLike[str]) -> None:
        """Write the fields of the config, and the switches of plugins, as JSON."""
        path = Path(config_path)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(builder_config.to_dict(), indent=2, default=str)
        path.write_text(text, encoding="utf-8")


class TensorrtBuilder:
    """What scripts ask of TensorRT's own builder."""

    def create_optimization_profile(self) -> OptimizationProfile:
        """An empty profile."""
        return OptimizationProfile()

    def create_builder_config(self, **_: Any) -> TensorrtConfig:
        """A config whose flags have no effect."""
        return TensorrtConfig()

    def build_engine(
        self, network: Network, config: TensorrtConfig | BuilderConfig
    ) -> EngineBuffer:
        """Bytes that name the engine of this rank."""
        if isinstance(config, TensorrtConfig):
            config = BuilderConfig(trt_builder_config=config)
        return Builder().build_engine(network=network, builder_config=config)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ScriptError(
            f"{name} of TensorRT's builder is not supported; use tensorrt_llm.Builder"
        )


@api("builder.get_engine_version")
def get_engine_version(engine_dir: str | os.PathLike[str]) -> str | None:
    """The version of TensorRT-LLM in a folder's config.json; None before 0.7, which wrote none."""
    return read_object(Path(engine_dir) / "config.json").get("version")


@api("builder.build")
def build(model: Any, build_config: BuildConfig | None = None) -> Engine | None:
    """Trace a model of this rank with the inputs that the config asks for; None in a dry run.

    `save` of the last rank's engine compiles the artifact.
    """
    config = deepcopy(build_config) if build_config is not None else BuildConfig()
    if config.kv_cache_type is not KVCacheType.DISABLED:
        config.kv_cache_type = KVCacheType.CONTINUOUS
    config.plugin_config.dtype = getattr(model.config, "dtype", "float16")
    if config.max_seq_len is None:
        limit = getattr(model.config, "max_position_embeddings", None)
        config.max_seq_len = limit or config.max_input_len
    if config.max_output_len is not None:
        config.max_seq_len = config.max_input_len + config.max_output_len
    network = Network()
    network.plugin_config = config.plugin_config
    network.mapping = model.config.mapping
    for part in model.modules():  # biases come from the buckets, not from a precomputed table
        if getattr(part, "relative_attention", False) and not part.max_distance:
            part.max_distance = getattr(model.config, "max_distance", 0)
    with net_guard(network):
        network.set_named_parameters(model.named_parameters())
        inputs = model.prepare_inputs(**_input_options(model.prepare_inputs, config))
        _ = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
        if config.enable_debug_output:
            for name, tensor in model.named_network_outputs():
                tensor.mark_output(name)
    if config.dry_run:
        return None
    name = str(getattr(model.config, "architecture", type(model).__name__))
    facts = EngineConfig(model.config, config, RELEASES[release()])
    return Engine(facts, register(network, config, name, facts))


# The arguments of `prepare_inputs` by the fields that they come from, where the names differ.
_ARGUMENTS = {
    "max_prompt_embedding_table_size": ("prompt_embedding_table_size",),
    "max_seq_len": ("max_seq_len", "max_position_embeddings"),
    "max_output_len": ("max_new_tokens",),
    "max_input_len": ("max_input_len", "max_decoder_input_len"),
    "kv_cache_type": ("kv_cache_type", "use_cache"),
}
_HERE = ("enable_debug_output", "dry_run", "use_refit", "use_strip_plan", "weight_streaming")


def _input_options(prepare: Any, config: BuildConfig) -> dict[str, Any]:
    """The fields of a config that a model's `prepare_inputs` takes; an Error about others that ask
    for what it does not have."""
    taken = {*inspect.signature(prepare).parameters}
    if "limits" in taken:  # those of its row
        taken |= implemented("models.modeling_utils.PretrainedModel.prepare_inputs")
    options: dict[str, Any] = {}
    initial = fields("builder.BuildConfig")
    for name, row in settings("build").items():
        value = getattr(config, name)
        arguments = [arg for arg in _ARGUMENTS.get(name, (name,)) if arg in taken]
        options |= dict.fromkeys(arguments, value)
        if arguments or name in _HERE or row.use == "ignored" or not _asks(value):
            continue
        if row.use == "refused":
            raise ScriptError(f"BuildConfig: {name} is not supported; {row.why}")
        own = ("max_seq_len", "max_output_len", "kv_cache_type")  # which build() sets
        if value != initial.get(name) and name not in own:
            current_session().note(f"{name} has no effect: prepare_inputs does not take it")
    if "use_cache" in options:
        options["use_cache"] = config.kv_cache_type is not KVCacheType.DISABLED
    return options


_OFF: dict[str, Any] = {"lora_dir": [], "lora_target_modules": [], "world_size": 1}


def _asks(value: Any) -> bool:
    """Whether the value of a field asks for something."""
    if hasattr(value, "keys"):
        return any(value.get(name, off) not in (off, None) for name, off in _OFF.items())
    if names := [name for name in _OFF if hasattr(value, name)]:
        return any(getattr(value, name) not in (_OFF[name], None) for name in names)
    return value is True or str(value).lower() not in ("none", "false", "0", "1", "")
