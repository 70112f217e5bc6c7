"""`fuse-qkv`: the three projections before an attention become one linear and a split."""

from __future__ import annotations

from itertools import takewhile
from typing import NamedTuple

from irc.ir.core import Module, Op, Value, Weight
from irc.ir.dims import DimLike
from irc.ir.types import TensorType
from irc.ops import LayerNorm, Linear, RmsNorm, Rope, Split
from irc.pipeline import Pass, Stats, register
from irc.rewrite import permit, report_failure
from irc.weights import ConcatRef, pinned

from .shared.edit import free_name


@register("fuse-qkv")
class FuseQkv(Pass):
    """Three linears of one input that feed one attention become one linear and a split.

    The weights, and the biases if all three have one, become one concatenated reference. They
    must be weights of the module, not sharded over the mesh, and have no other use.
    """

    def run(self, module: Module, stats: Stats) -> None:
        for function in module.functions.values():
            for op in function:
                if op.opname == "attention":
                    _fuse_before(module, op, stats)


class _Projections(NamedTuple):
    linears: tuple[Op, ...]
    weights: tuple[Weight, ...]
    biases: tuple[Weight, ...]


def _fuse_before(module: Module, attention: Op, stats: Stats) -> None:
    found = _projections(attention)
    if isinstance(found, str):
        report_failure("fuse-qkv", attention, found)
        return
    if permit("fuse-qkv", attention):
        _fuse(module, attention, found)
        stats.count("fused")


def _projections(attention: Op) -> _Projections | str:
    """The three linears with their weights, or why they cannot be fused."""
    linears: list[Op] = []
    for letter, value in zip("qkv", attention.operands[:3], strict=True):
        op = _source(value)
        if op is None or op.opname != "linear":
            source = "no operation" if op is None else op.opname
            return f"{letter} of attention comes from {source}, not from a linear"
        linears.append(op)
    if len(set(linears)) < 3:
        return "q, k and v of attention share a linear"
    if len({op.operands[0] for op in linears}) > 1:
        return "the linears of q, k and v have different inputs"
    if len({op.present for op in linears}) > 1:
        return "some of the linears of q, k and v have a bias and some have none"
    parameters: list[list[Weight]] = []
    for at in range(1, len(linears[0].operands)):
        values = [op.operands[at] for op in linears]
        weights = [value for value in values if isinstance(value, Weight)]
        if len(weights) < 3:
            return "a linear of q, k or v takes a computed value for a weight"
        for weight in weights:
            if len(weight.users) > 1 or len(set(weights)) < 3:
                return f"@{weight.name} has other uses"
            if weight.type.sharded:
                return f"@{weight.name} is {weight.type}; fuse before sharding or after localize"
        parameters.append(weights)
    return _Projections(
        tuple(linears), tuple(parameters[0]), tuple(parameters[1]) if parameters[1:] else ()
    )


def _source(value: Value) -> Op | None:
    """The operation that makes a value, seen through moves, rope, norms and cache updates."""
    op = value.producer
    while op is not None and (op.moves_data or isinstance(op, (Rope, RmsNorm, LayerNorm))):
        op = op.operands[1 if op.in_place else 0].producer
    return op


def _fuse(module: Module, attention: Op, found: _Projections) -> None:
    function = attention.parent
    assert function is not None
    first = next(op for op in function if op in found.linears)
    weight = _joined(module, found.weights)
    bias = _joined(module, found.biases) if found.biases else None
    linear = Linear(first.operands[0], weight, bias=bias)
    linear.result.name = "qkv"
    sizes = tuple(w.type.shape[0] for w in found.weights)
    split = Split(linear, dim=linear.result.type.ndim - 1, sizes=sizes)
    for new in (linear, split):
        new.loc = first.loc
        function.insert(new, first)
    for old, new in zip(found.linears, split.results, strict=True):
        old.result.replace_by(new)
        old.erase()
    for old in (*found.weights, *found.biases):
        del module.weights[old.name]


def _joined(module: Module, parts: tuple[Weight, ...]) -> Weight:
    """A new weight, the concatenation of several along their first dimension."""
    names = [part.name for part in parts]
    rows: DimLike = 0
    for part in parts:
        rows = rows + part.type.shape[0]
    type = TensorType(parts[0].type.dtype, (rows, *parts[0].type.shape[1:]))
    refs = tuple(pinned(part.ref, part.type.shape, part.type.dtype) for part in parts)
    joined = Weight(type, _name(names, module), ConcatRef(refs, 0))
    return module.add_weight(joined)


def _name(names: list[str], module: Module) -> str:
    """`attn.qkv_proj.weight` from `attn.q_proj.weight`, `attn.k_proj.weight`, ..."""
    head = _common_start(names)
    tail = _common_start([name[len(head) :][::-1] for name in names])[::-1]
    return free_name(f"{head}qkv{tail}", module.weights)


def _common_start(names: list[str]) -> str:
    same = takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    return "".join(letters[0] for letters in same)
