"""TensorRT-LLM checkpoint folders: config.json and rank0.safetensors, rank1.safetensors, ...

A folder holds weights sharded for its own mapping. They are joined to references of the complete
weights, in the model of irc that config.json describes, which then runs on any mesh.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ...errors import Error, did_you_mean
from ...ir.core import Module
from ...quantization.schemes import scheme_called
from ..huggingface.binding import bind_tensors
from ..huggingface.config import Model, compute_dtype, is_of_tensorrt_llm, model_of, read_config
from ..huggingface.quantized import Method
from ..huggingface.quantized.modelopt import ModelOpt
from ..huggingface.quantized.parts import FLOATS
from ..models.config_reader import MOST_LAYERS, ConfigReader
from ..models.family import Dims
from .mixed_gemm import is_interleaved
from .ranks import PLACES, JoinedTensors, Layout, Ranks, WeightOnly

_UNREAD = (
    *("*.rotary_inv_freq", "*.embed_positions*", "*.kv_orig_quant_scale", "*.kv_quant_orig_*"),
    "*_cache*_scaling_factor",  # of KV caches, which stay in the compute dtype here
)
_INTERLEAVED = ("W4A16", "W4A16_GPTQ", "W8A16_GPTQ")  # always
_BITS = {"W8A16": 8, "W4A16": 4}  # of weight-only codes


def load(
    folder: str | os.PathLike[str],
    dtype: str | None = None,
    dims: Dims | None = None,
    ignore: Sequence[str] = (),
) -> Module:
    """The model of a folder, whose weights refer to complete tensors, joined from all ranks.

    `dtype` is the compute dtype, by default that of config.json; `dims` replaces ranges of symbols;
    `ignore` names keys of config.json that do not matter, and patterns of tensors without use. An
    Error lists the tensors that are missing, unused or of a wrong shape.
    """
    config = read_config(folder)
    _scheme(config)  # an Error where there is none
    ranks = Ranks(Path(folder), layout_of(config))
    model = transformers_model(config, "lm_head.weight" not in ranks, ignore)
    module = model.trace(compute_dtype(config, dtype), dims)
    _check_order(ranks, config)
    method: Method | None = None
    if (algorithm := _algorithm(config)) and _is_scaled(ranks):
        keys = {"quant_algo": algorithm, "clamp_val": [*_quantization(config).numbers("clamp_val")]}
        reader = ConfigReader(keys, "config.json: quantization")
        method = WeightOnly() if ranks.layout.bits else ModelOpt(reader)
    unread = (*_UNREAD, *ignore)
    try:
        bind_tensors(module, JoinedTensors(ranks), ranks.paths, method, {}, unread)
    except Error as error:
        error.add_note(f"the ranks have {_names_of_ranks()}")
        raise
    _note_quantization(ranks, config, method is not None)
    return module


def scheme_of_floats(folder: str | os.PathLike[str]) -> str:
    """The scheme of a folder whose float weights are to be quantized, "" for any other."""
    config = read_config(folder)
    if _algorithm(config) not in _BITS or not is_of_tensorrt_llm(config):
        return ""
    return "" if _is_scaled(Ranks(Path(folder), layout_of(config))) else _scheme(config)


def trace(config: dict[str, Any], dtype: str | None = None, ignore: Sequence[str] = ()) -> Module:
    """The model of a config.json, its weights unbound."""
    model = transformers_model(config, bool(config.get("tie_word_embeddings")), ignore)
    return model.trace(compute_dtype(config, dtype))


def is_unread(key: str) -> bool:
    """Whether models need no tensor of this name."""
    return any(fnmatchcase(key, pattern) for pattern in _UNREAD)


def _quantization(config: Mapping[str, Any]) -> ConfigReader:
    """The section `quantization` of a config.json."""
    return ConfigReader(ConfigReader(config).inner("quantization"), "config.json: quantization")


def _algorithm(config: Mapping[str, Any]) -> str:
    """TensorRT-LLM's name of the quantization of weights, "" where there is none."""
    name = _quantization(config).word("quant_algo", "").upper()
    return "" if name == "NO_QUANT" else name


def _scheme(config: Mapping[str, Any]) -> str:
    """irc's name of that quantization; an Error where irc knows no such algorithm."""
    algorithm, has_zero = _algorithm(config), _quantization(config).flag("has_zero_point")
    name = scheme_called(algorithm).name if algorithm else ""
    return "w4a16_asym" if name == "w4a16" and has_zero else name


def _is_scaled(ranks: Ranks) -> bool:
    """Whether layers have codes and scales."""
    return any(key.endswith(".weight_scale") for key in ranks)


