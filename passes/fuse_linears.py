"""`fuse-linears` and `fuse-qkv`: linears of one input become one linear and a split."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import ClassVar, TypeAlias

from irc.ir.core import Function, Module, Op, Value, Weight
from irc.ir.dims import DimLike
from irc.ir.types import TensorType
from irc.ir.weight_parts import weight_part
from irc.ops import Attention, Dequantize, LayerNorm, Linear, RmsNorm, Rope, Split
from irc.pipeline import Pass, Stats, register
from irc.rewrite import erase_dead, permit, report_failure
from irc.weights import ConcatRef, is_computed, with_shape

from .shared.edit import free_name, insert_before
from .shared.parameters import in_use, is_shared, per_index, same, weights_of

# The operation that a fusion is about, the linears, and why they cannot be fused.
Group: TypeAlias = tuple[Op, Sequence[Op], str | None]


class _FuseGroups(Pass):
    """Fuses the groups of linears that a subclass finds; all of one have a bias, or none has."""

    word: ClassVar[str] = ""  # in the names of new weights; by default what differs in the old ones

    @abstractmethod
    def groups(self, function: Function) -> Iterator[Group]:
        """The groups of a function."""

    def run(self, module: Module, stats: Stats) -> None:
        for function in module.functions.values():
            for root, linears, refusal in self.groups(function):
                refusal = refusal or next(
                    filter(None, map(_refusal, _parameters_of(linears))), None
                )
                if refusal is not None:
                    report_failure(self.name, root, refusal)
                elif permit(self.name, root):
                    _fuse(module, linears, self.word)
                    stats.count("fused")


@register("fuse-linears")
class FuseLinears(_FuseGroups):
    """Linears of one input, whose weights have one format, become one linear and a split.

    Such as q, k and v, or gate and up. With `blocks`, only those whose weights are quantized in
    blocks of their inputs: the builder of TensorRT joins other products itself where that helps.
    With `computed`, only those whose codes are computed, and so are written to a file anyway.
    """

    blocks: bool = False
    computed: bool = False

    def groups(self, function: Function) -> Iterator[Group]:
        """The linears that have an input and the formats of parameters in common."""
        alike: dict[object, list[Linear]] = {}
        for op in function:
            if not isinstance(op, Linear) or (self.blocks and not _in_blocks(op.weight)):
                continue
            weights = weights_of(op.weight)
            if self.computed and weights and not is_computed(weights[0].ref):
                continue
            if all(weights_of(value) for value in op.operands[1:]):
                forms = tuple(_form_of(value) for value in op.operands[1:])
                alike.setdefault((op.x, forms), []).append(op)
        return ((group[0], group, None) for group in alike.values() if len(group) > 1)


@register("fuse-qkv")
class FuseQkv(_FuseGroups):
    """Linears of one input that feed one attention become one linear and a split.

    Three linears, or two where a checkpoint merges k and v. The weights, and the biases if all
    have one, become concatenated references; so do the codes, scales and zeros of quantized
    weights. They must be weights of the module, not sharded over the mesh, and have no other use.
    Norms of the heads, rope and cache updates may lie between the linears and the attention.
    """

    word = "qkv"

    def groups(self, function: Function) -> Iterator[Group]:
        """The linears before every attention."""
        for op in function:
            if isinstance(op, Attention):
                linears = _projections(op)
                reason = linears if isinstance(linears, str) else None
                yield op, () if isinstance(linears, str) else linears, reason


def _in_blocks(weight: Value) -> bool:
    """Whether the inputs of a row have several scales."""
    op = weight.producer
    return isinstance(op, Dequantize) and op.scale.type.shape[-1] != 1


def _projections(attention: Op) -> list[Op] | str:
    """The linears, or why they cannot be fused."""
    linears: list[Op] = []
    for letter, value in zip("qkv", attention.operands[:3], strict=True):
        op = _source(value)
        if op is None or op.opname != "linear":
            source = "no operation" if op is None else op.opname
            return f"{letter} of attention comes from {source}, not from a linear"
        linears += [] if op in linears else [op]
    if len(linears) == 1:
        return "q, k and v of attention come from one linear already"
    if not all(same(op.operands[0], linears[0].operands[0]) for op in linears):
        return "the linears of q, k and v have different inputs"
    if len({op.present for op in linears}) > 1:
        return "some of the linears of q, k and v have a bias and some have none"
    if any(weights_of(value) is None for op in linears for value in op.operands[1:]):
        return "a linear of q, k or v takes a computed or shared value for a weight"
    return linears


def _source(value: Value) -> Op | None:
    """The operation that makes a value, seen through moves, rope, norms and cache updates."""
    op = value.producer
    while op is not None and (op.moves_data or isinstance(op, (Rope, RmsNorm, LayerNorm))):
        op = op.operands[1 if op.in_place else 0].producer
    return op


def _parameters_of(linears: Sequence[Op]) -> list[list[Value]]:
    """The weights of linears that all have a bias or none, then their biases, if any."""
    parameters = [op.operands[1:] for op in linears]
    return [list(in_place) for in_place in zip(*parameters, strict=True)]


def _fuse(module: Module, linears: Sequence[Op], word: str) -> None:
    """One linear and a split in place of several of one input, whose parameters can be joined."""
    groups = _parameters_of(linears)
    word = word or _differing(groups[0])
    assert linears[0].parent is not None
    first = next(op for op in linears[0].parent if op in linears)
    weight, *bias = [_joined(module, group, word, first) for group in groups]
    linear = insert_before(Linear(first.operands[0], weight, bias=bias[0] if bias else None), first)
    linear.result.name = word if word.isidentifier() else None
    sizes = tuple(op.operands[1].type.shape[0] for op in linears)
    split = insert_before(Split(linear, dim=linear.result.type.ndim - 1, sizes=sizes), first)
    for old, new in zip(linears, split.results, strict=True):
        old.result.replace_by(new)
        erase_dead(old)


def _refusal(parts: list[Value]) -> str | None:
    """Why parameters cannot be joined along their first dimension; None if they can."""
    forms = {_form_of(part) for part in parts}
    if len(forms) > 1:
        return f"the weights have different formats: {' and '.join(sorted(forms))}"
    rows = [part.type.shape[0] for part in parts]
    for group in zip(*(weights_of(part) or () for part in parts), strict=True):
        refusal = _weights_refusal(list(group), rows)
        if refusal is not None:
            return refusal
    return None


def _form_of(part: Value) -> str:
    """The operations and the types, but for rows, of a parameter."""
    if isinstance(part, Weight):
        type = part.type
        over = "@" + ".".join(type.of.axes[0]) if type.of is not None else ""
        return f"{type.dtype}[{', '.join(map(str, (f'N{over}', *type.shape[1:])))}]"
    op = part.producer
    assert op is not None
    inner = (f"{name}={_form_of(value)}" for name, value in op.named_operands())
    attributes = (f"{name}={value}" for name, value in op.attributes.items())
    return f"{op.opname}({', '.join((*inner, *attributes))})"


def _weights_refusal(group: list[Weight], rows: list[DimLike]) -> str | None:
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


def _joined(module: Module, parts: list[Value], name: str, before: Op) -> Value:
    """The parameter of the rows of several, whose weights leave the module."""
    first = parts[0]
    if not isinstance(first, Weight):
        op = first.producer
        assert op is not None
        groups = zip(*(part.producer.operands for part in parts if part.producer), strict=True)
        inner = [_joined(module, list(group), name, before) for group in groups]
        return insert_before(op.rebuilt(inner), before).result
    weights = [part for part in parts if isinstance(part, Weight)]
    if all(weight is first for weight in weights):
        return first
    rows: DimLike = 0
    for weight in weights:
        rows = rows + weight.type.shape[0]
    type = TensorType(first.type.dtype, (rows, *first.type.shape[1:]))
    refs = tuple(with_shape(weight.ref, weight.type.shape, weight.type.dtype) for weight in weights)
    ref = ConcatRef(refs, 0)
    if module.local:
        type = weight_part(ref, type, module.mesh)
    new = Weight(type, _name([weight.name for weight in weights], name, module), ref)
    for weight in weights:
        del module.weights[weight.name]
    return module.add_weight(new)


def _name(names: list[str], word: str, module: Module) -> str:
    """`attn.qkv_proj.weight` from `attn.q_proj.weight`, `attn.k_proj.weight`, ... and qkv."""
    head, _, tail = _divided(names)
    return free_name(f"{head}{word}{tail}", module.weights)


def _differing(parts: list[Value]) -> str:
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
