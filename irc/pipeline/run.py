"""Runs a pipeline over a module, with instruments around every pass."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from ..analysis.spmd import verify_spmd
from ..core import Module
from ..errors import Error
from ..given import check_kind
from ..rewrite.stats import Stats
from ..verify import verify
from .base import Pass
from .text import Pipeline, parse_pipeline


@dataclass
class Step:
    """One pass of a running pipeline: its position counted from 1, and what it counted.

    `refused`: the pass has raised an Error, which is about the user's module or options. Any other
    exception, and whatever an instrument finds wrong afterwards, is a failure of the pass.
    """

    index: int
    pass_: Pass
    pipeline: Pipeline
    stats: Stats = field(default_factory=Stats)
    refused: bool = False

    def __str__(self) -> str:
        return str(self.pass_)

    @property
    def so_far(self) -> Pipeline:
        """The pipeline up to and including this pass."""
        return Pipeline(self.pipeline.passes[: self.index])

    @property
    def remaining(self) -> Pipeline:
        """The pipeline from this pass on."""
        return Pipeline(self.pipeline.passes[self.index - 1 :])


class Instrument:
    """Watches a pipeline run. Instruments nest: the first is entered first and left last."""

    def start(self, module: Module, pipeline: Pipeline) -> None:
        """Before the first pass."""

    def before(self, step: Step, module: Module) -> None:
        """Before a pass."""

    def after(self, step: Step, module: Module) -> None:
        """After a pass that did not fail; raise to stop the run."""

    def failed(self, step: Step, module: Module, error: Exception) -> None:
        """After a pass, or an instrument after it, raised."""

    def leave(self, step: Step) -> None:
        """After a pass in any case, last of all: undo what `before` set up."""

    def finish(self, module: Module) -> None:
        """After the last pass."""


class VerifyEach(Instrument):
    """Verifies the module, and what its ranks do together, before and after every pass."""

    def start(self, module: Module, pipeline: Pipeline) -> None:
        verify(module)
        verify_spmd(module)

    def after(self, step: Step, module: Module) -> None:
        try:
            verify(module)
            verify_spmd(module)
        except Error as error:
            error.add_note(f"the module was in order before the pass {step}")
            raise


def run_pipeline(
    module: Module,
    passes: str | Iterable[Pass],
    instruments: Sequence[Instrument] | None = None,
) -> list[Step]:
    """Run passes in place and give a Step with statistics for each.

    `passes` is pipeline text or passes. Without `instruments` the module is verified after each
    pass. A pass that fails is reported by an Error that names it.
    """
    check_kind("the module", module, Module, "one of irc, as irc.trace and irc.parse return")
    pipeline = _pipeline(passes)
    watching = (VerifyEach(),) if instruments is None else tuple(instruments)
    for instrument in watching:
        instrument.start(module, pipeline)
    steps = [Step(i + 1, pass_, pipeline) for i, pass_ in enumerate(pipeline)]
    for step in steps:
        _run_step(step, module, watching)
    for instrument in reversed(watching):
        instrument.finish(module)
    return steps


def _pipeline(passes: str | Iterable[Pass]) -> Pipeline:
    if isinstance(passes, str):
        return parse_pipeline(passes)
    wanted = 'the passes as text, such as "cse, dce", or as objects of irc.Pass'
    check_kind("the pipeline", passes, Iterable, wanted)
    listed = tuple(passes)
    for each in listed:
        check_kind("a pass of the pipeline", each, Pass, wanted)
    return Pipeline(listed)


def _run_step(step: Step, module: Module, watching: tuple[Instrument, ...]) -> None:
    with ExitStack() as stack:
        try:
            for instrument in watching:
                instrument.before(step, module)
                stack.callback(instrument.leave, step)
            _run_pass(step, module)
            for instrument in reversed(watching):
                instrument.after(step, module)
        except Exception as raised:
            error = _named(step, raised)
            for instrument in reversed(watching):
                instrument.failed(step, module, error)
            raise error from error.__cause__


def _run_pass(step: Step, module: Module) -> None:
    try:
        step.pass_.run(module, step.stats)
    except Error:
        step.refused = True
        raise


def _named(step: Step, error: Exception) -> Error:
    """The error as the user reads it, with the pass it happened in."""
    if isinstance(error, Error):
        error.add_note(f"in the pass {step}, number {step.index} of {len(step.pipeline)}")
        return error
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{os.path.basename(last.filename)}:{last.lineno}: {type(error).__name__}"
    named = Error(
        f"the pass {step} (number {step.index} of {len(step.pipeline)}) has a bug, at {where}: "
        f"{error}"
    )
    named.__cause__ = error
    return named