def _check_order(ranks: Ranks, config: Mapping[str, Any]) -> None:
    """An Error where codes are in the order of a kernel of one kind of GPU."""
    algorithm, is_checked = _algorithm(config), False
    for key, whole in ranks.wholes.items():
        if not key.endswith(".weight_scale"):
            continue
        rows = whole.end == "per_channel_scale" and algorithm != "FP8_PER_CHANNEL_PER_TOKEN"
        codes = whole.ranks[0].info(f"{whole.owner}.weight")
        if whole.bits and codes.dtype == "i8" and len(codes.shape) == 2:
            stored = None if is_checked else whole.ranks[0].read(f"{whole.owner}.weight")
            is_checked = True
            if stored is None or not is_interleaved(stored, whole.bits):
                continue
        if rows or algorithm in _INTERLEAVED or codes.dtype in FLOATS:
            raise Error(
                f"{whole.owner}.weight is {codes.dtype}{[*codes.shape]}: codes of {algorithm} in "
                "the order that the GEMM plugin of one kind of GPU reads, which the checkpoint "
                "does not name. Convert the original checkpoint without quantization, or compile "
                f"it as it is, and give irc --quantize {_scheme(config)}"
            )


def _names_of_ranks() -> str:
    """The names of transformers by those of the ranks, where these differ."""
    return ", ".join(f"{' and '.join(n)} in {own}" for own, (n, _) in PLACES.items() if n != (own,))


def _note_quantization(ranks: Ranks, config: Mapping[str, Any], has_layers: bool) -> None:
    """Warn where config.json asks for a quantization that this module does not have."""
    if not has_layers and (scheme := _scheme(config)):
        warnings.warn(
            f"config.json has quant_algo={_algorithm(config)}, but the weights in {ranks.folder} "
            f"are floats; give --quantize {scheme} to quantize them",
            stacklevel=4,
        )
    if cache := _quantization(config).word("kv_cache_quant_algo", ""):
        warnings.warn(
            f"{ranks.folder}: config.json has kv_cache_quant_algo={cache}; the caches stay in the "
            "compute dtype. --kv-cache quantizes them with scales of a calibration",
            stacklevel=4,
        )


# -- config.json

# architecture -> (model_type, architecture) of transformers
ARCHITECTURES = {
    "LlamaForCausalLM": ("llama", "LlamaForCausalLM"),
    "LLaMAForCausalLM": ("llama", "LlamaForCausalLM"),
    "MistralForCausalLM": ("mistral", "MistralForCausalLM"),
    "MixtralForCausalLM": ("mixtral", "MixtralForCausalLM"),
    "QWenForCausalLM": ("qwen2", "Qwen2ForCausalLM"),
    "Qwen2ForCausalLM": ("qwen2", "Qwen2ForCausalLM"),
    "Qwen3ForCausalLM": ("qwen3", "Qwen3ForCausalLM"),
}
_ACTS = {"swiglu": "silu", "geglu": "gelu"}  # gated activations by the function that they apply
# Keys that say nothing about what the model computes, or that the layout of the tensors answers.
_WITHOUT_MEANING = """
    architecture attn_bias auto_map builder_name decoder disable_weight_only_quant_plugin dtype
    embedding_sharding_dim gpus_per_node has_partial_lora_mask is_pruned kv_dtype logits_dtype
    mapping max_beam_width max_lora_rank model_type moe_normalization_mode moe_tp_mode producer
    quantization qwen_type rank remove_duplicated_kv_heads rmsnorm runtime_defaults seq_length
    share_embedding_table tie_word_embeddings tokenizer_dir use_fused_mlp use_parallel_embedding
    use_prompt_tuning world_size
"""
WITHOUT_MEANING = frozenset(_WITHOUT_MEANING.split())
# Keys that LLaMA variants set to other values, which irc does not compute.
FIXED: Mapping[str, object] = {
    "attention_multiplier": 1.0,
    "attn_logit_softcapping": None,
    "clip_qkv": None,
    "dense_context_fmha": False,
    "embedding_multiplier": 1.0,
    "enable_pos_shift": False,
    "fc_after_embed": False,
    "final_logit_softcapping": None,
    "layer_idx_offset": 0,
    "moe_intermediate_size": 0,
    "moe_shared_expert_intermediate_size": 0,
    "num_labels": 1,
    "output_multiplier_scale": 1.0,
    "query_pre_attn_scalar": None,
    "residual_mlp": False,
    "residual_multiplier": 1.0,
    "rotary_pct": 1.0,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_logn_attn": False,
    "use_parallel_residual": False,
    "use_sliding_window": False,
}


