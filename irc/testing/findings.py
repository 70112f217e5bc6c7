"""`Examiner`: what a pass does wrong in a module, with the flags of `irc opt` that show it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias

from ..analysis.stages import check_stages
from ..errors import Error
from ..ir.core import Module, Op, Value
from ..ir.verify import verify
from ..pipeline import Pass, Stats, run_pipeline
from ..pipeline.instruments import random_inputs, small_sizes
from ..pipeline.instruments.numerics import tolerance_of
from ..rewrite.rules import Rule
from ..rewrite.watch import Rewrite, Watch, place, watching
from ..text import parse_module
from ..text.diff import differences
from .wanted import Arrays, Wanted

Then: TypeAlias = Sequence[Callable[[Module], str]]  # passes that shard and localize a module
Operations: TypeAlias = dict[Op, tuple[Value, ...]]
BELOW = 4  # operations in a chain that a pattern has


class Finding(Exception):
    """What is wrong: a kind, a sentence, and the passes and flags of `irc opt` that show it."""

    def __init__(self, kind: str, message: str, passes: str, *flags: str) -> None:
        super().__init__(message)
        self.kind, self.passes, self.flags = kind, passes, flags


class Refusal(Finding):
    """The pass does not take a module, for the reason in the message."""


class Rewrites(Watch):
    """Collects rewrites, and not why rules failed, which takes longer."""

    def ask(self, what: str, op: Op) -> bool:
        if not super().ask(what, op):
            return False
        self.rewrites.append(Rewrite(what, op, str(op), place(op)))
        return True


@dataclass
class Examiner:
    """Runs one pass over modules; see `check_pass` for its options. `rules` are those it tried, by
    name and place."""

    pass_: Pass
    tolerance: float | None = None
    idempotent: bool = True
    refusals: Sequence[str] = ()
    rules: dict[str, Rule] = field(default_factory=dict[str, Rule])

    def look(self, text: str, then: Then = ()) -> tuple[Watch, str] | None:
        """The rewrites in a module and why no results were compared (empty: they were); None where
        nothing changes. Raise what is wrong.

        The results are compared also after the passes `then`, where they accept the module.
        """
        module = parse_module(text)
        before, passes = str(module), str(self.pass_)
        watch = self.run(module)
        after = str(module)
        if after == before:
            return None
        if str(parse_module(after)) != after:
            raise Finding("text", "the module is not read as it is printed", passes)
        self.run(again := parse_module(text))
        self.equal(after, again, "two runs over one module differ", passes)
        why_not = self.compare(text, after, then)
        if self.idempotent:
            self.run(module)
            twice = f"{passes}, {passes}"
            self.equal(after, module, "a second run changes the module again", twice, "--diff")
        if watch.made:
            self.limited(text, before)
        return watch, why_not

    def run(self, module: Module, limit: int | None = None) -> Watch:
        """Run the pass with at most so many rewrites, and verify."""
        watch = Rewrites(limit)
        try:
            with watching(watch):
                self.pass_.run(module, Stats())
            verify(module)
            check_stages(module)
        except Exception as error:  # any: the pass is somebody's
            if isinstance(error, Error) and any(each in str(error) for each in self.refusals):
                raise Refusal("refusal", error.message, "") from None
            name = type(error).__name__
            kind = f"{name} {re.sub(r'[0-9]|%[a-z_]+', '', str(error))[:30]}"
            flags = () if limit is None else ("--limit", f"{self.pass_.name}={limit}")
            raise Finding(kind, f"{name}: {error}", str(self.pass_), *flags) from error
        self.rules |= {f"{rule.name} ({rule.where})": rule for rule in watch.rules}
        return watch

    def equal(self, wanted: str, module: Module, message: str, passes: str, *flags: str) -> None:
        """Raise a Finding unless a module has this text."""
        if wanted != str(module):
            shown = "\n".join(differences(wanted, str(module), "before", "after", 0))
            raise Finding(message, f"{message}:\n{shown}", passes, *flags)

    def compare(self, text: str, after: str, then: Then) -> str:
        """Why the results cannot be compared, or empty; raise a Finding unless they are those
        before on every rank."""
        module, new, passes = parse_module(text), parse_module(after), str(self.pass_)
        tolerance = tolerance_of(module) if self.tolerance is None else self.tolerance
        inputs = random_inputs(module, small_sizes(module))
        try:
            wanted = Wanted.of(module, inputs, tolerance)
            if module.local:
                wanted.check_module(module, inputs, "before the pass")
        except (Error, AssertionError) as error:  # of a reduced module, partial sums of ranks
            return str(error)
        if not wanted.stable:
            return "noise in the inputs makes results infinite or NaN"
        flags = ("--check-numerics", "--tolerance", f"{tolerance:g}")
        self.same(wanted, new, inputs, Finding("results", "", passes, *flags))
        if then:
            with suppress(Error):  # not every module is sharded by every plan
                added = ", ".join(step(new) for step in then)
                passes = f"{passes}, {added}"
                run_pipeline(new, added)
                self.same(wanted, new, inputs, Finding("sharded results", "", passes, *flags))
        return "" if wanted.finite else "no result has a finite number"

    def same(self, wanted: Wanted, module: Module, inputs: Arrays, found: Finding) -> None:
        """Raise the Finding, with its sentence, unless a module gives the wanted results."""
        try:
            wanted.check_module(module, inputs, f"after {found.passes}")
        except Exception as error:  # any: operations that the pass made are evaluated
            found.args = (f"the results change: {error}",)
            raise found from error

    def limited(self, text: str, before: str) -> None:
        """Raise a Finding unless limits leave out all rewrites, and all but what one changes."""
        name, passes, module = self.pass_.name, str(self.pass_), parse_module(text)
        self.run(module, 0)
        flags = ("--limit", f"{name}=0", "--diff")
        self.equal(before, module, "it changes operations without a rewrite", passes, *flags)
        module = parse_module(text)
        old = {op: op.operands for op in module.ops()}
        texts = {op: str(op) for op in old}
        (rewrite,) = self.run(module, 1).rewrites
        far = _unconnected(rewrite.root, old, {op: op.operands for op in module.ops()})
        if far is not None:
            message = f"the rewrite of `{rewrite.before}` also changes `{texts.get(far, far)}`"
            raise Finding("elsewhere", message, passes, "--limit", f"{name}=1", "--diff")


def _unconnected(root: Op, old: Operations, new: Operations) -> Op | None:
    """An operation that is erased, new or has other operands, and shares no value with the root or
    the operations below it, not even by way of others that change."""
    far = [op for op in {**old, **new} if old.get(op) != new.get(op)]
    values = {op: {*old.get(op, ()), *new.get(op, ()), *op.results} for op in far}
    known = {*root.results, *old.get(root, ())}
    for _ in range(BELOW):
        known |= {x for value in known if value.producer for x in old.get(value.producer, ())}
    while near := [op for op in far if values[op] & known]:
        known = known.union(*(values[op] for op in near))
        far = [op for op in far if op not in near]
    return next(iter(far), None)
