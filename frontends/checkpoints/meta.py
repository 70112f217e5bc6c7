"""Checkpoint folders of Meta: params.json and consolidated.00.pth, consolidated.01.pth, ..."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any

from ...errors import Error
from ...json_files import read_object

# Module of Meta -> that of transformers, and the dimension over which the files split its weight.
_PLACES: dict[str, tuple[str, int | None]] = {
    "tok_embeddings": ("model.embed_tokens", 1),
    "norm": ("model.norm", None),
    "output": ("lm_head", 0),
    "attention_norm": ("input_layernorm", None),
    "ffn_norm": ("post_attention_layernorm", None),
    "attention.wq": ("self_attn.q_proj", 0),
    "attention.wk": ("self_attn.k_proj", 0),
    "attention.wv": ("self_attn.v_proj", 0),
    "attention.wo": ("self_attn.o_proj", 1),
    "feed_forward.w1": ("mlp.gate_proj", 0),
    "feed_forward.w2": ("mlp.down_proj", 1),
    "feed_forward.w3": ("mlp.up_proj", 0),
}


def config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The sizes in params.json under the names of TensorRT-LLM's configs."""
    params = read_object(Path(folder) / "params.json")
    hidden, heads = params["dim"], params["n_heads"]
    multiple = params.get("multiple_of", 1)
    inner = int(int(4 * hidden * 2 / 3) * params.get("ffn_dim_multiplier", 1))
    vocabulary = params.get("vocab_size", -1)
    return {
        "architecture": "LlamaForCausalLM",
        "num_hidden_layers": params["n_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": params.get("n_kv_heads", heads),
        "hidden_size": hidden,
        "intermediate_size": params.get("hidden_dim", -(-inner // multiple) * multiple),
        "vocab_size": 32000 if vocabulary == -1 else vocabulary,
        "max_position_embeddings": 2048,
        "hidden_act": "silu",
        "norm_epsilon": params["norm_eps"],
        "rotary_base": params.get("rope_theta", 10000),
        "rotary_scaling": _LLAMA3 if params.get("use_scaled_rope") else params.get("rope_scaling"),
    }


_LLAMA3 = {  # what Meta's code computes for use_scaled_rope
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def tensors(folder: str | os.PathLike[str], head_size: int, vocab_size: int) -> dict[str, Any]:
    """The tensors of PyTorch of all files, joined, under the names of transformers, which also has
    the rows of queries and keys in another order: halves of a head instead of pairs."""
    torch, paths = import_module("torch"), sorted(Path(folder).glob("consolidated.*.pth"))
    if not paths:
        raise Error(f"expected consolidated.00.pth, ... in {folder}, found none")
    parts = [torch.load(path, map_location="cpu", weights_only=True) for path in paths]
    joined: dict[str, Any] = {}
    for key in parts[0]:
        prefix, module = "", key.removesuffix(".weight")
        if module.startswith("layers."):
            _, index, module = module.split(".", 2)
            prefix = f"model.layers.{index}."
        if module not in _PLACES:
            continue  # frequencies of rotations
        name, dim = _PLACES[module]
        if module == "tok_embeddings":  # over rows since Llama 3
            dim = int(parts[0][key].shape[0] == vocab_size)
        whole = parts[0][key] if dim is None else torch.cat([part[key] for part in parts], dim)
        if module in ("attention.wq", "attention.wk"):
            pairs = whole.view(-1, head_size // 2, 2, whole.shape[1])
            whole = pairs.transpose(1, 2).reshape(whole.shape)
        joined[f"{prefix}{name}.weight"] = whole
    return joined