def layout_of(config: Mapping[str, Any]) -> Layout:
    """The section `mapping`, the heads of a rank, and the sharding of the embedding."""
    reader = ConfigReader(config)
    mapping = ConfigReader(reader.inner("mapping"), "config.json: mapping")
    tp, pp = mapping.integer("tp_size", 1), mapping.integer("pp_size", 1)
    cp, world = mapping.integer("cp_size", 1), mapping.integer("world_size", tp * pp)
    if min(tp, pp, cp) < 1 or world not in (tp * pp * cp, tp * pp):
        raise Error(
            f"config.json: mapping has world_size={world}, but tp_size x pp_size x cp_size is "
            f"{tp} x {pp} x {cp}; correct it"
        )
    experts = max(1, mapping.integer("moe_ep_size", 1))
    if tp % experts:
        raise mapping.error("moe_ep_size", f"it does not divide tp_size={tp}")
    heads = reader.integer("num_attention_heads")
    keys = reader.integer("num_key_value_heads", heads)
    if min(heads, keys) < 1 or heads % tp or (keys % tp and tp % keys):
        raise Error(
            f"config.json: tp_size={tp} does not fit {heads} heads with {keys} key and value "
            "heads; TensorRT-LLM stores padding there, so convert with another tp_size, and give "
            "irc the mesh that you want"
        )
    own = max(1, keys // tp)
    dim = reader.integer("embedding_sharding_dim", 0)
    if dim not in (0, 1):
        raise reader.error("embedding_sharding_dim", "expected 0 (rows) or 1 (columns)")
    algorithm = _algorithm(config)
    return Layout(
        tp,
        pp,
        reader.integer("num_hidden_layers", most=MOST_LAYERS),
        reader.integer("vocab_size"),
        qkv=(heads // tp, own, own),
        step=max(1, tp // keys),
        moe_ep=experts,
        table_dim=dim if reader.flag("use_parallel_embedding") else None,
        packed="AWQ" in algorithm,
        bits=_BITS.get(algorithm, 0),
    )


def transformers_model(
    config: Mapping[str, Any], tied: bool = False, ignore: Sequence[str] = ()
) -> Model:
    """The model of irc that a config describes; an Error names every key that irc cannot honour.

    `tied`: the head of the language model is the embedding table.
    """
    reader = ConfigReader(config)
    name = reader.word("architecture")
    if name == "QWenForCausalLM" and reader.word("qwen_type", "qwen2") != "qwen2":
        raise reader.error("qwen_type", "irc has the architecture of qwen2 and qwen3")
    if name not in ARCHITECTURES:
        near = did_you_mean(name, ARCHITECTURES, "trace the script that defines the model")
        raise reader.error("architecture", f"irc reads {', '.join(ARCHITECTURES)}{near}")
    model_type, architecture = ARCHITECTURES[name]
    keys: dict[str, Any] = {"model_type": model_type, "architectures": [architecture]}
    keys |= _sizes(reader) | {"tie_word_embeddings": tied} | _own(reader, model_type)
    for key, wanted in FIXED.items():
        if config.get(key, wanted) not in (wanted, None) and key not in ignore:
            how = "without it" if wanted is None else f"with {wanted!r} only"
            raise reader.error(key, f"irc computes {architecture} {how}")
    done = {*WITHOUT_MEANING, *FIXED, *ignore}
    reader.finish(f"a checkpoint of {name}", done)
    return model_of(keys, ignore)


def _sizes(reader: ConfigReader) -> dict[str, Any]:
    """The keys that all families have, in the names of transformers."""
    heads, hidden = reader.integer("num_attention_heads"), reader.integer("hidden_size")
    size = reader.integer("head_size", hidden // max(1, heads))
    kind = reader.word("position_embedding_type", "rope_gpt_neox")
    if kind not in ("rope_gpt_neox", "long_rope", "yarn"):
        raise reader.error("position_embedding_type", "irc's families have rope_gpt_neox")
    if (rotary := reader.integer("rotary_embedding_dim", size)) != size:
        raise reader.error("rotary_embedding_dim", f"expected {size}, the size of a head: {rotary}")
    act = reader.word("hidden_act")
    return {
        "vocab_size": reader.integer("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": reader.integer("intermediate_size", 4 * hidden),
        "num_hidden_layers": reader.integer("num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": reader.integer("num_key_value_heads", heads),
        "head_dim": size,
        "hidden_act": _ACTS.get(act, act),
        "max_position_embeddings": reader.integer("max_position_embeddings", 2048),
        "rms_norm_eps": reader.number("norm_epsilon", 1e-5),
        "rope_theta": reader.number("rotary_base", 10000.0),
        "rope_scaling": reader.inner("rotary_scaling") or None,
    }


def _own(reader: ConfigReader, model_type: str) -> dict[str, Any]:
    """The keys of one family; an Error about those that it does not have."""
    moe = reader.inner("moe")
    experts = moe.get("num_experts") or reader.integer("moe_num_experts", 0)
    chosen = moe.get("top_k") or reader.integer("moe_top_k", 0)
    bias, mlp_bias = reader.flag("attn_bias"), reader.flag("mlp_bias")
    norm, window = reader.flag("qk_layernorm"), reader.integer("sliding_window", None)
    keys: dict[str, Any] = {"sliding_window": window}
    if model_type == "llama":
        keys = {"attention_bias": bias, "mlp_bias": mlp_bias}
    if model_type == "mixtral":
        keys |= {"num_local_experts": experts or 8, "num_experts_per_tok": chosen or 2}
    normalized = moe.get("normalization_mode", 1) in (1, None)  # the chosen experts' weights
    unsupported = {
        "moe": experts and (model_type != "mixtral" or not normalized),
        "qk_layernorm": norm and model_type != "qwen3",
        "mlp_bias": mlp_bias and model_type != "llama",
        "attn_bias": bias and model_type in ("mistral", "mixtral"),
    }
    for key, is_set in unsupported.items():
        if is_set:
            raise reader.error(key, f"irc's {model_type} has no such layer")
    return {} if model_type.startswith("qwen") else keys
