"""Embeddings of recommenders: slots in one table, and the layer of SparseOperationKit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...errors import Error
from ...source import here
from .. import functional as F
from ..module import Module, Parameter
from ..tensor import Tensor
from .index import FrozenIndex


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
    distributes them over ranks. Without `use_hashtable` keys are row indices. With it a FrozenIndex
    of as many keys as rows maps keys to rows, which are in the order of the keys; unknown keys give
    zeros. `embedding_initializer` is ignored: it is for training.
    """

    def __init__(
        self,
        max_vocabulary_size_per_gpu: int,
        embedding_vec_size: int,
        slot_num: int,
        nnz_per_slot: int,
        dynamic_input: bool = False,
        use_hashtable: bool = True,
        key_dtype: str | None = None,
        embedding_initializer: Any = None,
        *,
        gpu_num: int = 1,
        dtype: str = "f32",
    ) -> None:
        if key_dtype not in (None, "i32", "i64", "int64", "uint32"):
            raise Error(f"key_dtype is {key_dtype!r}, but it must be i32, i64, int64", loc=here())
        rows = max_vocabulary_size_per_gpu * gpu_num
        self.slot_num, self.nnz_per_slot = slot_num, nnz_per_slot
        self.dynamic_input = dynamic_input
        self.weight = Parameter((rows, embedding_vec_size), dtype)
        self.index = FrozenIndex(rows) if use_hashtable else None

    def forward(self, keys: Tensor, training: bool = False) -> Tensor:
        """keys [B, slot_num, nnz_per_slot] to [B, slot_num, nnz_per_slot, vec]; with dynamic_input
        keys [N] to [N, vec]."""
        if training:
            raise Error("irc is for inference and inserts no keys; leave training out", loc=here())
        shape = keys.shape
        wanted = (self.slot_num, self.nnz_per_slot)
        if self.dynamic_input and len(shape) != 1:
            raise Error(f"with dynamic_input keys are [N], not {list(shape)}", loc=here())
        if not self.dynamic_input and tuple(shape[1:]) != wanted:
            raise Error(f"keys are [B, {wanted[0]}, {wanted[1]}], not {list(shape)}", loc=here())
        return F.embedding(self.index(keys) if self.index is not None else keys, self.weight)
