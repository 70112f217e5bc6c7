"""`complete`: converts the inputs of a program, and adds those that a language model implies.

Language models follow frontends/models/language_model.py: `input_ids` [B, S], `positions` [B, S],
`past_lengths` [B], `lengths` [B], `logit_positions` [B, T], and caches [B, heads, C, head size] and
fixed states [B, ...] as states.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import numpy as np

from ..backends.base import Port, Ports
from ..errors import Error, did_you_mean
from ..ir.dims import Dim, DimLike, bind, exact_divide, linear, symbol
from ..ir.dtypes import dtype, integer_range, numpy_dtype
from ..ir.types import TensorType
from .pages import PAGES, layout

Array: TypeAlias = np.ndarray[Any, Any]
Arrays: TypeAlias = dict[str, Array]
Range: TypeAlias = tuple[int, int]

_CACHE_NDIMS = (4, 5)  # [B, heads, C, head size], and with keys and values stacked behind B
_OF_TOKENS = {"attention_mask": 1, "token_type_ids": 0}  # what each token has by default
_ROUND = 64  # the capacity of a cache is a multiple, so that several lengths share a plan


def complete(ports: Ports, inputs: Mapping[str, object], slots: Range = (0, 0)) -> Arrays:
    """Every input and state of a program, in its dtype.

    A language model or an encoder needs `input_ids` only: by default the cache is empty, positions
    are consecutive, all logits are computed, and there is no padding and one type of tokens.
    `slots` is the `cache_range` of the model.
    """
    ports_by_name = {port.name: port for port in (*ports.inputs, *ports.states)}
    check_names(inputs, ports_by_name)
    arrays = {
        name: converted(ports_by_name[name], _array(name, value)) for name, value in inputs.items()
    }
    if "input_ids" in arrays and len(ports_by_name["input_ids"].shape) == 2:
        _check_ids(arrays["input_ids"], vocabulary(ports))
        _fill(ports, arrays, slots)
    missing = [name for name in ports_by_name if name not in arrays]
    if missing:
        raise Error(
            f"the inputs lack {', '.join(missing)}; the model takes {', '.join(ports_by_name)}"
        )
    return {name: arrays[name] for name in ports_by_name}


def check_names(names: Iterable[str], ports: Collection[str]) -> None:
    """An Error about a name that is none of the inputs of a model."""
    for name in names:
        if name not in ports:
            raise Error(
                f"the model has no input {name!r}{did_you_mean(name, ports)}; "
                f"it has {', '.join(ports)}"
            )


def check_ranges(
    ports: Iterable[Port], arrays: Mapping[str, Array], dims: Mapping[str, Sequence[int]]
) -> None:
    """An Error where a size of an array is outside the range that the model was compiled for.

    Of arrays that do not fit their ports, the program says why.
    """
    for port in ports:
        if port.name not in arrays:
            continue
        for dim, size in zip(port.shape, arrays[port.name].shape, strict=False):
            terms = linear(dim)
            if terms is None or terms[0] not in dims:
                continue
            (name, factor, rest), (low, _, high) = terms, dims[terms[0]]
            if not low <= (value := (size - rest) // factor) <= high:
                raise Error(
                    f"{port.name} has {name}={value}, but the model was compiled for "
                    f"{name}={low} to {high}; give another size, or compile with another --dims "
                    f"{name}=min:typical:max"
                )


def sizes_of_shapes(
    ports: Iterable[Port], shapes: Mapping[str, Sequence[int]], dims: Mapping[str, Sequence[int]]
) -> dict[str, int]:
    """The sizes of the symbols that inputs of some shapes have; an Error where they do not fit."""
    from ..backends.reference.inputs import Input, bind_sizes

    given = [port for port in ports if port.name in shapes]
    zeros = {port.name: np.zeros((), numpy_dtype(port.dtype)) for port in given}
    arrays = {name: np.broadcast_to(zero, tuple(shapes[name])) for name, zero in zeros.items()}
    sizes = bind_sizes(
        [Input(port.name, TensorType(port.dtype, port.shape), arrays[port.name]) for port in given],
        {},
    )
    check_ranges(given, arrays, dims)
    return sizes


def bound_shape(port: Port, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of a result for these sizes of symbols."""
    shape = [bind(dim, sizes) for dim in port.shape]
    for dim in shape:
        if isinstance(dim, Dim):
            raise Error(f"{port.name} has the size {dim}, which the inputs do not tell; give all")
    return tuple(cast("list[int]", shape))


def vocabulary(ports: Ports) -> int | None:
    """The number of tokens of a language model, where its logits tell.

    None without caches: logits may be scores of other classes.
    """
    if not ports.states and not any(port.name.startswith("past_") for port in ports.inputs):
        return None
    size = next((port.shape[-1] for port in ports.outputs if port.name == "logits"), None)
    return size if isinstance(size, int) else None


