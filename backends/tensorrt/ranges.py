"""The profiles of an engine: for decoding, the fewest tokens of each row; for prefill, many.

A kernel that reads the cache directly is chosen for a profile of exactly one token; any other
expands the whole cache at every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from irc.backends.tensorrt.builder.request import Profile
from irc.core import Function
from irc.dims import Dim, DimLike, Shape, bind
from irc.errors import Error

Range = tuple[int, int, int]


def profiles_of(
    functions: Iterable[Function], dims: Mapping[str, Range]
) -> list[tuple[Profile, ...]]:
    """The profiles of each function from the ranges of its symbols; none where all is static.

    An Error names all symbols that have no range.
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
    step = _step(function)
    if step is None:
        return (_profile("all", arguments, ranges),)
    ranges[step] = _within(ranges[step], step, function)
    decode = ranges | {step: (1, 1, 1)} | _no_more_than_one(function, ranges, step)
    found = [_profile("decode", arguments, decode)]
    if ranges[step][2] > 1:
        found.append(_profile("prefill", arguments, ranges))
    return tuple(found)


def _no_more_than_one(
    function: Function, ranges: Mapping[str, Range], step: str
) -> dict[str, Range]:
    """The symbols of arguments that point at tokens of a call: of one token there is one."""
    for arg in function.args:
        names = [str(dim) for dim in arg.type.shape]
        if arg.name == "logit_positions" and names[-1] in ranges and names[-1] != step:
            return {names[-1]: (1, 1, 1)}
    return {}


def _step(function: Function) -> str | None:
    """The symbol that says how many tokens one call brings, where caches are written.

    Where tokens are split over ranks a call brings a multiple of it.
    """
    steps = {op.operands[1].type.shape[1] for op in function if op.opname == "cache_update"}
    names = {name for dim in steps if isinstance(dim, Dim) for name in dim.symbols()}
    told = _symbols(arg.type.shape for arg in function.args)
    return next(iter(names)) if len(steps) == len(names) == 1 and names <= told.keys() else None


def _within(range: Range, step: str, function: Function) -> Range:
    """The range of the tokens of a call, no more of them than the caches hold."""
    low, typical, high = range
    for op in function:
        if op.opname != "cache_update":
            continue
        capacity, tokens = op.operands[0].type.shape[2], op.operands[1].type.shape[1]
        if isinstance(capacity, int):
            most = max(capacity // number(tokens, {step: 1}), 1)
            low, typical, high = min(low, most), min(typical, most), min(high, most)
    return low, typical, high


def _symbols(shapes: Iterable[Shape]) -> dict[str, None]:
    dims = (dim for shape in shapes for dim in shape if isinstance(dim, Dim))
    return {name: None for dim in dims for name in dim.symbols()}


def _range(name: str, dims: Mapping[str, Range]) -> Range:
    low, typical, high = dims[name]
    if high < 1:
        raise Error(
            f"the range of {name} ends at {high}; an engine needs one that ends at 1 or more"
        )
    return max(low, 1), max(typical, 1), high


def _profile(name: str, arguments: Mapping[str, Shape], ranges: Mapping[str, Range]) -> Profile:
    def at(shape: Shape, which: int) -> tuple[int, ...]:
        sizes = {symbol: each[which] for symbol, each in ranges.items()}
        return tuple(number(dim, sizes) for dim in shape)

    return Profile(
        name, {key: (at(shape, 0), at(shape, 1), at(shape, 2)) for key, shape in arguments.items()}
    )


def number(dim: DimLike, sizes: Mapping[str, int]) -> int:
    """A dimension whose symbols all have sizes."""
    found = bind(dim, sizes)
    assert isinstance(found, int)
    return found
