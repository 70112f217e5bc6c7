"""What each AttentionMaskType lets a query see, in terms of irc's attention.

| type | visible keys of the query at position p |
|---|---|
| padding | all |
| causal, sliding_window_causal | up to p, and with a window the last ones of that number |
| bidirectional, bidirectionalglm | all of the prompt but its last, and those up to p |
| blocksparse | up to p, in the blocks of `BlockSparse` |
| custom_mask | those of attention_mask |

Without the attention plugin `attention_mask` hides keys of every type.
"""

from __future__ import annotations

from typing import Any

from ....errors import Error
from ....ir.dims import DimLike
from ....source import here
from ... import functional as F
from ...layers import BlockSparse
from ...layers.positions import query_positions, size_tensor
from ...tensor import Tensor as Inner
from ..dtypes import irc_dtype
from ..enums import AttentionMaskType
from ..tensor import Tensor, shape_of, wrap


def visible(
    kind: AttentionMaskType,
    keys: DimLike,
    *,
    mask: Inner | None = None,
    prompt: Inner | None = None,
    window: int | Inner = 0,
    block_sparse: BlockSparse | None = None,
) -> dict[str, Any]:
    """The options of `layers.scores.attend` for a mask type, over `keys` keys.

    `prompt` i32 [B] is the length of the prompts, by default all keys.
    """
    options: dict[str, Any] = {"mask": None if mask is None else key_mask(mask, keys)}
    match kind:
        case AttentionMaskType.padding:
            return options
        case AttentionMaskType.causal:
            return options | {"causal": True, "window": window}
        case AttentionMaskType.sliding_window_causal:
            if isinstance(window, int) and window < 1:
                raise Error(
                    "sliding_window_causal attention needs its window: give "
                    "host_max_attention_window_sizes, the number of keys per layer",
                    loc=here(),
                )
            return options | {"causal": True, "window": window}
        case AttentionMaskType.blocksparse:
            return options | {"block_sparse": block_sparse or BlockSparse()}
        case AttentionMaskType.custom_mask:
            if mask is None:
                raise Error("custom_mask attention needs attention_mask", loc=here())
            return options
        case _:
            length = size_tensor(keys) if prompt is None else prompt
            return options | {"prefix": length - 1}


def key_mask(mask: Inner, keys: DimLike) -> Inner:
    """A mask [B, T], [B, S, T] or [B, H, S, T] as bool of four dimensions, true where not 0.

    Keys behind the last one of the mask, as a cache has them, are hidden.
    """
    if mask.ndim not in (2, 3, 4):
        raise Error(
            "expected an attention_mask [batch, keys], [batch, queries, keys] or "
            f"[batch, heads, queries, keys], found {mask.type}",
            loc=here(),
        )
    seen = mask if mask.dtype == "bool" else F.ne(mask, 0)
    seen = seen.unsqueeze(*{2: (1, 2), 3: (1,), 4: ()}[mask.ndim]) if mask.ndim < 4 else seen
    missing = keys - seen.shape[3]
    if missing == 0:
        return seen
    before, after = (0, 0, 0, 0), (0, 0, 0, missing)
    return F.ne(F.pad(F.cast(seen, "i32"), before, after), 0)


def make_causal_mask(bsz: Any, tgt_len: Any, past_key_values_length: Any, dtype: Any) -> Tensor:
    """A bias [bsz, 1, tgt_len, past + tgt_len]: 0 for keys up to the query, else -infinity."""
    (batch,), (tokens,) = shape_of(bsz), shape_of(tgt_len)
    (past,) = shape_of(past_key_values_length)
    keys = past + tokens
    query = query_positions(tokens, past).reshape(1, 1, tokens, 1)
    seen = F.le(F.iota(keys).reshape(1, 1, 1, keys), query)
    bias = F.where(seen, F.full(0.0), F.full(float("-inf"))).cast(irc_dtype(dtype))
    return wrap(F.expand(bias, (batch, 1, tokens, keys)))
