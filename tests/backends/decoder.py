"""A small Llama in IR, with key-value caches, over a safetensors file of random numbers."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from irc import ops
from irc.ir.core import Function, Module, Op, Result, Value, Weight
from irc.ir.dims import symbol
from irc.ir.dtypes import numpy_dtype
from irc.ir.mesh import Mesh
from irc.ir.types import TensorType
from irc.ir.weight_parts import weight_part
from irc.ops import Return
from irc.weights import Cast, FileRef, Shard
from tests.fresh import fresh

B, S, T, C = map(symbol, "BSTC")


@dataclass(frozen=True)
class Shape:
    """The sizes of the model; `stored` is the dtype in the file, `dtype` that of the model."""

    layers: int = 2
    hidden: int = 32
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    ffn: int = 48
    vocab: int = 61
    dtype: str = "f32"
    stored: str = "f32"
    window: int = 0

    def shard(self, group_size: int) -> Shape:
        """The sizes on one of `group_size` ranks."""
        heads, kv_heads = self.heads // group_size, self.kv_heads // group_size
        ffn, vocab = -(-self.ffn // group_size), -(-self.vocab // group_size)
        return replace(self, heads=heads, kv_heads=kv_heads, ffn=ffn, vocab=vocab)


SHARDED = {  # the dimension of a weight that is sharded over the ranks
    "q_proj": 0,
    "k_proj": 0,
    "v_proj": 0,
    "o_proj": 1,
    "gate_proj": 0,
    "up_proj": 0,
    "down_proj": 1,
    "lm_head": 0,
}


def tensors(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Key to shape, in the names of Hugging Face."""
    h, d = shape.hidden, shape.head_dim
    found = {"model.embed_tokens.weight": (shape.vocab, h), "model.norm.weight": (h,)}
    for i in range(shape.layers):
        p = f"model.layers.{i}."
        found |= {
            p + "input_layernorm.weight": (h,),
            p + "self_attn.q_proj.weight": (shape.heads * d, h),
            p + "self_attn.k_proj.weight": (shape.kv_heads * d, h),
            p + "self_attn.v_proj.weight": (shape.kv_heads * d, h),
            p + "self_attn.o_proj.weight": (h, shape.heads * d),
            p + "post_attention_layernorm.weight": (h,),
            p + "mlp.gate_proj.weight": (shape.ffn, h),
            p + "mlp.up_proj.weight": (shape.ffn, h),
            p + "mlp.down_proj.weight": (h, shape.ffn),
        }
    return found | {"lm_head.weight": (shape.vocab, h)}


