"""Identities that simplify tensors written as operations on others, checked on random instances."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeAlias

import numpy as np

from ..errors import Error
from ..ir.core import Function, Module, Value
from ..ir.declare import REGISTRY
from ..ir.dims import DimLike, Shape
from ..ir.dtypes import numpy_dtype
from ..ir.expansion import in_order
from ..ir.types import TensorType


@dataclass(frozen=True)
class Term:
    """A tensor as one result of an operation on tensors, which are given by their numbers."""

    name: str
    operands: tuple[int, ...]
    shape: Shape
    dtype: str
    attributes: Mapping[str, Any]
    index: int = 0

    @property
    def key(self) -> tuple[object, ...]:
        """What equal terms have in common."""
        own = (self.name, self.operands, self.index, self.dtype, self.shape)
        return ("term", *own, repr(self.attributes))


Terms: TypeAlias = Mapping[int, Term]
Simplify: TypeAlias = Callable[[Term, Terms], "Term | int | None"]


@dataclass(frozen=True)
class Identity:
    """`simplify` gives a simpler term, the number of an equal tensor, or None.

    `sides` builds both sides of an instance from the sizes m, n, k and the values whose shapes
    `shapes` has, by letters.
    """

    name: str
    simplify: Simplify
    shapes: tuple[str, ...]
    sides: Callable[..., tuple[Value, Value]]


def simplified(term: Term, terms: Terms, used: dict[str, int]) -> Term | int:
    """A term by all identities; those that apply are checked once, and counted in `used`."""
    for identity in IDENTITIES:
        new = identity.simplify(term, terms)
        if new is None:
            continue
        check_identity(identity)
        used[identity.name] = used.get(identity.name, 0) + 1
        return new if isinstance(new, int) else simplified(new, terms, used)
    return term


@cache
def check_identity(identity: Identity, instances: int = 3) -> None:
    """Evaluate both sides on random arrays in every dtype; an Error where they differ."""
    from ..backends.reference import evaluate
    from ..ops import Return
    from ..pipeline.instruments.numerics import compare

    for dtype, tolerance in (("f64", 1e-12), ("f32", 1e-5), ("bf16", 5e-2), ("i32", 0.0)):
        for seed in range(instances):
            rng = np.random.default_rng(seed)
            sizes = {letter: int(rng.integers(2, 6)) for letter in "mnk"}
            module = Module("identity")
            function = module.add_function(Function("forward"))
            for i, shape in enumerate(identity.shapes):
                function.add_argument(f"x{i}", TensorType(dtype, tuple(sizes[c] for c in shape)))
            try:
                sides = identity.sides(*function.args, **sizes)
            except Error:
                continue  # the operations do not take this dtype
            for op in (*in_order(sides), Return(sides)):
                function.append(op)
            arrays = {str(a.name): rng.normal(0, 3, a.type.shape) for a in function.args}
            inputs = {name: array.astype(numpy_dtype(dtype)) for name, array in arrays.items()}
            left, right = evaluate(module, inputs).values()
            difference = compare(left, right, tolerance)
            if difference is not None:
                raise Error(f"the identity {identity.name} fails in {dtype}: {difference}")


def _views(term: Term, terms: Terms) -> Term | int | None:
    """A view has the elements of its operand in order, whatever their views before it."""
    if term.name != "view" and not (term.name in REGISTRY and REGISTRY[term.name].is_view):
        return None
    base = terms[term.operands[0]]
    if base.shape == term.shape:
        return term.operands[0]
    if base.name == "view":
        return replace(term, name="view", operands=base.operands, attributes={})
    return None if term.name == "view" else replace(term, name="view", attributes={})


def _two_views(x: Value, m: int, n: int, k: int) -> tuple[Value, Value]:
    from .. import ops

    inner = ops.Unsqueeze(ops.Reshape(x, shape=(n, m * k)), dims=(0,))
    return ops.Reshape(inner, shape=(m * n, k)).result, ops.Reshape(x, shape=(m * n, k)).result


def _notes(term: Term, terms: Terms) -> Term | None:
    """`sentinel` tells localize how to look up; it changes no row."""
    if term.name != "embedding" or not term.attributes.get("sentinel"):
        return None
    return replace(term, attributes={**term.attributes, "sentinel": False})


def _looked_up(x: Value, table: Value, **_: int) -> tuple[Value, Value]:
    from .. import ops

    ids = ops.Cast(x, dtype="i32")
    return ops.Embedding(ids, table, sentinel=True).result, ops.Embedding(ids, table).result


def _parts(term: Term, terms: Terms) -> Term | int | None:
    """A part of joined tensors is one of them."""
    whole = terms[term.operands[0]] if term.operands else term
    part = _part(term, whole, terms) if whole.name == "concat" else None
    return None if part is None else whole.operands[part]


def _linear_parts(term: Term, terms: Terms) -> Term | None:
    """A part of the product with joined weights, and biases, is the product with one of them."""
    whole = terms[term.operands[0]] if term.operands else term
    if whole.name != "linear":
        return None
    joined = [terms[operand] for operand in whole.operands[1:]]
    if any(one.name != "concat" or one.attributes["dim"] != 0 for one in joined):
        return None
    last = len(term.shape) - 1
    parts = [_part(term, replace(one, attributes={"dim": last}), terms, 0) for one in joined]
    chosen = [one.operands[i] for one, i in zip(joined, parts, strict=True) if i is not None]
    if len(chosen) < len(joined):
        return None
    operands = (whole.operands[0], *chosen)
    return replace(term, name="linear", operands=operands, attributes=whole.attributes, index=0)


def _part(term: Term, joined: Term, terms: Terms, along: int | None = None) -> int | None:
    """Which operand of a concat a split or a slice takes; its sizes are those of `along`."""
    dim, attributes = joined.attributes["dim"], term.attributes
    if term.name not in ("split", "slice") or attributes.get("step", 1) != 1:
        return None
    if attributes["dim"] % len(term.shape) != dim:
        return None
    sizes = attributes["sizes"][: term.index] if term.name == "split" else [attributes["start"]]
    at: DimLike = 0
    for i, operand in enumerate(joined.operands):
        size = terms[operand].shape[dim if along is None else along]
        if at == sum(sizes):
            return i if size == term.shape[dim] else None
        at = at + size
    return None


def _join(x: Value, y: Value, m: int, n: int, k: int) -> tuple[Value, Value]:
    from .. import ops

    return ops.Split(ops.Concat([x, y], dim=0), dim=0, sizes=(m, n)).results[1], y


def _joined_weights(x: Value, v: Value, w: Value, m: int, n: int, k: int) -> tuple[Value, Value]:
    from .. import ops

    whole = ops.Linear(x, ops.Concat([v, w], dim=0))
    return ops.Split(whole, dim=-1, sizes=(m, n)).results[1], ops.Linear(x, w).result


IDENTITIES = (
    Identity("a view of a view is a view", _views, ("mnk",), _two_views),
    Identity("a sentinel changes no row", _notes, ("m", "nk"), _looked_up),
    Identity("a part of joined tensors is one of them", _parts, ("mk", "nk"), _join),
    Identity(
        "a part of a linear with joined weights is a linear with one of them",
        _linear_parts,
        ("nk", "mk", "nk"),
        _joined_weights,
    ),
)
