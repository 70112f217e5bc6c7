"""Names of results that passes add to a model, and that runtimes look for."""

from __future__ import annotations

NEXT_TOKENS = "next_tokens"  # i32 [B, T]: the likeliest token after each position asked for
TOP_TOKENS, TOP_LOGITS = "top_tokens", "top_logits"  # [B, T, k]: the likeliest ones, best first
OUTSIDE = "_outside"  # NAME_outside, i32: how many numbers of the input NAME are rows of no table
UNKNOWN = "ids"  # NAME where the numbers come from no single input
OVERFLOW = "overflow"  # i32: ids that found no room; the function's others are right where it is 0
EXACT = "exact"  # the function that has room for all, for a call that overflowed