def write(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """A safetensors file in which the data begins at an odd byte."""
    header: dict[str, Any] = {}
    end = 0
    for key, array in arrays.items():
        begin, end = end, end + array.nbytes
        name = {"bfloat16": "BF16", "int8": "I8"}.get(str(array.dtype), f"F{array.itemsize * 8}")
        header[key] = {"dtype": name, "shape": list(array.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (1 - len(text) % 2)
    data = b"".join(array.tobytes() for array in arrays.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def save(shape: Shape, folder: Path, files: int = 1) -> list[str]:
    """Random weights in one or more safetensors files; returns the paths, relative to `folder`."""
    rng = fresh(7)
    kind = numpy_dtype(shape.stored)
    arrays = {
        key: (rng.standard_normal(size) * (0.2 if len(size) > 1 else 1)).astype(kind)
        for key, size in tensors(shape).items()
    }
    names = [f"part-{i}.safetensors" for i in range(files)]
    for i, name in enumerate(names):
        part = {k: a for n, (k, a) in enumerate(arrays.items()) if n % files == i}
        write(folder / name, part)
    return names


def build(shape: Shape, files: list[str], group_size: int = 1) -> Module:
    """The model over those files: `files[i % len]` holds tensor i.

    With `group_size` > 1 the local view, sharded over tp except for the embedding.
    """
    mesh = Mesh((("tp", group_size),)) if group_size > 1 else Mesh()
    dims = {"B": (1, 1, 4), "S": (1, 1, 64), "C": (1, 64, 512), "T": (1, 1, 64)}
    module = Module("decoder", mesh, dims, local=group_size > 1)
    for i, path in enumerate(files):
        module.files[f"part{i}"] = path
    part = replace(shape.shard(group_size), vocab=shape.vocab)
    for n, (key, size) in enumerate(tensors(part).items()):
        ref = FileRef(f"part{n % len(files)}", key)
        ref = ref if shape.dtype == shape.stored else ref.then(Cast(shape.dtype))
        dim = next((dim for name, dim in SHARDED.items() if f"{name}." in key), None)
        if group_size > 1 and dim is not None:
            ref = ref.then(Shard(dim, ("tp",)))
        size = (shape.shard(group_size).vocab, size[1]) if key == "lm_head.weight" else size
        type = weight_part(ref, TensorType(shape.dtype, size), mesh)
        module.add_weight(Weight(type, key.replace(".", "_"), ref))
    module.add_function(_forward(part, module, group_size))
    return module


def _forward(shape: Shape, module: Module, group_size: int) -> Function:
    cache = TensorType(shape.dtype, (B, shape.kv_heads, C, shape.head_dim))
    if group_size > 1:
        whole = TensorType(shape.dtype, (B, shape.kv_heads * group_size, C, shape.head_dim))
        cache = cache.part_of(whole.replace(axes=((), ("tp",), (), ())))
    caches = [f"{name}{i}" for i in range(shape.layers) for name in "kv"]
    args = {
        "input_ids": TensorType("i32", (B, S)),
        "positions": TensorType("i32", (B, S)),
        "past_lengths": TensorType("i32", (B,)),
        "logit_positions": TensorType("i32", (B, T)),
    }
    function = Function("forward", [*args.items(), *((name, cache) for name in caches)])
    weights = {key: module.weights[key.replace(".", "_")] for key in tensors(shape)}

    def put(op: Op, name: str | None = None) -> Any:
        function.append(op)
        if name:
            op.results[0].name = name
        return op.results[0] if len(op.results) == 1 else op.results

    def summed(x: Value) -> Any:
        return put(ops.AllReduce(x, axis="tp", group_size=group_size)) if group_size > 1 else x

    past = function.arg("past_lengths")
    x = put(ops.Embedding(function.arg("input_ids"), weights["model.embed_tokens.weight"]))
    updated: list[Value] = []
    for i in range(shape.layers):
        w = {k.split(f"layers.{i}.")[1]: v for k, v in weights.items() if f"layers.{i}." in k}
        h = put(ops.RmsNorm(x, w["input_layernorm.weight"]))
        q, k, v = (put(ops.Linear(h, w[f"self_attn.{n}_proj.weight"]), n) for n in "qkv")
        turn = {"head_dim": shape.head_dim, "theta": 10000.0}
        q, k = (put(ops.Rope(t, function.arg("positions"), **turn)) for t in (q, k))
        keys = put(ops.CacheUpdate(function.arg(f"k{i}"), k, past))
        values = put(ops.CacheUpdate(function.arg(f"v{i}"), v, past))
        updated += [keys, values]
        seen: dict[str, Any] = {"past": past, "causal": True, "window": shape.window}
        a = put(ops.Attention(q, keys, values, head_dim=shape.head_dim, **seen))
        x = put(ops.Add(x, summed(put(ops.Linear(a, w["self_attn.o_proj.weight"])))))
        h = put(ops.RmsNorm(x, w["post_attention_layernorm.weight"]))
        m = put(ops.GatedMlp(h, w["mlp.gate_proj.weight"], w["mlp.up_proj.weight"]))
        x = put(ops.Add(x, summed(put(ops.Linear(m, w["mlp.down_proj.weight"])))))
    places = put(
        ops.Expand(
            put(ops.Unsqueeze(function.arg("logit_positions"), dims=(-1,))),
            shape=(B, T, shape.hidden),
        )
    )
    x = put(ops.GatherElements(x, places, dim=1))
    logits = put(
        ops.Linear(put(ops.RmsNorm(x, weights["model.norm.weight"])), weights["lm_head.weight"])
    )
    if group_size > 1:
        whole = put(ops.AllGather(logits, axis="tp", dim=-1, group_size=group_size))
        logits = put(ops.Slice(whole, dim=-1, start=0, stop=shape.vocab))
    logits.name = "logits"
    function.append(Return([logits, *updated]))
    function.results = (Result("logits"), *(Result(name, name) for name in caches))
    return function


def call(ids: np.ndarray, past: np.ndarray, wanted: int | None = None) -> dict[str, np.ndarray]:
    """The plain inputs of one call; `wanted` is the only position whose logits are returned."""
    batch, tokens = ids.shape
    places = np.arange(tokens) if wanted is None else np.array([wanted])
    return {
        "input_ids": ids.astype(np.int32),
        "positions": (past[:, None] + np.arange(tokens)).astype(np.int32),
        "past_lengths": past.astype(np.int32),
        "logit_positions": np.tile(places, (batch, 1)).astype(np.int32),
    }
