"""Beam search, compared with that of transformers on random models."""

from typing import Any

import numpy as np
import pytest

from irc.generation.sampling import Sampling
from irc.generation.search import Beams, DecodingRules, Sampled
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


def searched(model: Random, penalty: float, early: bool) -> list[list[int]]:
    """The sequences that Beams finds, best first."""
    beams = Beams(PROMPT, DecodingRules(Sampling(), LIMIT, (END,)), WIDTH, penalty, early)
    rows = [PROMPT] * WIDTH
    while not beams.done:
        order = beams.advance(np.stack([model.logits(row) for row in rows]))
        last = [tokens[-1] for tokens in beams.sequences]
        rows = [[*rows[at], token] for at, token in zip(order, last, strict=True)]
        assert rows[: len(beams.running)] == [each.tokens for each in beams.running]
    return [each.tokens for each in beams.results]


def of_transformers(models: list[Random], penalty: float, early: bool) -> list[list[list[int]]]:
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
            early_stopping=early,
            length_penalty=penalty,
        )
        found.append([[token for token in row if token != SIZE] for row in rows.tolist()])
    return found


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
def test_beams_are_those_of_transformers(penalty: float, early: bool) -> None:
    models = [Random(seed) for seed in range(12)]
    wanted = of_transformers(models, penalty, early)
    assert [searched(model, penalty, early) for model in models] == wanted
    assert penalty or any(len(row) < len(PROMPT) + LIMIT for rows in wanted for row in rows)


def test_stop_words_end_beams_and_bad_words_are_left_out() -> None:
    rules = DecodingRules(Sampling(), LIMIT, (), stop=[[3], [4, 5]], bad=[[0]])
    beams, model = Beams(PROMPT, rules, WIDTH), Random(99)
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
        draws = Sampled(PROMPT, DecodingRules(Sampling(top_k=0, top_p=1.0), limit, (END,)), fresh())
        while not draws.done:
            assert draws.advance(model.logits(draws.results[0].tokens)[None]) == [0]
        new = draws.results[0].tokens[len(PROMPT) :]
        assert len(new) == limit or new[-1] == END
        assert END not in new[:-1] and len(draws.results[0].log_probs) == len(new)
