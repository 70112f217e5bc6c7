"""Reading and writing by index: embedding, gather, scatter, one-hot."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from ..errors import Error
from ..ir.core import Op
from ..ir.declare import Operand, operation
from ..ir.dims import DimLike
from ..ir.dtypes import dtype, numpy_dtype
from ..ir.types import TensorType
from .control import Iota
from .logic import Cast, Eq
from .shape import Unsqueeze
from .shapes import (
    dim_names,
    index_operand,
    number_operand,
    position,
    rule_text,
    run_sizes,
    same_but,
    same_dtype,
    shape_text,
)


@operation(
    "embedding",
    sharding="..., v~ d -> ... d",
    sums="table",
    moves_data=True,
    selects="table",
    safe_values={"ids": 0},
)
class Embedding(Op):
    """Row ids[...] of table [V, D], as [..., D]; an out-of-range id 0 to V-1 gives a row of zeros.

    With `inside` all ids are known to be in range, so backends check nothing.
    With `sentinel` localize may put rows of zeros behind each rank's, for all other ids to find.
    """

    ids: Operand
    table: Operand
    inside: bool = False
    sentinel: bool = False

    def infer(self) -> TensorType:
        ids, table = index_operand(self.opname, self.ids), self.table.type
        if table.ndim != 2:
            raise Error(f"embedding: the table is [rows, width], not {shape_text(table.shape)}")
        return TensorType(table.dtype, (*ids.shape, table.shape[1]))

    def evaluate(self, ids: Any, table: Any) -> Any:
        if self.inside:
            check_bounds(self.opname, ids, table.shape[0])
        rows = np.zeros((*np.shape(ids), table.shape[1]), table.dtype)
        in_range = (ids >= 0) & (ids < table.shape[0])
        rows[in_range] = table[ids[in_range]]
        return rows


def check_bounds(op: str, indices: Any, size: int, least: int = 0) -> None:
    """Raise where an index is out of range of a dimension of `size`; `least` is the first one."""
    if np.size(indices) and (np.min(indices) < least or np.max(indices) >= size):
        wrong = indices[(indices < least) | (indices >= size)].flat[0]
        raise Error(f"{op}: index {wrong} is out of range of a dimension of {size}")


@operation("gather", sums="x", moves_data=True, selects="x", safe_values={"indices": 0})
class Gather(Op):
    """The slices of x at `indices` along `dim`, whose place the dimensions of indices take.

    numpy.take: every index lies in the dimension, negative ones count from its end; others are an
    error.
    """

    x: Operand
    indices: Operand
    dim: int = 0

    def infer(self) -> TensorType:
        shape, inner = self.x.type.shape, index_operand(self.opname, self.indices).shape
        at = position(self.opname, self.dim, len(shape))
        return TensorType(self.x.type.dtype, (*shape[:at], *inner, *shape[at + 1 :]))

    def sharding_rule(self) -> str:
        rank = self.x.type.ndim
        at = self.dim % rank
        words, inner = dim_names(rank, [at]), [f"i{i}" for i in range(self.indices.type.ndim)]
        return rule_text([words, inner], [[*words[:at], *inner, *words[at + 1 :]]])

    def evaluate(self, x: Any, indices: Any) -> Any:
        check_bounds(self.opname, indices, x.shape[self.dim], -x.shape[self.dim])
        return np.take(x, indices, self.dim)


@operation("gather_elements", sums="x", moves_data=True, selects="x", safe_values={"indices": 0})
class GatherElements(Op):
    """Per place of indices, the element of x there, but at `indices[place]` along `dim`.

    numpy.take_along_axis: indices has the shape of x, other than in `dim`. Every index lies in
    the dimension, negative ones count from its end; others are an error.
    """

    x: Operand
    indices: Operand
    dim: int

    def infer(self) -> TensorType:
        inner = index_operand(self.opname, self.indices).shape
        at = position(self.opname, self.dim, self.x.type.ndim)
        same_but(self.opname, at, [self.x.type.shape, inner])
        return TensorType(self.x.type.dtype, inner)

    def sharding_rule(self) -> str:
        rank = self.x.type.ndim
        words = dim_names(rank, [self.dim % rank])
        inner = dim_names(rank)
        inner[self.dim % rank] = "i"
        return rule_text([words, inner], [inner])

    def evaluate(self, x: Any, indices: Any) -> Any:
        check_bounds(self.opname, indices, x.shape[self.dim], -x.shape[self.dim])
        return np.take_along_axis(x, indices, self.dim)


_indices: Any = np.indices
_COMBINE: dict[str, Any] = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}


@operation("scatter_elements", safe_values={"indices": 0}, reads="many")
class ScatterElements(Op):
    """x with updates[place] put in at `indices[place]` along `dim`, for every place of indices.

    `reduction` combines an update with the element of x: it replaces it ("none": which of two
    updates to one element wins is undefined), or adds to it and so on. indices and updates have
    one shape, that of x other than in `dim`. Every index lies in the dimension; negative ones
    count from its end.
    """

    x: Operand
    indices: Operand
    updates: Operand
    dim: int
    reduction: Literal["none", "add", "mul", "max", "min"] = "none"

    def infer(self) -> TensorType:
        inner = index_operand(self.opname, self.indices).shape
        kind = same_dtype(self.opname, self.x, self.updates)
        if self.reduction != "none":
            number_operand(self.opname, self.x)
        at = position(self.opname, self.dim, self.x.type.ndim)
        same_but(self.opname, at, [self.x.type.shape, inner])
        if self.updates.type.shape != inner:
            raise Error(
                f"scatter_elements: indices are {shape_text(inner)}, "
                f"but updates {shape_text(self.updates.type.shape)}"
            )
        return TensorType(kind, self.x.type.shape)

    def sharding_rule(self) -> str:
        rank = self.x.type.ndim
        at = self.dim % rank
        words, inner = dim_names(rank, [at]), dim_names(rank)
        inner[at] = "i!"
        return rule_text([words, inner, inner], [words])

    @np.errstate(all="ignore")
    def evaluate(self, x: Any, indices: Any, updates: Any) -> Any:
        check_bounds(self.opname, indices, x.shape[self.dim], -x.shape[self.dim])
        places: list[Any] = list(_indices(indices.shape, sparse=True))
        places[self.dim] = indices
        out = np.array(x)
        if self.reduction == "none":
            out[tuple(places)] = updates
        else:
            _COMBINE[self.reduction].at(out, tuple(places), updates)
        return out


@operation("one_hot", sharding="... -> ... 1", bounded="always")
class OneHot(Op):
    """A new last dimension of `size`, 1 at the place that the index names and 0 elsewhere.

    An index below 0 or from `size` on gives only zeros.
    """

    indices: Operand
    size: DimLike
    dtype: str = "f32"

    def expand(self) -> Op:
        index = index_operand(self.opname, self.indices)
        dtype(self.dtype)
        places = Iota(size=self.size, dtype=index.dtype)
        return Cast(Eq(Unsqueeze(self.indices, dims=(-1,)), places), dtype=self.dtype)

    def evaluate(self, indices: Any) -> Any:
        (size,) = run_sizes(self.opname, (self.size,))
        hit = np.expand_dims(indices, -1) == np.arange(size)
        return hit.astype(numpy_dtype(self.dtype))
