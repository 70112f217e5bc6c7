"""`convert-floats`: what a module computes in floats, computed in another dtype."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any, cast

from irc import ops
from irc.errors import Error
from irc.ir.core import Function, Module, Op, Value, Weight
from irc.ir.dtypes import is_float, largest
from irc.pipeline import Pass, Stats, register
from irc.weights import Cast

_LARGE = 1 << 16  # elements of a weight; the tables of frequencies are smaller
_AFTER_SQUARES = (ops.Add, ops.Sqrt, ops.Rsqrt, ops.Reciprocal, ops.Maximum, ops.Clip)


@register("convert-floats")
class ConvertFloats(Pass):
    """Computes in `dtype` what a module computes in the float dtype of most of its weights.

    Arguments and results keep their dtypes, but for states. Angles of sines and cosines, and means
    of squares with what norms make of them, stay as they are: f16 has neither the digits of
    positions nor the range of squares.
    """

    changes_numbers = True

    dtype: str

    def run(self, module: Module, stats: Stats) -> None:
        if not is_float(self.dtype):
            raise Error(f"convert-floats takes the name of a float dtype, found {self.dtype!r}")
        if len(module.functions) != 1:
            raise Error("convert-floats takes a module of one function; run inline before it")
        old = _main_dtype(module)
        if old is not None and old != self.dtype:
            _Conversion(module, old, self.dtype).run()
            stats.count("modules")


def _main_dtype(module: Module) -> str | None:
    counts = Counter(weight.type.dtype for weight in module.weights.values())
    counts.update({arg.type.dtype: 0 for arg in module.main.args})
    return next((name for name, _ in counts.most_common() if is_float(name)), None)


class _Conversion:
    """A function whose values of one float dtype become another."""

    def __init__(self, module: Module, old: str, dtype: str) -> None:
        self.module, self.function, self.old, self.dtype = module, module.main, old, dtype
        self.kept = _kept(module.main, old)
        self.new: dict[Value, Value] = {arg: arg for arg in module.main.args}
        self.casts: dict[tuple[Value, str], Value] = {}

    def run(self) -> None:
        """Rebuild the operations in their order, over weights that are cast as they are read."""
        function, aliases = self.function, self.function.aliases()
        for i in aliases.values():
            arg = function.args[i]
            arg.type = arg.type.replace(dtype=self._dtype(arg, self.dtype))
        for op in list(function):
            function.unlink(op)
            if isinstance(op, ops.Return):
                kinds = [self.dtype if i in aliases else self.old for i in range(len(op.operands))]
                function.append(op.rebuilt(list(map(self._as, op.operands, kinds))))
            else:
                self._rebuild(op)
            op.drop_operands()
        weights = list(self.module.weights.values())
        self.module.weights.clear()
        for weight in weights:
            for value in (weight, self.casts.get((weight, self.dtype))):
                if isinstance(value, Weight) and value.users:
                    while value.name in self.module.weights:
                        value.name = f"{value.name}_{value.type.dtype}"
                    self.module.add_weight(value)

    def _dtype(self, value: Value, wanted: str) -> str:
        """The dtype of a value that is wanted in this one, if it is a float of the old one."""
        return wanted if value.type.dtype == self.old else value.type.dtype

    def _rebuild(self, op: Op) -> None:
        kind = self.old if op in self.kept else self.dtype
        changes = {"dtype": kind} if op.attributes.get("dtype") == self.old else {}
        if op.results and op.results[0].type.dtype == self.old:
            changes |= _finite(op, kind)
        new = op.rebuilt([self._as(value, kind) for value in op.operands], **changes)
        self.function.append(new)
        for before, after in zip(op.results, new.results, strict=True):
            self.new[before], after.name = after, before.name

    def _as(self, value: Value, kind: str) -> Value:
        """What a value of the function is now, of dtype `kind` if it is a float of the old one."""
        now, kind = self.new.get(value, value), self._dtype(value, kind)
        if now.type.dtype == kind:
            return now
        if (now, kind) not in self.casts:
            self.casts[now, kind] = self._cast(now, kind)
        return self.casts[now, kind]

    def _cast(self, value: Value, kind: str) -> Value:
        if not isinstance(value, Weight):
            return self.function.append(ops.Cast(value, dtype=kind)).result
        return Weight(value.type.replace(dtype=kind), value.name, value.ref.then(Cast(kind)))


def _finite(op: Op, dtype: str) -> dict[str, Any]:
    """The numbers among the attributes of an operation: finite ones stay finite in a dtype."""
    most = largest(dtype)

    def limited(number: Any) -> Any:
        return min(max(number, -most), most) if math.isfinite(number) else number

    changed: dict[str, Any] = {}
    for name in ("value", "values", "low", "high"):
        number = op.attributes.get(name)
        if isinstance(number, tuple):
            changed[name] = tuple(map(limited, cast("tuple[Any, ...]", number)))
        elif number is not None:
            changed[name] = limited(number)
    return changed


def _kept(function: Function, old: str) -> set[Op]:
    """The operations that stay in the old dtype, and the constants that these take."""
    kept: set[Op] = set()
    for op in function:
        if isinstance(op, (ops.Sin, ops.Cos)):
            kept |= _angle(op, old)
        elif isinstance(op, ops.ReduceMean):
            square = op.x.producer
            is_product = isinstance(square, ops.Mul) and square.x is square.y
            if square is not None and (is_product or isinstance(square, ops.Pow)):
                kept |= {op, square, *_after(op)}
    operands = (value.producer for op in kept for value in op.operands)
    return kept | {op for op in operands if isinstance(op, (ops.Full, ops.Constant))}


def _after(op: Op) -> Iterator[Op]:
    """What norms compute of a mean of squares: the root of it and of a small number."""
    for user in op.result.users:
        if isinstance(user, _AFTER_SQUARES):
            yield user
            yield from _after(user)


def _angle(op: Op, old: str) -> set[Op]:
    """The operations that compute an angle; none where it depends on activations."""
    kept, stack = set[Op](), [op]
    while stack:
        op = stack.pop()
        if op in kept:
            continue
        kept.add(op)
        for value in (operand for operand in op.operands if operand.type.dtype == old):
            is_large = isinstance(value, Weight) and math.prod(map(int, value.type.shape)) > _LARGE
            if value.producer is not None:
                stack.append(value.producer)
            elif is_large or not isinstance(value, Weight):
                return set()
    return kept
