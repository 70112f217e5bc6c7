"""Perplexity, divergence and agreement of language models, against their definitions."""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from irc.backends.base import Port, Ports
from irc.errors import Error
from irc.generation.model import Model
from irc.generation.quality import longest_call, measure_quality
from irc.ir.dims import symbol
from tests.fresh import fresh

VOCABULARY = 11
S = symbol("S")


class Bigram:
    """Logits that are a function of the token alone."""

    def __init__(self, table: np.ndarray, result: str = "logits") -> None:
        self.table, self.result = table, result
        output = Port(result, "f32", (1, S, VOCABULARY))
        self.ports = Ports((Port("input_ids", "i32", (1, S)),), (), (output,))
        self.calls: list[int] = []

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, Any]:
        self.calls.append(inputs["input_ids"].shape[1])
        return {self.result: self.table[inputs["input_ids"]]}


def model(program: Any, most: int = 1000) -> Model:
    return Model(program, {"S": (1, 4, most)}, Path())


def table() -> np.ndarray:
    return (fresh(1).standard_normal((VOCABULARY, VOCABULARY)) * 3).astype(np.float32)


@pytest.mark.parametrize("length", [2, 7, 65, 150, 400])
def test_figures_are_those_of_the_definitions(length: int) -> None:
    mine, other = table(), table()
    mine[3] = other[3]
    mine[:, -1] = other[:, -1] = -np.inf  # a token that is masked
    ids = fresh(length).integers(0, VOCABULARY - 1, 151).tolist()
    found = measure_quality(model(Bigram(mine)), model(Bigram(other)), ids, length)
    pairs = [(a, b) for i, (a, b) in enumerate(pairwise(ids), 1) if i % length]
    p = np.exp(mine.astype(float)) / np.exp(mine.astype(float)).sum(1, keepdims=True)
    q = np.exp(other.astype(float)) / np.exp(other.astype(float)).sum(1, keepdims=True)
    assert found.tokens == len(pairs)
    perplexities = [np.exp(-np.mean([np.log(t[a, b]) for a, b in pairs])) for t in (p, q)]
    assert found.perplexity == pytest.approx(perplexities[0], rel=1e-6)
    assert found.reference_perplexity == pytest.approx(perplexities[1], rel=1e-6)
    terms = q[:, :-1] * np.log(q[:, :-1] / p[:, :-1])
    divergence = np.mean([terms[a].sum() for a, _ in pairs])
    assert found.kl == pytest.approx(divergence, rel=1e-6)
    agree = np.mean([p[a].argmax() == q[a].argmax() for a, _ in pairs])
    assert found.top1 == pytest.approx(agree)
    assert found.increase == pytest.approx(perplexities[0] / perplexities[1] - 1, rel=1e-6)


def test_one_model_alone_has_a_perplexity() -> None:
    found = measure_quality(model(Bigram(np.zeros((VOCABULARY,) * 2))), None, [1, 2, 3], 8)
    assert found.perplexity == pytest.approx(VOCABULARY)
    assert (found.kl, found.top1, found.increase) == (None, None, None)


def test_a_window_is_one_call() -> None:
    program = Bigram(table())
    measure_quality(model(program), None, [1] * 21, 10)
    assert program.calls == [10, 10]  # one token alone predicts nothing
    assert longest_call(model(program, 77)) == 77
    assert longest_call(model(program, 1000)) == 256


@pytest.mark.parametrize(
    ("program", "ids", "message"),
    [
        (Bigram(table()), [1], "the text has 1 token; expected at least 2"),
        (Bigram(table(), "next_tokens"), [1, 2], "no logits, only next_tokens; compile without"),
        (Bigram(table(), "score"), [1, 2], "no logits, only score$"),
    ],
)
def test_what_cannot_be_measured_is_an_error(program: Any, ids: list[int], message: str) -> None:
    with pytest.raises(Error, match=message):
        measure_quality(model(program), None, ids)
