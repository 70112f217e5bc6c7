"""Prints what each pass changed, as a unified diff of the module text."""

from __future__ import annotations

import difflib
from typing import TextIO

from ..core import Module
from ..pipeline.run import Instrument, Step
from ..pipeline.text import Pipeline
from ..text.printer import print_module


class PrintDiff(Instrument):
    """Writes a unified diff to `out` after every pass that changed something."""

    def __init__(self, out: TextIO, context: int = 1) -> None:
        self.out, self.context = out, context
        self._text = ""
        self._label = "before"

    def start(self, module: Module, pipeline: Pipeline) -> None:
        self._text, self._label = print_module(module), "before"

    def after(self, step: Step, module: Module) -> None:
        new, label = print_module(module), f"after {step}"
        diff = difflib.unified_diff(
            self._text.splitlines(keepends=True),
            new.splitlines(keepends=True),
            self._label,
            label,
            n=self.context,
        )
        self.out.writelines(diff)
        self._text, self._label = new, label
