"""`History`: what every pass of a run did: its rewrites by number, and the origin of each value."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from contextvars import Token
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from ...ir.core import Module, Op, Value, replacements
from ...rewrite.watch import MatchFailure, Rewrite, Watch, watching
from ...text.printer import names_of, print_module
from ..run import Instrument, Step
from ..text import Pipeline

How: TypeAlias = Literal["kept", "renamed", "rewritten", "rebuilt", "new"]
Names: TypeAlias = dict[Value, str]
INPUT = "input"


@dataclass(frozen=True)
class Hit:
    """One rewrite: its number among those of this pass, as `--limit PASS=N` counts them.

    `rule_where` is the line of the rule, "" for a pass that walks; `before` is the operation that
    it began with, `values` the values after the pass that took the place of others.
    """

    number: int
    rule: str
    rule_where: str
    where: str
    before: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Origin:
    """The values before a pass that a value after it comes from, and how.

    `kept`: the same value; `renamed`: under another name; `rewritten`: in the rewrite `hit`;
    `rebuilt`: in a copy of the function; `new`: computed from `values`, if there are any.
    """

    how: How
    values: tuple[str, ...] = ()
    hit: int | None = None


@dataclass(frozen=True)
class PassRecord:
    """What a pass did. `text` is the module after it with locations, `pass_` the pass as text.

    Values have the names of the text, behind `@function ` outside of the main function.
    """

    index: int
    name: str
    pass_: str
    text: str
    operations: int
    seconds: float = 0.0
    counts: Mapping[str, int] = field(default_factory=dict[str, int])
    notes: tuple[str, ...] = ()
    hits: tuple[Hit, ...] = ()
    failures: tuple[MatchFailure, ...] = ()
    origins: Mapping[str, Origin] = field(default_factory=dict[str, Origin])


class History(Instrument):
    """Records every pass of a run. `records` begin with the module before the first pass."""

    def __init__(self) -> None:
        self.records: list[PassRecord] = []
        self._made: dict[str, int] = {}  # rewrites by the name of the pass
        self._names: Names = {}
        self._watch, self._stack, self._began = _LoggedWatch(), ExitStack(), 0.0
        self._log: list[tuple[Value, Value]] = []

    @property
    def input(self) -> PassRecord:
        """The module before the first pass."""
        return self.records[0]

    @property
    def steps(self) -> list[PassRecord]:
        """The passes in order."""
        return self.records[1:]

    def start(self, module: Module, pipeline: Pipeline) -> None:
        self._names = value_names(module)
        self.records = [PassRecord(0, INPUT, "", _text(module), sum(1 for _ in module.ops()))]

    def before(self, step: Step, module: Module) -> None:
        self._log = []
        self._watch = _LoggedWatch(collect=True, log=self._log)
        token: Token[list[tuple[Value, Value]] | None] = replacements.set(self._log)
        self._stack.callback(replacements.reset, token)
        self._stack.enter_context(watching(self._watch))
        self._began = time.perf_counter()

    def after(self, step: Step, module: Module) -> None:
        seconds = time.perf_counter() - self._began
        watch, name = self._watch, step.pass_.name
        names, first = value_names(module), self._made.get(name, 0) + 1
        finder = _Origins(self._names, watch.rewrites, self._log, watch.marks, first)
        origins = {text: finder.of(value, text) for value, text in names.items()}
        values: dict[int, list[str]] = {}
        for text, origin in origins.items():
            if origin.hit is not None:
                values.setdefault(origin.hit, []).append(text)
        rules = step.stats.rules
        hits = [
            Hit(
                first + i,
                rewrite.rule,
                rules[rewrite.rule].where if rewrite.rule in rules else "",
                rewrite.where,
                rewrite.before,
                tuple(values.get(first + i, ())),
            )
            for i, rewrite in enumerate(watch.rewrites)
        ]
        self.records.append(
            PassRecord(
                step.index,
                name,
                str(step),
                _text(module),
                sum(1 for _ in module.ops()),
                seconds,
                {what: step.stats[what] for what in step.stats if step.stats[what]},
                tuple(step.stats.notes),
                tuple(hits),
                tuple(watch.failures),
                origins,
            )
        )
        self._names = names
        self._made[name] = self._made.get(name, 0) + watch.made

    def leave(self, step: Step) -> None:
        self._stack.close()


@dataclass
class _LoggedWatch(Watch):
    """A watch that marks where in a log of replaced values each rewrite begins."""

    log: list[tuple[Value, Value]] = field(default_factory=list[tuple[Value, Value]])
    marks: list[int] = field(default_factory=list[int])

    def ask(self, what: str, op: Op) -> bool:
        permitted = super().ask(what, op)
        if permitted:
            self.marks.append(len(self.log))
        return permitted


class _Origins:
    """Finds where the values after a pass come from."""

    def __init__(
        self,
        names: Names,
        rewrites: list[Rewrite],
        log: list[tuple[Value, Value]],
        marks: list[int],
        first: int,
    ) -> None:
        self.names, self.rewrites, self.first = names, rewrites, first
        self.replaced: dict[Value, list[Value]] = {}  # by the new value, the old ones
        self.hits: dict[Value, int] = {}
        hit = -1
        for i, (old, new) in enumerate(log):
            while hit + 1 < len(marks) and marks[hit + 1] <= i:
                hit += 1
            self.replaced.setdefault(new, []).append(old)
            if hit >= 0:
                self.hits[new] = first + hit
        self.by_loc = {
            id(rewrite.root.loc): (number, rewrite)
            for number, rewrite in enumerate(rewrites, first)
            if rewrite.root.loc is not None
        }
        self.same: dict[tuple[object, ...], list[str]] = {}
        self.near: dict[object, list[str]] = {}
        for value, name in names.items():
            loc = value.producer.loc if value.producer is not None else None
            self.same.setdefault((value.name, repr(loc)), []).append(name)
            if loc is not None:
                self.near.setdefault(repr(loc), []).append(name)

    def of(self, value: Value, name: str) -> Origin:
        """The origin of a value that has a name after the pass."""
        before = self.names.get(value)
        if before is not None:
            return Origin("kept" if before == name else "renamed", (before,))
        if value in self.replaced:
            return Origin("rewritten", tuple(self._sources(value)), self.hits.get(value))
        loc = value.producer.loc if value.producer is not None else None
        rewritten = self.by_loc.get(id(loc)) if loc is not None else None
        if rewritten is not None:
            number, rewrite = rewritten
            return Origin("rewritten", tuple(self._all_sources(rewrite.root.results)), number)
        if (number := self._hit_of_user(value)) is not None:
            root = self.rewrites[number - self.first].root
            return Origin("rewritten", tuple(self._all_sources(root.results)), number)
        operands = value.producer.operands if value.producer is not None else ()
        operand_names = [self.names[operand] for operand in operands if operand in self.names]
        same = self.same.get((value.name, repr(loc)), [])
        values = same or ([] if operand_names else self.near.get(repr(loc), []))
        return Origin("rebuilt", tuple(values)) if values else Origin("new", tuple(operand_names))

    def _hit_of_user(self, value: Value) -> int | None:
        """The rewrite that made what a new value is computed for, if there is one."""
        while value.users:
            results = next(iter(value.users)).results
            if not results or results[0] in self.names:
                return None
            if results[0] in self.hits:
                return self.hits[results[0]]
            value = results[0]
        return None

    def _sources(self, value: Value) -> dict[str, None]:
        return self._all_sources(self.replaced.get(value, ()))

    def _all_sources(self, values: tuple[Value, ...] | list[Value]) -> dict[str, None]:
        """The names before the pass of values, or of those that they replaced within the pass."""
        sources: dict[str, None] = {}
        pending, seen = list(values), set[Value]()
        while pending:
            value = pending.pop(0)
            if value in seen:
                continue
            seen.add(value)
            if value in self.names:
                sources[self.names[value]] = None
            pending += self.replaced.get(value, ())
        return sources


def value_names(module: Module) -> Names:
    """The name of every value in the text of a module, as PassRecord has it."""
    names: Names = {}
    for function in module.functions.values():
        prefix = "" if function is module.main else f"@{function.name} "
        names |= {value: prefix + name for value, name in names_of(function).items()}
    return names


def _text(module: Module) -> str:
    return print_module(module, locs=True)