def _array(name: str, value: object) -> Array:
    try:
        return np.asarray(value)
    except ValueError as error:
        raise Error(
            f"the input {name} is not an array ({error}); expected rows of equal length"
        ) from None


def _check_ids(ids: Array, tokens: int | None) -> None:
    if ids.ndim != 2 or 0 in ids.shape:
        raise Error(
            f"input_ids has the shape {list(ids.shape)}, but it must be [B, S]: "
            "a row of at least one token id per sequence"
        )
    outside = _outside(ids, tokens)
    if outside.size:
        warnings.warn(
            f"input_ids has the token {outside.flat[0]}, but the model has {tokens} tokens; unless "
            "irc compile --outside says otherwise, its embedding is a row of zeros",
            stacklevel=4,
        )


def check_prompt(prompt: Sequence[int], tokens: int | None) -> None:
    """An Error unless a prompt is some of a model's `tokens` token ids (None: any number)."""
    ids = np.asarray(prompt)
    if not ids.size:
        raise Error("the prompt has no tokens; expected at least one")
    if ids.dtype.kind not in "iu":
        raise Error(f"the prompt is {ids.dtype}; expected token ids, which are integers")
    outside = _outside(ids, tokens)
    if outside.size:
        raise Error(f"the prompt has the token {outside[0]}, but the model has {tokens} tokens")


def split_prompts(ids: Array, lengths: Sequence[int]) -> list[list[int]]:
    """The tokens of each prompt, of padded rows [B, S] or of all rows joined, [T] or [1, T]."""
    has_lengths = min(lengths, default=0) > 0
    if has_lengths and ids.ndim == 2 and len(ids) == len(lengths) and max(lengths) <= ids.shape[1]:
        return [row[:length].tolist() for row, length in zip(ids, lengths, strict=True)]
    if not has_lengths or sum(lengths) != ids.size:
        raise Error(
            f"input_ids has the shape {list(ids.shape)} and context_lengths is {list(lengths)}; "
            "expected rows [B, S] with B lengths of 1 to S, or the prompts of these lengths joined"
        )
    return [row.tolist() for row in np.split(ids.reshape(-1), np.cumsum(lengths)[:-1])]


def _outside(ids: Array, tokens: int | None) -> Array:
    """The token ids that a model with `tokens` tokens does not have."""
    return ids[(ids < 0) | (ids >= tokens)] if tokens is not None else ids[:0]


def _check_multiples(ports: Ports, ids: Array) -> None:
    """Raise an Error unless rows and tokens are multiples of their group sizes."""
    (port,) = [port for port in ports.inputs if port.name == "input_ids"]
    for dim, size, what in zip(port.shape, ids.shape, ("rows", "tokens"), strict=True):
        multiple = multiple_of(dim)
        if multiple is not None and size % multiple[1]:
            raise Error(
                f"input_ids has {size} {what}, but the {what} of this model are sharded; expected "
                f"a multiple of {multiple[1]}: pad them, and drop the results of the padding"
            )


def converted(port: Port, array: Array) -> Array:
    """`array` in the port's dtype; an Error for float to integer, or integers out of range."""
    target = numpy_dtype(port.dtype)
    if array.dtype == target:
        return array
    kind = dtype(port.dtype)
    if kind.is_float and (array.dtype.kind in "fiu" or array.dtype.name == "bfloat16"):
        return array.astype(target)
    if kind.is_integer and array.dtype.kind in "iu":
        low, high = integer_range(port.dtype)
        if array.size and (array.min() < low or array.max() > high):
            raise Error(f"the input {port.name} has numbers outside the range of {port.dtype}")
        return array.astype(target)
    raise Error(f"the input {port.name} is {array.dtype}, but it must be {port.dtype}; convert it")


