"""`find_dialect`: which dialect of TensorRT-LLM a script is written in."""

from __future__ import annotations

import ast

from .context import Dialect
from .names import ROOT

# What only one dialect has: names that are imported or used as attributes, and keyword arguments.
_NAMES: dict[Dialect, set[str]] = {
    "A": {"quantize_model", "get_quant_mode", "hlapi", "weight_only_quantize", "smooth_quantize"}
    | {"set_gemm_plugin", "set_nccl_plugin", "set_rmsnorm_plugin", "set_layernorm_plugin"}
    | {"set_gpt_attention_plugin", "set_bert_attention_plugin", "set_context_fmha"}
    | {"enable_remove_input_padding", "enable_paged_kv_cache", "LLaMADecoderLayer"},
    "B": {"BuildConfig", "PretrainedConfig", "PretrainedModel", "LLaMAConfig", "QuantAlgo"}
    | {"QuantConfig", "AllReduceParams", "DecoderModelForCausalLM", "from_hugging_face"}
    | {"from_checkpoint", "KVCacheType", "DecoderLayerList", "EngineConfig", "LLM"},
}
_KEYWORDS: dict[Dialect, set[str]] = {
    "A": {"workspace", "all_reduce_workspace", "instance_id", "use_auto_parallel", "layer_id"}
    | {"hidden_states_shape", "use_parallel_embedding", "rotary_base"},
    "B": {
        "local_layer_idx",
        "all_reduce_params",
        "per_token_scale",
        "kv_cache_type",
        "plugin_config",
    }
    | {"pretrained_config", "quant_config", "build_config"},
}
_MODULES: dict[str, Dialect] = {
    f"{ROOT}.models.modeling_utils": "B",
    f"{ROOT}.commands": "B",
    f"{ROOT}.bindings": "B",
}


def find_dialect(tree: ast.Module) -> Dialect:
    """The dialect that more of the names and keyword arguments belong to; B where none tells.

    A (0.5 to 0.7.1) has keyword constructors, `workspace` and `instance_id`; B (0.8 and later) has
    config objects.
    """
    seen: dict[Dialect, set[str]] = {"A": set(), "B": set()}
    for node in ast.walk(tree):
        for kind in seen:
            seen[kind] |= _NAMES[kind] & _names(node)
            if isinstance(node, ast.keyword) and node.arg in _KEYWORDS[kind]:
                seen[kind].add(f"{node.arg}=")
        if isinstance(node, ast.ImportFrom) and node.module in _MODULES:
            seen[_MODULES[node.module]].add(node.module)
    return "A" if len(seen["A"]) > len(seen["B"]) else "B"


def _names(node: ast.AST) -> set[str]:
    match node:
        case ast.ImportFrom(names=names) | ast.Import(names=names):
            return {part for each in names for part in each.name.split(".")}
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return {name}
        case _:
            return set()
