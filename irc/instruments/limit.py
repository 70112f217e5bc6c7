"""Stops a pass after so many rewrites, to find by halving the rewrite that makes a difference."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack

from ..core import Module
from ..errors import Error
from ..pipeline.run import Instrument, Step
from ..pipeline.text import Pipeline
from ..rewrite.watch import Watch, watching


def parse_limit(text: str) -> tuple[str, int]:
    """(pass, count) from `fuse-gated-mlp=7`."""
    match = re.fullmatch(r"\s*([\w-]+)\s*=\s*(\d{1,9})\s*", text)
    if match is None:
        raise Error(f"cannot read the limit {text!r}; write it as pass=count, as in dce=7")
    return match[1], int(match[2])


class Limit(Instrument):
    """Lets a pass make only its first so many rewrites, over all its runs together.

    `made` counts the rewrites of every pass that ran; `last` says what the last permitted one
    was, as `llama.py:97: fuse`.
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


def first_wrong(count: int, is_right: Callable[[int], bool]) -> int | None:
    """The least n of 1..count for which `is_right(n)` is false, by halving; None if there is none.

    `is_right(n)` runs the pipeline with at most n rewrites. What is wrong with n must stay wrong
    with more.
    """
    if count == 0 or is_right(count):
        return None
    low, high = 0, count  # right with `low` (no rewrite), wrong with `high`
    while high - low > 1:
        middle = (low + high) // 2
        if is_right(middle):
            low = middle
        else:
            high = middle
    return high
