"""Propagation: axes follow the sharding rules, and collectives are inserted where needed.

Operations are kept and their types inferred again. Where operands do not fit a sharding rule,
replicated ones are sharded (which is free), sharded ones gathered, and partial sums completed.
"""

from __future__ import annotations

from collections.abc import Sequence

from irc.analysis.places import value_name
from irc.errors import Error
from irc.ir.core import Function, Module, Op, Result, Value, Weight
from irc.ir.layouts import uneven
from irc.ir.sharding import Rule, Words, operand_words, parse_rule, passed_sums
from irc.ir.types import Axes
from irc.ops import (
    Add,
    Argmax,
    Attention,
    Dequantize,
    DynamicScale,
    Embedding,
    Linear,
    MoeSlots,
    Topk,
)
from irc.ops.quant import QuantizedOp
from irc.pipeline import Stats

from ..shared.bounds import needs_complete
from ..shared.edit import insert_before, retype, used_once
from ..shared.local_operation import is_local, with_axes
from .place import BATCH, Placement
from .transfers import Transfers, choose_across, look_up_parts, queue_apart, scale_across

Wanted = tuple[tuple[Axes, ...], ...]  # per operand and dimension


class Solver:
    """Shards one function."""

    def __init__(
        self,
        module: Module,
        function: Function,
        placement: Placement,
        stats: Stats,
        sequence: bool = False,
    ) -> None:
        self.module, self.function, self.placement = module, function, placement
        self.stats = stats
        self._seen: set[Op] = set()  # what has its final types
        self._transfers = Transfers(module, function, stats, sequence, self._seen)
        self._fits: dict[object, bool] = {}

    def run(self) -> None:
        """Give every operation operands that fit, and its results their types."""
        for op in list(self.function):
            if op.parent is None:
                continue
            try:
                if op.opname == "return":
                    self._return(op)
                else:
                    self._fit(op)
            except Error as error:
                raise error.at(op) from None
            self._seen.add(op)

    def _fit(self, op: Op) -> None:
        if not any(value.type.sharded for value in op.operands):
            retype(op)
            return
        if self._special(op):
            return
        if op.sharding_rule() is None:
            for at in range(len(op.operands)):
                self._replicate(op, at, f"{op.opname} has no sharding rule")
            retype(op)
            return
        self._complete(op)
        self._use_complete(op)
        wanted, why = self._wanted(op)
        for at, axes in enumerate(wanted):
            self._bring(op, at, axes, why)
        retype(op)

    def _special(self, op: Op) -> bool:
        """Whether an operation has another form where its operands are sharded."""
        match op:
            case MoeSlots():
                queue_apart(op, self.module, self.stats)
                return False
            case Embedding():
                return look_up_parts(self.function, op, self._transfers, self.stats)
            case Argmax() | Topk():
                self._finish(op, 0)
                return choose_across(op, self.stats)
            case DynamicScale():
                self._finish(op, 0)
                return scale_across(op, self.stats)
            case Linear():
                return op.bias is not None and self._bias_after_sum(op, op.bias)
            case _:
                return False

    # partial sums

    def _complete(self, op: Op) -> None:
        """Complete partial sums where the operation does not pass them on.

        One that any operation needs complete is completed for all: the residual of a block is the
        value that its norm sees, not a sum that grows from block to block. So are rows of a table
        with several uses, which rewrite-embeddings can then look up by any scheme.
        """
        split = {a for v in op.operands for group in v.type.axes for a in group}
        for at, value in enumerate(op.operands):
            partial = set(value.type.partial)
            rows = isinstance(value.producer, Embedding) and not used_once(value)
            needed = rows or any(needs_complete(user, value) for user in value.users)
            if partial and (partial & split or needed):
                self._finish(op, at)
        try:
            passed_sums(op, [])
        except Error:
            for at in range(len(op.operands)):
                self._finish(op, at)

    def _use_complete(self, op: Op) -> None:
        """Use complete copies of sharded operands that are there already, if others are complete.

        The result is complete then, too, and nobody has to gather it.
        """
        rule = parse_rule(op.sharding or "! -> !")
        if len(op.operands) < 2 or not rule.is_elementwise:
            return
        others = {v.type.replace(dtype="f32") for v in op.operands if not isinstance(v, Weight)}
        for at, value in enumerate(op.operands):
            for copy in self._transfers.copies_of(value):
                if copy.type.replace(dtype="f32") in others:
                    self._use(op, at, copy)

    def _finish(self, op: Op, at: int) -> None:
        """Use the complete sum in place of a partial one."""
        value = op.operands[at]
        if value.type.partial:
            self._use(op, at, self._transfers.finished(op, value))

    def _bias_after_sum(self, op: Linear, bias: Value) -> bool:
        """A bias is added once, after the sum over the split inputs."""
        self._complete(op)
        words, chosen = self._chosen(op)
        if not chosen.get("k"):
            return False
        for at in (0, 1):
            self._bring(
                op, at, _axes(chosen, words[at], op.operands[at]), "linear needs it complete"
            )
        product = insert_before(Linear(op.x, op.weight), op)
        product.result.name = op.result.name
        self._fit(product)
        total = self._transfers.finished(op, product.result)
        self._finish(op, 2)
        self._bring(op, 2, total.type.axes[-1:], "add needs it complete")
        added = insert_before(Add(total, op.operands[2]), op)
        added.result.name = f"{op.result.name}_biased" if op.result.name else None
        op.result.replace_by(added.result)
        op.erase()
        self.stats.explain(
            f"the bias {value_name(bias)} is added once, after the sum over the ranks: its "
            "linear is row-parallel"
        )
        self._fit(added)
        self._seen |= {product, added}
        return True

    # splits

    def _chosen(self, op: Op) -> tuple[list[Words], dict[str, Axes]]:
        """The names of the dimensions of every operand, and the axes of every name."""
        rule = parse_rule(op.sharding_rule() or "")
        words = [names for _, names in operand_words(op, rule)]
        return words, chosen_axes(op, rule, words, self.placement.fixed)

    def _wanted(self, op: Op) -> tuple[Wanted, str]:
        """The axes of the operands with which a rank can compute its shard alone, and why these.

        Where sizes do not divide that is less than the operands have: the batch, or nothing.
        """
        words, chosen = self._chosen(op)
        if isinstance(op, (QuantizedOp, DynamicScale)):
            op.check_parts(self.module.mesh, _axes(chosen, words[0], op.x))
        batch = {name: axes for name, axes in chosen.items() if axes == (BATCH,)}
        for offer in (chosen, batch):
            pairs = zip(words, op.operands, strict=True)
            wanted = tuple(_axes(offer, names, value) for names, value in pairs)
            if self._works(op, wanted):
                why = "needs it replicated" if offer is chosen else "cannot be done on such shards"
                return wanted, f"{op.opname} {why}"
        replicated = tuple(((),) * value.type.ndim for value in op.operands)
        return replicated, f"{op.opname} cannot be done on such shards"

    def _works(self, op: Op, wanted: Wanted) -> bool:
        """Whether the operation on such shards gives shards of its results."""
        trial = with_axes(op, wanted)
        key = trial.type_key()
        if key not in self._fits:
            self._fits[key] = is_local(trial, self.module.mesh)
        return self._fits[key]

    def _bring(self, op: Op, at: int, wanted: Sequence[Axes], why: str) -> None:
        """Shard every dimension of an operand over exactly the wanted axes."""
        if tuple(wanted) == op.operands[at].type.axes:
            return
        self._exchange(op, at, wanted)
        for dim, over in enumerate(wanted):
            have = op.operands[at].type.axes[dim]
            inside = have == over[: len(have)] and not self._padded(op.operands[at], dim, over)
            if have and have != over and not inside:
                self._gather(op, at, dim, why, over)
        for dim, over in enumerate(wanted):
            have = op.operands[at].type.axes[dim]
            if have != over:
                self._cut(op, at, dim, over[len(have) :])

    def _exchange(self, op: Op, at: int, wanted: Sequence[Axes]) -> None:
        """One all_to_all where axes only move from one dimension to another."""
        value = op.operands[at]
        have = value.type.axes
        moved = [dim for dim, over in enumerate(wanted) if over != have[dim]]
        if len(moved) != 2:
            return
        split, concat = moved if not have[moved[0]] else reversed(moved)
        axes = have[concat]
        if axes and not have[split] and not wanted[concat] and wanted[split] == axes:
            self._use(op, at, self._transfers.exchanged(op, value, split, concat))

    def _padded(self, value: Value, dim: int, axes: Axes) -> bool:
        """Whether a dimension over these axes has padding: its shards cannot be sharded again."""
        return uneven(value.type.shape[dim], self.module.mesh.group_size(axes))

    def _cut(self, op: Op, at: int, dim: int, axes: Axes) -> None:
        """Shard a replicated value: a weight or state at its source, another by a slice."""
        value = op.operands[at]
        scales = value.producer
        if isinstance(scales, Dequantize) and used_once(value) and self._scales_follow(scales, dim):
            self._cut(scales, 0, dim, axes)
            retype(scales)
            return
        if not self._follows(value, dim):
            self._use(op, at, self._transfers.part(op, value, dim, axes))
            return
        groups = list(value.type.axes)
        groups[dim] = (*groups[dim], *axes)
        value.type = value.type.replace(axes=tuple(groups))
        self.stats.explain(f"{value_name(value)} is {value.type}: it follows {op.opname}")

    def _scales_follow(self, op: Dequantize, dim: int) -> bool:
        """Whether a weight that is dequantized by one scale may be sharded at its source."""
        one = all(value.type.shape[dim] == 1 for value in op.operands[1:])
        return one and isinstance(op.x, Weight) and self._follows(op.x, dim)

    def _follows(self, value: Value, dim: int) -> bool:
        """Whether a value may be sharded at its source: nothing has used it replicated."""
        if not self.placement.free(value, dim):
            return False
        if isinstance(value, Weight):
            return len(value.users) == 1
        if value.owner is not self.function or any(user in self._seen for user in value.users):
            return False
        return value.index in self.function.aliases().values() or _are_keys(value)

    def _gather(self, op: Op, at: int, dim: int, why: str, keep: Axes = ()) -> None:
        """Gather a sharded dimension; axes to keep stay if shards are even."""
        value = op.operands[at]
        have = value.type.axes[dim]
        outer = have[: len(keep)] == keep and not self._padded(value, dim, have)
        inner = have[len(keep) :] if outer else have
        self._use(op, at, self._transfers.gathered(op, value, dim, inner, why))

    def _replicate(self, op: Op, at: int, why: str, keep: Axes = ()) -> None:
        self._finish(op, at)
        for dim in range(op.operands[at].type.ndim):
            axes = op.operands[at].type.axes[dim]
            if axes and not set(axes) <= set(keep):
                self._gather(op, at, dim, why)

    def _return(self, op: Op) -> None:
        """Results are replicated, or sharded over the batch; a state is as its argument."""
        aliases = self.function.aliases()
        for at, result in enumerate(self.function.results or [Result()] * len(op.operands)):
            value = op.operands[at]
            value.name = value.name or result.name
            if at not in aliases:
                self._replicate(op, at, "a result is replicated", keep=(BATCH,))
                continue
            self._finish(op, at)
            wanted = self.function.args[aliases[at]].type.axes
            self._bring(op, at, wanted, "the state is kept so")

    def _use(self, op: Op, at: int, value: Value) -> None:
        op.set_operands((*op.operands[:at], value, *op.operands[at + 1 :]))


