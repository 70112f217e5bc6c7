"""What instruments see of rewriting: permission for each rewrite, and why rules did not match."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from ..core import Op


@dataclass
class Miss:
    """A place where a rule nearly applied. `missing` counts the pattern's operations not found."""

    rule: str
    missing: int
    where: str
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


@dataclass
class Watch:
    """Listens to the rewrites of one pass.

    `limit` is how many may still be made (None: any number); `made` counts them and `last` says
    what the last one was. Misses are collected where `collect` is set.
    """

    limit: int | None = None
    collect: bool = False
    made: int = 0
    last: str = ""
    misses: list[Miss] = field(default_factory=list[Miss])
    reason: str | None = None  # of the rule that declined last
    outer: Watch | None = None  # the watch around this one, which has a say too

    def ask(self, what: str, op: Op) -> bool:
        """Whether one more rewrite may be made; if so it is counted."""
        if self.limit is not None and self.made >= self.limit:
            return False
        if self.outer is not None and not self.outer.ask(what, op):
            return False
        self.made += 1
        self.last = f"{place(op)}: {what}"
        return True


_current: ContextVar[Watch | None] = ContextVar("irc_rewrite_watch", default=None)


@contextmanager
def watching(watch: Watch) -> Generator[Watch]:
    """Everything rewritten inside is seen by `watch`."""
    watch.outer = _current.get()
    token = _current.set(watch)
    try:
        yield watch
    finally:
        _current.reset(token)


def current_watch() -> Watch | None:
    """The watch around this code, if any."""
    return _current.get()


def permit(what: str, op: Op) -> bool:
    """Whether a pass may make one more rewrite, called `what`, at `op`.

    A pass that rewrites without rules asks before each rewrite; that is what `--limit` and bisect
    count.
    """
    watch = _current.get()
    return watch is None or watch.ask(what, op)


def decline(reason: str) -> None:
    """Returned by a rule that does not apply after all: `return decline("the dtypes differ")`."""
    watch = _current.get()
    if watch is not None:
        watch.reason = reason


def miss(rule: str, op: Op, reason: str, missing: int = 0) -> None:
    """Report, where someone asked why, a place at which a pass without rules did nothing."""
    watch = _current.get()
    if watch is not None and watch.collect:
        watch.misses.append(Miss(rule, missing, place(op), reason))


def place(op: Op) -> str:
    """`llama.py:97 in layers.0.mlp`, or the name of the result where there is no location."""
    if op.loc is not None:
        return op.loc.where()
    name = next((r.name for r in op.results if r.name), None)
    return f"%{name}" if name else op.opname
