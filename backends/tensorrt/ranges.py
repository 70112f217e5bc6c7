"""The profiles of an engine: for decoding, one token of each row; for prefill, many.

A kernel that reads the cache directly is chosen for a profile of exactly one token; any other
expands the whole cache at every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from irc.backends.onnx.growth import writes_of
from irc.backends.tensorrt.request import Profile
from irc.core import Function
from irc.dims import Dim, DimLike, Shape, bind
from irc.errors import Error

Range = tuple[int, int, int]


def profiles_of(function: Function, dims: Mapping[str, Range]) -> tuple[Profile, ...]:
    """The profiles of a function from the ranges of its symbols; none where all is static."""
    arguments = {
        str(arg.name): arg.type.shape
        for arg in function.args
        if any(isinstance(dim, Dim) for dim in arg.type.shape)
    }
    if not arguments:
        return ()
    ranges = {name: _range(name, dims) for name in _symbols(arguments.values())}
    step = _step(function)
    if step is None:
        return (_profile("all", arguments, ranges),)
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
    """The symbol of how many tokens one call brings, where caches are written."""
    found = {write["step"] for write in writes_of(function)}
    symbols = {str(dim) for arg in function.args for dim in arg.type.shape if isinstance(dim, Dim)}
    return next(iter(found)) if len(found) == 1 and found <= symbols else None


def _symbols(shapes: Iterable[Shape]) -> dict[str, None]:
    dims = (dim for shape in shapes for dim in shape if isinstance(dim, Dim))
    return {name: None for dim in dims for name in dim.symbols()}


def _range(name: str, dims: Mapping[str, Range]) -> Range:
    if name not in dims:
        raise Error(f"an engine needs a range for {name}; give --dims {name}=min:typical:max")
    low, typical, high = dims[name]
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
