"""`put_pattern`: operations that a pattern matches, in a random module."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from .. import ops
from ..errors import Error
from ..ir.attributes import split_optional
from ..ir.core import Op, Value, Weight
from ..ir.types import TensorType
from ..ops.collective import OverAxes
from ..rewrite.patterns import ConstantPattern, Maybe, OpPattern, Pattern, Rest, WeightPattern
from .draw import Arg, B, Draw

TRIES, OPERATIONS = 8, 200  # of one operation, and in all
# Those that activations are written with, too.
NUMBERS = (
    0.0, 1.0, -1.0, 2.0, 0.5, 3.0, 1e-5, 0.5**0.5, 2**0.5, 0.044715, (2 / np.pi) ** 0.5, 1.702,
)  # fmt: skip


def put_pattern(draw: Draw, pattern: OpPattern) -> Value:
    """Add operations that the pattern (without alternatives) matches; the result of the root.

    Operands and attributes that it leaves open are drawn until the operations accept them. An Error
    where none of these fit.
    """
    instance = _Instance(draw)
    value = instance.operation(pattern)
    for i, op in enumerate(instance.made):
        try:
            draw.put(op)
        except Error:
            instance.undo(i)
            raise
    return value


class _Instance:
    """The operations that are made, in no function yet, and what is captured."""

    def __init__(self, draw: Draw) -> None:
        self.draw, self.rng = draw, draw.rng
        self.made: list[Op] = []
        self.captured: dict[str, Value] = {}
        self.left = OPERATIONS

    def undo(self, kept: int) -> None:
        """Unlink the operations but the first ones."""
        while len(self.made) > kept:
            self.made.pop().drop_operands()

    def operation(self, pattern: OpPattern) -> Value:
        """The result of an operation, with those of the patterns below it."""
        kept, captured = len(self.made), dict(self.captured)
        with_optional = self.rng.choice((0, TRIES - 2))  # of the tries
        for tried in range(TRIES):
            self.left -= 1
            if self.left < 0:
                break
            try:
                return self.attempt(pattern, tried < with_optional)
            except (Error, TypeError, ValueError, IndexError):  # of numbers that an inference meets
                self.undo(kept)
                self.captured = dict(captured)
        raise Error(f"no operands of {pattern.opname} fit its pattern")

    def attempt(self, pattern: OpPattern, with_optional: bool) -> Value:
        values: dict[int, list[Value]] = {}
        inner = [*pattern.args, *pattern.named.values()]
        for i in sorted(range(len(inner)), key=lambda i: not isinstance(inner[i], OpPattern)):
            near = [value for found in values.values() for value in found]
            count = self.rng.choice((1, 2)) if isinstance(inner[i], Rest) else 1
            values[i] = [self.value(inner[i], near) for _ in range(count)]
        plain = [value for i in range(len(pattern.args)) for value in values[i]]
        named = {name: values[len(pattern.args) + i][0] for i, name in enumerate(pattern.named)}
        for name, below in pattern.named.items():
            if isinstance(below, Maybe) and not with_optional:
                del named[name]
        cls: Any = pattern.cls
        if issubclass(cls, OverAxes):
            raise Error("a module without a mesh has no collectives")
        chosen = self.attributes(pattern, plain)
        if cls.variadic:
            fixed = len(cls.operand_names) - 1
            plain = [*plain[:fixed], plain[fixed:]]
        self.made.append(op := cls(*plain, **named, **chosen))
        return op.results[pattern.index]

    def value(self, pattern: Pattern, near: Sequence[Value]) -> Value:
        """A value that a pattern below an operation matches; `near` are its other operands."""
        if isinstance(pattern, OpPattern):
            return self.operation(pattern)
        if isinstance(pattern, ConstantPattern):
            numbers, wanted = NUMBERS, pattern.value
            if wanted is not None:
                numbers = [n for n in NUMBERS if wanted(n)] if callable(wanted) else [wanted]
            self.made.append(
                full := ops.Full(value=self.rng.choice(numbers), dtype=self.draw.dtype)
            )
            return full.result
        name: str = getattr(pattern, "name", "") or ""
        if name not in self.captured or isinstance(pattern, Rest):
            self.captured[name] = self.leaf(near, isinstance(pattern, WeightPattern))
        return self.captured.pop(name) if not name else self.captured[name]

    def leaf(self, near: Sequence[Value], is_weight: bool) -> Value:
        """A value, an argument or a weight, of a type that suits the values near it."""
        draw, rng = self.draw, self.rng
        if not near and not is_weight:
            ids = Arg((B, draw.tokens), "i32", 0, 2)
            return draw.argument(ids) if rng.random() < 0.1 else draw.pick(rng.randint(0, 2))
        known = [value for value in self.captured.values() if isinstance(value, Weight)]
        shape = rng.choice(near or known or [draw.pick(1)]).type.shape
        size, last = draw.size(), shape[-1] if shape else 1
        shapes = [shape, (last,), shape[:1], (size, last), (last, size), (size,)]
        shapes += [value.type.shape for value in known] * 2
        type = TensorType(draw.dtype, rng.choice(shapes))
        if all(isinstance(dim, int) for dim in type.shape) and (is_weight or rng.random() < 0.8):
            return draw.weight(*type.shape)
        fitting = [value for value in draw.values if value.type is type]
        return rng.choice(fitting) if fitting else draw.argument(Arg(type.shape))

    def attributes(self, pattern: OpPattern, operands: Sequence[Value]) -> dict[str, Any]:
        """Those that the pattern asks for, those without a default, and at times others."""
        chosen: dict[str, Any] = {}
        for name, kind in pattern.cls.attribute_types.items():
            wanted, has_default = pattern.where.get(name), name in pattern.cls.attribute_defaults
            if wanted is not None and not callable(wanted):
                chosen[name] = wanted
            elif wanted is not None or not has_default or self.rng.random() < 0.2:
                found = self.candidates(kind, operands)
                chosen[name] = self.rng.choice([v for v in found if wanted is None or wanted(v)])
        return chosen

    def candidates(self, kind: Any, operands: Sequence[Value]) -> Sequence[Any]:
        """Values of an attribute of a kind."""
        kind, _ = split_optional(kind)
        shape = operands[0].type.shape if operands else ()
        if typing.get_origin(kind) is Literal:
            return typing.get_args(kind)
        if typing.get_origin(kind) is tuple:
            dims = list(range(len(shape)))
            self.rng.shuffle(dims)
            merged = (*shape[:-2], shape[-2] * shape[-1]) if len(shape) > 1 else (1, *shape)
            return [tuple(dims), tuple(dims[:1]), shape, merged, (2, *shape)]
        by_kind = {bool: (True, False), int: (0, 1, -1, 2), str: ("f32", "f64", "f16")}
        return by_kind.get(kind, NUMBERS)
