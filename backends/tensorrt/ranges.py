"""The profiles of an engine: `decode` for one token per row, `prefill` for many.

TensorRT chooses a kernel that reads the cache directly only for a profile of exactly one token; any
other profile expands the whole cache at every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from irc.backends.ranks.ports import sized
from irc.backends.tensorrt.builder.request import Profile
from irc.errors import Error
from irc.ir.core import Function
from irc.ir.dims import Dim, DimLike, Shape
from irc.ops.fused_attention import cache_writes

Range = tuple[int, int, int]


def profiles_of(
    functions: Iterable[Function], dims: Mapping[str, Range]
) -> list[tuple[Profile, ...]]:
    """The profiles of each function from the ranges of its symbols; none if it has no symbols.

    An Error names all symbols without a range.
    """
    arguments = [(function, _dynamic(function)) for function in functions]
    symbols = _symbols(shape for _, found in arguments for shape in found.values())
    missing = [name for name in symbols if name not in dims]
    if missing:
        wanted = ",".join(f"{name}=min:typical:max" for name in missing)
        what = "a range" if len(missing) == 1 else "ranges"
        raise Error(f"an engine needs {what} for {', '.join(missing)}; give --dims {wanted}")
    return [_profiles(function, found, dims) for function, found in arguments]


def _dynamic(function: Function) -> dict[str, Shape]:
    """The arguments whose shapes have symbols."""
    return {
        str(arg.name): arg.type.shape
        for arg in function.args
        if any(isinstance(dim, Dim) for dim in arg.type.shape)
    }


def _profiles(
    function: Function, arguments: Mapping[str, Shape], dims: Mapping[str, Range]
) -> tuple[Profile, ...]:
    if not arguments:
        return ()
    ranges = {name: _range(name, dims) for name in _symbols(arguments.values())}
    tokens = _token_symbol(function, ranges)
    if tokens is None:
        return (_profile("all", arguments, ranges),)
    ranges[tokens] = _within_caches(ranges[tokens], tokens, function)
    ones = [tokens]
    for arg in function.args:  # of one token, logits are asked for one
        symbol = str(arg.type.shape[-1]) if arg.name == "logit_positions" else ""
        ones += [symbol] if symbol in ranges else []
    found = [_profile("decode", arguments, ranges | dict.fromkeys(ones, (1, 1, 1)))]
    if ranges[tokens][2] > 1:
        found.append(_profile("prefill", arguments, ranges))
    return tuple(found)


def _token_symbol(function: Function, ranges: Mapping[str, Range]) -> str | None:
    """The symbol of the number of tokens that one call appends to caches (or of its multiple, where
    tokens are sharded); None if there is none, or several."""
    counts = {write.new.type.shape[1] for op in function for write in cache_writes(op)}
    names = [*_symbols([tuple(counts)])]
    return names[0] if len(counts) == len(names) == 1 and names[0] in ranges else None


def _within_caches(range: Range, tokens: str, function: Function) -> Range:
    """The range of the number of tokens, at most the capacity of the caches."""
    for write in (each for op in function for each in cache_writes(op)):
        if isinstance(write.capacity, int):
            most = max(write.capacity // smallest(write.new.type.shape[1]), 1)
            range = (min(range[0], most), min(range[1], most), min(range[2], most))
    return range


def _symbols(shapes: Iterable[Shape]) -> dict[str, None]:
    dims = (dim for shape in shapes for dim in shape if isinstance(dim, Dim))
    return {name: None for dim in dims for name in dim.symbols()}


def _range(name: str, dims: Mapping[str, Range]) -> Range:
    low, typical, high = dims[name]
    if high < 1:
        raise Error(f"the range of {name} ends at {high}; an engine needs 1 or more")
    return max(low, 1), max(typical, 1), high


def _profile(name: str, arguments: Mapping[str, Shape], ranges: Mapping[str, Range]) -> Profile:
    low, typical, high = ({name: each[i] for name, each in ranges.items()} for i in range(3))
    shapes = {
        key: (sized(shape, low), sized(shape, typical), sized(shape, high))
        for key, shape in arguments.items()
    }
    return Profile(name, shapes)


def smallest(dim: DimLike) -> int:
    """A dimension with 1 for every symbol."""
    return sized((dim,), dict.fromkeys(dim.symbols(), 1))[0] if isinstance(dim, Dim) else dim
