"""Embedding tables, and those that prompt tuning extends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....errors import Error
from ....source import here
from ... import functional as F
from ..context import signatures
from ..dtypes import irc_dtype
from ..errors import ArgumentError
from ..functional.lookup import embedding
from ..module import Module
from ..tensor import Tensor, unwrap, wrap
from .linear import shard_size, sharded_parameter

_NAMES = (
    "num_embeddings, embedding_dim, dtype, tp_size, tp_group, sharding_dim, tp_rank, instance_id"
)
_PROMPT_NAMES = _NAMES.replace("dtype", "vocab_size, dtype")


class Embedding(Module):
    """Rows of a table for token ids; zeros for ids that are none of `num_embeddings`.

    Per rank weight [ceil(num_embeddings/tp_size), embedding_dim] if sharding_dim is 0, the last
    ranks' padded with zeros, and [num_embeddings, embedding_dim/tp_size] if it is 1.
    """

    codes = ""  # the dtype of the weight where that is not `dtype`

    @signatures(a=_NAMES, b=_NAMES)
    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        dtype: Any = None,
        tp_size: int = 1,
        tp_group: Sequence[int] | None = None,
        sharding_dim: int = 0,
        tp_rank: int | None = None,
        instance_id: int | None = None,
    ) -> None:
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.dtype = irc_dtype(dtype) if dtype is not None else "f32"
        parallel = tp_size > 1 and tp_group is not None
        self.tp_size, self.tp_group = tp_size, tp_group if parallel else None
        self.sharding_dim, self.tp_rank, self.instance_id = sharding_dim, tp_rank, instance_id
        if sharding_dim not in (0, 1):
            raise ArgumentError(
                f"Embedding: expected sharding_dim 0 or 1, found {sharding_dim}", loc=here()
            )
        parts = tp_size if parallel else 1
        shape = [-(-num_embeddings // parts), embedding_dim]
        if sharding_dim == 1:
            columns = shard_size("Embedding", "embedding_dim", embedding_dim, parts)
            shape = [num_embeddings, columns]
        self.weight = sharded_parameter(
            shape, self.codes or self.dtype, sharding_dim, self.tp_group
        )
        self.weight.whole_size = num_embeddings if sharding_dim == 0 else 0

    def forward(self, x: Tensor, workspace: Tensor | None = None) -> Tensor:
        """ids i32|i64 [...] to [..., embedding_dim] on every rank."""
        return self.look_up(x)

    def look_up(self, ids: Tensor, per_token_scale: Tensor | None = None) -> Tensor:
        """The rows of ids, times the factor of each row if there are any."""
        return embedding(
            input=ids,
            weight=self.weight.value,
            tp_size=self.tp_size,
            tp_group=self.tp_group,
            sharding_dim=self.sharding_dim,
            tp_rank=self.tp_rank,
            per_token_scale=per_token_scale,
            vocab_size=self.num_embeddings,
        )


class PromptTuningEmbedding(Embedding):
    """Rows of a table for ids below `vocab_size`, and of the prompt table for those from there on.

    Token vocab_size + i of a row with task t is row t * task_vocab_size + i of the prompt table.
    """

    @signatures(a=_PROMPT_NAMES, b=_PROMPT_NAMES)
    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        vocab_size: int | None = None,
        tp_rank: int = 0,
        **more: Any,
    ) -> None:
        sizes = {"num_embeddings": num_embeddings, "embedding_dim": embedding_dim}
        super().__init__(**sizes, tp_rank=tp_rank, **more)
        self.vocab_size = num_embeddings if vocab_size is None else vocab_size

    @classmethod
    def of(cls, table: Embedding) -> PromptTuningEmbedding:
        """An embedding with the parameters of another one, which has no prompts."""
        prompted = cls.__new__(cls)
        vars(prompted).update(vars(table), vocab_size=table.num_embeddings)
        return prompted

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        tokens: Tensor,
        prompt_embedding_table: Tensor,
        tasks: Tensor,
        task_vocab_size: Tensor,
        workspace: Tensor | None = None,
    ) -> Tensor:
        """tokens i32 [B, S] or packed [N], prompt_embedding_table [rows, embedding_dim], tasks
        i32 [B], [B, 1] or [N], task_vocab_size i32 [1], to [..., embedding_dim]."""
        ids, table = unwrap(tokens), unwrap(prompt_embedding_table)
        size = unwrap(task_vocab_size).cast(ids.dtype)
        tuned = F.ge(ids, self.vocab_size)
        last = F.full(self.vocab_size - 1, dtype=ids.dtype)
        normal = self.look_up(wrap(F.where(tuned, last, ids)))
        task = _per_token(unwrap(tasks).cast(ids.dtype), ids)
        zero = F.full(0, dtype=ids.dtype)
        rows = F.where(tuned, ids - self.vocab_size, zero) + task * size
        prompt = F.embedding(rows, table.cast(unwrap(normal).dtype))
        return wrap(F.where(tuned.unsqueeze(-1), prompt, unwrap(normal)))


def _per_token(tasks: Any, ids: Any) -> Any:
    """The task of each row of tokens, so that it broadcasts to them."""
    if tasks.ndim < ids.ndim and tasks.shape[0] in (1, ids.shape[0]):
        return tasks.unsqueeze(-1)
    if tasks.ndim == ids.ndim:
        return tasks
    raise Error(
        f"PromptTuningEmbedding: expected a task per row or token of {ids.type}, found "
        f"{tasks.type}",
        loc=here(),
    )
