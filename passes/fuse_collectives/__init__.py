"""`fuse-collectives`: fewer and smaller collectives."""

from __future__ import annotations

from irc import ops
from irc.ir.core import Function, Module, Op, Value, Weight
from irc.ir.dims import Dim, bind, product
from irc.ir.dtypes import DTYPES
from irc.ops.collective import Collective
from irc.pipeline import Pass, Stats, register
from irc.rewrite import P, Rule, apply_rules, decline, erase_dead, permit, rule
from irc.weights import Shard

from ..shared.edit import insert_before, known_before, merge_equal, used_once
from .join_sums import join_sums

_NAME = "fuse-collectives"
_CODES = "i8"


@rule(P.shard_slice(P.all_reduce("x").capture("reduced")).capture("part"))
def scatter_for_slice(x: Value, reduced: ops.AllReduce, part: ops.ShardSlice) -> Op | None:
    """A shard of a complete sum is a reduce_scatter."""
    if reduced.axis != part.axis:
        return decline("the rule takes a sum over the axis of the slice")
    return ops.ReduceScatter(x, axis=part.axis, dim=part.dim)


@rule(P.shard_slice(P.all_gather("x", shared=True).capture("gathered")).capture("part"))
def slice_of_gathered(x: Value, gathered: Op, part: ops.ShardSlice) -> Value | Op | None:
    """A shard of a gathered value is the operand, or an all_to_all of it."""
    if gathered.attributes["axis"] != part.axis:
        return decline("the rule takes a gather and a slice over one axis")
    split, joined = part.dim % x.type.ndim, gathered.attributes["dim"] % x.type.ndim
    if split == joined:
        return x
    if len(gathered.result.users) > 1:
        return decline("the gathered value is used elsewhere, so an all_to_all would send more")
    return ops.AllToAll(x, axis=part.axis, split=split, concat=joined)


@rule(P.slice(P.all_reduce("x").capture("reduced")).capture("cut"))
def reduce_what_is_cut(x: Value, reduced: Op, cut: ops.Slice) -> Op:
    """Only the elements of the slice need to be combined."""
    part = ops.Slice(x, dim=cut.dim, start=cut.start, stop=cut.stop, step=cut.step)
    return reduced.rebuilt([part.result])


@rule((P.all_gather(P.cast("x")) | P.all_to_all(P.cast("x"))).capture("moved"))
def send_before_widening(x: Value, moved: Op) -> Op | None:
    """Communicate before a widening cast."""
    dtype = moved.result.type.dtype
    if DTYPES[x.type.dtype].bits >= DTYPES[dtype].bits:
        return decline("the rule takes a cast to a wider dtype")
    return ops.Cast(moved.rebuilt([x]).result, dtype=dtype)


@rule(P.cast(P.all_gather("x").capture("moved") | P.all_to_all("x").capture("moved")).capture("to"))
def send_after_narrowing(x: Value, moved: Op, to: ops.Cast) -> Op | None:
    """Communicate after a narrowing cast."""
    if DTYPES[x.type.dtype].bits <= DTYPES[to.dtype].bits:
        return decline("the rule takes a cast to a narrower dtype")
    return moved.rebuilt([ops.Cast(x, dtype=to.dtype).result])


@rule(
    P.all_gather(
        P.dequantize("codes", "scale", zero=P.maybe("zero"), shared=True).capture("numbers")
    ).capture("gathered")
)
def gather_codes(
    codes: Value, scale: Value, zero: Value | None, numbers: Op, gathered: ops.AllGather
) -> Op | None:
    """Communicate the codes of quantized values, with their scales where these are per index."""
    if codes.type.dtype != _CODES:
        return decline(f"the collectives of all backends take codes of {_CODES} only")
    dim = gathered.dim % codes.type.ndim
    given = [codes, scale, *([zero] if zero is not None else [])]
    sizes = {value.type.shape[dim] for value in given}
    if not sizes <= {1, codes.type.shape[dim]}:
        return decline("the gathered dimension is in blocks")
    alone = [value.type.shape[dim] != codes.type.shape[dim] for value in given]
    if gathered.group_size and any(
        same and not _is_of_all_ranks(v) for v, same in zip(given, alone, strict=True)
    ):
        return decline("the scale may be that of one rank's block")
    moved = [
        v if same else gathered.rebuilt([v]).result for v, same in zip(given, alone, strict=True)
    ]
    return numbers.rebuilt(moved)


def _is_of_all_ranks(value: Value) -> bool:
    """Whether a value of the local view is known to be the same on all ranks."""
    if isinstance(value, Weight):
        return not any(isinstance(step, Shard) for step in value.ref.steps)
    return isinstance(value.producer, (ops.Full, ops.Constant, ops.AllReduce))


