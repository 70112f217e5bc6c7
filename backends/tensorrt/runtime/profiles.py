"""Which profile of an engine a run uses, and padding of inputs up to its minimum sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from irc.backends.base import Port
from irc.backends.ranks.ports import sized
from irc.backends.tensorrt.builder.request import Profile
from irc.errors import Error
from irc.ir.dims import Dim, DimLike

Sizes: TypeAlias = Mapping[str, int]


def refusal(profile: Profile, ports: Mapping[str, Port], sizes: Sizes) -> str:
    """The first dimension of inputs that does not fit a profile; "" where all do."""
    for name, dim, size, low, high in _dims(profile, ports, sizes):
        if not low <= size <= high:
            shown = f"{dim}={size}" if isinstance(dim, Dim) else str(size)
            return f"{profile.name}: {name} has {shown} and must have {low} to {high}"
    return ""


def _too_small(profile: Profile, ports: Mapping[str, Port], sizes: Sizes) -> dict[str, int]:
    """The symbols that are below the minimum of the profile, with that minimum."""
    return {
        str(dim): low
        for _, dim, size, low, _ in _dims(profile, ports, sizes)
        if size < low and isinstance(dim, Dim) and list(dim.symbols()) == [str(dim)]
    }


def _dims(
    profile: Profile, ports: Mapping[str, Port], sizes: Sizes
) -> Iterator[tuple[str, DimLike, int, int, int]]:
    """(input, dimension, its size, minimum, maximum) of all dimensions."""
    for name, (lows, _, highs) in profile.shapes.items():
        for dim, low, high in zip(ports[name].shape, lows, highs, strict=True):
            yield name, dim, sized((dim,), sizes)[0], low, high


def padded_sizes(
    profiles: Sequence[Profile], ports: Mapping[str, Port], sizes: Sizes, may_grow: set[str]
) -> dict[str, int]:
    """`sizes` that a profile accepts, with symbols of `may_grow` raised to its minimum if needed.

    An Error says why no profile accepts them.
    """
    reasons = [refusal(profile, ports, sizes) for profile in profiles]
    if not all(reasons) or not profiles:
        return dict(sizes)
    for profile in profiles:
        grown = _too_small(profile, ports, sizes)
        if set(grown) <= may_grow and not refusal(profile, ports, {**sizes, **grown}):
            return {**sizes, **grown}
    raise Error(
        f"no profile of the engine accepts these inputs ({'; '.join(reasons)}); use inputs of "
        "other sizes, or compile with wider --dims"
    )


def chosen(profiles: Sequence[Profile], ports: Mapping[str, Port], sizes: Sizes) -> int:
    """The number of the first profile that accepts inputs of these sizes."""
    return next((n for n, each in enumerate(profiles) if not refusal(each, ports, sizes)), 0)
