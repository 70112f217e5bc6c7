"""Collects why the rules of a pass did not apply."""

from __future__ import annotations

from contextlib import ExitStack

from ..core import Module
from ..pipeline.run import Instrument, Step
from ..pipeline.text import Pipeline
from ..rewrite.watch import Miss, Watch, watching


class WhyNot(Instrument):
    """The places where a pass nearly did something, the nearest first."""

    def __init__(self, pass_name: str) -> None:
        self.pass_name = pass_name
        self.misses: list[Miss] = []
        self._stack = ExitStack()

    def start(self, module: Module, pipeline: Pipeline) -> None:
        pipeline.require(self.pass_name, "--why-not")

    def before(self, step: Step, module: Module) -> None:
        if step.pass_.name == self.pass_name:
            self._watch = self._stack.enter_context(watching(Watch(collect=True)))

    def after(self, step: Step, module: Module) -> None:
        if step.pass_.name == self.pass_name:
            self.misses += sorted(self._watch.misses, key=lambda miss: miss.missing)

    def leave(self, step: Step) -> None:
        self._stack.close()

    def __str__(self) -> str:
        if not self.misses:
            return f"{self.pass_name}: nothing came near"
        return "\n".join(map(str, self.misses))
