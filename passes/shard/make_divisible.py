"""Replaces sharded symbolic dimensions by multiples of the number of shards."""

from __future__ import annotations

from math import lcm
from typing import Any, cast

from irc.errors import Error
from irc.ir.core import Module
from irc.ir.dims import Dim, DimLike, bind, exact_divide, symbol
from irc.ir.types import TensorType
from irc.pipeline import Stats


def make_divisible(module: Module, stats: Stats, sequence: bool) -> None:
    """Replace every symbol that is sharded over N ranks by N times a new one."""
    group_size: dict[str, dict[str, int]] = {}  # per symbol, the numbers of shards by axes
    for function in module.functions.values():
        for arg in function.args:
            for dim, axes in zip(arg.type.shape, arg.type.axes, strict=True):
                if isinstance(dim, Dim) and axes:
                    _note(group_size, dim, module.mesh.group_size(axes), "_".join(axes))
    if sequence:
        axes = tuple(a for a in ("ep", "tp") if a in module.mesh.names)
        for name in _token_symbols(module):
            _note(group_size, symbol(name), module.mesh.group_size(axes), "_".join(axes))
    counts = {name: lcm(*parts.values()) for name, parts in group_size.items()}
    sizes = {
        n: _replacement(module, n, count, "_".join(group_size[n])) for n, count in counts.items()
    }
    if sizes:
        substitute(module, sizes)
    for name, count in counts.items():
        stats.explain(f"{name} is sharded over {count} ranks, so it is a multiple of {count}")


def _note(group_size: dict[str, dict[str, int]], dim: Dim, count: int, axes: str) -> None:
    if exact_divide(dim, count) is not None:
        return
    names = list(dim.symbols())
    if dim is not symbol(names[0]):
        raise Error(f"the dimension {dim} is sharded over {count} ranks; give it a name of its own")
    group_size.setdefault(names[0], {})[axes] = count


def _token_symbols(module: Module) -> list[str]:
    """The second dimension of the ids or activations that come in as [B, S, ...]."""
    symbols: dict[str, None] = {}
    for arg in module.main.args:
        if 2 <= arg.type.ndim <= 3 and isinstance(arg.type.shape[1], Dim):
            symbols.update(dict.fromkeys(arg.type.shape[1].symbols()))
            break
    return list(symbols)


def _replacement(module: Module, name: str, count: int, suffix: str) -> DimLike:
    new = f"{name}_{suffix}"
    while new in module.dims:
        new += "_"
    if name in module.dims:
        low, typical, high = module.dims.pop(name)
        most = high // count
        if not most:
            raise Error(
                f"{name} is at most {high}, which is too little to shard over {count} ranks"
            )
        fitting = [min(-(-n // count), most) for n in (low, typical)]
        module.dims[new] = (fitting[0], fitting[1], most)
    return symbol(new) * count


def substitute(module: Module, sizes: dict[str, DimLike]) -> None:
    """Write other dimensions for symbols, everywhere in a module."""
    args = [arg for function in module.functions.values() for arg in function.args]
    results = [result for op in module.ops() for result in op.results]
    for value in (*module.weights.values(), *args, *results):
        value.type = _substituted(value.type, sizes)
    for op in module.ops():
        for name in op.attribute_types:
            setattr(op, name, _attribute(getattr(op, name), sizes))


def _substituted(type: TensorType, sizes: dict[str, DimLike]) -> TensorType:
    """A type with other dimensions, in that of which it is a part too."""
    new = type.replace(shape=tuple(replaced(dim, sizes) for dim in type.shape))
    return new if type.of is None else new.part_of(_substituted(type.of, sizes))


def _attribute(value: Any, sizes: dict[str, DimLike]) -> Any:
    if isinstance(value, tuple):
        return tuple(_attribute(item, sizes) for item in cast("tuple[Any, ...]", value))
    return replaced(value, sizes) if isinstance(value, Dim) else value


def replaced(dim: DimLike, sizes: dict[str, DimLike]) -> DimLike:
    """`dim` with other dimensions for some of its symbols."""
    if not isinstance(dim, Dim) or not sizes.keys() & set(dim.symbols()):
        return dim
    return bind(dim, sizes)
