"""Embedding tables, and those that prompt tuning extends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from ... import functional as F
from ...tensor import Tensor
from ..api import api
from ..arithmetic import unwrapped
from ..errors import ArgumentError, ScriptError
from ..functional.collectives import embedding
from ..module import Module
from .linear import shard_size, sharded_parameter


@api("layers.embedding.Embedding", inner=True)
@dataclass(eq=False, repr=False)
class Embedding(Module):
    """Rows of a table for token ids; zeros for ids that are none of `num_embeddings`.

    Per rank weight [ceil(num_embeddings/tp_size), embedding_dim] if sharding_dim is 0, the last
    ranks' padded with zeros, and [num_embeddings, embedding_dim/tp_size] if it is 1.
    """

    num_embeddings: int
    embedding_dim: int
    dtype: Any = None
    tp_size: int = 1
    tp_group: Sequence[int] | None = None
    sharding_dim: int = 0
    tp_rank: int | None = None

    def __post_init__(self) -> None:
        self.tp_group = None if self.tp_size == 1 else self.tp_group
        if self.sharding_dim not in (0, 1):
            raise ArgumentError(
                f"Embedding: expected sharding_dim 0 or 1, found {self.sharding_dim}"
            )
        parts = 1 if self.tp_group is None else self.tp_size
        rows, columns = self.num_embeddings, self.embedding_dim
        if self.sharding_dim == 0:
            shape, whole_size = (-(-rows // parts), columns), rows
        else:
            shape, whole_size = (rows, shard_size("Embedding", "embedding_dim", columns, parts)), 0
        place = self.sharding_dim, self.tp_group, whole_size
        self.weight = sharded_parameter(shape, self.dtype, *place)

    def forward(self, x: Any) -> Any:
        """ids i32|i64 [...] to [..., embedding_dim] on every rank."""
        rows = embedding(
            x,
            cast("Any", self.weight),
            tp_size=self.tp_size,
            tp_group=self.tp_group,
            sharding_dim=self.sharding_dim,
            tp_rank=self.tp_rank,
            vocab_size=self.num_embeddings,
        )
        return unwrapped(rows)


@api("layers.embedding.PromptTuningEmbedding", inner=True)
@dataclass(eq=False, repr=False)
class PromptTuningEmbedding(Embedding):
    """Rows of a table for ids below `vocab_size`, and of the prompt table for those from there on.

    Token vocab_size + i of a row with task t is row t * task_vocab_size + i of the prompt table.
    """

    vocab_size: int | None = None
    tp_rank: int | None = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.vocab_size = self.num_embeddings if self.vocab_size is None else self.vocab_size

    @classmethod
    def of(cls, table: Embedding) -> PromptTuningEmbedding:
        """An embedding with the parameters of another one, which has no prompts."""
        prompted: Any = cls.__new__(cls)
        prompted.__dict__.update(vars(table), vocab_size=table.num_embeddings)
        return prompted

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, tokens: Any, prompt_embedding_table: Any, tasks: Any, task_vocab_size: Any
    ) -> Any:
        """tokens i32 [B, S] or packed [N], prompt_embedding_table [rows, embedding_dim], tasks
        i32 [B], [B, 1] or [N], task_vocab_size i32 [1], to [..., embedding_dim]."""
        assert self.vocab_size is not None
        kind, zero = tokens.dtype, F.full(0, dtype=tokens.dtype)
        tuned = F.ge(tokens, self.vocab_size)
        last = F.full(self.vocab_size - 1, dtype=kind)
        normal: Tensor = super().forward(F.where(tuned, last, tokens))
        start = _per_token(tasks.cast(kind), tokens) * task_vocab_size.cast(kind)
        rows = F.where(tuned, tokens - self.vocab_size, zero) + start
        prompt = F.embedding(rows, prompt_embedding_table.cast(normal.dtype))
        return F.where(tuned.unsqueeze(-1), prompt, normal)


def _per_token(tasks: Tensor, ids: Tensor) -> Tensor:
    """The task of each row of tokens, so that it broadcasts to them."""
    if tasks.ndim < ids.ndim and tasks.shape[0] in (1, ids.shape[0]):
        return tasks.unsqueeze(-1)
    if tasks.ndim == ids.ndim:
        return tasks
    raise ScriptError(
        f"PromptTuningEmbedding: expected a task per row or token of {ids.type}, found {tasks.type}"
    )
