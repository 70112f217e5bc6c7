"""`Watch`: limits the rewrites of a pass and collects why rules did not match."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..ir.core import Op

if TYPE_CHECKING:
    from .rules import Rule


@dataclass
class MatchFailure:
    """A rule that nearly applied at an operation; `missing` counts the unmatched operations."""

    rule: str
    missing: int
    where: str
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


@dataclass
class Rewrite:
    """One rewrite while it happens: what made it, and the operation and the text it began with."""

    rule: str
    root: Op
    before: str
    where: str


@dataclass
class Watch:
    """Observes the rewrites of one pass.

    At most `limit` rewrites are permitted (None: any number); `made` counts them, and `last`
    describes the last one, and `rules` are those that were tried. `rewrites` and `failures` are
    collected if `collect` is set.
    """

    limit: int | None = None
    collect: bool = False
    made: int = 0
    last: str = ""
    failures: list[MatchFailure] = field(default_factory=list[MatchFailure])
    rewrites: list[Rewrite] = field(default_factory=list[Rewrite])
    rules: list[Rule] = field(default_factory=list["Rule"])
    reason: str | None = None  # of the rule that declined last
    outer: Watch | None = None  # the enclosing watch, which must permit a rewrite too

    def ask(self, what: str, op: Op) -> bool:
        """Whether one more rewrite is permitted; if so, count it."""
        if self.limit is not None and self.made >= self.limit:
            return False
        if self.outer is not None and not self.outer.ask(what, op):
            return False
        self.made += 1
        self.last = f"{place(op)}: {what}"
        if self.collect:
            self.rewrites.append(Rewrite(what, op, str(op), place(op)))
        return True


_current: ContextVar[Watch | None] = ContextVar("irc_rewrite_watch", default=None)


@contextmanager
def watching(watch: Watch) -> Generator[Watch]:
    """Let `watch` observe all rewrites inside the block."""
    watch.outer = _current.get()
    token = _current.set(watch)
    try:
        yield watch
    finally:
        _current.reset(token)


def current_watch() -> Watch | None:
    """The innermost active watch, if any."""
    return _current.get()


def permit(what: str, op: Op) -> bool:
    """Whether a pass may make one more rewrite, named `what`, at `op`.

    A pass that rewrites without rules asks before each rewrite, so that `--limit` and bisection
    count it.
    """
    watch = _current.get()
    return watch is None or watch.ask(what, op)


def decline(reason: str) -> None:
    """The result of a rule that does not apply: `return decline("the dtypes differ")`."""
    watch = _current.get()
    if watch is not None:
        watch.reason = reason


def report_failure(rule: str, op: Op, reason: str) -> None:
    """Record why a pass without rules did not rewrite `op`, if failures are collected."""
    watch = _current.get()
    if watch is not None and watch.collect:
        watch.failures.append(MatchFailure(rule, 0, place(op), reason))


def place(op: Op) -> str:
    """The location of an operation, as `llama.py:97 in layers.0.mlp`, else its result or name."""
    if op.loc is not None:
        return op.loc.where()
    name = next((r.name for r in op.results if r.name), None)
    return f"%{name}" if name else op.opname
