"""What becomes of calls whose ids found no room: the function that has room for all is run.

Every rank is told the same count (`overflow`), so that all decide alike without asking each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from threading import Lock
from typing import Any, Protocol, cast

from irc.backends.base import Array, Arrays, Ports, Program, Stream
from irc.core import Function, Module
from irc.errors import Error
from irc.results import EXACT, OVERFLOW
from irc.types import TensorType


def fallback_of(module: Module) -> Function | None:
    """The function that takes over where the main one counts ids without room, if it does.

    An Error where that function is another one by now.
    """
    main, exact = module.main, module.functions.get(EXACT)
    if exact is None or exact is main or OVERFLOW not in main.result_names():
        return None
    if _arguments(main) != _arguments(exact) or _results(main) != _results(exact):
        raise Error(
            f"@{main.name} returns {OVERFLOW}, and @{EXACT}, which is to be run where that is not "
            "0, takes or gives something else; change the function before rewrite-embeddings"
        )
    return exact


def _arguments(function: Function) -> list[tuple[str, TensorType]]:
    return [(str(arg.name), function.argument_layout(arg)) for arg in function.args]


def _results(function: Function) -> list[tuple[str, TensorType, int | None]]:
    aliases = function.aliases()
    named = zip(function.result_names(), function.result_layouts(), strict=True)
    found = [(name, type, aliases.get(i)) for i, (name, type) in enumerate(named)]
    return [each for each in found if each[0] != OVERFLOW]


class Sharing(Stream, Protocol):
    """A stream that can do a step over the states of another one."""

    def share(self, other: Any) -> None:
        """Keep the states where `other` has them, a stream of the same kind and sizes."""
        ...


class FallbackProgram:
    """A program, and one with room for every id, which is loaded by the first call that needs it.

    Results are right, however many ids had no room: that is what `overflow` says. `again` tells
    whether a step over states can be done a second time.
    """

    def __init__(self, fast: Program, load: Callable[[], Program], again: bool) -> None:
        self.fast, self.again = fast, again
        self._load, self._lock = load, Lock()
        self._exact: Program | None = None

    @property
    def ports(self) -> Ports:
        """What goes in, what stays, what comes out."""
        return self.fast.ports

    @property
    def loaded(self) -> bool:
        """Whether a call has needed the other program."""
        return self._exact is not None

    @property
    def exact(self) -> Program:
        """The program that has room for all."""
        with self._lock:  # streams may run at the same time
            if self._exact is None:
                self._exact = self._load()
            return self._exact

    def run(self, inputs: Mapping[str, Array]) -> Arrays:
        """Every argument in (states too), every result out; nothing is kept."""
        results = self.fast.run(inputs)
        return results if fits(results) else results | self.exact.run(inputs)

    def open(self, sizes: Mapping[str, int]) -> FallbackStream:
        """A stream whose states are zeros; `sizes` gives the symbols in their shapes."""
        states = [port.name for port in self.ports.states]
        if states and not self.again:
            raise Error(
                f"a step of this model cannot be done again for ids that find no room, because of "
                f"what it does to its state {states[0]}; compile it without capacity in "
                "rewrite-embeddings"
            )
        return FallbackStream(self, sizes)


class FallbackStream:
    """The states of one conversation, which both programs work on.

    What the first program has written for ids without room, the second one overwrites.
    """

    def __init__(self, program: FallbackProgram, sizes: Mapping[str, int]) -> None:
        self._program, self._sizes = program, dict(sizes)
        self._fast = program.fast.open(sizes)
        self._exact: Sharing | None = None

    def step(self, inputs: Mapping[str, Array]) -> Arrays:
        """Run once over the plain inputs, advance the states, return the plain outputs."""
        results = self._fast.step(inputs)
        if fits(results):
            return results
        if self._exact is None:
            self._exact = cast("Sharing", self._program.exact.open(self._sizes))
        self._exact.share(self._fast)
        return results | self._exact.step(inputs)


def fits(results: Mapping[str, Array]) -> bool:
    """Whether every id of a call found room."""
    return not int(results[OVERFLOW])