@rule(
    P.quantize(
        P.all_gather("x").capture("gathered"), "scale", zero=P.maybe("zero"), dtype=_CODES
    ).capture("codes")
)
def quantize_before_gather(
    x: Value, scale: Value, zero: Value | None, gathered: ops.AllGather, codes: Op
) -> Op | None:
    """Quantize what is gathered by one scale before communicating it."""
    if scale.type.shape[gathered.dim % x.type.ndim] != 1:
        return decline("the gathered dimension has several scales")
    given = [x, scale, *([zero] if zero is not None else [])]
    return gathered.rebuilt([codes.rebuilt(given).result])


def _reduce_what_is_chosen(module: Module) -> Rule:
    """The rule about selections, for the sizes of a module."""

    @rule(P.gather_elements(P.all_reduce("x").capture("reduced"), "indices").capture("choice"))
    def reduce_what_is_chosen(
        x: Value, indices: Value, reduced: ops.AllReduce, choice: ops.GatherElements
    ) -> Op | None:
        """Only the selected elements need to be combined."""
        if set(reduced.axes).intersection(indices.type.global_type.spread):
            return decline("the ranks of the sum select different elements")
        if not _fewer(module, indices, x):
            return decline("the rule takes selections of fewer elements than the operand has")
        return reduced.rebuilt([ops.GatherElements(x, indices, dim=choice.dim).result])

    return reduce_what_is_chosen


def _fewer(module: Module, value: Value, other: Value) -> bool:
    """Whether a value typically has fewer elements than another."""
    sizes = {name: typical for name, (_, typical, _) in module.dims.items()}
    a, b = (bind(product(v.type.shape), sizes) for v in (value, other))
    return not isinstance(a, Dim) and not isinstance(b, Dim) and a < b


@register(_NAME)
class FuseCollectives(Pass):
    """Merges equal collectives, and moves them to where they send less.

    Equal ones are done once; sums that are added become one; a sum or gather of which each rank
    keeps a part becomes a reduce_scatter or all_to_all; a sum moves behind a selection, a gather
    before a cast to more bits and behind one to less, before dequantize and behind quantize. With
    `norm`, an all_reduce with the residual addition and the rms_norm after it becomes one operation
    of both results.
    """

    norm: bool = False

    def run(self, module: Module, stats: Stats) -> None:
        for function in module.functions.values():
            merge_equal(function, _NAME, _key, stats)
            join_sums(function, _NAME, stats)
        rules = [scatter_for_slice, slice_of_gathered, reduce_what_is_cut]
        rules += [send_before_widening, send_after_narrowing]
        rules += [gather_codes, quantize_before_gather]
        stats.update(apply_rules(module, [*rules, _reduce_what_is_chosen(module)]))
        if self.norm:
            for function in module.functions.values():
                _fuse_norms(function, stats)


def _key(op: Op) -> object:
    """The key that equal collectives share; None for other operations."""
    if not isinstance(op, (Collective, ops.ShardSlice)):
        return None
    return op.opname, op.operands, tuple(op.attributes.items())


def _fuse_norms(function: Function, stats: Stats) -> None:
    """Fuse all_reduce, add and rms_norm, where the sum without the residual has no other use."""
    for op in list(function):
        total = op.x.producer if isinstance(op, ops.RmsNorm) else None
        if not isinstance(op, ops.RmsNorm) or op.parent is None or not isinstance(total, ops.Add):
            continue
        parts = _reduced(total)
        if parts is None or not known_before(op.weight, total) or not permit(_NAME, op):
            continue
        reduced, residual, bias = parts
        if bias is not None:
            residual = insert_before(ops.Add(residual, bias), total).result
        new = ops.AllReduceRmsNorm(
            reduced.x,
            residual,
            weight=op.weight,
            axis=reduced.axis,
            eps=op.eps,
            offset=op.offset,
            group_size=reduced.group_size,
        )
        insert_before(new, total).loc = op.loc
        for old, result in zip((op.result, total.result), new.results, strict=True):
            old.replace_by(result)
        op.erase()
        erase_dead(total)
        stats.count("all_reduce_rms_norm")


def _reduced(total: ops.Add) -> tuple[ops.AllReduce, Value, Value | None] | None:
    """(the all_reduce, the residual, a bias that is added to the former) of a sum."""
    for value, other in ((total.x, total.y), (total.y, total.x)):
        if value is other or other.type is not value.type or not used_once(value):
            continue
        op = value.producer
        if isinstance(op, ops.AllReduce) and op.op == "sum":
            return op, other, None
        if not isinstance(op, ops.Add):
            continue
        for inner, bias in ((op.x, op.y), (op.y, op.x)):
            first = inner.producer if used_once(inner) and inner.type is value.type else None
            if isinstance(first, ops.AllReduce) and first.op == "sum" and isinstance(bias, Weight):
                return first, other, bias
    return None
