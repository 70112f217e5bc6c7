"""Changed logits and the probabilities of drawn tokens, compared with transformers."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from irc.generation.checkpoint_settings import CheckpointSettings
from irc.generation.rules import DecodingRules, History
from irc.generation.sampling import candidates, draw, log_probability_of
from irc.generation.settings import GenerationSettings
from tests.fresh import fresh

SIZE, END, PROMPT = 40, 39, 5
DRAWS = 100_000


def logits(size: int = SIZE, scale: float = 3) -> np.ndarray:
    return fresh(size).standard_normal(size) * scale


def tokens(count: int = 16) -> list[int]:
    return fresh(9).integers(0, SIZE // 4, count).tolist()


def of_transformers(ids: list[int], scores: np.ndarray, **settings: Any) -> np.ndarray:
    """The scores after all processors of transformers' generate, in its order."""
    torch: Any = pytest.importorskip("torch")
    transformers: Any = pytest.importorskip("transformers")

    class Owner(transformers.GenerationMixin):
        config = transformers.PretrainedConfig()

    config = transformers.GenerationConfig(**settings)
    config._eos_token_tensor = torch.tensor([END])
    processors = Owner()._get_logits_processor(config, input_ids_seq_length=PROMPT, device="cpu")
    return processors(torch.tensor([ids]), torch.from_numpy(scores[None].copy()))[0].numpy()


@pytest.mark.parametrize(
    ("settings", "checkpoint"),
    [
        ({"repetition_penalty": 1.4}, {}),
        ({"no_repeat_ngram_size": 1}, {}),
        ({"no_repeat_ngram_size": 2}, {}),
        ({"min_new_tokens": 11}, {}),
        ({"min_new_tokens": 12}, {}),
        ({"min_length": 16}, {}),
        ({"min_length": 17}, {}),
        ({}, {"bad_words_ids": ((3,), (END,))}),
        ({}, {"suppress_tokens": (1, 2, END)}),
        ({"repetition_penalty": 0.7, "no_repeat_ngram_size": 3}, {"suppress_tokens": (4,)}),
        ({"repetition_penalty": 2.0, "max_length": 17}, {"forced_eos_token_ids": (END, 3)}),
    ],
)
def test_logits_as_transformers_changes_them(
    settings: dict[str, Any], checkpoint: dict[str, Any]
) -> None:
    ids, scores = tokens(), logits()
    ids[-2:] = ids[:2]  # an n-gram that occurs again
    if "bad_words_ids" in checkpoint:  # two that would be complete, and one that would not
        checkpoint = {"bad_words_ids": (*checkpoint["bad_words_ids"], (*ids[-2:], 7), (8, 9, 6))}
    theirs = {name.replace("eos_token_ids", "eos_token_id"): x for name, x in checkpoint.items()}
    theirs = {
        name: [list(x) if isinstance(x, tuple) else x for x in value]
        for name, value in theirs.items()
    }
    wanted = of_transformers(ids, scores, **settings, **theirs)
    rules = DecodingRules(
        GenerationSettings(**settings), 12, (END,), checkpoint=CheckpointSettings(**checkpoint)
    )
    adjusted = rules.adjusted(scores, History(ids, PROMPT, rules))
    np.testing.assert_allclose(adjusted, wanted, rtol=1e-12)
    changes = not np.array_equal(wanted, scores)
    assert changes == (settings not in ({"min_new_tokens": 11}, {"min_length": 16}))


@pytest.mark.parametrize(("count", "forced"), [(1, None), (1, 4), (2, 4), (2, None)])
def test_tokens_of_the_beginning(count: int, forced: int | None) -> None:
    """As transformers: a forced first token, behind which others may not begin."""
    settings = {"begin_suppress_tokens": [4, 5], "forced_bos_token_id": forced}
    checkpoint = CheckpointSettings(begin_suppress_tokens=(4, 5), forced_bos_token_id=forced)
    rules = DecodingRules(GenerationSettings(), 12, (END,), checkpoint=checkpoint)
    for new in range(3):
        ids, scores = [7] * (count + new), logits()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tests.generation.test_sampling.PROMPT", count)
            wanted = of_transformers(ids, scores, **settings)
        adjusted = rules.adjusted(scores, History(ids, count, rules))
        np.testing.assert_array_equal(adjusted, wanted)


