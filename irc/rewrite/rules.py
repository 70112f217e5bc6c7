"""`@rule(pattern)`: a pattern and the function that builds the replacement."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable
from typing import Any, cast

from ..errors import Error, did_you_mean
from ..ir.core import Op, Value
from .compile import Matcher, compile_pattern
from .patterns import OpPattern, Pattern, captured_names, depth, matching_order, variants


class Rule:
    """A pattern, and a function of its captures that returns the replacement or None.

    The replacement is a fresh operation, a value, or a tuple of values for a root with several
    results. `bound` is how often the rule may apply in one run over a function; beyond it, the rule
    counts as endless. The default is 1000 plus four times the number of operations.
    """

    def __init__(
        self,
        pattern: Pattern,
        build: Callable[..., Any],
        bound: int | None = None,
        name: str | None = None,
    ) -> None:
        code = build.__code__
        self.pattern, self.build, self.bound = pattern, build, bound
        self.name = name or build.__name__
        folder, file = os.path.split(code.co_filename)
        named = f"{os.path.basename(folder)}/{file}" if file == "__init__.py" else file
        self.where = f"{named}:{code.co_firstlineno}"
        self.variants = [self._root(v) for v in variants(pattern)]
        self.parameters = _parameters(self)
        self.matchers: list[tuple[type[Op], Matcher]] = [
            (v.cls, compile_pattern(v, self.parameters)) for v in self.variants
        ]
        self.depth = max(depth(v) for v in self.variants)
        # the operations below the root; those that may have other uses
        inner = [p for v in self.variants for p in matching_order(v)[1:]]
        self.inner = {p.cls for p in inner}
        self.shared = {p.cls for p in inner if p.shared}

    def _root(self, pattern: Pattern) -> OpPattern:
        if isinstance(pattern, OpPattern):
            return pattern
        raise Error(f"rule {self.name}: the root of a pattern is an operation, not {pattern!r}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The replacement that the function builds."""
        return self.build(*args, **kwargs)


def rule(
    pattern: Pattern, *, bound: int | None = None, name: str | None = None
) -> Callable[[Callable[..., Any]], Rule]:
    """Decorate a function of the captures, by the names of its parameters, as a Rule."""
    return lambda build: Rule(pattern, build, bound, name)


def _parameters(rule: Rule) -> tuple[str, ...]:
    """The parameters of the function; an Error unless they are the captures of the pattern."""
    names = tuple(inspect.signature(rule.build).parameters)
    captured = list(dict.fromkeys(n for v in rule.variants for n in captured_names(v)))
    for name in names:
        if name not in captured:
            hint = did_you_mean(name, captured)
            raise Error(
                f"rule {rule.name} takes {name!r}, which its pattern does not capture{hint}"
            )
    for name in captured:
        if name not in names:
            raise Error(f"rule {rule.name} captures {name!r}, but its function does not take it")
    return names


def unplaced_users(captures: Iterable[Any]) -> list[Op]:
    """The operations over a rule's captures that are in no function yet.

    An operation registers as a user when it is built, so the new ones are the last users.
    """
    unplaced: list[Op] = []
    for captured in captures:
        if isinstance(captured, Value):
            for user in reversed(captured.users):
                if user.parent is not None:
                    break
                unplaced.append(user)
        elif isinstance(captured, tuple):
            unplaced += unplaced_users(cast("tuple[Value, ...]", captured))
    return unplaced


def drop_unplaced(built: list[Op]) -> None:
    """Unlink those of the new operations that were never inserted."""
    for op in built:
        if op.parent is None:
            op.drop_operands()
