"""Rows of embedding tables: rows of zeros behind them, and the range of ids."""

from __future__ import annotations

ROUND = 8  # rows of a table with zeros behind are a multiple of this
LARGEST = {"i32": 2**31 - 1, "i64": 2**63 - 1}  # what an id of a dtype can be at most


def with_spare(rows: int) -> int:
    """The rows of a table with 1 to ROUND rows of zeros behind."""
    return -(-(rows + 1) // ROUND) * ROUND
