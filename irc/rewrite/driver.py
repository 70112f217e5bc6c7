"""The rewrite driver: a worklist of operations that may be roots, in program order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from time import perf_counter
from typing import Any, NamedTuple, cast

from ..errors import Error
from ..ir.core import Function, Module, Op, Value
from ..ir.declare import types_of
from ..ir.gc_pause import collector_paused
from ..ir.recorded import recorded_refusal
from ..ir.types import TensorType
from .compile import Matcher
from .rules import Rule, drop_unplaced, unplaced_users
from .stats import RuleStats, Stats
from .watch import Watch, current_watch
from .why import explain_failures


class _Entry(NamedTuple):
    rule: Rule
    match: Matcher
    record: RuleStats


def apply_rules(target: Module | Function, rules: Iterable[Rule]) -> Stats:
    """Apply rules until none matches, and count how often each applied.

    Operations are visited in order, and again after a rewrite touched them. The replacement takes
    the position, name and location of the root; operations without uses are erased.
    """
    chosen = list(rules)
    stats = Stats()
    watch = current_watch()
    functions = target.functions.values() if isinstance(target, Module) else (target,)
    if watch is not None:
        watch.rules += chosen
    for function in functions:
        with collector_paused():
            _Driver(function, chosen, stats).run(watch)
        if watch is not None and watch.collect:
            explain_failures(function, chosen, watch)
    return stats


class _Driver:
    def __init__(self, function: Function, rules: list[Rule], stats: Stats) -> None:
        self.function = function
        self.by_root: dict[type[Op], list[_Entry]] = {}
        for rule in rules:
            record = stats.rule(rule.name, rule.where)
            for cls, matcher in rule.matchers:
                self.by_root.setdefault(cls, []).append(_Entry(rule, matcher, record))
        self.levels = max((rule.depth for rule in rules), default=0)
        self.inner = {cls for rule in rules for cls in rule.inner}
        self.shared = {cls for rule in rules for cls in rule.shared}
        self.work: deque[Op] = deque()
        self.queued: set[Op] = set()
        self.hits: dict[Rule, int] = {}
        self.size = 0

    def run(self, watch: Watch | None) -> None:
        """Apply the rules until the worklist is empty."""
        by_root = self.by_root
        for op in self.function:
            self.size += 1
            if op.__class__ in by_root:
                self.work.append(op)
        self.queued.update(self.work)
        work, queued = self.work, self.queued
        while work:
            op = work.popleft()
            queued.discard(op)
            if op.parent is None:
                continue
            for entry in by_root[op.__class__]:
                record = entry.record
                record.tries += 1
                started = perf_counter()
                hit = self.attempt(entry, op, watch)
                record.seconds += perf_counter() - started
                if hit:
                    record.hits += 1
                    self.check_bound(entry.rule)
                    break

    def attempt(self, entry: _Entry, op: Op, watch: Watch | None) -> bool:
        """Try one rule at one root."""
        rule = entry.rule
        for captures in entry.match(op):
            try:
                new = rule.build(*captures)
            except Error as error:
                error.add_note(f"in the rule {rule.name} ({rule.where})")
                error.at(op)
                raise
            built = unplaced_users(captures)
            if new is None:
                drop_unplaced(built)
                continue
            if watch is not None and not watch.ask(rule.name, op):
                drop_unplaced(built)
                return False
            try:
                values = results_of(op, new)
            except Error as error:
                message = f"the rule {rule.name} ({rule.where}) {error.message}"
                raise Error(message, op) from error
            if not _keeps_parts(op, values):
                drop_unplaced(built)
                continue
            uses = [result.users for result in op.results]
            touched = uses[0] if len(uses) == 1 else [user for users in uses for user in users]
            fresh = substitute(op, values)
            drop_unplaced(built)
            self.revisit(touched, fresh, captures, erase_dead(op))
            return True
        return False

    def check_bound(self, rule: Rule) -> None:
        count = self.hits[rule] = self.hits.get(rule, 0) + 1
        bound = 1000 + 4 * self.size if rule.bound is None else rule.bound
        if count > bound:
            raise Error(
                f"the rule {rule.name} ({rule.where}) does not stop: it applied {count} times in "
                f"@{self.function.name}; make it decline "
                f"its own results, or declare a larger bound"
            )

    def revisit(
        self,
        touched: Iterable[Op],
        fresh: list[Op],
        captures: tuple[Any, ...],
        single_use: list[Value],
    ) -> None:
        """Queue every root that may match after a rewrite."""
        by_root = self.by_root
        for op in fresh:
            if op.__class__ in by_root:
                self.push(op)
        for captured in captures:
            if isinstance(captured, Value) and captured.owner.__class__ in by_root:
                self.push(cast("Op", captured.owner))
        for user in touched:
            self.push_above(user, self.levels)
        for value in single_use:
            for user in value.users:
                self.push_above(user, self.levels)

    def push_above(self, op: Op, levels: int) -> None:
        """Queue `op` and the roots among its users whose patterns reach it."""
        kind = op.__class__
        if kind in self.by_root:
            self.push(op)
        if levels <= 1 or kind not in self.inner:
            return
        for result in op.results:
            users = result.users
            if len(users) == 1 or kind in self.shared:
                for user in users:
                    self.push_above(user, levels - 1)

    def push(self, op: Op) -> None:
        """Queue an operation unless it was erased or is queued."""
        if op.parent is not None and op not in self.queued:
            self.queued.add(op)
            self.work.append(op)


def results_of(op: Op, new: Any) -> tuple[Value, ...]:
    """The values that replace the results of `op`; an Error if their number or types differ."""
    if isinstance(new, Op):
        values: tuple[Any, ...] = new.results
    elif isinstance(new, tuple):
        items = cast("tuple[Any, ...]", new)
        values = tuple([v.result if isinstance(v, Op) else v for v in items])
    else:
        values = (new,)
    olds = op.results
    if len(values) != len(olds):
        raise Error(f"returns {len(values)} values for the {len(olds)} results of {op.opname}")
    for old, value in zip(olds, values, strict=True):
        if not isinstance(value, Value):
            raise Error(f"returns {value!r}, which is not a value, operation or tuple of them")
        if value.type is not old.type and _plain(value.type) is not _plain(old.type):
            raise Error(f"returns {value.type} for {old.type}; a rewrite must keep the types")
    return values


def _plain(type: TensorType) -> TensorType:
    """A local type without its global type; any other as it is."""
    return type.replicated if type.of is not None else type


def _keeps_parts(op: Op, values: tuple[Value, ...]) -> bool:
    """Whether the new local values can be parts of the same global values as the old ones."""
    for old, value in zip(op.results, values, strict=True):
        if value.type is old.type:
            continue
        maker = value.producer
        if maker is None or maker.parent is not None:
            return False
        derived = types_of(maker)[value.index]
        if recorded_refusal(maker, value.index, derived, old.type) is not None:
            return False
    return True


def replace(op: Op, new: Any) -> list[Op]:
    """Replace `op` by a new operation, a value or a tuple of values.

    New operations are inserted before `op`, which is erased with all that only it used. Returns
    the inserted operations in order; an Error if the types differ.
    """
    fresh = substitute(op, results_of(op, new))
    erase_dead(op)
    return fresh


def substitute(op: Op, values: tuple[Value, ...]) -> list[Op]:
    """Insert new operations before `op` and replace every use; `op` stays, unused."""
    fresh: list[Op] = []
    for value in values:
        owner = value.owner
        if isinstance(owner, Op) and owner.parent is None:
            _place(owner, op, fresh)
    for old, value in zip(op.results, values, strict=True):
        old.replace_by(value)
    return fresh


def _place(root: Op, before: Op, fresh: list[Op]) -> None:
    """Insert a new tree of operations, operands first."""
    function = before.parent
    if function is None:
        raise ValueError(f"{before.opname} is in no function")
    stack = [root]
    while stack:
        op = stack[-1]
        if op.parent is not None:
            stack.pop()
            continue
        ready = True
        for value in reversed(op.operands):
            owner = value.owner
            if isinstance(owner, Op) and owner.parent is None:
                stack.append(owner)
                ready = False
        if not ready:
            continue
        stack.pop()
        if op.loc is None:
            op.loc = before.loc
        function.insert(op, before)
        fresh.append(op)


def erase_dead(op: Op) -> list[Value]:
    """Erase `op`, whose results are unused, and the pure operations that only it used.

    Returns the values that now have a single user.
    """
    single_use: list[Value] = []
    stack = [op]
    while stack:
        dead = stack.pop()
        if dead.parent is None:
            continue
        operands = dead.operands
        dead.erase()
        for value in operands:
            users = value.users
            if users:
                if len(users) == 1:
                    single_use.append(value)
                continue
            owner = value.owner
            if isinstance(owner, Op) and owner.pure and (len(owner.results) == 1 or _unused(owner)):
                stack.append(owner)
    return single_use


def _unused(op: Op) -> bool:
    return not any(result.users for result in op.results)
