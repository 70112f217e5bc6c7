"""`PretrainedConfig` and `LLaMAConfig`: sizes of a model and its mapping, as in config.json of a
checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from collections.abc import Mapping as Table
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

from ....errors import Error, did_you_mean
from ....json_files import read_object
from ....source import here
from ..api import api, fields, release
from ..context import current_session
from ..dtypes import str_dtype
from ..enums import PositionEmbeddingType
from ..layers import MoeConfig
from ..mapping import Mapping
from ..quantization import QuantConfig, QuantMode

_PATH = "models.modeling_utils.PretrainedConfig"
_NEEDED = ["architecture", "dtype", "hidden_size", "num_hidden_layers", "num_attention_heads"]
_LLAMAS = ["LlamaForCausalLM", "LLaMAForCausalLM", "MistralForCausalLM", "MixtralForCausalLM"]
_WORLD = ("world_size", "tp_size", "pp_size", "gpus_per_node")  # of a mapping, up to 0.10
# Keys and values that are not written.
_UNWRITTEN: list[Any] = [
    ("max_lora_rank", 64),
    ("quant_kwargs", None),
    ("runtime_defaults", None),
    ("use_prompt_tuning", False),
]
# Keys of a LLaMA's config.json that say nothing about what the model computes.
_WITHOUT_MEANING = """
    auto_map builder_name decoder has_partial_lora_mask is_pruned max_beam_width model_type
    moe_tp_mode producer qwen_type rank rmsnorm seq_length tie_word_embeddings tokenizer_dir
