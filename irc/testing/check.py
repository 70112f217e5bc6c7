"""`check_pass`: a pass over random modules that hold its patterns, sharded and not, and over given
ones; the smallest module found in which it does something wrong."""

from __future__ import annotations

import inspect
import os
import random
import shlex
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NoReturn, TypeAlias

from .. import passes as passes  # registers them
from ..debug.reduce import reduce_module
from ..driver.sources import read_module
from ..errors import Error
from ..extensions.user_files import is_users
from ..ir.core import Module
from ..ir.mesh import Mesh
from ..pipeline import Pass, parse_pipeline, run_pipeline
from ..rewrite.patterns import OpPattern
from ..text import parse_module
from ..text.printer import print_module
from .draw import Draw
from .findings import Examiner, Finding, Refusal, Then
from .instances import put_pattern

Given: TypeAlias = Module | str | Path  # a module, its text of lines, a file or an artifact of it
RANKS = (1, 2, 3, 4)
BATCHES = (0, 1, 2, 3, 3, 5)
STEPS, MORE_STEPS = 4, 12  # of a random module, with operations of patterns and without
ADVICE = "give modules=[...] that hold what it looks for"


@dataclass
class PassCheck:
    """What `check_pass` saw: the number of modules, those in which the pass applied, by mesh and
    view; the rewrites by rule; the reasons for which the pass refused modules, and for which the
    results of modules could not be compared."""

    name: str
    modules: int = 0
    applied: Counter[str] = field(default_factory=Counter[str])
    rewrites: Counter[str] = field(default_factory=Counter[str])
    refusals: Counter[str] = field(default_factory=Counter[str])
    uncompared: Counter[str] = field(default_factory=Counter[str])
    notes: list[str] = field(default_factory=list[str])

    def __str__(self) -> str:
        lines = [f"{self.name} applied in {self.applied.total()} of {self.modules} modules"]
        lines += [f"  {where}: {n}" for where, n in sorted(self.applied.items())]
        lines += [f"  {n} rewrites of {rule}" for rule, n in self.rewrites.items()]
        lines += [f"  refused {n} modules: {why}" for why, n in self.refusals.items()]
        lines += [f"  not compared in {n}: {why}" for why, n in self.uncompared.items()]
        return "\n".join([*lines, *self.notes])


def check_pass(
    pass_: Pass | type[Pass] | str,
    *,
    seeds: Iterable[int] = range(50),
    modules: Sequence[Given] = (),
    mesh: str = "",
    tolerance: float | None = None,
    idempotent: bool = True,
    refusals: Sequence[str] = (),
    folder: Path | str | None = None,
) -> PassCheck:
    """Raise an AssertionError with the smallest module found in which a pass does wrong.

    The modules are one per seed, with operations that the rules of the pass match, on 1 to 4 ranks
    or on `mesh`, and the given `modules`. In each of them the pass has to leave a module that
    verifies, that is read as it is printed, and that has the results of before on every rank: up to
    `tolerance`, relative to the largest number, by default up to the rounding of its dtype, or more
    where noise in the inputs changes more. Another run over the same module has to do the same, a
    second run nothing unless `idempotent` is false. With `--limit NAME=0` the pass changes nothing,
    with `--limit NAME=1` only what is connected with the first rewrite. It raises no Error but
    those with one of the texts `refusals`.

    The module is written to `folder`, or a new temporary one, and the message has the command
    that shows what is wrong. A pass that applies in no module is an Error: give `modules` that hold
    what it looks for. So is a given module whose results cannot be compared.
    """
    Mesh.parse(mesh)
    with tempfile.TemporaryDirectory(prefix="irc-check-") as plans:
        bench = _Bench(Examiner(_chosen(pass_), tolerance, idempotent, refusals), folder, plans)
        for i, given in enumerate(modules):
            module = _read(given)
            own = str(module.mesh) or mesh
            for name in [own] if own else [f"tp={ranks}" for ranks in RANKS]:
                bench.over(print_module(module, locs=True), f"module {i + 1}", name)
        for seed in seeds:
            bench.over_random(seed, mesh or f"tp={RANKS[seed % len(RANKS)]}")
        return bench.done()


def _chosen(pass_: Pass | type[Pass] | str) -> Pass:
    """The pass, with its options."""
    if isinstance(pass_, Pass):
        return pass_
    found = parse_pipeline(pass_ if isinstance(pass_, str) else pass_.name).passes
    if len(found) != 1:
        raise Error(f"check_pass takes one pass, found {len(found)} in {pass_!r}")
    return found[0]


def _read(given: Given) -> Module:
    """The module, with its weight files by their whole paths."""
    if isinstance(given, str) and "\n" in given:
        given = parse_module(given)
    if isinstance(given, Module):
        return given
    path = Path(given)
    module, base = read_module(path), path if path.is_dir() else path.parent
    module.files = {name: os.path.abspath(base / file) for name, file in module.files.items()}
    return module


