"""Layers of irc.frontends and blocks of model families, as cases to shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from irc.frontends import Module, Tensor
from irc.frontends import functional as F
from irc.frontends.layers import (
    MLP,
    Attention,
    ClampedSwiGLU,
    Embedding,
    GatedMLP,
    GroupNorm,
    LayerNorm,
    Linear,
    MixtureOfExperts,
    RmsNorm,
    Rope,
)
from irc.frontends.module import Parameter
from irc.frontends.trace import Spec
from tests.sharded.checking import Case

HIDDEN = 24
X = {"x": Spec("f32", ("B", "S", HIDDEN))}
POSITIONS = {"positions": Spec("i32", ("B", "S"))}
IDS = {"ids": Spec("i32", ("B", "S"))}
MEMORY = {"memory": Spec("f32", ("B", "M", 10)), "lengths": Spec("i32", ("B",))}


def attention(heads: int, kv: int, **settings: Any) -> Callable[[], Module]:
    return lambda: Attention(HIDDEN, heads, kv, 4, **settings)


class Cross(Module):
    """Attention to another sequence, whose rows have different lengths."""

    def __init__(self) -> None:
        self.attn = Attention(HIDDEN, 6, 3, 4, memory_size=10)

    def forward(self, x: Tensor, memory: Tensor, lengths: Tensor) -> Any:
        return self.attn(x, memory=memory, lengths=lengths)


class Biased(Module):
    """Attention whose scores have a bias."""

    def __init__(self) -> None:
        self.attn = Attention(HIDDEN, 5, 5, 4, causal=False)

    def forward(self, x: Tensor, bias: Tensor) -> Any:
        return self.attn(x, bias=bias)


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


class Interleaved(Module):
    """QKV merged head by head, as in GPT-NeoX and BLOOM."""

    def __init__(self, heads: int) -> None:
        self.query_key_value, self.dense = Linear(HIDDEN, heads * 12), Linear(heads * 4, HIDDEN)
        self.heads = heads

    def forward(self, x: Tensor) -> Any:
        rows, tokens, _ = x.shape
        merged = self.query_key_value(x).reshape(rows, tokens, self.heads, 12)
        size = self.heads * 4
        q, k, v = (part.reshape(rows, tokens, size) for part in merged.split([4, 4, 4], 3))
        return self.dense(F.attention(q, k, v, head_dim=4, causal=True))


class NormInside(Module):
    """A norm over the features that a column-parallel linear has split."""

    def __init__(self, norm: Module, width: int) -> None:
        self.fc1, self.fc2, self.norm = Linear(HIDDEN, width), Linear(width, HIDDEN), norm

    def forward(self, x: Tensor) -> Any:
        opened = self.fc1(x)
        rows, tokens, width = opened.shape
        flat = (rows * tokens, width) if isinstance(self.norm, GroupNorm) else opened.shape
        return x + self.fc2(self.norm(opened.reshape(*flat)).reshape(*opened.shape))


class Turned(Module):
    """x · weight + bias with weight [in, out], as in GPT-2's checkpoints."""

    def __init__(self, inside: int, outside: int) -> None:
        self.weight, self.bias = Parameter((inside, outside)), Parameter((outside,))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Gpt2(Module):
    """Attention and feed-forward of GPT-2, QKV merged, between learned positions and a head, which
    is the table as well."""

    def __init__(self, heads: int, linear: type[Linear | Turned] = Linear) -> None:
        self.wte, self.wpe = Embedding(13, HIDDEN), Embedding(16, HIDDEN)
        self.ln_1, self.ln_2 = LayerNorm(HIDDEN), LayerNorm(HIDDEN)
        self.c_attn, self.c_proj = linear(HIDDEN, 12 * heads), linear(4 * heads, HIDDEN)
        self.c_fc, self.fc_out = linear(HIDDEN, 31), linear(31, HIDDEN)
        self.size = 4 * heads

    def forward(self, ids: Tensor, positions: Tensor) -> Any:
        x = self.wte(ids) + self.wpe(positions)
        merged, size = self.c_attn(self.ln_1(x)), self.size
        parts = [merged[:, :, i * size : (i + 1) * size] for i in range(3)]
        x = x + self.c_proj(F.attention(*parts, head_dim=4, causal=True))
        x = x + self.fc_out(F.gelu(self.c_fc(self.ln_2(x))))
        return F.linear(x, self.wte.weight)


TURNED = (
    *("c_attn.weight 1@tp", "c_attn.bias 0@tp", "c_proj.weight 0@tp", "c_fc.weight 1@tp"),
    *("c_fc.bias 0@tp", "fc_out.weight 0@tp", "w?e.weight replicated"),
)


