"""`PretrainedConfig` and `LLaMAConfig`: sizes of a model and its mapping, as in config.json of a
checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from collections.abc import Mapping as Table
from copy import deepcopy
from importlib import import_module
from inspect import getattr_static
from pathlib import Path
from typing import Any

from ....errors import Error, did_you_mean
from ....json_files import read_object
from ...checkpoints.tensorrt_llm import FIXED, WITHOUT_MEANING
from ...models.config_reader import MOST_LAYERS
from ..api import ROOT, api, fields, release
from ..context import current_session
from ..dtypes import str_dtype
from ..enums import PositionEmbeddingType
from ..errors import ScriptError
from ..layers import MoeConfig
from ..mapping import Mapping
from ..quantization import QuantConfig, QuantMode
from .weights import read_llama, read_meta

_PATH, _LLAMA = "models.modeling_utils.PretrainedConfig", "models.llama.config.LLaMAConfig"
_NEEDED = ["architecture", "dtype", "hidden_size", "num_hidden_layers", "num_attention_heads"]
_LLAMAS = ["LlamaForCausalLM", "LLaMAForCausalLM", "MistralForCausalLM", "MixtralForCausalLM"]
_WORLD = ("world_size", "tp_size", "pp_size", "gpus_per_node")  # of a mapping, up to 0.10
# Keys by which other models compute something else, with the only values that LLaMA computes.
_FIXED = {**FIXED, "qk_layernorm": False, "sliding_window": None}


@api(_PATH)
class PretrainedConfig:
    """Sizes and options of a model; a script's own keys become attributes, with a note.

    Dtypes are names such as "float16". `head_size` is hidden_size / num_attention_heads by default,
    `intermediate_size` 4 * hidden_size, `num_key_value_heads` num_attention_heads. `mapping` may
    also be given as `world_size`, `tp_size` and `pp_size`.
    """

    def __init__(self, **keys: Any) -> None:
        self._fill(keys)

    def _fill(self, keys: dict[str, Any]) -> None:
        """Set the keys, and those that follow from them."""
        self._mode: QuantMode | None = keys.pop("quant_mode", None)
        world = {name: keys.pop(name) for name in _WORLD if keys.get(name) is not None}
        keys.pop("kv_dtype", None)  # which the quantization implies
        own = {name: value for name, value in keys.items() if name not in self._keys(every=True)}
        if own:
            current_session().note(
                f"{type(self).__name__} keeps {', '.join(own)} as attributes for the script's model"
            )
        given = {name: value for name, value in keys.items() if value is not None}
        for name, value in {**self._keys(), **vars(self), **own, **given}.items():
            setattr(self, name, value)
        for name in _NEEDED:
            if getattr(self, name) is None:
                raise ScriptError(f"expected the key {name} in the config, found none")
        layers: Any = self.num_hidden_layers
        if isinstance(layers, int) and layers > MOST_LAYERS:
            raise Error(f"num_hidden_layers is {layers}; expected at most {MOST_LAYERS}")
        self.dtype, self.logits_dtype = str_dtype(self.dtype), str_dtype(self.logits_dtype)
        kind: Any = self.position_embedding_type or PositionEmbeddingType.learned_absolute
        if isinstance(kind, str):
            kind = PositionEmbeddingType[str(PositionEmbeddingType.from_string(kind))]
        self.position_embedding_type = kind
        self.num_key_value_heads = self.num_key_value_heads or self.num_attention_heads
        self.intermediate_size = self.intermediate_size or 4 * self.hidden_size
        self.head_size = self.head_size or self.hidden_size // self.num_attention_heads
        share = float(getattr(self, "rotary_pct", None) or 1.0)
        rotary_dim = getattr(self, "rotary_dim", None) or int(self.head_size * share)
        self.rotary_embedding_dim = self.rotary_embedding_dim or rotary_dim
        mapping: Any = self.mapping or world
        algorithms: Any = self.quantization or {}
        self.mapping = mapping if isinstance(mapping, Mapping) else Mapping.from_dict(mapping)
        is_config = isinstance(algorithms, QuantConfig)
        self.quantization = algorithms if is_config else QuantConfig.from_dict(algorithms)

    @classmethod
    def _keys(cls, every: bool = False) -> dict[str, Any]:
        """The keys in the script's release, or in every one, with their defaults."""
        derived, initial = ("*", "**", "quant_mode", *_WORLD), fields(_PATH, every=True)
        return {name: initial[name] for name in fields(_PATH, every) if name not in derived}

    def __getattr__(self, name: str) -> Any:
        """The default of a key that only other releases have."""
        keys = self._keys(every=True)
        if name not in keys:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return keys[name]

    @property
    def quant_mode(self) -> QuantMode:
        """The flags of the quantization."""
        return self.quantization.quant_mode if self._mode is None else self._mode

    @property
    def quant_algo(self) -> Any:
        """The algorithm of the quantization, or None."""
        return self.quantization.quant_algo

    @property
    def kv_dtype(self) -> str:
        """The dtype of KV caches."""
        mode = self.quant_mode
        return (
            "int8" if mode.has_int8_kv_cache() else "fp8" if mode.has_fp8_kv_cache() else self.dtype
        )

    def get_quant_cfg(self, module_name: str) -> QuantConfig:
        """The quantization of a layer, the same for all."""
        return self.quantization

    def set_if_not_exist(self, key: str, value: Any) -> None:
        """Set an attribute, unless there is one of this name."""
        if not hasattr(self, key):
            setattr(self, key, value)

    def set_rank(self, rank: int) -> None:
        """Make this the config of another rank."""
        self.mapping = Mapping.from_dict({**self.mapping.to_dict(), "rank": rank})

    def for_each_rank(self) -> Iterator[Any]:
        """A copy of the config for every rank of the world."""
        for rank in range(self.mapping.world_size):
            config = deepcopy(self)
            config.set_rank(rank)
            yield config

    def has_config_group(self, group_cls: Any) -> bool:
        """Whether the config has every key of a group of keys."""
        return all(hasattr(self, key) for key in sorted(group_cls.keys()))

    def get_config_group(self, group_cls: Any) -> Any:
        """The keys of a group."""
        return group_cls(**{key: getattr(self, key) for key in sorted(group_cls.keys())})

    @classmethod
    def from_dict(cls, config: Table[str, Any]) -> Any:
        """The config of a dict; the class PretrainedConfig gives that of the architecture."""
        kind: Any = _class_of(config.get("architecture", "")) if cls is PretrainedConfig else cls
        optional = fields(_PATH) if release() < 11 else {}  # whose constructor needs all
        return kind(**{**optional, **config})

    @classmethod
    def from_json_file(cls, config_file: str | os.PathLike[str]) -> Any:
        """The config in a JSON file."""
        return cls.from_dict(read_object(Path(config_file)))

    @classmethod
    def from_checkpoint(cls, ckpt_dir: str | os.PathLike[str]) -> Any:
        """The config of a checkpoint folder."""
        return cls.from_json_file(Path(ckpt_dir) / "config.json")

    def to_dict(self) -> dict[str, Any]:
        """Every key as JSON has it."""
        keys = {name: deepcopy(value) for name, value in vars(self).items() if name != "_mode"}
        keys["position_embedding_type"] = str(self.position_embedding_type)
        keys["mapping"] = {k: v for k, v in self.mapping.to_dict().items() if k != "rank"}
        return keys | {"quantization": self.quantization.to_dict()}

    def to_json_file(self, config_file: str | os.PathLike[str]) -> None:
        """Write the config."""
        Path(config_file).write_text(json.dumps(self.to_dict(), indent=2) + "\n")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.architecture}, {self.num_hidden_layers} layers)"


