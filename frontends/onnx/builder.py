"""The function under construction: operations made in the file's order, values made when asked for.

Rules make an operation as soon as they read its node. Another that reads more of the graph may make
a better one, so at the end only those are kept that a result or a collective needs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from irc import ops
from irc.core import Function, Module, Op, Value, Weight
from irc.dims import Dim, DimLike, Shape, symbol
from irc.dtypes import dtype as dtype_called
from irc.errors import Error
from irc.frontends.onnx.entry import Content, Entry, shortest
from irc.frontends.onnx.tensors import Data, Files
from irc.ops.control import LARGEST_CONSTANT
from irc.source import Loc
from irc.types import TensorType
from irc.weights import Cast

CHUNKED = 4096  # the most numbers without a place in a file that become constants joined


class Builder:
    """What rules work with. `ranks` are facts of a model of one rank among several."""

    def __init__(self, module: Module, function: Function, files: Files) -> None:
        self.module, self.function, self.files = module, function, files
        self.rank: int | None = None
        self.ops: list[Op] = []
        self.pinned: set[Op] = set()
        self.loc: Loc | None = None
        self._constants: dict[tuple[Any, ...], Value] = {}
        self._weights: dict[tuple[Any, ...], Weight] = {}
        self._places: dict[Weight, str] = {}  # what the file calls them
        self._symbols: dict[str, Value] = {}

    def add(self, op: Op) -> Op:
        """Put an operation at the end."""
        op.loc = op.loc or self.loc
        self.ops.append(op)
        return op

    def value(self, op: Op) -> Value:
        """Put an operation of one result at the end."""
        return self.add(op).result

    def get(self, entry: Entry) -> Value:
        """The IR value of an entry, in its own shape and dtype."""
        if entry.value is None:
            entry.value = self._made(entry)
            if entry.value.name is None and not isinstance(entry.value, Weight):
                entry.value.name = entry.name or None
            entry.base = entry.value
        return entry.value

    def _made(self, entry: Entry) -> Value:
        if entry.base is not None and entry.base.type.shape == entry.shape:
            return entry.base
        if entry.make is not None:
            return entry.make()
        if entry.base is not None:
            return self.value(ops.Reshape(entry.base, shape=entry.shape))
        if entry.data is not None:
            return self.tensor(entry.data)
        if entry.content is not None:
            return self._content(entry, entry.content)
        raise Error("a node takes what no node computes")

    def _content(self, entry: Entry, content: Content) -> Value:
        """What was computed while reading."""
        count = content.size
        if entry.rank == 1 and count > 1 and content.tolist() == list(range(count)):
            return self.value(ops.Iota(size=count, dtype=entry.dtype))
        return self.constant(content, entry.dtype, entry.shape)

    def based(self, entry: Entry) -> Value:
        """An IR value with the elements of an entry, in whatever shape it has."""
        return entry.base if entry.base is not None else self.get(entry)

    def tensor(self, data: Data, cast: str | None = None) -> Value:
        """A tensor of the file: a weight, or constants where it is small and in the model."""
        small = data.count <= LARGEST_CONSTANT
        if data.inline is not None and data.count and (small or not data.path):
            values = data.inline if cast is None else data.inline.astype(np.float64)
            return self.constant(numbers(values), cast or data.dtype, data.shape)
        key = data.path, data.offset, data.shape, cast or data.dtype
        if key not in self._weights:
            self._weights[key] = self._weight(data, cast)
            self._places[self._weights[key]] = data.name
        return self._weights[key]

    def _weight(self, data: Data, cast: str | None) -> Weight:
        if not data.count:
            from irc.weights import ZerosRef

            ref = ZerosRef(data.shape, data.dtype)
        else:
            ref = self.files.ref(data)
        if cast is not None and cast != data.dtype:
            ref = ref.then(Cast(cast))
        name = plain_name(data.name) or "weight"
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
        """A scalar constant."""
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
        joined = self.value(ops.Concat(made, dim=0))
        return joined if len(shape) == 1 else self.value(ops.Reshape(joined, shape=shape))

    def _sizes(self, flat: tuple[DimLike, ...], dtype: str, shape: Shape) -> Value:
        """Sizes as data: a symbol is the number of ones that fill a dimension of it."""
        values = [self._size(item, dtype) for item in flat]
        if len(values) == 1:
            found = values[0]
        else:
            rows = [self.value(ops.Reshape(value, shape=(1,))) for value in values]
            found = self.value(ops.Concat(rows, dim=0))
        return found if found.type.shape == shape else self.value(ops.Reshape(found, shape=shape))

    def _size(self, dim: DimLike, dtype: str) -> Value:
        if not isinstance(dim, Dim):
            return self.number(dim, dtype)
        total: Value | None = None
        for names, factor in dim.terms:
            term = self.number(factor, "i64") if factor != 1 or not names else None
            for name in names:
                one = self._symbol(name)
                term = one if term is None else self.value(ops.Mul(term, one))
            assert term is not None
            total = term if total is None else self.value(ops.Add(total, term))
        assert total is not None
        return total if dtype == "i64" else self.value(ops.Cast(total, dtype=dtype))

    def _symbol(self, name: str) -> Value:
        if name not in self._symbols:
            ones = self.value(ops.Full(value=1, shape=(symbol(name),), dtype="i64"))
            self._symbols[name] = self.value(ops.ReduceSum(ones, dims=(0,)))
        return self._symbols[name]

    def entry(self, value: Value) -> Entry:
        """What is known of a value that was just made."""
        return Entry(value.type.dtype, value.type.shape, value, base=value)

    def viewed(self, value: Value, shape: Shape) -> Entry:
        """The elements of a value in another shape."""
        same = value.type.shape == shape
        return Entry(value.type.dtype, shape, value if same else None, base=value)

    def together(self, entries: Sequence[Entry]) -> tuple[list[Value], Callable[[Value], Entry]]:
        """Operands of an elementwise operation, and what its result is.

        Where all are matrices that were made of tensors of one shape, or vectors and scalars, the
        operation is done on those tensors.
        """
        wide = [entry for entry in entries if entry.rank > 1]
        shapes = {e.base.type.shape if e.base is not None else None for e in wide}
        first = wide[0] if wide else None
        base = first.base.type.shape if first is not None and first.base is not None else None
        if first is not None and base is not None and len(shapes) == 1 and base != first.shape:
            same = all(entry.shape == first.shape for entry in wide)
            vectors = all(e.rank == 0 or base[-1:] == first.shape[-1:] for e in entries)
            if same and vectors and base:
                shape = first.shape
                values = [self.based(e) if e.rank > 1 else self.get(e) for e in entries]
                return values, lambda value: self.viewed(value, shape)
        return [self.get(entry) for entry in entries], self.entry

    def rows(self, entry: Entry) -> tuple[Value, Callable[[Value], Entry]]:
        """The operand of an operation along the last dimension, and what its result is."""
        base = entry.base
        if base is None or base.type.shape == entry.shape or entry.rank != 2 or not base.type.rank:
            return self.get(entry), self.entry
        if base.type.shape[-1] != entry.shape[-1]:
            return self.get(entry), self.entry
        lead = entry.shape[0]
        return base, lambda value: self.viewed(value, (lead, value.type.shape[-1]))

    def finish(self, returned: Sequence[Value], places: Mapping[str, int]) -> None:
        """Put the operations that are needed into the function, and give up the others.

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
            self._weights.values(), key=lambda each: places.get(self._places[each], last)
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
    found = np.empty(array.shape, object)
    kind = array.dtype
    for place in np.ndindex(array.shape):
        item = array[place]
        if kind == np.bool_:
            found[place] = bool(item)
        elif kind.kind in "iu":
            found[place] = int(item)
        else:
            found[place] = float(item) if kind == np.float64 else shortest(float(item))
    return found


def _number(item: Any, dtype: str) -> Any:
    kind = dtype_called(dtype)
    if kind.is_float:
        return float(item)
    return bool(item) if kind.kind == "bool" else int(item)


def plain_name(name: str) -> str:
    """A name that text can have, made of one that ONNX has; empty where nothing is left."""
    found = "".join(c if c.isalnum() or c in "_." else "_" for c in name).strip(".")
    return f"_{found}" if found[:1].isdigit() else found


def hint(name: str) -> str:
    """The name of a value in text: without what counts equal names."""
    last = re.sub(r"_output_\d+$", "", name.rsplit("/", 1)[-1]).split(".")[0]
    return "" if last.isdigit() else plain_name(last)
