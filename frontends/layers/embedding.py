"""Embeddings of recommenders: slots in one table, and the layer of SparseOperationKit."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import numpy as np

from ...errors import Error
from ...source import here
from .. import functional as F
from ..module import Module, Parameter
from ..tensor import Tensor
from .index import MOST, RESERVED, FrozenIndex, frozen_levels
from .tables import Array, Table

KEY_DTYPES = (None, "i32", "i64", "int32", "int64", "uint32")
Combiner = Literal["sum", "mean"]


class SlotEmbedding(Module):
    """One table for all slots, which holds the rows of one slot after those of another.

    An index outside the size of its slot gives zeros, never a row of the next slot.
    """

    def __init__(self, sizes: Sequence[int], features: int, dtype: str = "f32") -> None:
        self.sizes = tuple(sizes)
        self.weight = Parameter((sum(self.sizes), features), dtype)

    def forward(self, ids: Tensor) -> Tensor:
        """ids i32|i64 [B, slots, ...] to [B, slots, ..., features]."""
        return F.embedding(F.slot_ids(ids, sizes=self.sizes, dim=1), self.weight)


class All2AllDenseEmbedding(Module):
    """The layer of SparseOperationKit 1 with its parameters, for inference.

    The table has `max_vocabulary_size_per_gpu` * `gpu_num` rows; the pass rewrite-embeddings
    distributes them over ranks. Without `use_hashtable` keys are row numbers. With it a FrozenIndex
    maps the keys of a Table to rows; `arrays` makes the weights. `key_dtype` is a name or a dtype
    of numpy or TensorFlow; uint32 takes keys in i64, or in i32 of the same bits.
    `embedding_initializer` and `training` have no effect: irc inserts no keys.

    `unseen` is the result of a key without a row: `zero`; `row:5`, that row; `oov:100`, row
    key % 100 of 100 more rows behind the table; `flag`, zeros, and a second result, bool of the
    shape of the keys, which keys have rows. `combiner` sums or averages the vectors of a slot, in
    f32. A `padding_key` gives zeros and does not count in the mean. With `by_frequency` the rows of
    the most frequent keys come first.
    """

    def __init__(
        self,
        max_vocabulary_size_per_gpu: int,
        embedding_vec_size: int,
        slot_num: int,
        nnz_per_slot: int,
        dynamic_input: bool = False,
        use_hashtable: bool = True,
        key_dtype: Any = None,
        embedding_initializer: Any = None,
        *,
        gpu_num: int = 1,
        dtype: str = "f32",
        unseen: str = "zero",
        combiner: Combiner | None = None,
        padding_key: int | None = None,
        by_frequency: bool = False,
    ) -> None:
        key_dtype = _dtype_name(key_dtype)
        if key_dtype not in KEY_DTYPES:
            dtypes = ", ".join(filter(None, KEY_DTYPES))
            raise Error(f"key_dtype is {key_dtype!r}, but it must be one of {dtypes}", loc=here())
        if combiner not in (None, "sum", "mean"):
            raise Error(f"combiner is {combiner!r}, but it must be sum or mean", loc=here())
        if dynamic_input and combiner:
            message = "with dynamic_input there are no slots to combine; leave combiner out"
            raise Error(message, loc=here())
        if min(slot_num, nnz_per_slot) < 1:
            message = f"slot_num is {slot_num} and nnz_per_slot {nnz_per_slot}; expected at least 1"
            raise Error(message, loc=here())
        if by_frequency and not use_hashtable:
            message = "by_frequency needs use_hashtable, which maps keys to rows in any order"
            raise Error(message, loc=here())
        if embedding_initializer is not None:
            warnings.warn(
                "embedding_initializer has no effect: only training inserts keys; say by unseen "
                "what a key without a row gives",
                stacklevel=2,
            )
        self.rows = max_vocabulary_size_per_gpu * gpu_num
        self.slot_num, self.nnz_per_slot = slot_num, nnz_per_slot
        self.dynamic_input, self.key_dtype = dynamic_input, key_dtype
        self.combiner, self.padding_key = combiner, padding_key
        self.unseen, self.unseen_row = _unseen(unseen, self.rows)
        self.size = self.rows + (self.unseen_row if self.unseen == "oov" else 0)
        self.weight = Parameter((self.size, embedding_vec_size), dtype)
        self.index = FrozenIndex(self.rows, permuted=by_frequency) if use_hashtable else None

    def forward(self, keys: Tensor, training: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """keys [B, slot_num, nnz_per_slot] to [B, slot_num, nnz_per_slot, vec], with a combiner to
        [B, slot_num, vec]; with dynamic_input keys [N] to [N, vec]. Keys may also be [B, slot_num *
        nnz_per_slot]."""
        if training:
            warnings.warn(
                "training=True has no effect: irc is for inference and inserts no keys",
                stacklevel=2,
            )
        keys = self._shaped(keys)
        if self.key_dtype == "uint32" and keys.dtype == "i32":
            if self.padding_key is not None and self.padding_key < 0:
                raise Error(
                    f"keys of uint32 are at least 0, but padding_key is {self.padding_key}; give "
                    f"the number of the same bits, {self.padding_key % 2**32}",
                    loc=here(),
                )
            wide = F.cast(keys, "i64")
            keys = F.where(F.lt(wide, F.full(0, dtype="i64")), wide + 2**32, wide)
        row = keys if self.index is None else self.index(keys)
        if row.dtype == "i32" and self.size > MOST:
            row = F.cast(row, "i64")
        result = self._combined(keys, self._resolved(keys, row))
        return (result, self._known(row)) if self.unseen == "flag" else result

    def _resolved(self, keys: Tensor, row: Tensor) -> Tensor:
        """The row numbers, with those of unseen keys."""
        if self.unseen == "row":
            return F.where(self._known(row), row, F.full(self.unseen_row, dtype=row.dtype))
        if self.unseen == "oov":
            other = F.mod(keys, F.full(self.unseen_row, dtype=keys.dtype)).cast(row.dtype)
            return F.where(self._known(row), row, other + self.rows)
        return row

    def _shaped(self, keys: Tensor) -> Tensor:
        """The keys as [B, slot_num, nnz_per_slot], or [N]."""
        shape, slots, nnz = keys.shape, self.slot_num, self.nnz_per_slot
        if keys.dtype not in ("i32", "i64"):
            raise Error(f"expected keys of i32 or i64, found {keys.type}", loc=here())
        if self.dynamic_input and len(shape) != 1:
            raise Error(f"with dynamic_input keys are [N], not {list(shape)}", loc=here())
        if self.dynamic_input or tuple(shape[1:]) == (slots, nnz):
            return keys
        if tuple(shape[1:]) != (slots * nnz,):
            raise Error(f"keys are [B, {slots}, {nnz}], not {list(shape)}", loc=here())
        return keys.reshape(shape[0], slots, nnz)

    def _known(self, row: Tensor) -> Tensor:
        """Which row numbers are those of keys that have rows."""
        least = F.ge(row, F.full(0, dtype=row.dtype))
        if self.index is not None:
            return least
        return least & F.lt(row, F.full(self.rows, dtype=row.dtype))

    def _combined(self, keys: Tensor, row: Tensor) -> Tensor:
        """The rows of the table, and of each slot their sum or mean."""
        present = None
        if self.padding_key is not None:
            present = F.ne(keys, F.full(self.padding_key, dtype=keys.dtype))
            row = F.where(present, row, F.full(-1, dtype=row.dtype))
        rows = F.embedding(row, self.weight)
        if present is not None:  # whatever the policy for out-of-range row numbers
            rows = F.where(present.unsqueeze(-1), rows, F.full(0, dtype=rows.dtype))
        if self.combiner is None:
            return rows
        total = F.reduce_sum(rows.cast("f32"), dims=(-2,))
        if self.combiner == "mean" and present is None:
            total = total / self.nnz_per_slot
        elif self.combiner == "mean" and present is not None:
            count = F.reduce_sum(present.cast("f32"), dims=(-1,)).unsqueeze(-1)
            total = total / F.maximum(count, F.full(1, dtype="f32"))
        return total.cast(rows.dtype)

    def arrays(
        self, table: Table, counts: Array | None = None, *, oov: Array | None = None
    ) -> dict[str, Array]:
        """The weights of the layer, by name, for the keys and rows of a table.

        `counts`, how often each key occurs, are for `by_frequency`; `oov` are the rows for unseen
        keys. Rows without a key are zeros.
        """
        width = self.weight.shape[1]
        if table.rows.shape[1] != width:
            raise Error(f"the layer has vectors of {width}, the table {table.rows.shape[1]}")
        weight = np.zeros((self.size, int(width)), table.rows.dtype)
        if (self.unseen == "oov") != (oov is not None):
            raise Error("expected `oov` rows for unseen='oov:M', and for no other")
        if oov is not None:
            if oov.shape != (self.unseen_row, width):
                raise Error(f"oov is {oov.shape}, but it must be {(self.unseen_row, width)}")
            weight[self.rows :] = oov
        by_frequency = self.index is not None and self.index.rows is not None
        if (counts is not None) != by_frequency:
            raise Error("expected counts for by_frequency, and for no other layer")
        if self.index is None:
            return {"weight": _placed(weight, table, table.keys, self.rows)}
        if counts is not None and counts.shape != table.keys.shape:
            raise Error(f"expected a count for each of {len(table.keys)} keys, not {counts.shape}")
        order = np.argsort(table.keys, kind="stable")
        levels = frozen_levels(table.keys, self.index.branching, self.rows)
        named = {f"index.levels.{i}.keys": level for i, level in enumerate(levels)}
        rank = np.empty(len(order), np.int64)  # the row of every key of the table
        rank[order if counts is None else np.argsort(-counts.astype(np.int64), kind="stable")] = (
            np.arange(len(rank))
        )
        if self.index.rows is not None:
            rows = np.zeros(self.rows, np.int32)
            rows[: len(rank)] = rank[order]
            named["index.rows"] = rows
        return {"weight": _placed(weight, table, rank, self.rows), **named}

    def table(self, arrays: Mapping[str, Array]) -> Table:
        """The keys and rows of the weights of the layer, in the order of the keys."""
        weight = arrays["weight"]
        if self.index is None:
            return Table(np.arange(self.rows, dtype=np.int64), weight[: self.rows])
        keys = arrays["index.levels.0.keys"].reshape(-1)
        keys = keys[keys != RESERVED]
        rows = arrays["index.rows"] if self.index.rows is not None else np.arange(len(keys))
        return Table(keys, weight[rows[: len(keys)]])


def _dtype_name(key_dtype: Any) -> Any:
    """The name of a dtype of numpy or TensorFlow; other values as they are."""
    if isinstance(key_dtype, (type, np.dtype)):
        return np.dtype(cast("Any", key_dtype)).name
    return key_dtype if isinstance(key_dtype, str) else getattr(key_dtype, "name", key_dtype)


def _unseen(text: str, rows: int) -> tuple[str, int]:
    """(kind, its number) of `zero`, `flag`, `row:5` or `oov:100`."""
    match = re.fullmatch(r"(?:(zero|flag)|(row|oov):(\d{1,18}))", text)
    if match is None or (match[2] == "oov" and int(match[3]) < 1):
        raise Error(f"unseen is {text!r}, but it must be zero, flag, row:N or oov:N", loc=here())
    if match[2] == "row" and int(match[3]) >= rows:
        raise Error(f"unseen is {text!r}, but the table has {rows} rows", loc=here())
    return match[1] or match[2], int(match[3] or 0)


def _placed(weight: Array, table: Table, rows: Array, limit: int) -> Array:
    """The weight with the rows of a table at these row numbers, which are below a limit."""
    if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < limit:
        raise Error(
            f"the keys of the table are {table.keys.min()} to {table.keys.max()}, but without "
            f"use_hashtable they must be row numbers below {limit}"
        )
    if len(rows) and np.bincount(rows).max() > 1:
        raise Error("expected distinct keys, found some of them twice")
    weight[rows] = table.rows
    return weight