@api(_LLAMA)
class LLaMAConfig(PretrainedConfig):
    """The sizes of LLaMA, Mistral, Mixtral and Qwen2. An unknown key is an Error."""

    attn_bias: bool
    dense_bias: bool | None

    def __init__(self, **keys: Any) -> None:
        names = ("num_experts", "top_k", "normalization_mode")
        experts = {name: keys.pop(f"moe_{name}", None) for name in names}
        moe = keys.pop("moe_config", None) or keys.pop("moe", None) or experts
        self._check(keys)
        if not isinstance(moe, MoeConfig):
            moe = MoeConfig(**{name: value for name, value in moe.items() if value is not None})
        self._fill({"architecture": _LLAMAS[0], **keys, "moe": moe.validate()})
        self.dense_bias = self.attn_bias if self.dense_bias is None else self.dense_bias
        self.attn_bias |= self.architecture in ("Qwen2ForCausalLM", "QWenForCausalLM")
        if self.position_embedding_type is PositionEmbeddingType.learned_absolute:
            self.position_embedding_type = PositionEmbeddingType.rope_gpt_neox
        if self.rotary_embedding_dim != self.head_size:
            raise ScriptError(
                f"LLaMAConfig: rotary_embedding_dim is {self.rotary_embedding_dim}; expected "
                f"{self.head_size}, the size of a head"
            )

    @classmethod
    def _keys(cls, every: bool = False) -> dict[str, Any]:
        constant = {name: value for name, value in _FIXED.items() if every and value is not None}
        own = {name: value for name, value in fields(_LLAMA, every).items() if "*" not in name}
        more = {"use_fused_mlp": False, "dense_bias": None}  # dense_bias: attn_bias by default
        return {**super()._keys(every), **constant, **own, **more}

    @classmethod
    def of(cls, config: PretrainedConfig) -> LLaMAConfig:
        """The config itself, or a LLaMAConfig of the keys of another class's."""
        if isinstance(config, cls):
            return config
        keys = {name: value for name, value in vars(config).items() if name != "_mode"}
        return cls(**keys, quant_mode=vars(config).get("_mode"))

    @classmethod
    def _check(cls, keys: Table[str, Any]) -> None:
        """An Error about keys that are unknown, or ask for what LLaMA does not compute."""
        names = {*cls._keys(every=True), *_WORLD, "quant_mode", "kv_dtype", *_FIXED}
        names |= WITHOUT_MEANING
        for key, value in keys.items():
            if key in _FIXED and value not in (None, _FIXED[key]):
                raise ScriptError(
                    f"LLaMAConfig: {key}={value!r}: expected {_FIXED[key]}, since "
                    "LLaMAForCausalLM computes without it; write a model of your own that reads "
                    "the key, or compile the Hugging Face folder with irc compile"
                )
            if key not in names:
                raise ScriptError(
                    f"LLaMAConfig has no key {key!r}{did_you_mean(key, sorted(names))}; a key of "
                    "your own model belongs into a subclass of PretrainedConfig or LLaMAConfig"
                )

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "moe": self.moe.to_dict()}

    @classmethod
    def from_hugging_face(
        cls, hf_config_or_dir: Any, dtype: Any = "auto", quant_config: Any = None, **keys: Any
    ) -> LLaMAConfig:
        """The config of a Hugging Face checkpoint folder."""
        own = {"quantization": quant_config, **keys}
        return cls(**read_llama(hf_config_or_dir, dtype) | own)

    @classmethod
    def from_meta_ckpt(
        cls,
        meta_ckpt_dir: str | os.PathLike[str],
        dtype: Any = "auto",
        quant_config: Any = None,
        **keys: Any,
    ) -> LLaMAConfig:
        """The config of a folder of Meta."""
        own = {"quantization": quant_config, **keys}
        return cls(**read_meta(meta_ckpt_dir, dtype) | own)


def _class_of(architecture: str) -> Any:
    """The class of the configs of an architecture, from the script's own copy of TensorRT-LLM if
    irc lacks the model."""
    if architecture in _LLAMAS:
        return LLaMAConfig
    models = import_module(f"{ROOT}.models") if current_session().sources else None
    model = getattr(models, architecture, PretrainedConfig)
    return getattr_static(model, "config_class", PretrainedConfig)
