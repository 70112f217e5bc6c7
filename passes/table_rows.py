"""Rows of tables that are looked up: those of zeros behind them, and which numbers ids can be."""

from __future__ import annotations

ROUND = 8  # rows of a table with zeros behind are a multiple of this
LARGEST = {"i32": 2**31 - 1, "i64": 2**63 - 1}  # what an id of a dtype can be at most


def with_spare(rows: int) -> int:
    """The rows of a table with at least one row of zeros behind, and at most ROUND of them."""
    return -(-(rows + 1) // ROUND) * ROUND
