"""Penalties, forbidden tokens and the probabilities of drawn tokens, compared with transformers."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from irc.errors import Error
from irc.generation.sampling import Sampling, adjusted, draw, log_probabilities
from tests.fresh import fresh

SIZE = 17


class Recorder:
    """Random numbers that keep the probabilities asked for, and choose the last token."""

    def choice(self, count: int, p: np.ndarray) -> int:
        self.chances = p
        return count - 1


def logits(stream: int = 0) -> np.ndarray:
    return fresh(stream).standard_normal(SIZE, np.float32) * 3


def tokens(count: int = 12) -> list[int]:
    return fresh(9).integers(0, SIZE // 2, count).tolist()


def of_transformers(name: str, *args: Any, ids: list[int], scores: np.ndarray) -> np.ndarray:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    processor = getattr(transformers.generation.logits_process, name)(*args)
    given = torch.tensor([ids]), torch.from_numpy(scores[None].astype(np.float32))
    return processor(*given)[0].numpy()


@pytest.mark.parametrize(
    ("name", "args", "settings", "bad"),
    [
        ("TemperatureLogitsWarper", (0.7,), {"temperature": 0.7}, ()),
        ("RepetitionPenaltyLogitsProcessor", (1.4,), {"repetition_penalty": 1.4}, ()),
        ("NoRepeatNGramLogitsProcessor", (1,), {"no_repeat_ngram_size": 1}, ()),
        ("NoRepeatNGramLogitsProcessor", (2,), {"no_repeat_ngram_size": 2}, ()),
        ("NoBadWordsLogitsProcessor", ([[3], [4, 5]],), {}, [[3], [], [4, 5]]),
    ],
)
def test_logits_as_transformers_adjusts_them(
    name: str, args: tuple[Any, ...], settings: dict[str, Any], bad: Any
) -> None:
    ids, scores = [*tokens(), 4], logits()
    wanted = of_transformers(name, *args, ids=ids, scores=scores)
    found = adjusted(scores, Sampling(**settings), ids, 2, bad=bad)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_penalties_by_presence_and_frequency() -> None:
    ids, scores = tokens(), logits()
    found = adjusted(scores, Sampling(presence_penalty=0.5, frequency_penalty=0.25), ids, 3)
    counts = Counter(ids)
    wanted = [x - (0.5 + 0.25 * counts[i]) * (i in counts) for i, x in enumerate(scores.tolist())]
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


@pytest.mark.parametrize(("new", "forbidden"), [(0, True), (1, True), (2, False)])
def test_the_third_token_may_be_the_end_where_three_are_asked_for(
    new: int, forbidden: bool
) -> None:
    found = adjusted(logits(), Sampling(min_length=3), [1] * (4 + new), 4, ends=(6,))
    assert np.isinf(found[6]) == forbidden
    assert np.isfinite(np.delete(found, 6)).all()


@pytest.mark.parametrize(("top_k", "top_p"), [(5, 0.0), (0, 0.8), (6, 0.5), (0, 1.0), (SIZE, 1.0)])
def test_the_probabilities_of_a_draw(top_k: int, top_p: float) -> None:
    scores, random = logits(), Recorder()
    token = draw(scores, Sampling(top_k=top_k, top_p=top_p), random)  # pyright: ignore[reportArgumentType]
    kept = scores
    if top_k:
        kept = of_transformers("TopKLogitsWarper", top_k, ids=[1], scores=kept)
    if top_p:
        kept = of_transformers("TopPLogitsWarper", top_p, ids=[1], scores=kept)
    order = np.argsort(-scores)[: len(random.chances)]
    np.testing.assert_allclose(random.chances, np.exp(log_probabilities(kept))[order], rtol=1e-4)
    assert random.chances.sum() == pytest.approx(1)
    assert token == order[-1]


@pytest.mark.parametrize("settings", [{}, {"top_k": 0}, {"top_k": 1, "top_p": 0.4}])
def test_greedy(settings: dict[str, Any]) -> None:
    scores = logits()
    scores[[3, 5]] = scores.max() + 1
    assert draw(scores, Sampling(**settings), fresh()) == 3
    assert draw(np.full(SIZE, -np.inf), Sampling(top_k=4), fresh()) == 0  # all are forbidden


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0.0}, "temperature is 0.0; expected more than 0"),
        ({"top_k": -1}, "top_k is -1; expected 0"),
        ({"top_p": 1.5}, "top_p is 1.5; expected from 0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"min_length": -1}, "min_length is -1"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(Error, match=message):
        Sampling(**settings)
