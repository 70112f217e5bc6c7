"""Every layer of irc.frontends, and variants of attention, as cases to shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from irc.frontends import Module, Tensor
from irc.frontends import functional as F
from irc.frontends.layers import (
    MLP,
    Attention,
    BlockSparse,
    GatedMLP,
    GroupNorm,
    LayerNorm,
    Linear,
    MixtureOfExperts,
    RelativePositions,
    RmsNorm,
    Rope,
)
from irc.frontends.module import Parameter
from irc.frontends.trace import Spec

from .cases import HIDDEN, POSITIONS, Case, X

LAYERS: dict[str, Case] = {}


def _attention(heads: int, kv: int, **settings: Any) -> Callable[[], Module]:
    return lambda: Attention(HIDDEN, heads, kv, 4, **settings)


def _normed(heads: int, kv: int) -> Case:
    """Queries and keys normed head by head, as in Qwen 3 and Gemma 3."""
    return Case(_attention(heads, kv, qk_norm=1e-5, rope=Rope()), X | POSITIONS)


LONG = Rope(kind="longrope", original_positions=4, short_factors=(1, 1.5), long_factors=(2, 3))
DYNAMIC = Rope(kind="dynamic", factor=2.0, original_positions=4)
LAYERS |= {
    "heads_6_3": Case(_attention(6, 3), X),
    "heads_5_5": Case(_attention(5, 5), X),
    "heads_6_1": Case(_attention(6, 1), X),
    "rope_dynamic": Case(_attention(6, 3, rope=DYNAMIC), X | POSITIONS),
    "rope_longrope": Case(_attention(6, 3, rope=LONG), X | POSITIONS),
    "normed_heads_6_3": _normed(6, 3),
    "normed_heads_5_5": _normed(5, 5),
    "normed_heads_8_2": _normed(8, 2),
    "biases": Case(_attention(6, 3, rope=Rope(), qkv_bias=True, output_bias=True), X | POSITIONS),
    "slopes": Case(_attention(6, 3, alibi=8.0), X),
    "slopes_of_5": Case(_attention(5, 5, alibi=8.0), X),
    "relative_biases": Case(_attention(6, 3, relative=RelativePositions(8, 20)), X),
    "clipped_logn": Case(_attention(24, 24, clip=0.5, logn=2), X),
    "block_sparse": Case(_attention(6, 3, block_sparse=BlockSparse(1, 1, 2)), X),
}


class Cross(Module):
    """Attention to another sequence, whose rows have different lengths."""

    def __init__(self) -> None:
        self.attn = Attention(HIDDEN, 6, 3, 4, memory_size=10)

    def forward(self, x: Tensor, memory: Tensor, lengths: Tensor) -> Any:
        return self.attn(x, memory=memory, lengths=lengths)


MEMORY = {"memory": Spec("f32", ("B", "M", 10)), "lengths": Spec("i32", ("B",))}
LAYERS["cross"] = Case(Cross, X | MEMORY)


class Scored(Module):
    """Attention whose scores have a mask or a bias."""

    def __init__(self, heads: int, kv: int) -> None:
        self.attn = Attention(HIDDEN, heads, kv, 4, causal=False)

    def forward(self, x: Tensor, scores: Tensor) -> Any:
        name = "mask" if scores.dtype == "bool" else "bias"
        return self.attn(x, **{name: scores})


def _scored(heads: int, kv: int, dtype: str, *shape: str | int) -> Case:
    return Case(lambda: Scored(heads, kv), X | {"scores": Spec(dtype, shape)})


LAYERS |= {
    "mask_per_head": _scored(6, 2, "bool", "B", 6, "S", "S"),
    "bias_of_5_heads": _scored(5, 5, "f32", "B", 5, "S", "S"),
}


class Alibi(Module):
    """A bias per head that decreases with the position of the key. Press et al., 2022."""

    def __init__(self, heads: int) -> None:
        self.attn = Attention(HIDDEN, heads, heads, 4, causal=False)
        self.slopes = Parameter((1, heads, 1, 1))

    def forward(self, x: Tensor) -> Any:
        keys = x.shape[1]
        places = F.iota(keys).cast("f32").reshape(1, 1, 1, keys)
        return self.attn(x, bias=self.slopes * places)


class PlainAttention(Module):
    """Attention in matmuls and a softmax."""

    def __init__(self, heads: int) -> None:
        self.q_proj, self.k_proj = Linear(HIDDEN, heads * 4), Linear(HIDDEN, heads * 4)
        self.v_proj, self.o_proj = Linear(HIDDEN, heads * 4), Linear(heads * 4, HIDDEN)
        self.heads = heads

    def forward(self, x: Tensor) -> Any:
        rows, tokens, _ = x.shape
        projections = (self.q_proj, self.k_proj, self.v_proj)
        apart = (p(x).reshape(rows, tokens, self.heads, 4).transpose(1, 2) for p in projections)
        q, k, v = apart
        mixed = F.softmax((q @ k.transpose(2, 3)) / 2.0) @ v
        return self.o_proj(mixed.transpose(1, 2).reshape(rows, tokens, self.heads * 4))


class NormedAcross(PlainAttention):
    """Queries and keys normed over all heads together, as in OLMo 2."""

    def __init__(self) -> None:
        super().__init__(6)
        self.q_norm, self.k_norm = RmsNorm(24), RmsNorm(24)

    def forward(self, x: Tensor) -> Any:
        q, k = self.q_norm(self.q_proj(x)), self.k_norm(self.k_proj(x))
        return self.o_proj(F.attention(q, k, self.v_proj(x), head_dim=4, causal=True))


LAYERS |= {
    "alibi_5": Case(lambda: Alibi(5), X),
    "normed_across": Case(NormedAcross, X),
    "plain_4": Case(lambda: PlainAttention(4), X),
}


class NormInside(Module):
    """A norm over the features that a column-parallel linear has split."""

    def __init__(self, norm: Module, width: int) -> None:
        self.fc1, self.fc2 = Linear(HIDDEN, width), Linear(width, HIDDEN)
        self.norm = norm

    def forward(self, x: Tensor) -> Any:
        rows, tokens, _ = x.shape
        opened = self.fc1(x)
        if isinstance(self.norm, GroupNorm):
            width = opened.shape[2]
            opened = self.norm(opened.reshape(rows * tokens, width)).reshape(rows, tokens, width)
        else:
            opened = self.norm(opened)
        return x + self.fc2(opened)


class Convolution(Module):
    """A convolution over the tokens, with a bias."""

    def __init__(self, ins: int, outs: int, groups: int = 1) -> None:
        self.weight, self.bias = Parameter((outs, ins // groups, 3)), Parameter((outs,))
        self.groups = groups

    def forward(self, x: Tensor) -> Any:
        ends: dict[str, Any] = {"before": (1,), "after": (1,)}
        return F.conv(x, self.weight, bias=self.bias, groups=self.groups, **ends)


class Convolutions(Module):
    """Convolutions into other channels and back, with one of groups of channels between them."""

    def __init__(self, width: int, groups: int = 0) -> None:
        self.fc1, self.fc2 = Convolution(HIDDEN, width), Convolution(width, HIDDEN)
        self.between = Convolution(width, width, groups) if groups else None

    def forward(self, x: Tensor) -> Any:
        opened = F.relu(self.fc1(x.transpose(1, 2)))
        opened = opened if self.between is None else self.between(opened)
        return x + self.fc2(opened).transpose(1, 2)


LAYERS |= {
    "convolutions": Case(lambda: Convolutions(11), X),
    "grouped_convolutions": Case(lambda: Convolutions(12, 4), X),
    "group_norm": Case(lambda: NormInside(GroupNorm(4, 12), 12), X),
    "one_group": Case(lambda: NormInside(GroupNorm(1, 7), 7), X),
    "layer_norm": Case(lambda: NormInside(LayerNorm(10), 10), X),
}
for act in ("gelu", "squared_relu", "gelu_new"):
    LAYERS[f"mlp_{act}"] = Case(lambda act=act: MLP(HIDDEN, 11, act), X)
for act in ("silu", "quick_gelu"):
    LAYERS[f"gated_{act}"] = Case(lambda act=act: GatedMLP(HIDDEN, 11, act, bias=True), X)


class Experts(Module):
    """A mixture of experts called with x alone."""

    def __init__(self, **settings: Any) -> None:
        self.mlp = MixtureOfExperts(HIDDEN, 6, 5, 2, **settings)

    def forward(self, x: Tensor) -> Any:
        return self.mlp(x)


LAYERS |= {
    "experts": Case(Experts, X),
    "shared_expert": Case(lambda: Experts(shared_size=7, normalize=False), X),
    "gated_expert": Case(lambda: Experts(shared_size=7, shared_gate=True), X),
    "capacity": Case(lambda: Experts(capacity=2), X),
}


class Typed(Module):
    """A norm and a gated feed-forward in 16 bits."""

    def __init__(self, dtype: str) -> None:
        self.norm = RmsNorm(HIDDEN, offset=1.0, dtype=dtype)
        self.mlp = GatedMLP(HIDDEN, 11, dtype=dtype)

    def forward(self, x: Tensor) -> Any:
        return x + self.mlp(self.norm(x))


for dtype in ("bf16", "f16"):
    LAYERS[dtype] = Case(lambda dtype=dtype: Typed(dtype), {"x": Spec(dtype, ("B", "S", HIDDEN))})
