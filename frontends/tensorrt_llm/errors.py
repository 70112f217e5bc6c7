"""Errors of scripts for TensorRT-LLM, some of which they also catch as those of Python."""

from __future__ import annotations

from ...errors import Error
from ...source import here


class ScriptError(Error):
    """Something that the script has to change, at the line of it that is running."""

    def __init__(self, message: str) -> None:
        super().__init__(message, loc=here())


class ArgumentError(ScriptError, ValueError):
    """An argument has a value that is not possible; a ValueError, as in TensorRT-LLM."""


class NetworkError(ScriptError, AssertionError):
    """No network is in progress; an AssertionError, as in TensorRT-LLM."""
