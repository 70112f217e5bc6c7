"""Errors that scripts for TensorRT-LLM also catch as those of Python."""

from __future__ import annotations

from ...errors import Error


class ArgumentError(Error, ValueError):
    """An argument has a value that is not possible; a ValueError, as in TensorRT-LLM."""


class NetworkError(Error, AssertionError):
    """No network is in progress; an AssertionError, as in TensorRT-LLM."""
