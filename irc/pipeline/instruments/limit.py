"""`Limit` stops a pass after some rewrites, to bisect; `WhyNot` tells why rules did not apply."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import ExitStack

from ...errors import Error
from ...ir.core import Module
from ...rewrite.watch import MatchFailure, Watch, watching
from ..run import Instrument, Step
from ..text import Pipeline


def parse_limit(text: str) -> tuple[str, int]:
    """(pass, count) from `fuse-gated-mlp=7`."""
    match = re.fullmatch(r"\s*([\w-]+)\s*=\s*(\d{1,9})\s*", text)
    if match is None:
        raise Error(f"cannot read the limit {text!r}; write it as pass=count, as in dce=7")
    return match[1], int(match[2])


class Limit(Instrument):
    """Permits only the first rewrites of a pass, over all its runs together.

    `made` counts the rewrites of every pass; `last` describes the last permitted one, as
    `llama.py:97: fuse`.
    """

    def __init__(self, limits: Mapping[str, int]) -> None:
        self.limits = dict(limits)
        self.made: dict[str, int] = {}
        self.last: dict[str, str] = {}
        self._stack = ExitStack()
        self._watch = Watch()

    def start(self, module: Module, pipeline: Pipeline) -> None:
        for name in self.limits:
            pipeline.require(name, "--limit")

    def before(self, step: Step, module: Module) -> None:
        name = step.pass_.name
        limit = self.limits.get(name)
        used = self.made.get(name, 0)
        self._watch = Watch(limit=None if limit is None else max(0, limit - used))
        self._stack.enter_context(watching(self._watch))

    def leave(self, step: Step) -> None:
        self._stack.close()
        name = step.pass_.name
        self.made[name] = self.made.get(name, 0) + self._watch.made
        self.last[name] = self._watch.last or self.last.get(name, "")


class WhyNot(Instrument):
    """The match failures of a pass, those with the fewest missing operations first."""

    def __init__(self, pass_name: str) -> None:
        self.pass_name = pass_name
        self.failures: list[MatchFailure] = []
        self._stack = ExitStack()

    def start(self, module: Module, pipeline: Pipeline) -> None:
        pipeline.require(self.pass_name, "--why-not")

    def before(self, step: Step, module: Module) -> None:
        if step.pass_.name == self.pass_name:
            self._watch = self._stack.enter_context(watching(Watch(collect=True)))

    def after(self, step: Step, module: Module) -> None:
        if step.pass_.name == self.pass_name:
            self.failures += sorted(self._watch.failures, key=lambda failure: failure.missing)

    def leave(self, step: Step) -> None:
        self._stack.close()

    def __str__(self) -> str:
        if not self.failures:
            return f"{self.pass_name}: no rule nearly matched"
        return "\n".join(map(str, self.failures))