def _are_keys(value: Value) -> bool:
    """Whether a value is only the cached keys or values of attentions."""
    return all(
        isinstance(user, Attention) and user.cached and value in (user.k, user.v)
        for user in value.users
    )


def _axes(chosen: dict[str, Axes], names: Words, value: Value) -> tuple[Axes, ...]:
    """The axes of every dimension; one of size 1 that is repeated has none."""
    sizes = zip(names, value.type.shape, strict=True)
    repeated = [name == "1" or (size == 1 and name.startswith(".")) for name, size in sizes]
    pairs = zip(names, repeated, strict=True)
    return tuple(() if alone else chosen.get(name, ()) for name, alone in pairs)


def chosen_axes(op: Op, rule: Rule, words: list[Words], placed: set[Value]) -> dict[str, Axes]:
    """The axes of every name; replicated names, and those that lose a conflict, have none.

    Of different axes of one name those of the first operand count. One axis cannot shard two names:
    a name that the plan shards keeps it, else the first name; positions come last.
    """
    offers: dict[str, Axes] = {}
    planned: set[str] = set()
    for value, names in zip(op.operands, words, strict=True):
        for axes, name in zip(value.type.axes, names, strict=True):
            if not axes or name == "1" or name in rule.replicated:
                continue
            offers.setdefault(name, axes)
            if _is_planned(value, placed):
                planned.add(name)
    partial = {a for value in op.operands for a in value.type.partial}
    chosen: dict[str, Axes] = {}
    taken: set[str] = set(partial)
    for name in sorted(offers, key=lambda n: (n not in planned, n in rule.positions)):
        axes = offers[name]
        if taken & set(axes):
            continue
        chosen[name] = axes
        taken |= set(axes)
    return chosen


def _is_planned(value: Value, placed: set[Value]) -> bool:
    """Whether a value is a weight that the plan shards, as it is, moved or dequantized."""
    while not isinstance(value, Weight):
        op = value.producer
        moved = op is not None and op.moves_data and len(op.operands) == 1
        if op is None or not (moved or isinstance(op, Dequantize)):
            return False
        value = op.operands[0]
    return value in placed
