"""Completes the inputs of a program: dtypes that convert safely, and what a language model implies.

The argument names are a convention that every language model of irc follows: `input_ids` [B, S],
`positions` [B, S], `past_lengths` [B] (tokens in the cache before this call), `logit_positions`
[B, T] (where logits are wanted), and caches [B, heads, C, head size] as states.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias, cast

import numpy as np

from ..backends.base import Port, Ports
from ..dims import Dim, DimLike, exact_divide, symbol
from ..dtypes import dtype, numpy_dtype
from ..errors import Error, did_you_mean

Array: TypeAlias = np.ndarray[Any, Any]
Arrays: TypeAlias = dict[str, Array]

_ROUND = 64  # a cache's capacity is a multiple of this, so that lengths share plans


def complete(ports: Ports, given: Mapping[str, object], capacity: int = 0) -> Arrays:
    """Every input and state of a program from those given.

    A language model needs `input_ids` alone: without the others nothing is in the cache, tokens
    stand one after the other, and all logits are wanted. `capacity` is the most a cache may hold
    (0: any number).
    """
    wanted = {port.name: port for port in (*ports.inputs, *ports.states)}
    for name in given:
        if name not in wanted:
            raise Error(
                f"the model has no input {name!r}{did_you_mean(name, wanted)}; "
                f"it has {', '.join(wanted)}"
            )
    arrays = {name: converted(wanted[name], _array(name, value)) for name, value in given.items()}
    if "input_ids" in arrays and len(wanted["input_ids"].shape) == 2:
        _check_ids(arrays["input_ids"])
        _fill(ports, arrays, capacity)
    missing = [name for name in wanted if name not in arrays]
    if missing:
        raise Error(f"the inputs lack {', '.join(missing)}; the model takes {', '.join(wanted)}")
    return {name: arrays[name] for name in wanted}


def _array(name: str, value: object) -> Array:
    try:
        return np.asarray(value)
    except ValueError as error:
        raise Error(f"the input {name} is no array ({error}); give rows of one length") from None


def _check_ids(ids: Array) -> None:
    if ids.ndim != 2 or 0 in ids.shape:
        raise Error(
            f"input_ids has the shape {list(ids.shape)}, but it must be [B, S]: "
            "a row of at least one token id for each text"
        )


def _check_multiples(ports: Ports, ids: Array) -> None:
    """An Error where rows or tokens are split over ranks, and these do not divide."""
    (port,) = [port for port in ports.inputs if port.name == "input_ids"]
    for dim, size, what in zip(port.shape, ids.shape, ("rows", "tokens"), strict=True):
        found = multiple_of(dim)
        if found is not None and size % found[1]:
            raise Error(
                f"input_ids has {size} {what}, and this model, whose {what} are split over ranks, "
                f"takes a multiple of {found[1]}"
            )


def converted(port: Port, array: Array) -> Array:
    """`array` in the port's dtype; an Error where a number would change its kind or not fit."""
    target = numpy_dtype(port.dtype)
    if array.dtype == target:
        return array
    kind = dtype(port.dtype)
    if kind.is_float and (array.dtype.kind in "fiu" or array.dtype.name == "bfloat16"):
        return array.astype(target)
    if kind.is_integer and array.dtype.kind in "iu":
        limits = np.iinfo(cast("Any", target))
        if array.size and (array.min() < limits.min or array.max() > limits.max):
            raise Error(f"the input {port.name} has numbers that do not fit {port.dtype}")
        return array.astype(target)
    raise Error(f"the input {port.name} is {array.dtype}, but it must be {port.dtype}; convert it")


def _fill(ports: Ports, arrays: Arrays, capacity: int) -> None:
    ids = arrays["input_ids"]
    _check_multiples(ports, ids)
    batch, count = ids.shape
    names = {port.name for port in ports.inputs}
    if "past_lengths" in names and "past_lengths" not in arrays:
        arrays["past_lengths"] = np.zeros(batch, np.int32)
    past = arrays.get("past_lengths", np.zeros(batch, np.int32))
    if past.shape != (batch,):
        raise Error(f"past_lengths has the shape {list(past.shape)}, but it must be [{batch}]")
    steps = np.arange(count, dtype=np.int32)
    if "positions" in names and "positions" not in arrays:
        arrays["positions"] = past[:, None] + steps
    if "logit_positions" in names and "logit_positions" not in arrays:
        arrays["logit_positions"] = np.tile(steps, (batch, 1))
    places = arrays.get("logit_positions", steps)
    if places.size and (places.min() < 0 or places.max() >= count):
        raise Error(f"logit_positions must lie between 0 and {count - 1}, the last token's")
    needed = int(past.max(initial=0)) + count
    absent = [state for state in ports.states if state.name not in arrays]
    if absent and needed > count:
        raise Error("past_lengths says that tokens are cached, so the caches must be given too")
    if absent and capacity and needed > capacity:
        raise Error(
            f"input_ids has {count} tokens per row, and the cache of this model holds {capacity}; "
            "compile it with a larger --dims C=min:typical:max"
        )
    room = rounded(needed, capacity)
    for state in absent:
        arrays[state.name] = np.zeros(state_shape(state, batch, room), numpy_dtype(state.dtype))


def rounded(count: int, capacity: int) -> int:
    """A capacity for `count` tokens: a multiple of 64 that stays within the model's own."""
    room = -(-count // _ROUND) * _ROUND
    return min(room, capacity) if capacity else room


def state_shape(state: Port, batch: int, room: int) -> tuple[int, ...]:
    """The shape of a cache [B, heads, C, head size] for a batch and a capacity."""
    sizes = _symbols(state, batch, room)
    shape: list[int] = []
    for dim in state.shape:
        size = dim.bind(sizes) if isinstance(dim, Dim) else dim
        if isinstance(size, Dim):
            raise Error(f"the state {state.name} is no cache [B, heads, C, size]; give it as input")
        shape.append(size)
    return tuple(shape)


def cache_sizes(states: Iterable[Port], batch: int, room: int) -> dict[str, int]:
    """The symbols of all caches, bound for a batch and a capacity."""
    sizes: dict[str, int] = {}
    for state in states:
        sizes |= _symbols(state, batch, room)
    return sizes


def _symbols(state: Port, batch: int, room: int) -> dict[str, int]:
    sizes: dict[str, int] = {}
    if len(state.shape) == 4:
        for dim, size in ((state.shape[0], batch), (state.shape[2], room)):
            found = multiple_of(dim)
            if found is not None and size % found[1] == 0:
                sizes[found[0]] = size // found[1]
    return sizes


def multiple_of(dim: DimLike) -> tuple[str, int] | None:
    """("S", n) where a dimension is n*S; None for any other."""
    if not isinstance(dim, Dim):
        return None
    symbols = list(dim.symbols())
    factor = exact_divide(dim, symbol(symbols[0]))
    return (symbols[0], factor) if isinstance(factor, int) else None


def cache_capacity(states: Iterable[Port], dims: Mapping[str, Any]) -> int:
    """The most tokens that caches hold: C, or the upper end of its range; 0: any number."""
    limits: list[int] = []
    for state in states:
        if len(state.shape) != 4:
            continue
        dim = state.shape[2]
        if isinstance(dim, int):
            limits.append(dim)
        elif str(dim) in dims:
            limits.append(int(dims[str(dim)][2]))
    return min(limits, default=0)
