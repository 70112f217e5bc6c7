"""`logger`: the messages of a script, on standard error."""

from __future__ import annotations

import os
import sys
from functools import partialmethod
from typing import Any

from ...errors import Error, did_you_mean
from ...source import here
from .api import api, register

_LEVELS = ("internal_error", "error", "warning", "info", "verbose", "debug")


def _at(severity: str) -> Any:
    """The method that prints a message of a severity."""

    def method(self: Any, msg: object = "") -> None:
        self.log(severity, msg)

    return method


@api("logger.Logger")
class Logger:
    """Prints messages of its level and of more severe ones.

    The first level is that of the environment variable TLLM_LOG_LEVEL, else "warning".
    """

    def __init__(self) -> None:
        level = os.environ.get("TLLM_LOG_LEVEL", "warning").lower()
        self.level = level if level in _LEVELS else "warning"
        self._said: set[str] = set()

    def set_level(self, min_severity: str) -> None:
        """Print messages from this severity on."""
        if min_severity not in _LEVELS:
            near = did_you_mean(min_severity, _LEVELS)
            raise Error(f"no log level is called {min_severity!r}{near}", loc=here())
        self.level = min_severity

    def log(self, severity: str, msg: object = "") -> None:
        """Print a message of a severity."""
        if _LEVELS.index(severity) <= _LEVELS.index(self.level):
            print(f"[{severity}]", msg, file=sys.stderr)

    def _log_once(self, severity: str, *parts: object, key: object = None) -> None:
        """Print a message with this key, or text, at most once."""
        text = str(parts if key is None else key)
        if text not in self._said:
            self._said.add(text)
            self.log(severity, " ".join(map(str, parts)))

    error, critical = _at("error"), _at("internal_error")
    warning, info = _at("warning"), _at("info")
    verbose, debug = _at("verbose"), _at("debug")
    warning_once, info_once = partialmethod(_log_once, "warning"), partialmethod(_log_once, "info")


logger = Logger()
for _name in ("set_level", "log", "error", "critical", "warning", "info", "verbose", "debug"):
    register(f"logger.{_name}", getattr(logger, _name))
for _name in ("warning_once", "info_once"):
    register(f"logger.{_name}", getattr(logger, _name))
register("logger.logger", logger)


def __getattr__(name: str) -> Any:
    """The methods of the logger: `tensorrt_llm.logger` is both this module and the logger."""
    return getattr(logger, name)
