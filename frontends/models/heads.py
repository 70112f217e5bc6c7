"""What a model makes of an encoder's hidden states: pooled vectors, scores, sentence embeddings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeAlias

from .. import functional as F
from ..layers import MLP, Attention, Linear, activation
from ..module import Module, ModuleList, Parameter
from ..tensor import Tensor
from .decoder import DecoderConfig, make_norm
from .language_model import at_positions

Inputs: TypeAlias = Mapping[str, Tensor]  # the arguments of @forward
Pool: TypeAlias = Callable[[Tensor, Inputs], Tensor]  # [B, S, H] to [B, H]


@dataclass(frozen=True)
class Head:
    """pool, then dense and act, then norm, then output; what is empty is absent.

    `pool` makes one vector of all tokens. `dense`, `norm` and `output` are the names of these
    layers in a checkpoint, `bias` that of the output's bias if it is not beside the weight.
    `results` are parts of the last dimension where there are several; `last_hidden_state`: that of
    the encoder is a result as well. `act` "" is that of the encoder, `dense_size` 0 its
    hidden_size. `scores_tokens`: the weights of output may be tied to the table of tokens.
    """

    results: tuple[str, ...] = ("logits",)
    last_hidden_state: bool = False
    pool: Pool | type[Module] | None = None
    dense: str = ""
    dense_size: int = 0
    dense_bias: bool = True
    act: str = ""
    norm: str = ""
    output: str = ""
    outputs: int = 0
    output_bias: bool = True
    bias: str = ""
    scores_tokens: bool = False


ROBERTA_UNUSED = "*pooler.dense.* lm_head.*"  # tensors of heads that another task has


def text_heads(pooled: Head, classes: Head, words: Head) -> dict[str, Head]:
    """The heads of an encoder of texts, by task: of pooled vectors, their classes, and words."""
    return {
        "Model": pooled,
        "ForSequenceClassification": classes,
        "ForTokenClassification": Head(output="classifier"),
        "ForMaskedLM": words,
        "ForQuestionAnswering": Head(output="qa_outputs"),
    }


def roberta_heads(base: str) -> dict[str, Head]:
    """The heads of RoBERTa, and of models that kept its names; `base` is the encoder's."""
    pooled = Head(pool=first_token, dense=f"{base}pooler.dense", act="tanh")
    words = Head(dense="lm_head.dense", act="gelu", norm="lm_head.layer_norm")
    return text_heads(
        pooled,
        replace(pooled, dense="classifier.dense", output="classifier.out_proj"),
        replace(words, output="lm_head.decoder", bias="lm_head.bias"),
    )


class HeadLayers(Module):
    """The layers of a Head."""

    def __init__(self, head: Head, config: DecoderConfig, dtype: str) -> None:
        size, bias = config.hidden_size, head.output_bias
        width = head.dense_size or size if head.dense else size
        self.pool: Any = AttentionPool(config, dtype) if head.pool is AttentionPool else head.pool
        self.dense = Linear(size, width, head.dense_bias, dtype) if head.dense else None
        self.act = activation(head.act or config.hidden_act) if head.dense else None
        self.norm = make_norm(config, dtype, width) if head.norm else None
        self.output = Linear(width, head.outputs, bias, dtype) if head.output else None
        self.results = head.results

    def forward(self, hidden: Tensor, inputs: Inputs) -> dict[str, Tensor]:
        """Hidden states [B, S, hidden_size] to results [B, ...], or [B, S, ...] without pool."""
        x = hidden if self.pool is None else self.pool(hidden, inputs).cast(hidden.dtype)
        for layer in (self.dense, self.act, self.norm, self.output):
            x = x if layer is None else layer(x)
        if len(self.results) < 2:
            return dict.fromkeys(self.results, x)
        parts = x.split(1, -1)
        return {name: part.squeeze(-1) for name, part in zip(self.results, parts, strict=True)}


class AttentionPool(Module):
    """A learned query attends to all tokens, and a feed-forward is added (SigLIP)."""

    def __init__(self, config: DecoderConfig, dtype: str) -> None:
        size, heads = config.hidden_size, config.num_attention_heads
        self.probe = Parameter((1, 1, size), dtype)
        self.attention = Attention(
            size, heads, qkv_bias=True, output_bias=True, memory_size=size, dtype=dtype
        )
        self.norm = make_norm(config, dtype)
        self.mlp = MLP(size, config.intermediate_size, config.hidden_act, dtype=dtype)

    def forward(self, hidden: Tensor, inputs: Inputs) -> Tensor:
        """Hidden states [B, S, H] to [B, H]."""
        batch, _, size = hidden.shape
        x = self.attention(F.expand(self.probe, (batch, 1, size)), memory=hidden)
        return (x + self.mlp(self.norm(x))).squeeze(1)


