"""The function under construction: operations in the file's order, constants made on request.

Rules make operations as they read a node. One that reads more of the graph may make a better
operation, so at the end only those are kept that a result or a collective needs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, TypeAlias

import numpy as np

from irc import ops
from irc.errors import Error
from irc.frontends.onnx.entry import Content, Entry, shortest, sizes
from irc.frontends.onnx.tensors import Data, Files
from irc.ir.core import Function, Module, Op, Value, Weight
from irc.ir.dims import Dim, DimLike, Shape, symbol
from irc.ir.dtypes import dtype as dtype_called
from irc.ir.types import TensorType
from irc.ops.control import LARGEST_CONSTANT
from irc.source import Loc
from irc.weights import Cast, ZerosRef

CHUNKED = 4096  # the most numbers without a place in a file that become joined constants
Operand: TypeAlias = Entry | Value | float  # a number gets the dtype of the first operand


class Builder:
    """The function that rules add operations to; `rank` is that of the file, if it has one.

    `read_graph` is the importer's: the results of a graph inside a node, given its inputs.
    """

    read_graph: Callable[[Any, Sequence[Entry]], list[Entry]]

    def __init__(self, module: Module, function: Function, files: Files) -> None:
        self.module, self.function, self.files = module, function, files
        self.rank: int | None = None
        self.names: dict[str, str] = {}  # of weights, by tensors that the file gives other names
        self.ops: list[Op] = []
        self.pinned: set[Op] = set()  # collectives, which are kept even if nothing uses them
        self.loc: Loc | None = None
        self._constants: dict[tuple[Any, ...], Value] = {}
        self._weights: dict[tuple[Any, ...], Weight] = {}
        self.data: dict[Weight, Data] = {}
        self._symbols: dict[str, Value] = {}

    def add(self, op: Op) -> Op:
        """Append an operation."""
        op.loc = op.loc or self.loc
        self.ops.append(op)
        return op

    def value(self, op: Op) -> Value:
        """Append an operation of one result."""
        return self.add(op).result

    def op(self, cls: type[Op], *operands: Operand, **attributes: Any) -> Entry:
        """Append an operation of one result on entries, values and numbers."""
        first = operands[0]
        assert isinstance(first, (Entry, Value))
        kind = first.dtype if isinstance(first, Entry) else first.type.dtype
        make: Any = cls
        values = [self.get(each, kind) for each in operands]
        return self.entry(self.value(make(*values, **attributes)))

    def where(self, condition: Entry | Value, x: Operand, y: Operand) -> Entry:
        """Elements of x where the condition holds, else of y; one of them may be a number."""
        known = x if isinstance(x, Entry) else y
        assert isinstance(known, Entry)
        values = (self.get(each, known.dtype) for each in (x, y))
        return self.entry(self.value(ops.Where(self.get(condition), *values)))

    def get(self, entry: Operand, dtype: str = "") -> Value:
        """The IR value of an entry; of a number the constant in a dtype."""
        if isinstance(entry, Value):
            return entry
        if not isinstance(entry, Entry):
            return self.number(entry, dtype)
        if entry.value is None:
            entry.value = self._made(entry)
        return entry.value

    def _made(self, entry: Entry) -> Value:
        if entry.data is not None:
            return self.tensor(entry.data)
        if entry.content is None:
            raise Error("a node takes a value that no node computes")
        count = entry.content.size
        if entry.ndim == 1 and count > 1 and entry.content.tolist() == list(range(count)):
            return self.value(ops.Iota(size=count, dtype=entry.dtype))
        return self.constant(entry.content, entry.dtype, entry.shape)

    def tensor(self, data: Data, cast: str | None = None) -> Value:
        """A tensor of the file: a weight, or constants where it is small and in the model."""
        small = data.count <= LARGEST_CONSTANT
        if data.inline is not None and data.count and (small or not data.path):
            values = data.inline if cast is None else data.inline.astype(np.float64)
            return self.constant(numbers(values), cast or data.dtype, data.shape)
        key = data.path, data.offset, data.shape, cast or data.dtype
        if key not in self._weights:
            self._weights[key] = self._weight(data, cast)
            self.data[self._weights[key]] = data
        return self._weights[key]

    def _weight(self, data: Data, cast: str | None) -> Weight:
        ref = self.files.ref(data) if data.count else ZerosRef(data.shape, data.dtype)
        if cast is not None and cast != data.dtype:
            ref = ref.then(Cast(cast))
        name = plain_name(self.names.get(data.name, data.name)) or "weight"
        return Weight(TensorType(cast or data.dtype, data.shape), name, ref)

    def constant(self, content: Content, dtype: str, shape: Shape) -> Value:
        """Numbers and sizes as a value; equal ones are made once."""
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
        parts = [flat[i : i + step] for i in range(0, len(flat), step)]
        made = [self.value(ops.Constant(values=p, shape=(len(p),), dtype=dtype)) for p in parts]
        return self.reshaped(self.value(ops.Concat(made, dim=0)), shape)

    def _sizes(self, flat: tuple[DimLike, ...], dtype: str, shape: Shape) -> Value:
        """Sizes as data: a symbol is the number of ones that fill a dimension of it."""
        values = [self._size(item, dtype) for item in flat]
        if len(values) == 1:
            return self.reshaped(values[0], shape)
        rows = [self.value(ops.Reshape(value, shape=(1,))) for value in values]
        return self.reshaped(self.value(ops.Concat(rows, dim=0)), shape)

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

    def entry(self, value: Value) -> Entry:
        """The entry of a value."""
        return Entry(value.type.dtype, value.type.shape, value)

    def reshaped(self, value: Value, shape: Shape) -> Value:
        """The elements of a value in another shape."""
        if value.type.shape == shape:
            return value
        return self.value(ops.Reshape(value, shape=shape))

    def transposed(self, value: Value, order: Sequence[int]) -> Value:
        """A value with its dimensions in another order."""
        same = tuple(order) == tuple(range(value.type.ndim))
        return value if same else self.value(ops.Transpose(value, order=tuple(order)))

    def cast(self, entry: Entry, dtype: str) -> Entry:
        """An entry converted to a dtype."""
        return entry if entry.dtype == dtype else self.op(ops.Cast, entry, dtype=dtype)

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
        last = len(places)
        for weight in sorted(
            self._weights.values(), key=lambda each: places.get(self.data[each].name, last)
        ):
            if weight.users:
                self._declare(weight)

    def _declare(self, weight: Weight) -> None:
        """Add a weight to the module, under a name that no other has."""
        base, n = weight.name, 0
        while weight.name in self.module.weights:
            n += 1
            weight.name = f"{base}.{n}"
        self.module.add_weight(weight)


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
    found = "".join(c if c.isalnum() or c in "_." else "_" for c in name).strip(".")
    return f"_{found}" if found[:1].isdigit() else found


def hint(name: str) -> str:
    """The name of a value in text: without what counts equal names."""
    last = re.sub(r"_output_\d+$", "", name.rsplit("/", 1)[-1]).split(".")[0]
    return "" if last.isdigit() else plain_name(last)
