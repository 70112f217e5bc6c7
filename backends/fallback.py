"""Runs the function without a capacity where ids overflowed the capacity of a call.

Every rank has the same count (`capacity_overflow`), so all of them take the same decision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from threading import Lock
from typing import Any, Protocol, cast

from irc.backends.base import Array, Arrays, Ports, Program, Stream
from irc.errors import Error
from irc.ir.core import Function, Module
from irc.ir.result_names import EXACT, OVERFLOW
from irc.ir.types import TensorType


def fallback_of(module: Module) -> Function | None:
    """The function without a capacity that goes with the main one, if there is one.

    An Error where its arguments or results differ from those of the main function.
    """
    main, exact = module.main, module.functions.get(EXACT)
    if exact is None or exact is main or OVERFLOW not in main.result_names():
        return None
    if _interface(main) != _interface(exact):
        raise Error(
            f"@{main.name} returns {OVERFLOW}, and @{EXACT}, which runs where that is not 0, has "
            "other arguments or results; change the function before rewrite-embeddings"
        )
    return exact


def refuse_fallback(module: Module, what: str) -> None:
    """An Error where a module has a function without a capacity; `what` cannot run it."""
    if fallback_of(module) is not None:
        raise Error(
            "with a capacity in rewrite-embeddings, a call whose ids overflow it runs again "
            f"without one, which {what} cannot do; leave it out, or give --backend onnx"
        )


def _interface(function: Function) -> list[tuple[str | None, TensorType, int | None]]:
    """(name, layout, aliased argument) of all arguments and results but the overflow."""
    names, layouts = function.result_names(), function.result_layouts()
    results = zip(names, layouts, map(function.aliases().get, range(len(names))), strict=True)
    args = ((arg.name, function.argument_layout(arg), None) for arg in function.args)
    return [*args, *(each for each in results if each[0] != OVERFLOW)]


class Sharing(Stream, Protocol):
    """A stream that can do a step over the states of another one."""

    def share(self, other: Any) -> None:
        """Keep the states where `other` has them, a stream of the same kind and sizes."""
        ...


class FallbackProgram:
    """A program with a capacity, and one without, which the first overflow loads.

    Results are right, however large `capacity_overflow` is. `again`: whether a step over states can
    be repeated.
    """

    def __init__(self, fast: Program, load: Callable[[], Program], again: bool) -> None:
        self.fast, self.again = fast, again
        self._load, self._lock = load, Lock()
        self._exact: Program | None = None

    @property
    def ports(self) -> Ports:
        """The inputs, states and outputs."""
        return self.fast.ports

    @property
    def loaded(self) -> bool:
        """Whether a call has needed the other program."""
        return self._exact is not None

    @property
    def exact(self) -> Program:
        """The program without a capacity."""
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
                "a step of this model cannot be repeated after a capacity overflow, because of how "
                f"it updates its state {states[0]}; compile it without capacity in "
                "rewrite-embeddings"
            )
        return FallbackStream(self, sizes)


class FallbackStream:
    """The states of one conversation, which both programs share.

    The second program overwrites what the first one wrote in a step with an overflow.
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
    """Whether no id of a call exceeded the capacity."""
    return not int(results[OVERFLOW])