def test_penalties_by_presence_and_frequency_of_new_tokens() -> None:
    ids, scores = tokens(), logits()
    settings = GenerationSettings(presence_penalty=0.5, frequency_penalty=0.25)
    for whole in (False, True):
        rules = DecodingRules(settings, 99, counts_prompt=whole)
        adjusted = rules.adjusted(scores, History([*ids, SIZE + 3], PROMPT, rules))
        counts = Counter(ids[0 if whole else PROMPT :])
        wanted = [x - (0.5 * (i in counts) + 0.25 * counts[i]) for i, x in enumerate(scores)]
        np.testing.assert_allclose(adjusted, wanted, rtol=1e-12)


WARPERS: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_k": 1000},
    {"top_p": 0.8},
    {"top_p": 0.99, "temperature": 3.0},
    {"top_p": 0.0},
    {"min_p": 0.1},
    {"typical_p": 0.6},
    {"typical_p": 0.95, "temperature": 2.0},
    {"temperature": 1.7, "top_k": 30, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.9},
    {"temperature": 2.0, "top_p": 0.7, "min_p": 0.2, "typical_p": 0.5},
    {"top_p": 0.9, "min_p": 0.4, "typical_p": 0.6},
]


def sampled(settings: dict[str, Any]) -> GenerationSettings:
    return GenerationSettings(**{"temperature": 1.0, **settings})


def chances_of(settings: dict[str, Any], scores: np.ndarray) -> np.ndarray:
    wanted = of_transformers([1] * PROMPT, scores, do_sample=True, **({"top_k": 0} | settings))
    chances = np.exp(wanted - wanted.max())
    return chances / chances.sum()


@pytest.mark.parametrize("size", [SIZE, 5000])
@pytest.mark.parametrize("settings", WARPERS)
def test_the_tokens_that_are_kept_and_their_probabilities(
    settings: dict[str, Any], size: int
) -> None:
    scores, all_chances = logits(size, 2), np.zeros(size)
    kept, chances = candidates(scores, sampled(settings))
    all_chances[slice(None) if kept is None else kept] = chances / chances.sum()
    np.testing.assert_allclose(all_chances, chances_of(settings, scores), rtol=1e-9, atol=0)


@pytest.mark.parametrize("settings", [WARPERS[at] for at in (0, 1, 3, 6, 7, 9)])
def test_drawn_tokens_have_the_probabilities_of_transformers(settings: dict[str, Any]) -> None:
    scores, random = logits(scale=1), fresh(3)
    wanted = chances_of(settings, scores) * DRAWS
    chosen = sampled(settings)
    counts = np.bincount([draw(scores, chosen, random) for _ in range(DRAWS)], minlength=SIZE)
    assert not counts[wanted == 0].any()
    kept = wanted > 0
    freedom = int(kept.sum()) - 1
    statistic = ((counts[kept] - wanted[kept]) ** 2 / wanted[kept]).sum()
    # Wilson and Hilferty (1931): a cube root of chi-square is about normal; 6 sigma: 1e-9
    normal = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (
        2 / (9 * freedom)
    ) ** 0.5
    assert normal < 6


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8, "top_k": 1, "top_p": 0.4}])
def test_the_most_likely_token(settings: dict[str, Any]) -> None:
    scores = logits()
    scores[[3, 5]] = scores.max() + 1
    assert draw(scores, GenerationSettings(**settings), fresh()) == 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers(temperature: float) -> None:
    chosen, random = GenerationSettings(temperature=temperature), fresh()
    nothing = np.full(SIZE, -np.inf)
    assert draw(nothing, chosen, random, END) == END
    for scores, wanted in ((nothing, 7), (np.full(SIZE, np.nan), 7), (logits(), 7)):
        scores = np.where(np.arange(SIZE) == wanted, 99.0, scores)
        scores[3] = np.nan
        assert draw(scores, chosen, random) == wanted
        scores[5] = np.inf
        assert draw(scores, chosen, random) == 5
    assert 0 <= draw(np.full(SIZE, np.nan), chosen, random) < SIZE
    assert np.isfinite(log_probability_of(np.full(SIZE, np.nan), 3, 2)[0])


def test_the_best_tokens() -> None:
    torch: Any = pytest.importorskip("torch")
    scores = logits()
    wanted = torch.log_softmax(torch.from_numpy(scores), 0)
    chance, best = log_probability_of(scores, 6, 4)
    assert chance == pytest.approx(wanted[6].item())
    assert [token for token, _ in best] == wanted.topk(4).indices.tolist()
    np.testing.assert_allclose([x for _, x in best], wanted.topk(4).values)
    assert len(log_probability_of(scores, 6, 99)[1]) == SIZE
