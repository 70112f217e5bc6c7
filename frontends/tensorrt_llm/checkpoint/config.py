"""config.json of a TensorRT-LLM checkpoint folder: the model of irc, and how ranks hold it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ....errors import Error, did_you_mean
from ...huggingface.config import Model, model_of
from ...models.config_reader import ConfigReader

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
    architecture attn_bias auto_map decoder disable_weight_only_quant_plugin dtype
    embedding_sharding_dim gpus_per_node has_partial_lora_mask is_pruned kv_dtype logits_dtype
    mapping max_beam_width model_type moe_normalization_mode moe_tp_mode producer quantization
    qwen_type rank remove_duplicated_kv_heads rmsnorm runtime_defaults seq_length
    share_embedding_table tie_word_embeddings tokenizer_dir use_fused_mlp use_parallel_embedding
    use_prompt_tuning world_size
"""
# Keys that LLaMA variants set to other values, which irc's families do not compute.
_FIXED: Mapping[str, object] = {
    "attention_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "fc_after_embed": False,
    "layer_idx_offset": 0,
    "output_multiplier_scale": 1.0,
    "residual_mlp": False,
    "residual_multiplier": 1.0,
    "rotary_pct": 1.0,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_logn_attn": False,
    "use_parallel_residual": False,
}


@dataclass(frozen=True)
class Layout:
    """How the ranks of a checkpoint hold its tensors; rank = stage * tp + rank within the stage.

    A rank has `qkv` heads of queries, keys and values; every `step`-th rank has other key heads.
    `table_dim` is the dimension over which the ranks of a stage split the embedding of `rows` rows,
    None if each has all of it. Experts are split over `moe_ep` groups of ranks, and their widths
    within these. `packed` codes of four bits may lie in other dtypes.
    """

    tp: int
    pp: int
    layers: int
    rows: int
    qkv: tuple[int, int, int]
    step: int
    moe_ep: int = 1
    table_dim: int | None = None
    packed: bool = False

    @property
    def ranks(self) -> int:
        """The number of rank files."""
        return self.tp * self.pp


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
    quantization = ConfigReader(reader.inner("quantization"), "config.json: quantization")
    return Layout(
        tp,
        pp,
        reader.integer("num_hidden_layers"),
        reader.integer("vocab_size"),
        qkv=(heads // tp, own, own),
        step=max(1, tp // keys),
        moe_ep=experts,
        table_dim=dim if reader.flag("use_parallel_embedding") else None,
        packed="AWQ" in quantization.word("quant_algo", ""),
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
    found: dict[str, Any] = {"model_type": model_type, "architectures": [architecture]}
    found |= _sizes(reader) | {"tie_word_embeddings": tied} | _own(reader, model_type)
    for key, wanted in _FIXED.items():
        if config.get(key, wanted) not in (wanted, None) and key not in ignore:
            raise reader.error(key, f"irc computes {architecture} with {wanted!r} only")
    done = {*_WITHOUT_MEANING.split(), *_FIXED, *ignore}
    reader.finish(f"a checkpoint of {name}", done)
    return model_of(found, ignore)


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
    found: dict[str, Any] = {"sliding_window": window}
    if model_type == "llama":
        found = {"attention_bias": bias, "mlp_bias": mlp_bias}
    if model_type == "mixtral":
        found |= {"num_local_experts": experts or 8, "num_experts_per_tok": chosen or 2}
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
    return {} if model_type.startswith("qwen") else found
