"""`fuse-linear-epilogue`: a linear and what stands around it become one operation."""

from __future__ import annotations

from dataclasses import replace as with_parts
from typing import Any, TypeAlias

from irc.ir.core import Function, Module, Op, Value
from irc.ops import Add, AddRmsNorm, AllReduce, AllReduceAdd, FusedLinear, GatedMlp, Linear, RmsNorm
from irc.ops.fused_linear import LinearParts
from irc.ops.mlp import act_of
from irc.pipeline import Pass, Stats, register
from irc.rewrite import erase_dead, permit, replace, report_failure

from .shared.edit import insert_before, only_user

_NAME = "fuse-linear-epilogue"
Product: TypeAlias = Linear | GatedMlp | FusedLinear


@register(_NAME)
class FuseLinearEpilogue(Pass):
    """A linear or gated_mlp, and what stands around it, become one fused_linear.

    In front: an rms_norm that only such products read. Behind: an activation, in the local view an
    all_reduce, and the addition of a residual. An all_reduce of another value and the addition
    become one all_reduce_add. Over several ranks it comes behind `localize`. It is for backends
    with kernels of these operations: the others run all as before.
    """

    def run(self, module: Module, stats: Stats) -> None:
        for function in module.functions.values():
            _separate_sums(function, stats)
            for op in reversed(list(function)):
                if isinstance(op, Product) and op.parent is not None:
                    _fuse(op, stats)
            for op in list(function):
                if isinstance(op, AllReduce):
                    _fuse_sum(op, stats)


def _separate_sums(function: Function, stats: Stats) -> None:
    """Expand every add_rms_norm whose sum or norm becomes part of a product or an all_reduce."""
    for op in list(function):
        if not isinstance(op, AddRmsNorm):
            continue
        makers = [v.producer for v in (op.x, op.residual) if only_user(v) is op]
        is_added = any(isinstance(maker, Product | AllReduce) for maker in makers)
        if (is_added or _reader_apart(op.results[0]) is None) and permit(_NAME, op):
            replace(op, op.expand())
            stats.count("add_rms_norm expanded")


def _reader_apart(norm: Value) -> Op | None:
    """A user of a norm that is not a product of it; None where all are."""
    for user, uses in norm.users.items():
        is_product = isinstance(user, Product) and uses == 1 and user.x is norm
        if not is_product or (isinstance(user, FusedLinear) and user.norm is not None):
            return user
    return None


def _fuse(product: Product, stats: Stats) -> None:
    """Replace a product and what stands around it."""
    if any(value.type.sharded for value in (*product.operands, product.result)):
        report_failure(_NAME, product, "its operands are sharded; the pass works behind localize")
        return
    own, last = LinearParts.of(product), product.result
    parts = _with_norm(product, own)
    while (user := only_user(last)) is not None and (more := _behind(user, last, parts)):
        parts, last = more, user.results[0]
    _report(product, last)
    if parts != own:
        _replace(last, parts.simplest(), stats)


def _with_norm(product: Product, parts: LinearParts) -> LinearParts:
    """The parts with the norm in front of the product, if only products read it."""
    norm = product.x.producer
    if not isinstance(norm, RmsNorm) or parts.norm is not None:
        return parts
    other = _reader_apart(norm.result)
    if other is not None:
        report_failure(_NAME, product, f"{other.opname} reads the result of rms_norm, too")
        return parts
    return with_parts(parts, x=norm.x, norm=norm.weight, eps=norm.eps, offset=norm.offset)


def _behind(user: Op, value: Value, parts: LinearParts) -> LinearParts | None:
    """The parts of the product that makes a value, with what its only user adds."""
    if parts.residual is not None:
        return None
    if isinstance(user, Add):
        return _with_addend(user.y if user.x is value else user.x, value, parts)
    if parts.axis:
        return None
    if isinstance(user, AllReduce):
        if user.op != "sum" or user.group_size < 2:
            return None
        return with_parts(parts, axis=user.axis, group_size=user.group_size)
    act = act_of(user)
    return None if act is None or parts.act else with_parts(parts, act=act)


def _with_addend(addend: Value, value: Value, parts: LinearParts) -> LinearParts | None:
    if addend.type.shape == value.type.shape:
        return with_parts(parts, residual=addend)
    is_bias = addend.type.shape == value.type.shape[-1:]
    if is_bias and parts.bias is None and not parts.act and not parts.axis:
        return with_parts(parts, bias=addend)
    return None


def _report(product: Product, last: Value) -> None:
    """Say why an operation behind a product stays apart."""
    users = [user for user in last.users if isinstance(user, Add | AllReduce) or act_of(user)]
    if users and only_user(last) is None:
        report_failure(_NAME, product, f"{users[0].opname} is not the only use of the result")
    elif users and isinstance(users[0], Add):
        types = " and ".join(str(value.type) for value in users[0].operands)
        report_failure(_NAME, product, f"the sum is of {types}, not of two equal types")


def _fuse_sum(reduced: AllReduce, stats: Stats) -> None:
    """Replace an all_reduce of any value and the addition of its result."""
    user = only_user(reduced.result)
    if not isinstance(user, Add) or reduced.op != "sum" or reduced.group_size < 2:
        return
    residual = user.y if user.x is reduced.result else user.x
    if residual.type.shape == reduced.result.type.shape:
        over: Any = {"axis": reduced.axis, "group_size": reduced.group_size}
        _replace(user.result, AllReduceAdd(reduced.x, residual, **over), stats)


def _replace(old: Value, new: Op, stats: Stats) -> None:
    """Use the result of a new operation, if its type is the same and the rewrite is permitted."""
    root = old.producer
    assert root is not None
    if new.result.type is not old.type:
        report_failure(_NAME, root, f"it would become {new.result.type} instead of {old.type}")
    elif permit(_NAME, root):
        insert_before(new, root)
        new.result.name, old.name = old.name, None
        old.replace_by(new.result)
        erase_dead(root)
        stats.count(new.opname)
        return
    new.drop_operands()
