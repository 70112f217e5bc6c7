"""Checks the arrays given to a function and binds its symbols to their sizes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from irc.core import Function, Value
from irc.dims import Dim, DimLike, bind
from irc.dtypes import dtype_of
from irc.errors import Error, did_you_mean

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


def bind_inputs(
    function: Function, given: Mapping[str, object], known: Mapping[str, int]
) -> tuple[list[np.ndarray], Sizes]:
    """The arguments as arrays in declared order, and the size of every symbol.

    `known` holds sizes of symbols that the shapes need not tell.
    """
    check_names(function, given)
    arrays = [np.asarray(given[str(arg.name)]) for arg in function.args]
    for arg, array in zip(function.args, arrays, strict=True):
        _check_form(arg, array)
    return arrays, _sizes(function, arrays, known)


def _check_form(arg: Value, array: np.ndarray) -> None:
    found = dtype_of(array)
    if found != arg.type.dtype:
        raise Error(f"the input {arg.name} is {found}, but it must be {arg.type.dtype}; convert it")
    if array.ndim != arg.type.rank:
        raise Error(
            f"the input {arg.name} has the shape {list(array.shape)}, but it must be {arg.type}"
        )


def _sizes(function: Function, arrays: list[np.ndarray], known: Mapping[str, int]) -> Sizes:
    """The size of every symbol that a dimension such as `S`, `2*S` or `S + 1` determines."""
    sizes: Sizes = dict(known)
    origin: dict[str, str] = dict.fromkeys(known, "sizes")
    pending: list[tuple[Value, Dim, int]] = []
    for arg, array in zip(function.args, arrays, strict=True):
        for dim, size in zip(arg.type.shape, array.shape, strict=True):
            if isinstance(dim, Dim):
                pending.append((arg, dim, size))
    solved = True
    while solved:
        solved = False
        for arg, dim, size in pending:
            found = _solve(bind(dim, sizes), size)
            if found is not None:
                sizes[found[0]], origin[found[0]] = found[1], str(arg.name)
                solved = True
    for arg, array in zip(function.args, arrays, strict=True):
        _check_shape(arg, array, sizes, origin)
    return sizes


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


def _check_shape(arg: Value, array: np.ndarray, sizes: Sizes, origin: dict[str, str]) -> None:
    for at, (dim, size) in enumerate(zip(arg.type.shape, array.shape, strict=True)):
        bound = bind(dim, sizes)
        if bound == size:
            continue
        shape = list(array.shape)
        if isinstance(bound, Dim):
            names = " and ".join(bound.symbols())
            many = len(list(bound.symbols())) > 1
            why = f"; nothing tells {names} apart: give their sizes" if many else ""
            raise Error(
                f"the input {arg.name} has the shape {shape}, which does not fit {arg.type}: "
                f"dimension {at} is {dim}{why}"
            )
        if not isinstance(dim, Dim):
            raise Error(f"the input {arg.name} has the shape {shape}, but it must be {arg.type}")
        known = ", ".join(f"{name} is {sizes[name]} in {origin[name]}" for name in dim.symbols())
        raise Error(
            f"the input {arg.name} has the shape {shape}, but {known}, "
            f"so dimension {at} ({dim}) must be {bound}"
        )
