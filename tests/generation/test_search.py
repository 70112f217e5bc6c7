"""Beam search, compared with that of transformers on random models."""

from itertools import chain
from typing import Any

import numpy as np
import pytest

from irc.generation.rules import DecodingRules
from irc.generation.search import Beams, Sampled
from irc.generation.settings import GenerationSettings
from tests.fresh import fresh, session_seed

SIZE, END, WIDTH, LIMIT = 7, 6, 3, 6
PROMPT = [1, 2]


class Random:
    """A model whose logits are random numbers that depend on all tokens."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def logits(self, tokens: list[int]) -> np.ndarray:
        random = np.random.default_rng([session_seed(), self.seed, *tokens])
        logits = random.standard_normal(SIZE) * 2
        logits[END] += 0.7  # so that many sequences end early
        return logits


def searched(model: Random, **settings: Any) -> list[list[int]]:
    """The sequences that Beams finds, best first."""
    chosen = GenerationSettings(num_beams=WIDTH, max_new_tokens=LIMIT, **settings)
    beams = Beams(PROMPT, DecodingRules(chosen, LIMIT, (END,)))
    rows = [PROMPT] * WIDTH
    while not beams.done:
        order = beams.advance(np.stack([model.logits(row) for row in rows]))
        last = [tokens[-1] for tokens in beams.sequences]
        rows = [[*rows[at], token] for at, token in zip(order, last, strict=True)]
        assert beams.done or beams.sequences[0] == rows[0]
    assert {answer.finish for answer in beams.answers()} <= {"end", "length"}
    return [each.tokens for each in beams.results]


def of_transformers(models: list[Random], **settings: Any) -> list[list[list[int]]]:
    """The sequences that transformers finds for each model."""
    torch: Any = pytest.importorskip("torch")
    transformers: Any = pytest.importorskip("transformers")

    class Model(transformers.PreTrainedModel, transformers.GenerationMixin):
        config_class = transformers.PretrainedConfig

        def __init__(self) -> None:
            super().__init__(transformers.PretrainedConfig(vocab_size=SIZE, is_decoder=True))
            self.unused = torch.nn.Parameter(torch.zeros(1))
            self.logits = models[0].logits

        def forward(self, input_ids: Any, **_: Any) -> Any:
            rows = np.stack([self.logits(row) for row in input_ids.tolist()])
            logits = torch.from_numpy(rows)[:, None]
            return transformers.modeling_outputs.CausalLMOutput(logits=logits)

        def prepare_inputs_for_generation(self, input_ids: Any, **_: Any) -> Any:
            return {"input_ids": input_ids}

    made, found = Model(), list[list[list[int]]]()
    for model in models:
        made.logits = model.logits
        rows = made.generate(
            torch.tensor([PROMPT]),
            num_beams=WIDTH,
            num_return_sequences=WIDTH,
            max_new_tokens=LIMIT,
            eos_token_id=END,
            pad_token_id=SIZE,
            do_sample=False,
            use_cache=False,
            **settings,
        )
        found.append([[token for token in row if token != SIZE] for row in rows.tolist()])
    return found


@pytest.mark.parametrize("early", [True, False, "never"])
@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0, -1.0])
def test_beams_are_those_of_transformers(penalty: float, early: bool | str) -> None:
    models = [Random(seed) for seed in range(12)]
    settings = {"length_penalty": penalty, "early_stopping": early}
    wanted = of_transformers(models, **settings)
    assert [searched(model, **settings) for model in models] == wanted
    assert penalty < 1 or any(len(row) < len(PROMPT) + LIMIT for rows in wanted for row in rows)


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.3, "early_stopping": True},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 4, "length_penalty": -2.0},
    ],
)
def test_penalties_change_the_log_probabilities_of_beams(settings: dict[str, Any]) -> None:
    models = [Random(seed) for seed in range(20, 26)]
    sequences = [searched(model, **settings) for model in models]
    assert sequences == of_transformers(models, **settings)
    assert sequences != of_transformers(models)


def diverse(model: Random, groups: int, penalty: float) -> list[list[int]]:
    """Diverse beam search by the paper's Algorithm 1 with Hamming diversity, without end tokens.

    Vijayakumar et al. (2016): at each step, group by group, log-probabilities lose `penalty` for
    each beam of an earlier group with the same token at this step.
    """
    size = WIDTH // groups
    beams: list[list[tuple[float, list[int]]]] = [[(0.0, PROMPT)] for _ in range(groups)]
    for _ in range(LIMIT):
        chosen = np.zeros(SIZE)
        for at in range(groups):
            every: list[tuple[float, list[int]]] = []
            for score, tokens in beams[at]:
                logits = model.logits(tokens)
                chances = logits - np.log(np.exp(logits).sum()) - penalty * chosen
                every += [(score + chances[i], [*tokens, i]) for i in range(SIZE)]
            beams[at] = sorted(every, key=lambda beam: -beam[0])[:size]
            for _, tokens in beams[at]:
                chosen[tokens[-1]] += 1
    return [tokens for _, tokens in sorted(chain(*beams), key=lambda beam: -beam[0])]


@pytest.mark.parametrize(("groups", "penalty"), [(3, 1.5), (3, 0.2), (3, 0.0), (1, 0.0)])
def test_groups_of_beams_are_those_of_the_paper(groups: int, penalty: float) -> None:
    def endless(model: Random) -> Random:
        logits = model.logits
        model.logits = lambda tokens: np.where(np.arange(SIZE) == END, -40, logits(tokens))
        return model

    models = [endless(Random(seed)) for seed in range(40, 46)]
    settings = {"num_beam_groups": groups, "diversity_penalty": penalty}
    sequences = [searched(model, **settings) for model in models]
    assert sequences == [diverse(model, groups, penalty) for model in models]
    distinct = sum(len({tuple(row) for row in rows}) for rows in sequences)
    every = len(models) * WIDTH
    if penalty == 1.5 or groups == 1:
        assert distinct > 0.8 * every  # beams of two groups may meet again
    else:
        assert distinct < every


def test_stop_words_end_beams_and_bad_words_are_left_out() -> None:
    settings = GenerationSettings(num_beams=WIDTH)
    rules = DecodingRules(settings, LIMIT, (), stop=[[3], [4, 5]], bad=[[0]])
    beams, model = Beams(PROMPT, rules), Random(99)
    rows = [PROMPT] * WIDTH
    while not beams.done:
        order = beams.advance(np.stack([model.logits(row) for row in rows]))
        last = [tokens[-1] for tokens in beams.sequences]
        rows = [[*rows[at], token] for at, token in zip(order, last, strict=True)]
    for each in beams.results:
        new = each.tokens[len(PROMPT) :]
        assert 0 not in new and 3 not in new[:-1]
        assert [4, 5] not in [new[at : at + 2] for at in range(len(new) - 2)]


def test_draws_stop_at_the_limit_or_at_an_end() -> None:
    model = Random(5)
    for limit in (0, 1, LIMIT):
        rules = DecodingRules(GenerationSettings(temperature=1.0), limit, (END,))
        draws = Sampled(PROMPT, rules, fresh())
        while not draws.done:
            assert draws.finish == ""
            assert draws.advance(model.logits(draws.results[0].tokens)[None]) == [0]
        new = draws.results[0].tokens[len(PROMPT) :]
        assert draws.finish == ("end" if new[-1:] == [END] else "length")
        assert len(new) == limit or new[-1] == END
        assert END not in new[:-1] and len(draws.results[0].log_probs) == len(new)
