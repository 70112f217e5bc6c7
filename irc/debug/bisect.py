"""`bisect`: the pass, and the rewrite of this pass, or the kernel, that breaks a module."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from ..errors import Error
from ..ir.core import Module
from ..pipeline import Pipeline, parse_pipeline, run_pipeline
from ..pipeline.instruments import Limit, VerifyEach
from ..text import parse_module
from ..text.printer import print_module
from .checks import Check


class State(NamedTuple):
    """A module after some passes: what is wrong with it, "" for nothing; its text, "" where a pass
    fails; the passes and the limit of their rewrites; the place and the rule of the last one."""

    problem: str
    text: str
    pipeline: Pipeline
    limit: Limit
    where: str
    rule: str


class Found(NamedTuple):
    """The rewrite between a good and a bad module, made by the last pass.

    `number` counts the rewrites of all passes of its name, as `--limit` does, of `total`; 0 means
    the pass as a whole. A rewrite of `expand` makes a bad module good: its kernel is wrong.
    """

    number: int
    total: int
    before: State
    after: State


def bisect(module: Module, pipeline: Pipeline, check: Check, trusted: int = 0) -> Found | None:
    """The first rewrite after which a check fails, None where it holds for the module after all
    passes: those between are checked only if it fails there.

    The passes run over copies of `module`, the first `trusted` ones are right. A pass that raises,
    or after which the module does not verify, fails too. An Error where the module is bad before.
    """
    state = _states(module, pipeline, check)
    if reason := state(trusted).problem:
        where = f"after pass {trusted}" if trusted else "before any pass"
        raise Error(f"the module fails the check already {where}: {reason}")
    if not state(len(pipeline)).problem:
        return None
    count = _first(trusted, len(pipeline), lambda n: bool(state(n).problem))
    return _rewrite(state, count, bad=True)


def bisect_kernels(module: Module, pipeline: Pipeline, check: Check) -> Found | None:
    """The composite operation of the final module whose kernel is wrong, of several the last one:
    with it expanded the module is good. None where it is good as it is."""
    expanding = Pipeline((*pipeline, *parse_pipeline("expand")))
    state = _states(module, expanding, check)
    if not state(len(pipeline)).problem:
        return None
    if reason := state(len(expanding)).problem:
        raise Error(
            f"the module stays wrong with every composite operation expanded ({reason}); irc "
            "compare names the first value that differs"
        )
    return _rewrite(state, len(expanding), bad=False)


def _rewrite(state: Callable[..., State], count: int, bad: bool) -> Found:
    """The first rewrite of the last of some passes after which the module is bad, or is not."""
    before, after = state(count - 1), state(count)
    start, total = (
        each.limit.made.get(after.pipeline.passes[-1].name, 0) for each in (before, after)
    )
    if start == total or bool(state(count, start).problem) == bad:
        return Found(0, total, before, after)
    number = _first(start, total, lambda n: bool(state(count, n).problem) == bad)
    return Found(number, total, state(count, number - 1), state(count, number))


def _first(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The least number behind `low` for which `holds` is true, as it is for `high`."""
    return low + 1 + bisect_left(range(low + 1, high), True, key=holds)


def _states(module: Module, pipeline: Pipeline, check: Check) -> Callable[..., State]:
    """The state after the first passes, with a limit of the rewrites of the last one."""
    start = print_module(module, locs=True)

    @cache
    def state(count: int, limit: int | None = None) -> State:
        module, passes = parse_module(start), Pipeline(pipeline.passes[:count])
        name = passes.passes[-1].name if count else ""
        limits = Limit({} if limit is None else {name: limit})
        try:
            run_pipeline(module, passes, [VerifyEach(), limits])
        except Error as error:
            problem, text = str(error), ""
        else:
            problem, text = check(module), print_module(module, locs=True)
        where, _, rule = limits.last.get(name, "").rpartition(": ")
        return State(problem, text, passes, limits, where, rule)

    return state
