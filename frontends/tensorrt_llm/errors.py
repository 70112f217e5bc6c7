"""Errors that scripts for TensorRT-LLM also catch as ValueError."""

from __future__ import annotations

from ...errors import Error


class ArgumentError(Error, ValueError):
    """An argument has a value that is not possible; a ValueError, as in TensorRT-LLM."""
