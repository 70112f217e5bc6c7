"""Blocks of other model families, and unusual uses of weights, as cases to shard."""

from __future__ import annotations

from typing import Any

from irc.frontends import Module, Tensor
from irc.frontends import functional as F
from irc.frontends.layers import MLP, Attention, Embedding, LayerNorm, Linear, RmsNorm
from irc.frontends.module import Parameter

from .cases import HIDDEN, IDS, POSITIONS, Case, X

BLOCKS: dict[str, Case] = {}


class Turned(Module):
    """x · weight + bias with weight [in, out], as in GPT-2's checkpoints."""

    def __init__(self, inside: int, outside: int) -> None:
        self.weight, self.bias = Parameter((inside, outside)), Parameter((outside,))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Named(Module):
    """A linear with a name that plans know, in a submodule."""

    def __init__(self, inside: int, linear: type[Linear | Turned]) -> None:
        self.c_proj = linear(inside, HIDDEN)

    def forward(self, x: Tensor) -> Any:
        return self.c_proj(x)


class Gpt2Block(Module):
    """Attention and feed-forward of GPT-2: QKV merged, and biases."""

    def __init__(self, heads: int, linear: type[Linear | Turned]) -> None:
        self.ln_1, self.ln_2 = LayerNorm(HIDDEN), LayerNorm(HIDDEN)
        self.c_attn, self.c_proj = linear(HIDDEN, 12 * heads), linear(4 * heads, HIDDEN)
        self.c_fc, self.mlp = linear(HIDDEN, 31), Named(31, linear)
        self.size = 4 * heads

    def forward(self, x: Tensor) -> Any:
        merged, size = self.c_attn(self.ln_1(x)), self.size
        if isinstance(self.c_attn, Turned):
            parts = [merged[:, :, i * size : (i + 1) * size] for i in range(3)]
        else:
            parts = merged.split([size] * 3, 2)
        x = x + self.c_proj(F.attention(*parts, head_dim=4, causal=True))
        return x + self.mlp(F.gelu(self.c_fc(self.ln_2(x))))


class Gpt2(Module):
    """A block between learned positions and a head, which is the table as well."""

    def __init__(self, heads: int) -> None:
        self.wte, self.wpe = Embedding(13, HIDDEN), Embedding(16, HIDDEN)
        self.block = Gpt2Block(heads, Linear)

    def forward(self, ids: Tensor, positions: Tensor) -> Any:
        return F.linear(self.block(self.wte(ids) + self.wpe(positions)), self.wte.weight)


TURNED = (
    *("c_attn.weight 1@tp", "c_attn.bias 0@tp", "c_proj.weight 0@tp", "c_fc.weight 1@tp"),
    *("c_fc.bias 0@tp", "mlp.c_proj.weight 0@tp"),
)


class Parallel(Module):
    """Attention and feed-forward side by side, as in GPT-J, GPT-NeoX and Falcon."""

    def __init__(self, bias: bool) -> None:
        self.norm = LayerNorm(HIDDEN)
        self.attn = Attention(HIDDEN, 6, 3, 4, qkv_bias=bias, output_bias=bias)
        self.mlp = MLP(HIDDEN, 11, bias=bias)

    def forward(self, x: Tensor) -> Any:
        normed = self.norm(x)
        return x + self.attn(normed) + self.mlp(normed)


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


class Bert(Module):
    """An encoder with three tables, norms behind the blocks and a pooler. Devlin et al., 2019."""

    def __init__(self) -> None:
        self.word_embeddings, self.position_embeddings = (
            Embedding(13, HIDDEN),
            Embedding(16, HIDDEN),
        )
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


class Prompted(Module):
    """Prompt tuning: ids beyond the vocabulary are rows of another table. Lester et al., 2021."""

    def __init__(self) -> None:
        self.embed_tokens, self.prompt = Embedding(11, HIDDEN), Embedding(5, HIDDEN)
        self.mlp = MLP(HIDDEN, 9, "relu")

    def forward(self, ids: Tensor) -> Any:
        virtual = (ids >= 11).unsqueeze(2)
        return self.mlp(F.where(virtual, self.prompt(ids - 11), self.embed_tokens(ids)))


class Tied(Module):
    """One table in four places."""

    def __init__(self) -> None:
        self.embed_tokens = Embedding(11, HIDDEN)
        self.lm_head, self.second = Linear(HIDDEN, 11, False), Linear(HIDDEN, 11, False)
        self.lm_head.weight = self.second.weight = self.embed_tokens.weight

    def forward(self, ids: Tensor) -> Any:
        x = self.embed_tokens(ids)
        return self.lm_head(x), self.second(F.tanh(x)), self.embed_tokens(ids + 1)


class Twice(Module):
    """The same layers twice, with another use of a weight."""

    def __init__(self) -> None:
        self.fc1, self.fc2 = Linear(HIDDEN, 10), Linear(10, HIDDEN)
        self.norm = RmsNorm(HIDDEN)

    def forward(self, x: Tensor) -> Any:
        for _ in range(2):
            x = x + self.fc2(F.relu(self.fc1(self.norm(x))))
        return x * self.norm.weight, self.fc1.weight.sum()


class Transposed(Module):
    """Weights that are transposed before their use, and computed ones."""

    def __init__(self) -> None:
        self.fc1, self.fc2, self.fc3 = (Parameter((11, HIDDEN)) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        inside = x @ self.fc1.transpose(0, 1)
        return (inside + F.linear(x, F.exp(self.fc3))) @ self.fc2


class Merged(Module):
    """Gate and up projection in one weight."""

    def __init__(self) -> None:
        self.gate_up_proj, self.down_proj = Linear(HIDDEN, 22), Linear(11, HIDDEN)

    def forward(self, x: Tensor) -> Any:
        gate, up = self.gate_up_proj(x).split([11, 11], 2)
        return self.down_proj(F.silu(gate) * up)


class Heads(Module):
    """Operations on logits."""

    def __init__(self) -> None:
        self.lm_head = Linear(HIDDEN, 11)

    def forward(self, x: Tensor) -> Any:
        logits = self.lm_head(x)
        best, places = F.topk(logits, 3)
        along = F.argmax(logits), F.argmax(logits, dim=1), logits.max(-1), F.cumsum(logits)
        return F.log_softmax(logits), best, places, *along


BLOCKS |= {
    "gpt2_6": Case(lambda: Gpt2(6), IDS | POSITIONS),
    "gpt2_5": Case(lambda: Gpt2(5), IDS | POSITIONS),
    "turned_gpt2_5": Case(lambda: Gpt2Block(5, Turned), X, TURNED),
    "turned_gpt2_by_others": Case(lambda: Gpt2Block(6, Turned), X),
    "parallel": Case(lambda: Parallel(bias=False), X),
    "parallel_bias": Case(lambda: Parallel(bias=True), X),
    "interleaved_5": Case(lambda: Interleaved(5), X),
    "bert": Case(Bert, IDS | POSITIONS),
    "prompted": Case(Prompted, IDS),
    "tied": Case(Tied, IDS),
    "twice": Case(Twice, X),
    "transposed": Case(Transposed, X, ("fc[13] 0@tp", "fc2 0@tp")),
    "transposed_mixed": Case(Transposed, X, ("fc1 0@tp", "fc2 1@tp", "fc3 replicated")),
    "merged": Case(Merged, X),
    "heads": Case(Heads, X),
}
