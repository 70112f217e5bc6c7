"""Multi-head latent attention, whose cache holds compressed keys and values."""

from __future__ import annotations

from .. import functional as F
from ..module import Module
from ..tensor import Tensor
from .basic import Linear, RmsNorm
from .rope import Rope

_EPS = 1e-6  # of the norms inside


class LatentAttention(Module):
    """Attention of `heads` heads to `kv_rank` features per token that stand for keys and values.

    A head's keys have `key_size` features computed from those, and `rotated` ones that heads share
    and `rope` rotates; values have `value_size`. What computes keys is applied to queries instead,
    and what computes values to the mean of the features: attention of one key-value head, with a
    cache [B, 1, capacity, kv_rank + rotated]. `query_rank` > 0 compresses queries as well; `scale`
    multiplies scores, and `bias` is that of the projections from and to hidden_size. DeepSeek-AI,
    2024 (DeepSeek-V2), and its names of parameters.
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        *,
        kv_rank: int,
        key_size: int,
        rotated: int,
        value_size: int,
        rope: Rope,
        query_rank: int = 0,
        scale: float | None = None,
        bias: bool = False,
        dtype: str = "f32",
    ) -> None:
        width = heads * (key_size + rotated)
        if query_rank:
            self.q_a_proj = Linear(hidden_size, query_rank, bias, dtype)
            self.q_a_layernorm = RmsNorm(query_rank, _EPS, dtype=dtype)
            self.q_b_proj = Linear(query_rank, width, False, dtype)
        else:
            self.q_proj = Linear(hidden_size, width, False, dtype)
        self.kv_a_proj_with_mqa = Linear(hidden_size, kv_rank + rotated, bias, dtype)
        self.kv_a_layernorm = RmsNorm(kv_rank, _EPS, dtype=dtype)
        self.kv_b_proj = Linear(kv_rank, heads * (key_size + value_size), False, dtype)
        self.o_proj = Linear(heads * value_size, hidden_size, bias, dtype)
        self.heads, self.query_rank, self.rope = heads, query_rank, rope
        self.kv_rank, self.key_size, self.rotated = kv_rank, key_size, rotated
        self.value_size = value_size
        self.scale = (key_size + rotated) ** -0.5 if scale is None else scale

    def forward(
        self, x: Tensor, positions: Tensor, cache: Tensor, past: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(x [B, S, hidden_size] to the same, the cache after this call).

        `positions` are i32 [B, S]; the new features are written after the `past` i32 [B] tokens.
        """
        batch, tokens = x.shape[:2]
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))) if self.query_rank else None
        q = (self.q_proj(x) if q is None else q).reshape(batch, tokens, self.heads, -1)
        fixed, turning = q.split((self.key_size, self.rotated), 3)
        turning = self.rope(turning.reshape(batch, tokens, -1), positions, self.rotated)
        expand = self.kv_b_proj.weight.reshape(self.heads, -1, self.kv_rank)
        to_keys, to_values = expand.split((self.key_size, self.value_size), 1)
        turning = turning.reshape(batch, tokens, self.heads, -1)
        q = F.concat([_by_head(fixed, to_keys), turning], 3).reshape(batch, tokens, -1)

        latent, shared = self.kv_a_proj_with_mqa(x).split((self.kv_rank, self.rotated), 2)
        shared = self.rope(shared, positions, self.rotated)
        stored = F.concat([self.kv_a_layernorm(latent), shared], 2)
        cache = F.cache_update(cache, stored, past).named("keys")
        size = self.kv_rank + self.rotated
        # the rotated features of values are dropped: a cache without them would be a copy
        mixed = F.attention(q, cache, cache, size, past=past, causal=True, scale=self.scale)
        mixed = mixed.reshape(batch, tokens, self.heads, size)[..., : self.kv_rank]
        values = _by_head(mixed, to_values.transpose(1, 2))
        return self.o_proj(values.reshape(batch, tokens, -1)), cache


def _by_head(x: Tensor, weights: Tensor) -> Tensor:
    """x [B, S, heads, inputs] times weights [heads, inputs, outputs]: [B, S, heads, outputs]."""
    batch, tokens, heads, size = x.shape
    rows = x.reshape(batch * tokens, heads, size).transpose(1, 0, 2) @ weights
    return rows.transpose(1, 0, 2).reshape(batch, tokens, heads, -1)