def _fill(ports: Ports, arrays: Arrays, slots: Range) -> None:
    ids = arrays["input_ids"]
    _check_multiples(ports, ids)
    batch, count = ids.shape
    names = {port.name for port in ports.inputs}
    shape = next(port.shape for port in ports.inputs if port.name == "input_ids")
    for port in ports.inputs:
        if port.name in _OF_TOKENS and port.shape == shape and port.name not in arrays:
            arrays[port.name] = converted(port, np.full(ids.shape, _OF_TOKENS[port.name], np.int32))
    if "past_lengths" in names and "past_lengths" not in arrays:
        arrays["past_lengths"] = np.zeros(batch, np.int32)
    past = arrays.get("past_lengths", np.zeros(batch, np.int32))
    if past.shape != (batch,):
        raise Error(f"past_lengths has the shape {list(past.shape)}, but it must be [{batch}]")
    steps = np.arange(count, dtype=np.int32)
    if "positions" in names and "positions" not in arrays:
        arrays["positions"] = past[:, None] + steps
    if "lengths" in names and "lengths" not in arrays:
        arrays["lengths"] = np.full(batch, count, np.int32)
    if "logit_positions" in names and "logit_positions" not in arrays:
        arrays["logit_positions"] = np.tile(steps, (batch, 1))
    chosen = arrays.get("logit_positions", steps)
    if chosen.size and (chosen.min() < 0 or chosen.max() >= count):
        raise Error(f"logit_positions must lie between 0 and {count - 1}")
    needed = int(past.max(initial=0)) + count
    absent = [state for state in ports.states if state.name not in arrays]
    if absent and needed > count:
        raise Error("past_lengths is not 0, so the caches are required too")
    if absent and slots[1] and needed > slots[1]:
        raise Error(
            f"input_ids has {count} tokens per row, but the cache of this model holds {slots[1]}; "
            "compile it with a larger --dims C=min:typical:max"
        )
    count = rounded(needed, slots)
    paged = layout(ports)
    if paged is not None and PAGES not in arrays:
        each, rows = paged.pages(count), np.arange(batch, dtype=np.int32)[:, None]
        arrays[PAGES] = np.full((batch, paged.count), -1, np.int32)
        arrays[PAGES][:, :each] = rows * each + np.arange(each)
    if paged is not None:
        batch = int(arrays[PAGES].max(initial=0)) + 1  # of a pool
        for name in (state.name for state in ports.states if state.name in arrays):
            if len(arrays[name]) < batch:
                raise Error(
                    f"pages has page {batch - 1}, but {name} has {len(arrays[name])} pages; "
                    "expected pages of the pool, or -1 for none"
                )
    for state in absent:
        arrays[state.name] = np.zeros(state_shape(state, batch, count), numpy_dtype(state.dtype))


def rounded(count: int, slots: Range) -> int:
    """A capacity for `count` tokens: a multiple of 64, within `cache_range`."""
    least, most = slots
    capacity = max(-(-count // _ROUND) * _ROUND, least)
    return min(capacity, most) if most else capacity


def state_shape(state: Port, batch: int, slots: int) -> tuple[int, ...]:
    """The shape of a state for a batch size and a capacity, which a fixed state does not have."""
    sizes = _symbols(state, batch, slots)
    shape: list[int] = []
    for dim in state.shape:
        size = dim.bind(sizes) if isinstance(dim, Dim) else dim
        if isinstance(size, Dim):
            raise Error(
                f"the state {state.name} is not a cache [B, ..., C, size]; pass it as an input"
            )
        shape.append(size)
    return tuple(shape)


def cache_sizes(states: Iterable[Port], batch: int, slots: int) -> dict[str, int]:
    """The symbols of all caches, for a batch size and a capacity."""
    sizes: dict[str, int] = {}
    for state in states:
        sizes |= _symbols(state, batch, slots)
    return sizes


def _symbols(state: Port, batch: int, slots: int) -> dict[str, int]:
    sizes: dict[str, int] = {}
    pairs = [(state.shape[0], batch)] if state.fixed else []
    if not state.fixed and len(state.shape) in _CACHE_NDIMS:
        pairs = [(state.shape[0], batch), (state.shape[-2], slots)]
    for dim, size in pairs:
        multiple = multiple_of(dim)
        if multiple is not None and size % multiple[1] == 0:
            sizes[multiple[0]] = size // multiple[1]
    return sizes


def multiple_of(dim: DimLike) -> tuple[str, int] | None:
    """("S", n) if a dimension is n*S; None for any other."""
    if not isinstance(dim, Dim):
        return None
    symbols = list(dim.symbols())
    factor = exact_divide(dim, symbol(symbols[0]))
    return (symbols[0], factor) if isinstance(factor, int) else None


def cache_range(ports: Ports, dims: Mapping[str, Any]) -> Range:
    """The least and the most tokens of caches: C, or its range; (0, 0): any number."""
    paged = layout(ports)
    if paged is not None:
        return 1, paged.size * paged.count
    limits: list[Range] = []
    for state in ports.states:
        if state.fixed or len(state.shape) not in _CACHE_NDIMS:
            continue
        dim = state.shape[-2]
        multiple = multiple_of(dim)
        if isinstance(dim, int):
            limits.append((dim, dim))
        elif multiple is not None and multiple[0] in dims:
            low, _, high = dims[multiple[0]]
            limits.append((int(low) * multiple[1], int(high) * multiple[1]))
    return max((low for low, _ in limits), default=0), min((high for _, high in limits), default=0)