@dataclass(frozen=True)
class Stage:
    """A module of sentence-transformers behind the pooling.

    It normalizes vectors, or is a dense layer whose weights are in `folder`.
    """

    folder: str = ""
    in_features: int = 0
    out_features: int = 0
    bias: bool = True
    act: str = ""


@dataclass(frozen=True)
class SentenceHead:
    """Pooled vectors side by side, then the stages, as sentence-transformers computes them."""

    pools: tuple[str, ...]
    stages: tuple[Stage, ...] = ()
    last_hidden_state: bool = False


class SentenceLayers(Module):
    """The layers of a SentenceHead."""

    def __init__(self, head: SentenceHead, dtype: str) -> None:
        self.pools, self.stages, self.dtype = head.pools, head.stages, dtype
        self.dense = ModuleList(
            Linear(stage.in_features, stage.out_features, stage.bias, dtype)
            for stage in head.stages
            if stage.folder
        )

    def forward(self, hidden: Tensor, inputs: Inputs) -> dict[str, Tensor]:
        """Hidden states [B, S, hidden_size] to sentence_embedding f32 [B, ...]."""
        hidden, layers = hidden.cast("f32"), iter(self.dense)
        x = F.concat([SENTENCE_POOLS[pool](hidden, inputs) for pool in self.pools], 1)
        for stage in self.stages:
            if not stage.folder:
                x = x / F.maximum(F.sqrt((x * x).sum(1, keep=True)), 1e-12)
                continue
            x = next(layers)(x.cast(self.dtype)).cast("f32")
            x = activation(stage.act)(x) if stage.act else x
        return {"sentence_embedding": x}


def _weighted(hidden: Tensor, weights: Tensor, power: float = 1.0) -> Tensor:
    """The sum of hidden [B, S, H] by weights i32 [B, S], over the power of their sum: f32."""
    weights = weights.cast("f32").unsqueeze(2)
    total = F.maximum(weights.sum(1), 1e-9)
    return (hidden.cast("f32") * weights).sum(1) / (total if power == 1 else F.sqrt(total))


def _mask(inputs: Inputs) -> Tensor:
    """i32 [B, S]: 1 for a token, 0 for padding."""
    return F.ne(inputs["attention_mask"], 0).cast("i32")


def _numbered(inputs: Inputs) -> Tensor:
    """i32 [B, S]: 1, 2, ... for the positions of tokens, 0 for padding."""
    mask = _mask(inputs)
    return mask * (F.iota(mask.shape[1]) + 1).unsqueeze(0)


def _at_largest(hidden: Tensor, scores: Tensor) -> Tensor:
    """hidden [B, S, H] at the first largest score i32 [B, S]: [B, H]."""
    return at_positions(hidden, F.argmax(scores, dim=1, keep=True)).squeeze(1)


@cache
def at_token(token: int) -> Pool:
    """Hidden states at the first `token`; old CLIPs say 2, and mean the largest id."""

    def pool(hidden: Tensor, inputs: Inputs) -> Tensor:
        ids = inputs["input_ids"]
        return _at_largest(hidden, ids if token == 2 else F.eq(ids, token).cast("i32"))

    return pool


def first_token(hidden: Tensor, inputs: Inputs) -> Tensor:
    """Hidden states of the first token, padding or not."""
    return hidden[:, 0]


def last_token(hidden: Tensor, inputs: Inputs) -> Tensor:
    """Hidden states of the last token, padding or not."""
    return hidden[:, -1]


# pooling_mode of sentence-transformers, in the order in which it joins several
SENTENCE_POOLS: dict[str, Pool] = {
    "cls": lambda hidden, inputs: _at_largest(hidden, _mask(inputs)),
    "max": lambda hidden, inputs: F.where(
        F.ne(_mask(inputs), 0).unsqueeze(2), hidden, -math.inf
    ).max(1),
    "mean": lambda hidden, inputs: _weighted(hidden, _mask(inputs)),
    "mean_sqrt_len_tokens": lambda hidden, inputs: _weighted(hidden, _mask(inputs), 0.5),
    "weightedmean": lambda hidden, inputs: _weighted(hidden, _numbered(inputs)),
    "lasttoken": lambda hidden, inputs: _at_largest(hidden, _numbered(inputs)),
}
