"""Quality of a language model against another one: perplexity, KL divergence, top-1 agreement."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np

from ..analysis.units import counted
from ..errors import Error
from ..ir.dims import linear
from ..ir.result_names import NEXT_TOKENS
from .model import Model

Array: TypeAlias = np.ndarray[Any, Any]

LENGTH = 256  # tokens of a window by default


@dataclass(frozen=True)
class Quality:
    """Means over all predicted tokens of a text.

    `perplexity`: exp of the mean negative log-likelihood. `kl`: the Kullback-Leibler divergence of
    the model's distribution from the reference's, in nats per token. `top1`: the fraction of tokens
    at which both have the same likeliest next token.
    """

    tokens: int
    perplexity: float
    reference_perplexity: float | None = None
    kl: float | None = None
    top1: float | None = None

    @property
    def increase(self) -> float | None:
        """The relative increase of the perplexity over the reference's."""
        before = self.reference_perplexity
        return None if before is None else self.perplexity / before - 1

    def as_json(self) -> dict[str, Any]:
        """All fields and the increase, for JSON."""
        return asdict(self) | {"increase": self.increase}


def longest_call(model: Model, most: int = LENGTH) -> int:
    """The tokens of a window: `most`, or fewer if a call of the model takes fewer."""
    longest = most
    for port in model.program.ports.inputs:
        terms = linear(port.shape[1]) if len(port.shape) == 2 else None
        if terms is not None and terms[0] in model.dims:
            name, factor, rest = terms
            longest = min(longest, int(model.dims[name][2]) * factor + rest)
    return longest


def measure_quality(
    model: Model,
    reference: Model | None,
    ids: Sequence[int],
    length: int = LENGTH,
    progress: Callable[[float], None] = lambda fraction: None,
) -> Quality:
    """The quality of `model` on a text of tokens, in windows of `length` that share no context.

    Every window is one call, so `length` must lie in the range of S that the models take. The last
    window may be shorter.
    """
    windows = [ids[at : at + length] for at in range(0, len(ids), length)]
    windows = [window for window in windows if len(window) > 1]
    if not windows:
        count = counted(len(ids), "token")
        raise Error(f"the text has {count}; expected at least 2, to predict one of them")
    sums = np.zeros(4)  # negative log-likelihoods of both, divergence, agreements
    for at, window in enumerate(windows):
        progress(at / len(windows))
        sums += _window(model, reference, window)
    count = sum(len(window) - 1 for window in windows)
    likelihood, other, kl, same = (sums / count).tolist()
    if reference is None:
        return Quality(count, float(np.exp(likelihood)))
    return Quality(count, float(np.exp(likelihood)), float(np.exp(other)), kl, same)


def _window(model: Model, reference: Model | None, ids: Sequence[int]) -> Array:
    """The sums over the predictions of one window."""
    wanted = np.asarray(ids[1:])
    sums = np.zeros(4)
    parts = _log_probabilities(model, ids)
    others = _log_probabilities(reference, ids) if reference is not None else None
    at = 0
    for part in parts:
        here = wanted[at : at + len(part)]
        rows = np.arange(len(here))
        sums[0] -= part[rows, here].sum()
        if others is not None:
            other = next(others)
            sums[1] -= other[rows, here].sum()
            likely = other > -np.inf  # tokens of probability 0 add nothing
            sums[2] += (np.exp(other[likely]) * (other[likely] - part[likely])).sum()
            sums[3] += (other.argmax(-1) == part.argmax(-1)).sum()
        at += len(part)
    return sums


def _log_probabilities(model: Model, ids: Sequence[int]) -> Iterator[Array]:
    """f64 [64, V] at a time: the log-probabilities of the token after each but the last."""
    outputs = model.run({"input_ids": np.asarray([ids], np.int32)})
    if "logits" not in outputs:
        instead = "; compile without --next-tokens" if NEXT_TOKENS in outputs else ""
        raise Error(f"the model returns no logits, only {', '.join(outputs)}{instead}")
    logits = outputs["logits"][0]
    if logits.shape[0] != len(ids):
        raise Error(
            f"the model returns logits of {logits.shape[0]} of {len(ids)} tokens; expected all"
        )
    for at in range(0, len(ids) - 1, 64):
        part = logits[at : min(at + 64, len(ids) - 1)].astype(np.float64)
        part -= part.max(-1, keepdims=True)
        yield part - np.log(np.exp(part).sum(-1, keepdims=True))
