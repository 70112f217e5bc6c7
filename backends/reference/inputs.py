"""Checks the arrays given to a function and binds its symbols to their sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from irc.core import Function
from irc.dims import Dim, DimLike, bind, exact_divide, symbol
from irc.dtypes import dtype_of
from irc.errors import Error, did_you_mean
from irc.types import TensorType

Sizes = dict[str, int]


def check_names(function: Function, given: Mapping[str, object]) -> None:
    """Every argument is given, and nothing else."""
    names = [str(arg.name) for arg in function.args]
    for name in given:
        if name not in names:
            raise Error(f"@{function.name} has no argument {name!r}{did_you_mean(name, names)}")
    missing = [name for name in names if name not in given]
    if missing:
        raise Error(f"the input {', '.join(missing)} of @{function.name} is missing")


class Input(NamedTuple):
    """One array that was given: for which argument, and the type that it must fit.

    The type is the argument's, or where the ranks share one whole array, that of the whole.
    """

    name: str
    type: TensorType
    array: np.ndarray


class _Origin(NamedTuple):
    """Which input told a symbol, and the symbols that are a dimension, or given, by themselves."""

    of: dict[str, str]
    named: set[str]


def bind_inputs(
    function: Function, given: Mapping[str, object], known: Mapping[str, int]
) -> tuple[list[np.ndarray], Sizes]:
    """The arguments as arrays in declared order, and the size of every symbol; see `bind_sizes`."""
    check_names(function, given)
    inputs = [
        Input(str(arg.name), arg.type, np.asarray(given[str(arg.name)])) for arg in function.args
    ]
    return [each.array for each in inputs], bind_sizes(inputs, known)


def bind_sizes(inputs: Sequence[Input], known: Mapping[str, int]) -> Sizes:
    """The size of every symbol that a dimension such as `S`, `2*S` or `S + 1` determines; an Error
    about an input that does not fit.

    `known` holds sizes of symbols that the shapes need not tell.
    """
    for each in inputs:
        _check_form(each)
    sizes: Sizes = dict(known)
    named = {str(dim) for each in inputs for dim in each.type.shape}
    origin = _Origin(dict.fromkeys(known, "sizes"), {*known, *named})
    pending: list[tuple[str, Dim, int]] = []
    for name, type, array in inputs:
        for dim, size in zip(type.shape, array.shape, strict=True):
            if isinstance(dim, Dim):
                pending.append((name, dim, size))
    solved = True
    while solved:
        solved = False
        for name, dim, size in pending:
            found = _solve(bind(dim, sizes), size)
            if found is not None:
                sizes[found[0]], origin.of[found[0]] = found[1], name
                solved = True
    for each in inputs:
        _check_shape(each, sizes, origin)
    return sizes


def _check_form(given: Input) -> None:
    name, type, array = given
    found = dtype_of(array)
    if found != type.dtype:
        raise Error(f"the input {name} is {found}, but it must be {type.dtype}; convert it")
    if array.ndim != type.rank:
        raise Error(
            f"the input {name} has the shape {list(array.shape)}, but it must be {type.whole}"
        )


def _solve(dim: DimLike, size: int) -> tuple[str, int] | None:
    """(symbol, its value) where `dim` is `a*S + b` with one unknown S."""
    if not isinstance(dim, Dim):
        return None
    names = list(dim.symbols())
    factors = dict(dim.terms)
    if len(names) != 1 or set(factors) - {(), (names[0],)}:
        return None
    rest = size - factors.get((), 0)
    value, left = divmod(rest, factors[(names[0],)])
    return (names[0], value) if not left and value >= 0 else None


def _check_shape(given: Input, sizes: Sizes, origin: _Origin) -> None:
    for at, (dim, size) in enumerate(zip(given.type.shape, given.array.shape, strict=True)):
        bound = bind(dim, sizes)
        if bound != size:
            has = f"the input {given.name} has the shape {list(given.array.shape)}"
            raise Error(f"{has}, {_misfit(given.type.whole, at, bound, sizes, origin)}")


def _misfit(type: TensorType, at: int, bound: DimLike, sizes: Sizes, origin: _Origin) -> str:
    """What is wrong with dimension `at`, of which `bound` is what the symbols leave."""
    dim = type.shape[at]
    if not isinstance(dim, Dim):
        return f"but it must be {type}"
    names = list(dim.symbols())
    factor = exact_divide(dim, symbol(names[0]))
    if isinstance(factor, int) and factor > 1:  # as the dimension of a shape that ranks share
        if isinstance(bound, Dim):
            return f"but dimension {at} must be a multiple of {factor}"
        if names[0] not in origin.named:
            return f"but dimension {at} must be {bound}, to go with {origin.of[names[0]]}"
    if isinstance(bound, Dim):
        unknown = list(bound.symbols())
        apart = f"; nothing tells {' and '.join(unknown)} apart: give their sizes"
        why = apart if len(unknown) > 1 else ""
        return f"which does not fit {type}: dimension {at} is {dim}{why}"
    known = ", ".join(f"{name} is {sizes[name]} in {origin.of[name]}" for name in names)
    return f"but {known}, so dimension {at} ({dim}) must be {bound}"
