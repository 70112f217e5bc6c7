"""Joins linears of one input, and their parameters by rows, each scale with its rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from irc.ir.core import Module, Op, Value, Weight
from irc.ir.dims import DimLike
from irc.ir.types import TensorType
from irc.ops import Linear, Split
from irc.rewrite import erase_dead
from irc.weights import ConcatRef, pinned

from .edit import free_name, insert_before
from .parameters import in_use, is_shared, per_index, weights_of


def parameters_of(linears: Sequence[Op]) -> list[list[Value]]:
    """The weights of linears that all have a bias or none, then their biases, if any."""
    return [list(each) for each in zip(*(op.operands[1:] for op in linears), strict=True)]


def fuse_linears(module: Module, linears: Sequence[Op], word: str, first: Op) -> None:
    """One linear and a split in place of several of one input, of which `first` comes first.

    `join_refusal` allows all parameters. The new weights have `word` where the names differ.
    """
    weight, *bias = [joined(module, group, word, first) for group in parameters_of(linears)]
    linear = insert_before(Linear(first.operands[0], weight, bias=bias[0] if bias else None), first)
    linear.result.name = word if word.isidentifier() else None
    sizes = tuple(op.operands[1].type.shape[0] for op in linears)
    split = insert_before(Split(linear, dim=linear.result.type.ndim - 1, sizes=sizes), first)
    for old, new in zip(linears, split.results, strict=True):
        old.result.replace_by(new)
        erase_dead(old)


def join_refusal(parts: list[Value]) -> str | None:
    """Why parameters cannot be joined along their first dimension; None if they can."""
    forms = {form_of(part) for part in parts}
    if len(forms) > 1:
        return f"the weights have different formats: {' and '.join(sorted(forms))}"
    rows = [part.type.shape[0] for part in parts]
    for group in zip(*(weights_of(part) or () for part in parts), strict=True):
        refusal = _refusal(list(group), rows)
        if refusal is not None:
            return refusal
    return None


def form_of(part: Value) -> str:
    """The operations and the types, but for rows, of a parameter."""
    if isinstance(part, Weight):
        type = part.type
        return f"{type.dtype}[{', '.join(map(str, ('N', *type.shape[1:])))}]"
    op = part.producer
    assert op is not None
    inner = (f"{name}={form_of(value)}" for name, value in op.named_operands())
    attributes = (f"{name}={value}" for name, value in op.attributes.items())
    return f"{op.opname}({', '.join((*inner, *attributes))})"


def _refusal(group: list[Weight], rows: list[DimLike]) -> str | None:
    """Why the weights at one place of several parameters cannot be joined."""
    if all(weight is group[0] and is_shared(weight, rows[0]) for weight in group):
        return None
    for weight, size in zip(group, rows, strict=True):
        if is_shared(weight, size):
            return f"@{weight.name} scales all {size} rows; scales per row can be joined"
        refusal = in_use(weight)
        if refusal is not None:
            return refusal
    blocks = {per_index(weight, size) for weight, size in zip(group, rows, strict=True)}
    if len(blocks) > 1 or len(set(group)) < len(group):
        names = ", ".join(f"@{weight.name}" for weight in group)
        return f"{names} hold for different numbers of rows"
    return None


def joined(module: Module, parts: list[Value], name: str, before: Op) -> Value:
    """The parameter of the rows of several, whose weights leave the module."""
    first = parts[0]
    if not isinstance(first, Weight):
        op = first.producer
        assert op is not None
        groups = zip(*(part.producer.operands for part in parts if part.producer), strict=True)
        inner = [joined(module, list(group), name, before) for group in groups]
        return insert_before(op.rebuilt(inner), before).result
    weights = [part for part in parts if isinstance(part, Weight)]
    if all(weight is first for weight in weights):
        return first
    rows: DimLike = 0
    for weight in weights:
        rows = rows + weight.type.shape[0]
    type = TensorType(first.type.dtype, (rows, *first.type.shape[1:]))
    refs = tuple(pinned(each.ref, each.type.shape, each.type.dtype) for each in weights)
    new = Weight(type, _name([each.name for each in weights], name, module), ConcatRef(refs, 0))
    for each in weights:
        del module.weights[each.name]
    return module.add_weight(new)


def _name(names: list[str], word: str, module: Module) -> str:
    """`attn.qkv_proj.weight` from `attn.q_proj.weight`, `attn.k_proj.weight`, ... and qkv."""
    head, _, tail = _divided(names)
    return free_name(f"{head}{word}{tail}", module.weights)


def differing(parts: list[Value]) -> str:
    """`qkv` from `q_proj.weight`, `k_proj.weight`, `v_proj.weight`; `gate_up` from longer words."""
    names = [weights[0].name for weights in map(weights_of, parts) if weights]
    words = _divided(names)[1]
    return ("_" if any(len(word) > 1 for word in words) else "").join(words)


def _divided(names: list[str]) -> tuple[str, list[str], str]:
    """What all names begin with, what differs, and what all of them end in."""
    head = _common_start(names)
    tail = _common_start([name[len(head) :][::-1] for name in names])[::-1]
    return head, [name[len(head) : len(name) - len(tail)] for name in names], tail


def _common_start(names: list[str]) -> str:
    same = takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    return "".join(letters[0] for letters in same)
