"""Wrong variants of modules that still verify: a changed operand, attribute, weight or result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, get_args, get_origin

import numpy as np

from irc import ops
from irc.backends.reference import evaluate
from irc.errors import Error
from irc.ir.core import Module, Op, Value, Weight
from irc.ir.verify import verify
from irc.pipeline.instruments.numerics import compare, random_inputs, small_sizes
from irc.text import parse_module
from irc.text.printer import print_module
from irc.weights import ConcatRef, Ref, Slice, Transpose

Rng = np.random.Generator
Mutation = Callable[[Module, Rng], str]


class NoPlaceError(Exception):
    """A mutation has no place in a module."""


def chosen(rng: Rng, items: Sequence[Any]) -> Any:
    """One of several."""
    if not items:
        raise NoPlaceError
    return items[int(rng.integers(len(items)))]


def ops_of(module: Module) -> list[Op]:
    """All operations but calls and returns."""
    return [op for op in module.ops() if op.opname not in ("return", "call")]


def other_operand(module: Module, rng: Rng) -> str:
    """Another operand of the same type."""
    op = chosen(rng, [op for op in ops_of(module) if op.operands])
    at = int(rng.integers(len(op.operands)))
    old, before = op.operands[at], op.prev
    values: list[Value] = [*op.parent.args, *module.weights.values()]
    while before is not None:
        values += before.results
        before = before.prev
    new = chosen(rng, [v for v in values if v.type is old.type and v is not old])
    op.set_operands((*op.operands[:at], new, *op.operands[at + 1 :]))
    return f"{op.opname} takes {new.name} instead of {old.name}"


def exchanged(module: Module, rng: Rng) -> str:
    """Two operands, or two results, of one type exchanged."""
    users = [module.main.last, *(op for op in ops_of(module) if not op.commutative)]
    user: Op = chosen(rng, [op for op in users if op is not None])
    count = range(len(user.operands))
    types = [v.type for v in user.operands]
    pairs = [(i, j) for i in count for j in range(i) if types[i] is types[j]]
    i, j = chosen(rng, pairs)
    values = [*user.operands]
    values[i], values[j] = values[j], values[i]
    user.set_operands(tuple(values))
    return f"operands {j} and {i} of {user.opname} exchanged"


def changed_value(kind: Any, old: Any, rng: Rng) -> Any:
    """Another value of an attribute."""
    if get_origin(kind) is not None and isinstance(old, str):
        return chosen(rng, [word for word in get_args(kind) if word not in (old, "")])
    if isinstance(old, bool):
        return not old
    if isinstance(old, float):
        return chosen(rng, [old * 2, old / 2, old + 1e-3, -old if old else 1.0])
    if isinstance(old, int):
        return old + chosen(rng, [-1, 1])
    if isinstance(old, tuple) and len(old) > 1:
        return (*old[1:], old[0])
    if isinstance(old, tuple) and len(old) == 1 and isinstance(old[0], (int, float)):
        return (type(old[0])(old[0] + 1),)
    raise NoPlaceError


def changed_attribute(module: Module, rng: Rng) -> str:
    """Another attribute: eps, causal, act, a dimension, a start, the kind of a reduction."""
    sites = [(op, name) for op in ops_of(module) for name in op.attributes if name != "group_size"]
    op, name = chosen(rng, sites)
    old = getattr(op, name)
    new = changed_value(op.attribute_types[name], old, rng)
    put(op, op.rebuilt(op.operands, **{name: new}))
    return f"{op.opname} has {name}={new} instead of {old}"


def put(old: Op, new: Op) -> None:
    """An operation in the place of another; its results keep their types."""
    assert old.parent is not None
    old.parent.insert(new, old)
    for before, after in zip(old.results, new.results, strict=True):
        after.type, after.name = before.type, before.name
        for user in [*before.users]:
            user.set_operands(tuple(after if v is before else v for v in user.operands))
    old.erase()


def scaled(module: Module, rng: Rng) -> str:
    """A value divided, as a mean in the place of a sum; or negated."""
    op: Op = chosen(rng, [op for op in ops_of(module) if op.results[0].type.dtype == "f32"])
    factor = chosen(rng, [0.5, 1 / 3, 2.0, 1.01, -1.0])
    value, users = op.results[0], [*op.results[0].users]
    number = ops.Full(value=factor, dtype=value.type.dtype)
    product = ops.Mul(value, number)
    product.results[0].type = value.type
    assert op.parent is not None
    op.parent.insert(product, op.next)
    op.parent.insert(number, product)
    for user in users:
        user.set_operands(tuple(product.results[0] if v is value else v for v in user.operands))
    return f"{op.opname} times {factor:g}"


def left_out(module: Module, rng: Rng) -> str:
    """An operation left out: a norm, a residual, a mask, a collective, a rotation."""
    pairs = [(op, v) for op in ops_of(module) for v in op.operands if v.type is op.results[0].type]
    op, new = chosen(rng, pairs)
    for user in [*op.results[0].users]:
        user.set_operands(tuple(new if v is op.results[0] else v for v in user.operands))
    return f"{op.opname} left out"


def without_optional(module: Module, rng: Rng) -> str:
    """A bias, a mask or the number of past tokens left out."""
    op: Op = chosen(rng, [op for op in ops_of(module) if op.present])
    count = len(op.operands) - len(op.present)
    rest = dict(zip(op.present, op.operands[count:], strict=True))
    gone = chosen(rng, op.present)
    del rest[gone]
    put(op, type(op)(*op.operands[:count], **rest, **op.attributes, loc=op.loc))
    return f"{op.opname} without {gone}"


def changed_weight(module: Module, rng: Rng) -> str:
    """The weight of another layer, transposed, or with its halves exchanged."""
    weight: Weight = chosen(rng, [w for w in module.weights.values() if w.users])
    kind = chosen(rng, ["other", "transposed", "turned"])
    if kind != "other":
        weight.ref = changed_source(weight.ref, kind)
        return f"@{weight.name} {kind}"
    like = [w for w in module.weights.values() if w.type is weight.type and w is not weight]
    other: Weight = chosen(rng, like)
    weight.ref = other.ref
    return f"@{weight.name} is @{other.name}"


def changed_source(ref: Ref, kind: str) -> Ref:
    """A reference with its first stored tensor transposed, or with its halves exchanged."""
    if ref.inputs:
        return ref.with_inputs((changed_source(ref.inputs[0], kind), *ref.inputs[1:]))
    shape = getattr(ref, "shape", None)
    if not shape or shape[0] < 2:
        raise NoPlaceError
    if kind == "transposed":
        if len(shape) != 2 or shape[0] != shape[1]:
            raise NoPlaceError
        return replace(ref, steps=(Transpose((1, 0)), *ref.steps))
    half, rest, plain = shape[0] // 2, (None,) * (len(shape) - 1), replace(ref, steps=())
    parts = [plain.then(Slice((span, *rest))) for span in ((half, shape[0]), (0, half))]
    return ConcatRef(tuple(parts), 0, steps=ref.steps)


MUTATIONS: tuple[Mutation, ...] = (
    other_operand,
    exchanged,
    changed_attribute,
    scaled,
    left_out,
    without_optional,
    changed_weight,
)


def mutants(text: str, rng: Rng) -> Iterator[tuple[str, Module]]:
    """Variants of a module that verify, each with what was changed; without end."""
    while True:
        module = parse_module(text)
        try:
            what = chosen(rng, MUTATIONS)(module, rng)
            module = parse_module(print_module(module, True))
            verify(module)
        except (NoPlaceError, Error, ValueError, TypeError):
            continue
        yield what, module


def differs(right: Module, wrong: Module, rng: Rng, draws: int = 3) -> bool:
    """Whether two modules of one signature give other results, by evaluation of both."""
    for _ in range(draws):
        inputs = random_inputs(right, small_sizes(right), int(rng.integers(1 << 30)))
        for name in inputs.keys() & {"input_ids", "keys"}:
            inputs[name] = rng.integers(0, 37, inputs[name].shape).astype(inputs[name].dtype)
        wanted = evaluate(right, inputs)
        try:
            got = evaluate(wrong, inputs)
        except (Error, ValueError, IndexError):
            return True
        if any(compare(wanted[name], got[name], 1e-4) is not None for name in wanted):
            return True
    return False
