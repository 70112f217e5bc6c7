"""Names of results that passes add to a model, and that runtimes look for."""

from __future__ import annotations

NEXT_TOKENS = "next_tokens"  # i32 [B, T]: the likeliest token after each position asked for
TOP_TOKENS, TOP_LOGITS = "top_tokens", "top_logits"  # [B, T, k]: the likeliest ones, best first
OUT_OF_RANGE = "_out_of_range"  # NAME_out_of_range, i32: out-of-range ids of the input NAME
UNKNOWN = "computed_ids"  # NAME where the ids come from no single input
OVERFLOW = "capacity_overflow"  # i32: the capacity that a call needs, where it is exceeded, else 0