"""
# Keys by which other models compute something else, with the values at which LLaMA is right.
_NEUTRAL: Table[str, tuple[Any, ...]] = {
    "attn_logit_softcapping": (None, 0),
    "clip_qkv": (None,),
    "dense_context_fmha": (False,),
    "enable_pos_shift": (False,),
    "final_logit_softcapping": (None, 0),
    "qk_layernorm": (False,),
    "query_pre_attn_scalar": (None,),
    "rotary_pct": (None, 1),
    "sliding_window": (None,),
    "use_logn_attn": (False,),
    "use_parallel_residual": (False,),
    "use_sliding_window": (False,),
}


@api(_PATH)
class PretrainedConfig:
    """Sizes and options of a model; a script's own keys become attributes, with a note.

    Dtypes are names such as "float16". `head_size` is hidden_size / num_attention_heads by default,
    `intermediate_size` 4 * hidden_size, `num_key_value_heads` num_attention_heads. `mapping` may
    also be given as `world_size`, `tp_size` and `pp_size`.
    """

    architecture: str = ""
    dtype: str = "float32"
    hidden_size: int = 0
    num_hidden_layers: int = 0
    num_attention_heads: int = 0
    vocab_size: int | None = None
    hidden_act: str = "gelu"
    logits_dtype: str = "float32"
    norm_epsilon: float = 1e-5
    position_embedding_type: PositionEmbeddingType = PositionEmbeddingType.learned_absolute
    max_position_embeddings: int | None = None
    rotary_embedding_dim: int = 0
    num_key_value_heads: int = 0
    intermediate_size: int = 0
    mapping: Mapping
    quantization: QuantConfig
    use_parallel_embedding: bool = False
    embedding_sharding_dim: int = 0
    share_embedding_table: bool = False
    head_size: int = 0
    qk_layernorm: bool = False
    quant_kwargs: Any = None
    use_prompt_tuning: bool = False
    max_lora_rank: int = 64
    runtime_defaults: Any = None

    def __init__(self, **keys: Any) -> None:
        self._fill(keys)

    def _fill(self, keys: dict[str, Any]) -> None:
        """Set the keys, and those that follow from them."""
        self._mode: QuantMode | None = keys.pop("quant_mode", None)
        world = {name: keys.pop(name) for name in _WORLD if keys.get(name) is not None}
        keys.pop("kv_dtype", None)  # which the quantization implies
        names = self._names()
        for name, value in keys.items():
            if value is not None or name not in names:
                setattr(self, name, value)
        if own := [name for name in keys if name not in names]:
            current_session().note(
                f"{type(self).__name__} keeps {', '.join(own)} as attributes for the script's model"
            )
        self.dtype, self.logits_dtype = str_dtype(self.dtype), str_dtype(self.logits_dtype)
        kind: Any = self.position_embedding_type
        if isinstance(kind, str):
            kind = PositionEmbeddingType[str(PositionEmbeddingType.from_string(kind))]
            self.position_embedding_type = kind
        heads = self.num_attention_heads
        self.num_key_value_heads = self.num_key_value_heads or heads
        self.intermediate_size = self.intermediate_size or 4 * self.hidden_size
        self.head_size = self.head_size or self.hidden_size // max(1, heads)
        share = float(getattr(self, "rotary_pct", None) or 1.0)
        rotary_dim = getattr(self, "rotary_dim", None) or int(self.head_size * share)
        self.rotary_embedding_dim = self.rotary_embedding_dim or rotary_dim
        mapping: Any = vars(self).get("mapping") or world
        self.mapping = mapping if isinstance(mapping, Mapping) else Mapping.from_dict(mapping)
        algorithms: Any = vars(self).get("quantization") or {}
        if not isinstance(algorithms, QuantConfig):
            algorithms = QuantConfig.from_dict(algorithms)
        self.quantization = algorithms

    @classmethod
    def _names(cls) -> list[str]:
        """The keys of the class."""
        return [name for each in cls.__mro__ for name in vars(each).get("__annotations__", ())]

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
        """Whether the config has every key of a group, such as Gemma2ConfigGroup."""
        return all(hasattr(self, key) for key in sorted(group_cls.keys()))

    def get_config_group(self, group_cls: Any) -> Any:
        """The keys of a group."""
        return group_cls(**{key: getattr(self, key) for key in sorted(group_cls.keys())})

    @classmethod
    def from_dict(cls, config: Table[str, Any]) -> Any:
        """The config of a dict, a LLaMAConfig for the architectures of LLaMA; an Error names a size
        that is missing."""
        for name in _NEEDED:
            if name not in config:
                raise Error(f"expected the key {name} in the config, found none", loc=here())
        if cls is PretrainedConfig and config["architecture"] in _LLAMAS:
            return LLaMAConfig(**config)
        optional = fields(_PATH) if release() < 11 else {}  # whose constructor needs all
        return cls(**{**optional, **config})

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
        names = dict.fromkeys([*self._names(), *vars(self)])
        keys = {name: deepcopy(getattr(self, name)) for name in names if name != "_mode"}
        keys["position_embedding_type"] = str(self.position_embedding_type)
        keys["mapping"] = {k: v for k, v in self.mapping.to_dict().items() if k != "rank"}
        keys["quantization"] = self.quantization.to_dict()
        return {n: value for n, value in keys.items() if (n, value) not in _UNWRITTEN}

    def to_json_file(self, config_file: str | os.PathLike[str]) -> None:
        """Write the config."""
        Path(config_file).write_text(json.dumps(self.to_dict(), indent=2) + "\n")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.architecture}, {self.num_hidden_layers} layers)"


@api("models.llama.config.LLaMAConfig")
class LLaMAConfig(PretrainedConfig):
    """The sizes of LLaMA, Mistral, Mixtral and Qwen2. An unknown key is an Error.

    Hidden states are `embedding_multiplier` times the table's rows, and grow by
    `residual_multiplier` times the results of attention and MLP; scores are times
    `attention_multiplier`, logits times `output_multiplier_scale`. `residual_mlp` adds a second MLP
    to each layer, `fc_after_embed` a layer that reads hidden_states_for_embed besides.
    """

    mlp_bias: bool = False
    attn_bias: bool = False
    dense_bias: bool | None = None
    rotary_base: float = 10000.0
    rotary_scaling: dict[str, Any] | None = None
    residual_mlp: bool = False
    moe: MoeConfig
    use_fused_mlp: bool = False
    remove_duplicated_kv_heads: bool = False
    disable_weight_only_quant_plugin: bool = False
    fc_after_embed: bool = False
    use_input_layernorm_in_first_layer: bool = True
    use_last_layernorm: bool = True
    layer_idx_offset: int = 0
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    output_multiplier_scale: float = 1.0

    def __init__(self, **keys: Any) -> None:
        experts = {name: keys.pop(f"moe_{name}", None) for name in ("num_experts", "top_k")}
        experts["normalization_mode"] = keys.pop("moe_normalization_mode", None)
        given: Any = keys.pop("moe_config", None) or keys.get("moe")
        self._check(keys)
        if given is None:
            given = MoeConfig(**{name: value for name, value in experts.items() if value})
        if isinstance(given, dict):
            given = MoeConfig.from_dict(cast("Any", given))
        moe: MoeConfig = given
        keys.setdefault("architecture", "LlamaForCausalLM")
        keys.setdefault("position_embedding_type", "rope_gpt_neox")
        self._fill({**keys, "moe": moe.validate()})
        if self.position_embedding_type is PositionEmbeddingType.learned_absolute:
            self.position_embedding_type = PositionEmbeddingType.rope_gpt_neox
        if self.rotary_embedding_dim != self.head_size:
            raise Error(
                f"LLaMAConfig: rotary_embedding_dim is {self.rotary_embedding_dim}; expected "
                f"{self.head_size}, the size of a head",
                loc=here(),
            )
        self.dense_bias = self.attn_bias if self.dense_bias is None else self.dense_bias
        if self.architecture in ("Qwen2ForCausalLM", "QWenForCausalLM"):
            self.attn_bias = True

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
        known = [*cls._names(), *_WORLD, "quant_mode", "kv_dtype", *_WITHOUT_MEANING.split()]
        for key, value in keys.items():
            if key in _NEUTRAL and value not in _NEUTRAL[key]:
                raise Error(
                    f"LLaMAConfig: {key}={value!r}: expected {_NEUTRAL[key][0]}, since "
                    "LLaMAForCausalLM computes without it; write a model of your own that reads "
                    "the key, or compile the Hugging Face folder with irc compile",
                    loc=here(),
                )
            if key not in known and key not in _NEUTRAL:
                raise Error(
                    f"LLaMAConfig has no key {key!r}{did_you_mean(key, known)}; a key of your own "
                    "model belongs into a subclass of PretrainedConfig or LLaMAConfig",
                    loc=here(),
                )

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "moe": self.moe.to_dict()}

    @classmethod
    def from_hugging_face(
        cls,
        hf_config_or_dir: Any,
        dtype: Any = "auto",
        mapping: Mapping | None = None,
        quant_config: Any = None,
        **keys: Any,
    ) -> LLaMAConfig:
        """The config of a Hugging Face checkpoint folder."""
        from .weights import read_llama

        sizes: dict[str, Any] = {"mapping": mapping, "quantization": quant_config, **keys}
        return cls(**read_llama(hf_config_or_dir, dtype) | sizes)

    @classmethod
    def from_meta_ckpt(
        cls,
        meta_ckpt_dir: str | os.PathLike[str],
        dtype: Any = "auto",
        mapping: Mapping | None = None,
        quant_config: Any = None,
        **keys: Any,
    ) -> LLaMAConfig:
        """The config of a folder of Meta."""
        from .weights import read_meta

        sizes: dict[str, Any] = {"mapping": mapping, "quantization": quant_config, **keys}
        return cls(**read_meta(meta_ckpt_dir, dtype) | sizes)
