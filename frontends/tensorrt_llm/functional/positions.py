"""ALiBi, relative biases and log-n scaling as scripts of TensorRT-LLM use them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ... import functional as F
from ...layers import RelativePositions
from ...layers.positions import alibi_slopes, query_positions
from ...tensor import Tensor as Inner
from ..context import dialect, signatures
from ..dtypes import irc_dtype
from ..module import constant_tensor
from ..tensor import Tensor, shape_of, unwrap, wrap

Array = np.ndarray[Any, Any]


@signatures(
    a="num_heads, dtype, tp_size, tp_rank, alibi_scale, alibi_bias_max",
    b="num_heads, tp_size, tp_rank, alibi_scale, alibi_bias_max",
)
def generate_alibi_slopes(
    num_heads: int,
    dtype: Any = "float32",
    tp_size: int = 1,
    tp_rank: int = 0,
    alibi_scale: float = 1.0,
    alibi_bias_max: int = 8,
) -> Any:
    """The slopes of this rank's heads times `alibi_scale`, [1, num_heads/tp_size, 1, 1].

    An array of numpy for dialect B, which makes a Parameter of it; a Tensor for dialect A.
    """
    local = num_heads // tp_size
    if dialect() == "A":
        found = alibi_slopes(num_heads, alibi_bias_max, tp_rank * local, local) * float(alibi_scale)
        return wrap(found.reshape(1, local, 1, 1).cast(irc_dtype(dtype)))
    power = 2 ** int(math.log2(num_heads))
    slopes = [
        2 ** (-alibi_bias_max * ((i + 1) / power if i < power else (i - power + 0.5) / power))
        for i in range(tp_rank * local, (tp_rank + 1) * local)
    ]
    return (np.array(slopes, np.float32) * np.float32(alibi_scale)).reshape(1, local, 1, 1)


def generate_alibi_biases(slopes: Tensor, key_length: Any) -> Tensor:
    """slope * position of the key: f32 [1, heads, 1, key_length], for slopes [1, heads, 1, 1]."""
    (keys,) = shape_of(key_length)
    return wrap(unwrap(slopes).cast("f32") * F.cast(F.iota(keys), "f32").reshape(1, 1, 1, keys))


def compute_relative_bias(
    query_length: Any,
    key_length: Any,
    num_buckets: int,
    max_distance: int,
    bidirectional: bool,
    rel_attn_table: Tensor,
    tp_size: int = 1,
    tp_group: Any = None,
    tp_rank: int | None = None,
) -> Tensor:
    """The bias of T5 for queries and keys from position 0: f32 [1, heads, queries, keys].

    `rel_attn_table` [num_buckets, heads] holds the heads of this rank, so that, unlike in
    TensorRT-LLM, the ranks do not exchange anything: each gets the biases of its own heads.
    """
    (queries,), (keys,) = shape_of(query_length), shape_of(key_length)
    rule = RelativePositions(num_buckets, max_distance, bidirectional)
    table = unwrap(rel_attn_table).permute(1, 0)
    return wrap(rule.bias(table, query_positions(queries), keys))


def generate_logn_scaling(seq_length: int = 8192, max_position_embeddings: int = 32768) -> Array:
    """log(n) / log(seq_length) for n up to `max_position_embeddings`, at least 1: f32 [n]."""
    numbers = np.log(np.arange(1, max_position_embeddings + 1)) / math.log(seq_length)
    return np.maximum(numbers, 1.0).astype(np.float32)


def as_tensor(x: Any) -> Inner:
    """A Tensor, a Parameter or an array as irc's tensor."""
    return unwrap(constant_tensor(x)) if isinstance(x, np.ndarray) else unwrap(x)
