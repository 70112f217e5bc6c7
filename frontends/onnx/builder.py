"""Values and nodes of an ONNX graph while it is read, and the function that rules build of them.

Rules append operations as they read a node. One that reads more of the graph may append a better
operation, so at the end only those are kept that a result or a collective needs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, TypeAlias, TypeVar

import numpy as np

from irc import ops
from irc.errors import Error
from irc.frontends.onnx.files import Data, Files
from irc.ir.core import Function, Module, Op, Value, Weight
from irc.ir.dims import Dim, DimLike, Shape, symbol
from irc.ir.dtypes import dtype as dtype_called
from irc.ir.types import TensorType
from irc.ops.control import LARGEST_CONSTANT
from irc.source import Loc
from irc.weights import Cast, ZerosRef

CHUNKED = 4096  # the most numbers without a place in a file that become joined constants
Read = TypeVar("Read")
Content: TypeAlias = np.ndarray[Any, Any]  # of objects: numbers, sizes, true and false


def _unary(cls: type[Op]) -> Callable[[ImportedValue], ImportedValue]:
    """The method for `op x`."""
    return lambda x: x.known_builder().op(cls, x)


def _binary(cls: type[Op]) -> Callable[[ImportedValue, Operand], ImportedValue]:
    """The method for `x op other`."""
    return lambda x, other: x.known_builder().op(cls, x, other)


def _reflected(cls: type[Op]) -> Callable[[ImportedValue, Value | float], ImportedValue]:
    """The method for `other op x`."""
    return lambda x, other: x.known_builder().op(cls, x.known_builder().get(other, x.dtype), x)


@dataclass(eq=False)
class ImportedValue:
    """A value of the graph: an IR value, elements that are known while reading, or a tensor.

    `content` are known elements: shapes and what is computed from them, and small constants.
    `data` is a tensor of the file. Builder.get makes an IR value of either. `node` is the producer.
    Arithmetic, `<`, `<=`, `>`, `>=`, `&` and `|` append operations to the `builder`.
    """

    dtype: str
    shape: Shape
    value: Value | None = None
    content: Content | None = None
    data: Data | None = None
    node: Node | None = None
    builder: Builder | None = None

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    def known_builder(self) -> Builder:
        """The builder, which the operands of a rule and what it makes of them have."""
        assert self.builder is not None
        return self.builder

    __neg__, __abs__ = _unary(ops.Neg), _unary(ops.Abs)
    __lt__, __le__, __gt__, __ge__ = map(_binary, (ops.Lt, ops.Le, ops.Gt, ops.Ge))
    __and__, __or__ = _binary(ops.And), _binary(ops.Or)
    __add__, __sub__, __mul__ = _binary(ops.Add), _binary(ops.Sub), _binary(ops.Mul)
    __truediv__, __floordiv__ = _binary(ops.Div), _binary(ops.FloorDiv)
    __mod__ = _binary(ops.Mod)
    __radd__, __rsub__, __rmul__ = map(_reflected, (ops.Add, ops.Sub, ops.Mul))
    __rtruediv__ = _reflected(ops.Div)


Operand: TypeAlias = ImportedValue | Value | float | Dim  # numbers take the first one's dtype


@dataclass(eq=False)
class Node:
    """A node; the standard operators have the domain "".

    `inputs` are None where an optional one is absent.
    """

    kind: str
    domain: str
    name: str
    number: int
    opset: int
    inputs: list[ImportedValue | None]
    outputs: list[str]
    attributes: dict[str, Any] = field(default_factory=dict[str, Any])
    loc: Loc | None = None
    misuse: str | None = None  # what ONNX itself forbids about it

    def has(self, index: int) -> bool:
        """Whether an optional input is present."""
        return self.optional(index) is not None

    def input(self, index: int) -> ImportedValue:
        """A required input."""
        operand = self.optional(index)
        if operand is None:
            raise Error(f"{self.kind} lacks its input {index}")
        return operand

    def shaped(self, index: int, least: int, most: int | None = None) -> ImportedValue:
        """A required input with `least` dimensions or more, and no more than `most`."""
        operand = self.input(index)
        if operand.ndim < least or (most is not None and operand.ndim > most):
            raise Error(f"input {index} of {self.kind} cannot have {operand.ndim} dimensions")
        return operand

    def optional(self, index: int) -> ImportedValue | None:
        """An input, or None where it is absent."""
        return self.inputs[index] if index < len(self.inputs) else None

    def present(self) -> list[ImportedValue]:
        """All inputs that are there."""
        return [operand for operand in self.inputs if operand is not None]

    def wants(self, index: int) -> bool:
        """Whether an output has a name, so that something may use it."""
        return index < len(self.outputs) and bool(self.outputs[index])

    def axis(self, ndim: int, default: int, name: str = "axis") -> int:
        """An attribute that names a dimension, counted from the front."""
        axis = self.integer(name, default)
        if not -ndim <= axis < ndim:
            raise Error(f"{self.kind} along {name} {axis} of {ndim} dimensions")
        return axis % ndim

    def ints(self, name: str) -> list[int] | None:
        """An attribute that is a list of integers."""
        if self.attributes.get(name) is None:
            return None
        return self._read(name, None, lambda value: [int(n) for n in value], "a list of integers")

    def integer(self, name: str, default: int) -> int:
        """An attribute that is an integer; plugins write it as text."""
        return self._read(name, default, int, "an integer")

    def real(self, name: str, default: float) -> float:
        """An attribute that is a number, or text of one: the shortest decimal that is this f32."""
        return self._read(name, default, shortest, "a number")

    def text(self, name: str, default: str = "") -> str:
        """An attribute that is a string."""
        return str(self.attributes.get(name, default))

    def _read(self, name: str, default: Any, read: Callable[[Any], Read], what: str) -> Read:
        value = self.attributes.get(name, default)
        try:
            return read(value)
        except (TypeError, ValueError):
            reason = f"{self.kind} has {name}={value!r}; expected {what}"
            raise Error(reason).at(loc=self.loc) from None


class Builder:
    """The function that rules add operations to; `rank` is that of the file, if it has one.

    `read_graph` is the importer's: the results of a graph inside a node, given its inputs.
    """

    read_graph: Callable[[Any, Sequence[ImportedValue]], list[ImportedValue]]

    def __init__(self, module: Module, function: Function, files: Files) -> None:
        self.module, self.function, self.files = module, function, files
        self.rank: int | None = None
        self.names: dict[str, str] = {}  # of weights, by tensors that the file gives other names
        self.ops: list[Op] = []
        self.pinned: set[Op] = set()  # collectives, which are kept even if nothing uses them
        self.loc: Loc | None = None
        self.data: dict[Weight, Data] = {}
        self._constants: dict[tuple[Any, ...], Value] = {}
        self._weights: dict[tuple[Any, ...], Weight] = {}
        self._symbols: dict[str, Value] = {}

    def add(self, op: Op) -> Op:
        """Append an operation."""
        op.loc = op.loc or self.loc
        self.ops.append(op)
        return op

    def value(self, op: Op) -> Value:
        """Append an operation of one result."""
        return self.add(op).result

    def op(
        self, cls: type[Op], *operands: Operand | Sequence[Operand], **attributes: Any
    ) -> ImportedValue:
        """Append an operation of one result; optional operands are among the `attributes`."""
        (result,) = self.results(cls, *operands, **attributes)
        return result

    def results(
        self, cls: type[Op], *operands: Operand | Sequence[Operand], **attributes: Any
    ) -> list[ImportedValue]:
        """Append an operation of several results."""
        first = operands[0] if operands else None
        dtype = first.dtype if isinstance(first, ImportedValue) else ""
        dtype = first.type.dtype if isinstance(first, Value) else dtype
        make: Any = cls
        values = [
            [self.get(part) for part in x] if isinstance(x, Sequence) else self.get(x, dtype)
            for x in operands
        ]
        for name, attribute in attributes.items():
            if isinstance(attribute, ImportedValue):
                attributes[name] = self.get(attribute)
        return [self.imported(value) for value in self.add(make(*values, **attributes)).results]

    def where(self, condition: ImportedValue | Value, x: Operand, y: Operand) -> ImportedValue:
        """Elements of x where the condition holds, else of y; one of them may be a number."""
        tensor = x if isinstance(x, ImportedValue) else y
        assert isinstance(tensor, ImportedValue)
        return self.op(ops.Where, condition, *(self.get(one, tensor.dtype) for one in (x, y)))

    def get(self, operand: Operand, dtype: str = "") -> Value:
        """The IR value of an operand; of a number the constant in a dtype."""
        if isinstance(operand, Value):
            return operand
        if not isinstance(operand, ImportedValue):
            return self.number(operand, dtype)
        if operand.value is None:
            operand.value = self._materialized(operand)
        return operand.value

    def _materialized(self, operand: ImportedValue) -> Value:
        if operand.data is not None:
            return self.tensor(operand.data)
        if operand.content is None:
            raise Error("a node takes a value that no node computes")
        count = operand.content.size
        if operand.ndim == 1 and count > 1 and operand.content.tolist() == list(range(count)):
            return self.value(ops.Iota(size=count, dtype=operand.dtype))
        return self.constant(operand.content, operand.dtype, operand.shape)

    def tensor(self, data: Data, cast: str | None = None) -> Value:
        """A tensor of the file: a weight, or constants where it is small and in the model."""
        small = data.count <= LARGEST_CONSTANT
        if data.inline is not None and data.count and (small or not data.path):
            values = data.inline if cast is None else data.inline.astype(np.float64)
            return self.constant(numbers(values), cast or data.dtype, data.shape)
        key = data.path, data.offset, data.shape, cast or data.dtype
        if key not in self._weights:
            self._weights[key] = self._weight(data, cast or data.dtype)
            self.data[self._weights[key]] = data
        return self._weights[key]

    def _weight(self, data: Data, dtype: str) -> Weight:
        ref = self.files.ref(data) if data.count else ZerosRef(data.shape, data.dtype)
        ref = ref if dtype == data.dtype else ref.then(Cast(dtype))
        name = plain_name(self.names.get(data.name, data.name)) or "weight"
        return Weight(self.module.own(TensorType(dtype, data.shape)), name, ref)

    def constant(self, content: Content, dtype: str, shape: Shape) -> Value:
        """Numbers and sizes as a value; equal ones share one operation."""
        flat = tuple(content.reshape(-1).tolist())
        if any(isinstance(item, Dim) for item in flat):
            return self._sizes(flat, dtype, shape)
        sizes = tuple(size for size in shape if isinstance(size, int))
        key = (tuple(map(repr, flat)), dtype, shape)
        if key not in self._constants:
            self._constants[key] = self._numbers(flat, dtype, sizes)
        return self._constants[key]

    def number(self, value: Any, dtype: str) -> Value:
        """A scalar constant; a size may have symbols."""
        return self.constant(np.array(value, object), dtype, ())

    def _numbers(self, flat: tuple[Any, ...], dtype: str, shape: tuple[int, ...]) -> Value:
        flat = tuple(_number(item, dtype) for item in flat)
        if not shape or (len(flat) > LARGEST_CONSTANT and len(set(map(repr, flat))) == 1):
            return self.value(ops.Full(value=flat[0], shape=shape, dtype=dtype))
        if len(flat) <= LARGEST_CONSTANT:
            return self.value(ops.Constant(values=flat, shape=shape, dtype=dtype))
        if len(flat) > CHUNKED:
            raise Error(
                f"a tensor of {len(flat)} numbers lies in no file as it is: save the model "
                "with onnx.save_model(..., save_as_external_data=True)"
            )
        step = LARGEST_CONSTANT
        chunks = [flat[i : i + step] for i in range(0, len(flat), step)]
        parts = [self.value(ops.Constant(values=p, shape=(len(p),), dtype=dtype)) for p in chunks]
        return self.get(self.reshaped(self.op(ops.Concat, parts, dim=0), shape))

    def _sizes(self, flat: tuple[DimLike, ...], dtype: str, shape: Shape) -> Value:
        """Sizes as data: a symbol is the number of ones that fill a dimension of it."""
        values = [self._size(item, dtype) for item in flat]
        if len(values) == 1:
            return self.get(self.reshaped(values[0], shape))
        rows = [self.op(ops.Reshape, value, shape=(1,)) for value in values]
        return self.get(self.reshaped(self.op(ops.Concat, rows, dim=0), shape))

    def _size(self, dim: DimLike, dtype: str) -> Value:
        if not isinstance(dim, Dim):
            return self.number(dim, dtype)
        terms: list[Value] = []
        for names, factor in dim.terms:
            factors = [self.number(factor, "i64")] if factor != 1 or not names else []
            factors += map(self._symbol, names)
            terms.append(reduce(lambda x, y: self.value(ops.Mul(x, y)), factors))
        total = reduce(lambda x, y: self.value(ops.Add(x, y)), terms)
        return total if dtype == "i64" else self.value(ops.Cast(total, dtype=dtype))

    def _symbol(self, name: str) -> Value:
        if name not in self._symbols:
            ones = self.value(ops.Full(value=1, shape=(symbol(name),), dtype="i64"))
            self._symbols[name] = self.value(ops.ReduceSum(ones, dims=(0,)))
        return self._symbols[name]

    def imported(self, value: Value) -> ImportedValue:
        """A value of the IR as one of the graph."""
        return ImportedValue(value.type.dtype, value.type.shape, value, builder=self)

    def reshaped(self, x: ImportedValue | Value, shape: Shape) -> ImportedValue:
        """The elements of x in another shape."""
        x = self.imported(x) if isinstance(x, Value) else x
        return x if x.shape == shape else self.op(ops.Reshape, x, shape=shape)

    def transposed(self, x: ImportedValue, order: Sequence[int]) -> ImportedValue:
        """x with its dimensions in another order."""
        if tuple(order) == tuple(range(x.ndim)):
            return x
        return self.op(ops.Transpose, x, order=tuple(order))

    def cast(self, x: ImportedValue, dtype: str) -> ImportedValue:
        """x converted to a dtype."""
        return x if x.dtype == dtype else self.op(ops.Cast, x, dtype=dtype)

    def finish(self, returned: Sequence[Value], places: Mapping[str, int]) -> None:
        """Put the operations that are needed into the function, and drop the others.

        `places` are those of tensors in the file, which is the order of the weights.
        """
        needed = set(self.pinned) | {v.producer for v in returned if v.producer is not None}
        stack = list(needed)
        while stack:
            for value in stack.pop().operands:
                if value.producer is not None and value.producer not in needed:
                    needed.add(value.producer)
                    stack.append(value.producer)
        for op in self.ops:
            if op in needed:
                self.function.append(op)
            else:
                op.drop_operands()
        self.function.append(ops.Return(returned))
        weights = self._weights.values()
        for weight in sorted(weights, key=lambda w: places.get(self.data[w].name, len(places))):
            if weight.users:
                self._declare(weight)

    def _declare(self, weight: Weight) -> None:
        """Add a weight to the module, under a name that no other has."""
        base, n = weight.name, 0
        while weight.name in self.module.weights:
            n += 1
            weight.name = f"{base}.{n}"
        self.module.add_weight(weight)


def shortest(number: float) -> float:
    """The number with the fewest digits that is the same in f32."""
    return float(str(np.float32(number)))


def sizes(*values: DimLike | float) -> Content:
    """A content of one dimension."""
    content = np.empty(len(values), object)
    content[:] = values
    return content


def numbers(array: np.ndarray[Any, Any]) -> Content:
    """An array as a content: Python numbers, floats as the shortest decimals that are them."""
    exact = array.dtype == np.float64 or array.dtype.kind in "biu"
    items = array.reshape(-1).tolist()
    return sizes(*(items if exact else (shortest(float(n)) for n in items))).reshape(array.shape)


def _number(item: Any, dtype: str) -> Any:
    kind = dtype_called(dtype)
    if kind.is_float:
        return float(item)
    if kind.kind == "bool":
        return bool(item)
    if not math.isfinite(item) or int(item) != item:
        raise Error(f"expected an operand of floats, found {dtype}, which does not hold {item}")
    return int(item)


def plain_name(name: str) -> str:
    """A name that text can have, made of one that ONNX has; empty where nothing is left."""
    plain = "".join(c if c.isalnum() or c in "_." else "_" for c in name).strip(".")
    return f"_{plain}" if plain[:1].isdigit() else plain


def hint(name: str) -> str:
    """The name of a value in text: without what counts equal names."""
    last = re.sub(r"_output_\d+$", "", name.rsplit("/", 1)[-1]).split(".")[0]
    return "" if last.isdigit() else plain_name(last)
