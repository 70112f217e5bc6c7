"""The trace in progress: the function that operations are appended to, and names of the model."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from ..errors import Error
from ..ir.core import Function, Op, Value, Weight
from ..source import here

if TYPE_CHECKING:
    from .module import Parameter


class Tracer:
    """One run of a model over symbolic tensors.

    `paths` and `keys` hold the names of the model's submodules and parameters. A parameter becomes
    a weight when it is first used; `named` holds the values whose name the user chose.
    """

    def __init__(
        self, function: Function, paths: Mapping[object, str], keys: Mapping[Parameter, str]
    ) -> None:
        self.function = function
        self.paths, self.keys = paths, keys
        self.weights: dict[Parameter, Weight] = {}
        self.named: set[Value] = set(function.args)
        self._taken: set[str] = set()  # the names of the weights

    def prepare(self, op: type[Op], operands: Sequence[Value]) -> None:
        """Called before an operation is made; a front end may change the types of its operands."""

    def append(self, op: Op) -> None:
        """Append an operation to the traced function."""
        self.function.append(op)

    def weight(self, parameter: Parameter) -> Weight:
        """The weight of a parameter in this trace."""
        traced = self.weights.get(parameter)
        if traced is not None:
            return traced
        key = self.keys.get(parameter, parameter.name)
        if key is None:
            raise Error(
                f"this parameter of shape {list(parameter.type.shape)} belongs to no part of the "
                "traced model: assign it to an attribute of a Module (modules in a list go into a "
                "ModuleList), or give it a name",
                loc=here(),
            )
        if key in self._taken:
            raise Error(f"two parameters are called {key!r}; rename one", loc=here())
        weight = Weight(parameter.type, key, parameter.reference(key))
        self.weights[parameter] = weight
        self._taken.add(key)
        return weight

    def suggest(self, value: Value, name: str) -> None:
        """Name a value in dumps, unless the user named it."""
        if value not in self.named and not isinstance(value, Weight):
            value.name = name


_current: ContextVar[Tracer | None] = ContextVar("irc_tracer", default=None)


def active() -> Tracer | None:
    """The trace in progress, if there is one."""
    return _current.get()


def current(what: str) -> Tracer:
    """The trace in progress; an Error says that `what` needs one."""
    tracer = _current.get()
    if tracer is None:
        raise Error(f"{what} builds a graph, so it works only inside irc.trace", loc=here())
    return tracer


def begin(tracer: Tracer) -> None:
    """Make `tracer` the trace in progress in this context; it ends with the context."""
    _current.set(tracer)


@contextmanager
def tracing(tracer: Tracer) -> Generator[None]:
    """Make `tracer` the trace in progress for a block, and then the one before again."""
    token = _current.set(tracer)
    try:
        yield
    finally:
        _current.reset(token)