class _Bench:
    """One call of `check_pass`."""

    def __init__(self, examiner: Examiner, folder: Path | str | None, plans: str) -> None:
        self.examiner, self.folder, self.plans = examiner, folder, Path(plans)
        self.check = PassCheck(examiner.pass_.name)

    def over_random(self, seed: int, mesh: str) -> None:
        """Check the random module of a seed, with the pattern of every third rule or so."""
        rng, rules = random.Random(seed), list(self.examiner.rules.values())
        patterns: list[OpPattern] = []
        if rules:
            chosen = rng.sample(rules, 1 + (len(rules) - 1) // 3)
            patterns = [rng.choice(rule.variants) for rule in chosen]
        blocks = [partial(put_pattern, pattern=pattern) for pattern in patterns]
        dtype, steps = rng.choice(("f64", "f64", "f32")), STEPS if blocks else MORE_STEPS
        drawn, batch = Draw(seed, dtype, steps, blocks=blocks), rng.choice(BATCHES)
        drawn.module.dims["B"] = (batch, batch, batch)
        self.over(str(drawn.module), f"seed {seed}", mesh, drawn.plan(mesh))

    def over(self, text: str, what: str, mesh: str, plan: Sequence[str] | None = None) -> None:
        """Check a module, and what becomes of it sharded and localized, as far as the pass goes; a
        given one, without a plan, has to be compared."""
        module, view = parse_module(text), self.examiner.pass_.view
        steps: Then = []
        if not module.local and mesh != "tp=1":
            steps = [partial(self.sharding, mesh=mesh, plan=plan or ()), lambda _: "localize"]
        if any(value.type.sharded for op in module.ops() for value in op.results):
            steps = steps[1:]
        last = {"unsharded": 0, "global": len(steps) - 1}.get(view, len(steps))
        for done in range(max(last, 0) + 1):
            rest, place = steps[done:], f"{mesh}{' localized' * module.local}"
            why_not = self.examine(module, what, place, rest)
            if why_not and plan is None:
                raise Error(f"{what} on {place}: the results cannot be compared: {why_not}")
            if done < last:
                try:
                    run_pipeline(module, rest[0](module))
                except Error:
                    return  # not every plan fits every module

    def sharding(self, module: Module, mesh: str, plan: Sequence[str]) -> str:
        """The pass `shard`, with the rows of a plan that fit a module."""
        names = {*module.weights, *(str(arg.name) for arg in module.main.args), "megatron"}
        rows = [row for row in plan if row.partition(" ")[0] in names]
        path = self.plans / "plan.txt"
        path.write_text("\n".join(rows or ["auto"]), encoding="utf-8")
        return f'shard{{mesh="{mesh}", plan="{path}"}}'

    def examine(self, module: Module, what: str, place: str, then: Then) -> str:
        """Count what the pass does to a module, raise where it does wrong; why its results were not
        compared, or empty."""
        self.check.modules += 1
        text = print_module(module, locs=True)
        try:
            seen = self.examiner.look(text, then)
        except Refusal as refusal:
            self.check.refusals[str(refusal)] += 1
        except Finding as found:
            self.fail(text, found, f"{what} on {place}", then)
        else:
            if seen is not None:
                watch, why_not = seen
                self.check.applied[place] += 1
                self.check.rewrites.update(rewrite.rule for rewrite in watch.rewrites)
                self.check.uncompared.update([why_not.partition("\n")[0]] if why_not else [])
                return why_not
        return ""

    def fail(self, text: str, found: Finding, what: str, then: Then) -> NoReturn:
        """Raise with the smallest module in which the same is wrong."""
        self.plans = Path(self.folder or tempfile.mkdtemp(prefix="irc-check-"))
        self.plans.mkdir(parents=True, exist_ok=True)

        def wrong(text: str) -> Finding | None:
            try:
                self.examiner.look(text, then)
            except Finding as other:
                return other if other.kind == found.kind else None
            return None

        reduced = reduce_module(parse_module(text), lambda smaller: wrong(smaller.text) is not None)
        small = print_module(reduced, locs=True)
        found = wrong(small) or found  # which writes the plan of this module
        path = self.plans / "case.irc"
        words = ["irc", "opt", str(path), *_load(type(self.examiner.pass_))]
        words += ["--passes", found.passes, *found.flags]
        path.write_text(f"// {shlex.join(words)}\n{small}", encoding="utf-8")
        where = f"in {path}, reduced from {what}; to see it:\n    {shlex.join(words)}"
        raise AssertionError(f"{self.check.name}: {found}\n{where}\n{small}") from found

    def done(self) -> PassCheck:
        """The check; an Error where the pass never applied."""
        check = self.check
        if not check.applied.total():
            raise Error(f"{check}; {ADVICE}")
        if check.uncompared.total() == check.applied.total():
            raise Error(f"{check}\nno results were compared; {ADVICE}")
        idle = [name for name, r in self.examiner.rules.items() if not check.rewrites[r.name]]
        check.notes += [f"the rule {name} never applied; {ADVICE}" for name in idle]
        return check


def _load(cls: type[Pass]) -> list[str]:
    """The flag that loads the file of a user's pass; none where a class has no file."""
    if is_users({cls.__module__}):
        with suppress(OSError, TypeError):
            return ["--load", os.path.abspath(inspect.getfile(cls))]
    return []
