"""Checks the input arrays of a function and binds its symbols to sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from irc.errors import Error, did_you_mean
from irc.ir.core import Function
from irc.ir.dims import Dim, DimLike, bind, exact_divide, linear, symbol
from irc.ir.dtypes import dtype_of
from irc.ir.types import TensorType

Sizes = dict[str, int]


def check_names(function: Function, inputs: Mapping[str, object]) -> None:
    """An Error unless the names of the inputs are those of the arguments."""
    names = [str(arg.name) for arg in function.args]
    for name in inputs:
        if name not in names:
            raise Error(f"@{function.name} has no argument {name!r}{did_you_mean(name, names)}")
    missing = [name for name in names if name not in inputs]
    if missing:
        lacking = ", ".join(missing)
        raise Error(f"the inputs lack {lacking}; @{function.name} takes {', '.join(names)}")


class Input(NamedTuple):
    """One input array, the name of its argument, and the type that it must fit.

    The type is the argument's; for a global array that ranks share, the global type.
    """

    name: str
    type: TensorType
    array: np.ndarray


class _Origin(NamedTuple):
    """The input that determined each symbol; the symbols that are a dimension by themselves."""

    of: dict[str, str]
    named: set[str]


def bind_inputs(
    function: Function, inputs: Mapping[str, object], given: Mapping[str, int]
) -> tuple[list[np.ndarray], Sizes]:
    """The arguments as arrays in declared order, and the size of every symbol; see `bind_sizes`."""
    check_names(function, inputs)
    bound_inputs = [
        Input(str(arg.name), arg.type, np.asarray(inputs[str(arg.name)])) for arg in function.args
    ]
    return [input.array for input in bound_inputs], bind_sizes(bound_inputs, given)


def bind_sizes(inputs: Sequence[Input], given: Mapping[str, int]) -> Sizes:
    """The size of every symbol, from dimensions such as `S`, `2*S` and `S + 1`; an Error names an
    input that does not fit.

    `given` holds the sizes that are known already.
    """
    for input in inputs:
        _check_form(input)
    sizes: Sizes = dict(given)
    named = {str(dim) for input in inputs for dim in input.type.shape}
    origin = _Origin(dict.fromkeys(given, "sizes"), {*given, *named})
    pending: list[tuple[str, Dim, int]] = []
    for name, type, array in inputs:
        for dim, size in zip(type.shape, array.shape, strict=True):
            if isinstance(dim, Dim):
                pending.append((name, dim, size))
    solved = True
    while solved:
        solved = False
        for name, dim, size in pending:
            solution = _solve(bind(dim, sizes), size)
            if solution is not None:
                sizes[solution[0]], origin.of[solution[0]] = solution[1], name
                solved = True
    for input in inputs:
        _check_shape(input, sizes, origin)
    return sizes


def _check_form(argument: Input) -> None:
    name, type, array = argument
    kind = dtype_of(array)
    if kind != type.dtype:
        raise Error(f"the input {name} is {kind}, but it must be {type.dtype}; convert it")
    if array.ndim != type.ndim:
        raise Error(
            f"the input {name} has the shape {list(array.shape)}, but it must be {type.replicated}"
        )


def _solve(dim: DimLike, size: int) -> tuple[str, int] | None:
    """(symbol, its value) where `dim` is `a*S + b` with one unknown S."""
    terms = linear(dim)
    if terms is None:
        return None
    name, factor, rest = terms
    value, left = divmod(size - rest, factor)
    return (name, value) if not left and value >= 0 else None


def _check_shape(argument: Input, sizes: Sizes, origin: _Origin) -> None:
    for at, (dim, size) in enumerate(zip(argument.type.shape, argument.array.shape, strict=True)):
        bound = bind(dim, sizes)
        if bound != size:
            has = f"the input {argument.name} has the shape {list(argument.array.shape)}"
            raise Error(f"{has}, {_misfit(argument.type.replicated, at, bound, sizes, origin)}")


def _misfit(type: TensorType, at: int, bound: DimLike, sizes: Sizes, origin: _Origin) -> str:
    """Why dimension `at` does not fit; `bound` is its value for the known symbols."""
    dim = type.shape[at]
    if not isinstance(dim, Dim):
        return f"but it must be {type}"
    names = list(dim.symbols())
    factor = exact_divide(dim, symbol(names[0]))
    if isinstance(factor, int) and factor > 1:  # as the dimension of a shape that ranks share
        if isinstance(bound, Dim):
            return (
                f"but dimension {at} must be a multiple of {factor}; pad it, and drop the results "
                "of the padding"
            )
        if names[0] not in origin.named:
            return f"but dimension {at} must be {bound}, to go with {origin.of[names[0]]}"
    if isinstance(bound, Dim):
        unknown = list(bound.symbols())
        apart = f"; the sizes of {' and '.join(unknown)} are not determined: give them"
        why = apart if len(unknown) > 1 else ""
        return f"which does not fit {type}: dimension {at} is {dim}{why}"
    origins = ", ".join(f"{name} is {sizes[name]} in {origin.of[name]}" for name in names)
    return f"but {origins}, so dimension {at} ({dim}) must be {bound}"
