"""`run_pipeline`: runs passes over a module, with instruments around every pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from ..analysis.stages import check_stages
from ..argument_checks import check_kind
from ..errors import Error
from ..ir.core import Module
from ..ir.verify import verify
from ..rewrite.stats import Stats
from ..source import is_own, raised_at
from .base import Pass
from .text import Pipeline, parse_pipeline


@dataclass
class Step:
    """One pass of a running pipeline, its position counted from 1, and its statistics.

    `refused`: the pass raised an Error, which concerns the user's module or options. Any other
    exception, and any error of an instrument after it, is a failure of the pass.
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
    """Observes a pipeline run. Instruments nest: the first is entered first and left last."""

    def start(self, module: Module, pipeline: Pipeline) -> None:
        """Before the first pass."""

    def before(self, step: Step, module: Module) -> None:
        """Before a pass."""

    def after(self, step: Step, module: Module) -> None:
        """After a pass that did not fail; raise to stop the run."""

    def failed(self, step: Step, module: Module, error: Exception) -> None:
        """After a pass, or an instrument after it, raised."""

    def leave(self, step: Step) -> None:
        """After a pass in any case, last of all: undo `before`."""

    def finish(self, module: Module) -> None:
        """After the last pass."""


class VerifyEach(Instrument):
    """Verifies the module, and what its stages communicate, after every pass."""

    def after(self, step: Step, module: Module) -> None:
        try:
            verify(module)
            check_stages(module)
        except Error as error:
            error.add_note(f"the module was valid before the pass {step}")
            raise


def run_pipeline(
    module: Module,
    passes: str | Iterable[Pass],
    instruments: Sequence[Instrument] | None = None,
    *,
    verified: bool = False,
) -> list[Step]:
    """Run passes in place and return a Step with statistics for each.

    `passes` is pipeline text or passes. A module that is not yet `verified` is verified first.
    The default instrument verifies the module after each pass. An Error names the pass that failed.
    """
    check_kind("the module", module, Module, "one of irc, as irc.trace and irc.parse return")
    pipeline = _pipeline(passes)
    if not verified:
        verify(module)
    check_stages(module)
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
    for step in listed:
        check_kind("a pass of the pipeline", step, Pass, wanted)
    return Pipeline(listed)


def _run_step(step: Step, module: Module, watching: tuple[Instrument, ...]) -> None:
    with ExitStack() as stack:
        try:
            for instrument in watching:
                instrument.before(step, module)
                stack.callback(instrument.leave, step)
            try:
                step.pass_.run(module, step.stats)
            except Error:
                step.refused = True
                raise
            for instrument in reversed(watching):
                instrument.after(step, module)
        except Exception as raised:
            error = _named(step, raised)
            for instrument in reversed(watching):
                instrument.failed(step, module, error)
            raise error from error.__cause__


def _named(step: Step, error: Exception) -> Error:
    """The Error for the user, which names the pass."""
    if isinstance(error, Error):
        error.add_note(f"in the pass {step}, number {step.index} of {len(step.pipeline)}")
        return error
    made_in = type(step.pass_).run.__code__.co_filename
    users = raised_at(error, lambda file: file == made_in and not is_own(file))
    named = Error(
        f"the pass {step} (number {step.index} of {len(step.pipeline)}) has a bug: "
        f"{type(error).__name__}: {error}",
        loc=users or raised_at(error, lambda _: True),
    )
    named.__cause__ = error
    return named
