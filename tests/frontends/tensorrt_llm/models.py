"""The models that examples/tensorrt_llm builds, in PyTorch, with random weights."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch
from torch.nn import functional as F

Array: TypeAlias = np.ndarray[Any, Any]
Weights: TypeAlias = dict[str, Array]


def drawn(rng: np.random.Generator, shapes: dict[str, tuple[int, ...]]) -> Weights:
    """Weights of a size that keeps activations near 1; norms near 1, biases near 0."""
    found: Weights = {}
    for name, shape in shapes.items():
        x = rng.standard_normal(shape)
        if name.endswith("bias"):
            x *= 0.1
        elif "norm" in name or "ln" in name:
            x = 1 + 0.1 * x
        else:
            x *= shape[-1] ** -0.5
        found[name] = x.astype(np.float32)
    return found


def layer_shapes(layers: int, modules: dict[str, tuple[int, ...]], biases: bool) -> Any:
    """The shapes of the weights, and of biases, of every layer."""
    shapes = {f"layers.{i}.{name}": size for i in range(layers) for name, size in modules.items()}
    ends = [("weight", slice(None))] + [("bias", slice(1))] * biases
    return {f"{name}.{end}": size[part] for name, size in shapes.items() for end, part in ends}


def gpt_shapes(joined: bool, layers: int = 2, width: int = 64, vocab: int = 96) -> dict[str, Any]:
    """The shapes of a GPT; `joined`: query, key and value are one weight."""
    parts = {"qkv": 3 * width} if joined else dict.fromkeys(("query", "key", "value"), width)
    modules: dict[str, tuple[int, ...]] = {
        **{f"attention.{part}": (rows, width) for part, rows in parts.items()},
        "attention.dense": (width, width), "mlp.fc": (4 * width, width),
        "mlp.proj": (width, 4 * width), "input_layernorm": (width,), "post_layernorm": (width,),
    }  # fmt: skip
    return {
        "vocab_embedding.weight": (vocab, width), "position_embedding.weight": (64, width),
        "ln_f.weight": (width,), "ln_f.bias": (width,),
        **layer_shapes(layers, modules, biases=True), "lm_head.weight": (vocab, width),
    }  # fmt: skip


def attention(qkv: Any, heads: int, causal: bool, mask: Any = None) -> Any:
    """Attention over q, k, v [B, S, width] of `heads` heads each."""
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in qkv)
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
    return mixed.transpose(1, 2).flatten(2)


class Reader:
    """Layers of a model with the weights of one scope."""

    def __init__(self, weights: Weights, scope: str = "") -> None:
        self.weights, self.scope = weights, scope

    def inside(self, scope: str) -> Reader:
        """The weights of a part."""
        return Reader(self.weights, f"{self.scope}{scope}.")

    def get(self, name: str) -> Any:
        """One tensor, None where there is none."""
        found = self.weights.get(self.scope + name)
        return None if found is None else torch.from_numpy(found)

    def linear(self, name: str, x: Any) -> Any:
        """x · weightᵀ + bias."""
        return F.linear(x, self.get(f"{name}.weight"), self.get(f"{name}.bias"))

    def norm(self, name: str, x: Any, eps: float = 1e-5) -> Any:
        """Layer norm."""
        return F.layer_norm(
            x, x.shape[-1:], self.get(f"{name}.weight"), self.get(f"{name}.bias"), eps
        )

    def rms(self, name: str, x: Any) -> Any:
        """RMS norm."""
        return F.rms_norm(x, x.shape[-1:], self.get(f"{name}.weight"), 1e-6)


def gpt(weights: Weights, ids: Array, layers: int = 2, heads: int = 4) -> Array:
    """Logits [B, S, vocab] of token ids [B, S]."""
    reader = Reader(weights)
    tokens = torch.from_numpy(ids).long()
    x = reader.get("vocab_embedding.weight")[tokens]
    x = x + reader.get("position_embedding.weight")[: ids.shape[1]]
    for i in range(layers):
        part = reader.inside(f"layers.{i}")
        normed = part.norm("input_layernorm", x)
        if part.get("attention.qkv.weight") is not None:
            qkv = part.linear("attention.qkv", normed).chunk(3, -1)
        else:
            qkv = [part.linear(f"attention.{each}", normed) for each in ("query", "key", "value")]
        x = x + part.linear("attention.dense", attention(qkv, heads, causal=True))
        inner = F.gelu(part.linear("mlp.fc", part.norm("post_layernorm", x)), approximate="tanh")
        x = x + part.linear("mlp.proj", inner)
    return reader.linear("lm_head", reader.norm("ln_f", x)).numpy()


def bert_shapes(layers: int = 2, width: int = 32, vocab: int = 120) -> dict[str, Any]:
    """The shapes of the encoder of 0.5 to 0.7."""
    shapes: dict[str, tuple[int, ...]] = {
        "embedding.vocab_embedding.weight": (vocab, width),
        "embedding.position_embedding.weight": (64, width),
        "embedding.token_embedding.weight": (2, width),
        "embedding.embedding_ln.weight": (width,),
        "embedding.embedding_ln.bias": (width,),
        "pooler.weight": (width, width),
        "pooler.bias": (width,),
    }
    gpt = gpt_shapes(joined=True, layers=layers, width=width)
    return shapes | {name: shape for name, shape in gpt.items() if name.startswith("layers")}


def bert(weights: Weights, ids: Array, types: Array, lengths: Array, layers: int = 2) -> Any:
    """(hidden states [B, S, width], pooled [B, width]) of the encoder of 0.5 to 0.7."""
    reader = Reader(weights)
    part = reader.inside("embedding")
    x = part.get("vocab_embedding.weight")[torch.from_numpy(ids).long()]
    x = x + part.get("position_embedding.weight")[: ids.shape[1]]
    x = x + part.get("token_embedding.weight")[torch.from_numpy(types).long()]
    x = part.norm("embedding_ln", x, 1e-12)
    mask = padding(lengths, ids.shape[1])
    for i in range(layers):
        part = reader.inside(f"layers.{i}")
        qkv = part.linear("attention.qkv", x).chunk(3, -1)
        mixed = part.linear("attention.dense", attention(qkv, 4, causal=False, mask=mask))
        x = part.norm("input_layernorm", x + mixed, 1e-12)
        inner = part.linear("mlp.proj", F.gelu(part.linear("mlp.fc", x), approximate="tanh"))
        x = part.norm("post_layernorm", x + inner, 1e-12)
    return x.numpy(), torch.tanh(reader.linear("pooler", x[:, 0])).numpy()


def padding(lengths: Array, size: int) -> Any:
    """The mask [B, 1, 1, S] of the keys that are no padding."""
    return (torch.arange(size)[None] < torch.from_numpy(lengths)[:, None])[:, None, None]


def encoder_shapes(layers: int = 2, width: int = 32, inner: int = 80) -> dict[str, Any]:
    """The shapes of the encoder of 0.8 and later."""
    modules: dict[str, tuple[int, ...]] = {
        "norm1": (width,), "norm2": (width,), "attention.qkv": (3 * width, width),
        "attention.dense": (width, width), "mlp.fused_fc": (2 * inner, width),
        "mlp.proj": (width, inner),
    }  # fmt: skip
    tables = {"embedding.weight": (120, width), "positions.weight": (64, width)}
    return tables | layer_shapes(layers, modules, biases=False)


def encoder(weights: Weights, ids: Array, lengths: Array, layers: int = 2) -> Array:
    """The embedding [B, width] of each row of the encoder of 0.8 and later."""
    reader = Reader(weights)
    x = reader.get("embedding.weight")[torch.from_numpy(ids).long()]
    x = x + reader.get("positions.weight")[: ids.shape[1]]
    mask = padding(lengths, ids.shape[1])
    for i in range(layers):
        part = reader.inside(f"layers.{i}")
        qkv = part.linear("attention.qkv", part.rms("norm1", x)).chunk(3, -1)
        x = x + part.linear("attention.dense", attention(qkv, 4, causal=False, mask=mask))
        value, gate = part.linear("mlp.fused_fc", part.rms("norm2", x)).chunk(2, -1)
        x = x + part.linear("mlp.proj", F.silu(gate) * value)
    kept = mask[:, 0, 0, :, None].float()
    pooled = (x * kept).sum(1) / kept.sum(1)
    return F.layer_norm(pooled, pooled.shape[-1:]).numpy()
