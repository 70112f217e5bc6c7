"""Comparing two models, layer by layer."""

from .compare import Comparison, Row, compare

__all__ = ["Comparison", "Row", "compare"]
