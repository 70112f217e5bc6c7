"""Writes TensorRT-LLM checkpoint folders: the weights of a transformers model, by rank."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.models.golden import write_safetensors

Arrays = dict[str, np.ndarray]
ROPE = {"rope_theta": 10000.0}


@dataclass(frozen=True)
class Conversion:
    """How a folder is written; `table_dim` is the dimension over which ranks split the table."""

    tp: int = 1
    pp: int = 1
    fused: bool = False
    local_layers: bool = True
    table_dim: int | None = None
    moe_ep: int = 1
    keep_head: bool = True


def write_folder(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Arrays,
    how: Conversion,
    pack: Callable[[str, np.ndarray], Arrays] | None = None,
    **changes: Any,
) -> Path:
    """A folder with config.json and a file per rank, of a model of transformers.

    `pack` gives the tensors in place of one of a rank; `changes` are keys of config.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(config, how) | changes))
    for rank in range(how.tp * how.pp):
        found = dict(_rank(config, tensors, how, *divmod(rank, how.tp)))
        if pack is not None:
            found = {k: v for key, array in found.items() for k, v in pack(key, array).items()}
        write_safetensors(folder / f"rank{rank}.safetensors", found)
    return folder


def config_of(config: Mapping[str, Any], how: Conversion) -> dict[str, Any]:
    """The config.json of the folder."""
    heads = config["num_attention_heads"]
    rope = config.get("rope_parameters") or ROPE
    scaling = {k: v for k, v in rope.items() if k != "rope_theta"}
    return {
        "producer": {"name": "modelopt", "version": "0.1"},
        "architecture": config["architectures"][0],
        "dtype": "float32",
        "logits_dtype": "float32",
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "num_hidden_layers": config["num_hidden_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "head_size": config.get("head_dim") or config["hidden_size"] // heads,
        "hidden_act": "swiglu" if config.get("num_local_experts") else "silu",
        "intermediate_size": config["intermediate_size"],
        "norm_epsilon": config.get("rms_norm_eps", 1e-6),
        "position_embedding_type": "rope_gpt_neox",
        "max_position_embeddings": config["max_position_embeddings"],
        "rotary_base": rope["rope_theta"],
        "rotary_scaling": scaling if scaling.get("rope_type", "default") != "default" else None,
        "attn_bias": config.get("attention_bias", False),
        "mlp_bias": config.get("mlp_bias", False),
        "moe": {
            "num_experts": config.get("num_local_experts", 0),
            "top_k": config.get("num_experts_per_tok", 0),
            "normalization_mode": 1,
        },
        "use_parallel_embedding": how.table_dim is not None,
        "embedding_sharding_dim": how.table_dim or 0,
        "mapping": {
            "world_size": how.tp * how.pp,
            "gpus_per_node": 8,
            "cp_size": 1,
            "tp_size": how.tp,
            "pp_size": how.pp,
            "moe_tp_size": how.tp // how.moe_ep,
            "moe_ep_size": how.moe_ep,
        },
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None, "group_size": 128},
        "residual_mlp": False,
        "use_last_layernorm": True,
    }


def cut(array: np.ndarray, dim: int, parts: int, index: int) -> np.ndarray:
    """An equal part of an array along a dimension."""
    assert array.shape[dim] % parts == 0
    return np.ascontiguousarray(np.split(array, parts, dim)[index])


def padded(array: np.ndarray, multiple: int) -> np.ndarray:
    """Rows of noise appended, which nobody may read as rows of the table."""
    extra = -array.shape[0] % multiple
    return np.concatenate([array, np.full((extra, *array.shape[1:]), 1e3, array.dtype)])