class Bert(Module):
    """An encoder with three tables, norms behind the blocks and a pooler. Devlin et al., 2019."""

    def __init__(self) -> None:
        self.word_embeddings = Embedding(13, HIDDEN)
        self.position_embeddings = Embedding(16, HIDDEN)
        self.norm, self.last = LayerNorm(HIDDEN), LayerNorm(HIDDEN)
        self.query, self.key, self.value = (Linear(HIDDEN, 20) for _ in range(3))
        self.dense, self.fc1, self.fc2 = Linear(20, HIDDEN), Linear(HIDDEN, 13), Linear(13, HIDDEN)
        self.pooler = Linear(HIDDEN, HIDDEN)

    def forward(self, ids: Tensor, positions: Tensor) -> Any:
        x = self.norm(self.word_embeddings(ids) + self.position_embeddings(positions))
        mixed = F.attention(self.query(x), self.key(x), self.value(x), head_dim=4)
        x = self.norm(x + self.dense(mixed))
        x = self.last(x + self.fc2(F.gelu(self.fc1(x))))
        return x, F.tanh(self.pooler(x[:, 0]))


class Tied(Module):
    """One table in four places."""

    def __init__(self) -> None:
        self.embed_tokens = Embedding(11, HIDDEN)
        self.lm_head, self.second = Linear(HIDDEN, 11, False), Linear(HIDDEN, 11, False)
        self.lm_head.weight = self.second.weight = self.embed_tokens.weight

    def forward(self, ids: Tensor) -> Any:
        x = self.embed_tokens(ids)
        return self.lm_head(x), self.second(F.tanh(x)), self.embed_tokens(ids + 1)


class Heads(Module):
    """Operations on logits."""

    def __init__(self) -> None:
        self.lm_head = Linear(HIDDEN, 11)

    def forward(self, x: Tensor) -> Any:
        logits = self.lm_head(x)
        best, places = F.topk(logits, 3)
        along = F.argmax(logits), F.argmax(logits, dim=1), logits.max(-1), F.cumsum(logits)
        return F.log_softmax(logits), best, places, *along


class Experts(Module):
    """A mixture of experts called with x alone."""

    def __init__(self, **settings: Any) -> None:
        self.mlp = MixtureOfExperts(HIDDEN, 6, 5, 2, **settings)

    def forward(self, x: Tensor) -> Any:
        return self.mlp(x)


class Narrow(Module):
    """A norm and a gated feed-forward in 16 bits."""

    def __init__(self, dtype: str) -> None:
        self.norm = RmsNorm(HIDDEN, offset=1.0, dtype=dtype)
        self.mlp = GatedMLP(HIDDEN, 11, dtype=dtype)

    def forward(self, x: Tensor) -> Any:
        return x + self.mlp(self.norm(x))


LONG = Rope(kind="longrope", original_positions=4, short_factors=(1, 1.5), long_factors=(2, 3))
BIAS = {"bias": Spec("f32", ("B", 5, "S", "S"))}
LAYERS = {
    "heads_6_1": Case(attention(6, 1), X),
    "biases": Case(attention(6, 3, rope=LONG, qkv_bias=True, output_bias=True), X | POSITIONS),
    "normed_heads_8_2": Case(attention(8, 2, qk_norm=1e-5, rope=Rope()), X | POSITIONS),
    "slopes_of_5": Case(attention(5, 5, alibi=8.0), X),
    "cross": Case(Cross, X | MEMORY),
    "bias_of_5_heads": Case(Biased, X | BIAS),
    "alibi_5": Case(lambda: Alibi(5), X),
    "plain_4": Case(lambda: PlainAttention(4), X),
    "normed_across": Case(NormedAcross, X),
    "interleaved_5": Case(lambda: Interleaved(5), X),
    "layer_norm": Case(lambda: NormInside(LayerNorm(10), 10), X),
    "group_norm": Case(lambda: NormInside(GroupNorm(4, 12), 12), X),
    "mlp_gelu": Case(lambda: MLP(HIDDEN, 11, "gelu"), X),
    "gpt2_5": Case(lambda: Gpt2(5), IDS | POSITIONS),
    "turned_gpt2_5": Case(lambda: Gpt2(5, Turned), IDS | POSITIONS, TURNED),
    "bert": Case(Bert, IDS | POSITIONS),
    "tied": Case(Tied, IDS),
    "heads": Case(Heads, X),
    "experts": Case(Experts, X),
    "gated_expert": Case(lambda: Experts(shared_size=7, shared_gate=True), X),
    "capacity": Case(lambda: Experts(capacity=2), X),
    "clamped_experts": Case(lambda: Experts(act=ClampedSwiGLU(limit=0.5), bias=True), X),
    "bf16": Case(lambda: Narrow("bf16"), {"x": Spec("bf16", ("B", "S", HIDDEN))}),
}