def _rank(
    config: Mapping[str, Any], tensors: Arrays, how: Conversion, stage: int, rank: int
) -> Iterator[tuple[str, np.ndarray]]:
    tp, layers = how.tp, config["num_hidden_layers"]
    if stage == 0:
        table = tensors["model.embed_tokens.weight"]
        if how.table_dim is not None:
            table = cut(padded(table, tp) if how.table_dim == 0 else table, how.table_dim, tp, rank)
        yield "transformer.vocab_embedding.weight", table
    if stage == how.pp - 1:
        yield "transformer.ln_f.weight", tensors["model.norm.weight"]
        if how.keep_head:
            head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
            yield "lm_head.weight", cut(padded(head, tp), 0, tp, rank)
    begin, end = (-(-each * layers // how.pp) for each in (stage, stage + 1))
    for index in range(begin, end):
        own = index - begin if how.local_layers else index
        for key, array in _layer(config, tensors, how, f"model.layers.{index}.", rank).items():
            yield f"transformer.layers.{own}.{key}", array


# module of transformers -> that of a rank, and the dimension over which ranks split its weight
_MODULES: dict[str, tuple[str, int | None]] = {
    "input_layernorm": ("input_layernorm", None),
    "post_attention_layernorm": ("post_layernorm", None),
    "self_attn.q_norm": ("attention.q_layernorm", None),
    "self_attn.k_norm": ("attention.k_layernorm", None),
    "self_attn.o_proj": ("attention.dense", 1),
    "mlp.gate_proj": ("mlp.fc", 0),
    "mlp.up_proj": ("mlp.gate", 0),
    "mlp.down_proj": ("mlp.proj", 1),
}


def _layer(
    config: Mapping[str, Any], tensors: Arrays, how: Conversion, prefix: str, rank: int
) -> Arrays:
    own = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
    found = Arrays()
    for key, whole in own.items():
        array, (module, _, kind) = whole, key.rpartition(".")
        name, dim = _MODULES.get(module, ("", None))
        if name:
            if dim is not None and dim < array.ndim:
                array = cut(array, dim, how.tp, rank)
            found[f"{name}.{kind}"] = array
        elif module == "self_attn.q_proj":
            found[f"attention.qkv.{kind}"] = _qkv(config, own, how.tp, kind, rank)
    for kind in ("weight", "bias") if how.fused else ():
        parts = [found.pop(f"mlp.{name}.{kind}") for name in ("gate", "fc")]
        found[f"mlp.fused_fc.{kind}"] = np.concatenate(parts)
    if "block_sparse_moe.gate.weight" in own:
        found |= dict(_experts(own, how, rank))
    return found


def _qkv(config: Mapping[str, Any], own: Arrays, tp: int, kind: str, rank: int) -> np.ndarray:
    """The rows of q, k and v of a rank, above each other; a key head may be on several ranks."""
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    parts = [cut(own[f"self_attn.q_proj.{kind}"], 0, tp, rank)]
    for name in "kv":
        array = own[f"self_attn.{name}_proj.{kind}"]
        parts.append(cut(array, 0, min(tp, heads), rank * min(tp, heads) // tp))
    return np.concatenate(parts)


def _experts(own: Arrays, how: Conversion, rank: int) -> Iterator[tuple[str, np.ndarray]]:
    """Experts of a rank: w3 above w1, and w2; ranks next to each other have other experts."""
    start = "block_sparse_moe.experts."
    count = len({key.split(".")[2] for key in own if key.startswith(start)})
    width_rank, group = divmod(rank, how.moe_ep)
    mine = range(count // how.moe_ep * group, count // how.moe_ep * (group + 1))
    parts = how.tp // how.moe_ep

    def stack(name: str, dim: int) -> np.ndarray:
        return np.stack(
            [cut(own[f"{start}{i}.{name}.weight"], dim, parts, width_rank) for i in mine]
        )

    yield "mlp.router.weight", own["block_sparse_moe.gate.weight"]
    yield "mlp.fc.weight", np.concatenate([stack("w3", 0), stack("w1", 0)], axis=1)
    yield "mlp.proj.weight", stack("w2", 1)
