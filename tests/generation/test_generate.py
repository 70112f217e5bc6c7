"""Generated tokens and texts, with the settings of generation_config.json, against transformers.

Prompts are drawn until the answer is no near tie: small changes of the weights do not change it.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import irc
from irc.errors import Error
from irc.generation.model import Model
from irc.generation.search import Completion
from irc.generation.settings import GenerationSettings
from irc.generation.tokenizer import Tokenizer
from tests.fresh import fresh, session_seed
from tests.tiny_checkpoint import write_checkpoint, write_tokenizer

torch: Any = pytest.importorskip("torch")
transformers: Any = pytest.importorskip("transformers")
VOCAB, NEW, NOISE, ENDS = 300, 12, 1e-4, [299]


class Pair(NamedTuple):
    """A model of irc, and one of transformers with another that is almost equal to it."""

    model: Model
    theirs: list[Any]
    letters: list[int]  # tokens that are text in ASCII

    def settings(self, folder: Path, config: dict[str, Any]) -> Model:
        """The model with a generation_config.json, from which transformers reads too."""
        write_tokenizer(folder)
        others = [token for token in range(VOCAB) if token not in (*self.letters, *ENDS)]
        config = {"eos_token_id": ENDS, "pad_token_id": 0, "suppress_tokens": others, **config}
        (folder / "generation_config.json").write_text(json.dumps(config))
        ends = config["eos_token_id"]
        ends = ends if isinstance(ends, list) else [ends]
        return Model(self.model.program, self.model.dims, folder, ends, self.model.module)

    def prompt(self, random: np.random.Generator, length: int = 0) -> list[int]:
        return random.choice(self.letters, length or random.integers(2, 9)).tolist()

    def answers(self, theirs: Any, folder: Path, prompt: list[int], **more: Any) -> list[list[int]]:
        """The new tokens of transformers, without padding."""
        config = transformers.GenerationConfig.from_pretrained(folder)
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json")
        )
        ids = torch.tensor([prompt])
        rows = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=config,
            tokenizer=tokenizer, **more,
        ).tolist()  # fmt: skip
        ends = config.eos_token_id
        new = [row[len(prompt) :] for row in rows]
        return [
            row[: next((i + 1 for i, t in enumerate(row) if t in ends), len(row))] for row in new
        ]

    def steady(
        self, folder: Path, draw: Callable[[], list[int]], **more: Any
    ) -> tuple[list[int], list[list[int]]]:
        """A prompt whose answers do not depend on small changes, and these answers."""
        for _ in range(30):
            prompt = draw()
            first, second = (self.answers(x, folder, prompt, **more) for x in self.theirs)
            if first == second:
                return prompt, first
        raise AssertionError("all answers are near ties")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("pair")
    checkpoint = write_checkpoint(folder / "checkpoint", session_seed())
    theirs = [transformers.AutoModelForCausalLM.from_pretrained(checkpoint) for _ in range(2)]
    noise = torch.Generator().manual_seed(session_seed())
    for weight in theirs[1].parameters():
        weight.data *= 1 + NOISE * torch.randn(weight.shape, generator=noise)
    torch.set_num_threads(1)
    model = irc.compile(checkpoint, folder / "model", dims={"B": (1, 3, 6)}).model
    tokenizer = Tokenizer(checkpoint)
    texts = {token: tokenizer.decode([token]) for token in range(VOCAB)}
    letters = [
        token for token, text in texts.items() if text.isascii() and text.isprintable() and text
    ]
    return Pair(model, theirs, letters)


def new_tokens(answers: Sequence[Completion]) -> list[list[int]]:
    return [answer.tokens for answer in answers]


GREEDY: dict[str, dict[str, Any]] = {
    "greedy": {},
    "max_length": {"max_length": 14, "max_new_tokens": None},
    "repetition": {"repetition_penalty": 1.3},
    "n-grams": {"no_repeat_ngram_size": 2},
    "length": {"min_length": 12},
    "new tokens": {"min_new_tokens": 6},
    "forced end": {"forced_eos_token_id": 299},
    "many": {"repetition_penalty": 0.8, "no_repeat_ngram_size": 3, "min_new_tokens": 3},
}
BEAMS: dict[str, dict[str, Any]] = {
    "beams": {},
    "early": {"early_stopping": True},
    "never, long": {"early_stopping": "never", "length_penalty": 2.0},
    "never, short": {"early_stopping": "never", "length_penalty": -1.0},
    "short": {"length_penalty": 0.0},
    "changed": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 4},
}


@pytest.mark.parametrize("name", [*GREEDY, *BEAMS])
def test_answers_are_those_of_transformers(name: str, pair: Pair, tmp_path: Path) -> None:
    """Each prompt alone in transformers, several of other lengths at once in irc."""
    random, config = fresh(), {"max_new_tokens": NEW, **({**GREEDY, **BEAMS}[name])}
    more: dict[str, Any] = {}
    if name in BEAMS:
        config |= {"num_beams": 3}
        more = {"num_return_sequences": 3}
    pair.settings(tmp_path, config)
    # tokens that end some answers, and that some may not have
    likely = pair.answers(pair.theirs[0], tmp_path, pair.prompt(random))[0]
    config |= {"eos_token_id": [*ENDS, *{*likely[3:6]} - {*likely[:3]}]}
    words = [[likely[2]], likely[1:3]] if name in ("many", "changed") else []
    config |= {"bad_words_ids": words} if words else {}
    model = pair.settings(tmp_path, config)
    pairs = [pair.steady(tmp_path, lambda: pair.prompt(random), **more) for _ in range(3)]
    prompts = [prompt for prompt, _ in pairs]
    completions = model.completions(prompts, model.defaults.changed(more))
    assert [new_tokens(answers) for answers in completions] == [answers for _, answers in pairs]
    for answers in completions:
        for answer in answers:
            ended = answer.tokens[-1] in config["eos_token_id"]
            assert answer.finish == ("end" if ended else "length")


def test_tokens_of_the_begin(pair: Pair, tmp_path: Path) -> None:
    first, second = pair.letters[:2]
    config = {"max_new_tokens": 5, "forced_bos_token_id": first}
    model = pair.settings(tmp_path, config)
    prompt, plain = pair.steady(tmp_path, lambda: pair.prompt(fresh(), 1))
    assert plain[0][0] == first
    config |= {"begin_suppress_tokens": [second, plain[0][1]]}
    model = pair.settings(tmp_path, config)
    for length in (1, 3):
        prompt, wanted = pair.steady(tmp_path, lambda n=length: pair.prompt(fresh(n), n))
        assert new_tokens(model.completions([prompt])[0]) == wanted


@pytest.mark.parametrize("beams", [1, 3])
def test_stop_strings_over_token_borders(beams: int, pair: Pair, tmp_path: Path) -> None:
    config: dict[str, Any] = {"max_new_tokens": NEW, "num_beams": beams}
    pair.settings(tmp_path, config)
    random, decode, prompt, stop = fresh(7), Tokenizer(tmp_path).decode, [0], ""
    while (
        not stop or decode(prompt)[-1:] in stop
    ):  # transformers also finds what begins in the prompt
        prompt, (answer,) = pair.steady(tmp_path, lambda: pair.prompt(random))
        begin = len(decode(answer[:4])) - 1
        stop = decode(answer)[begin : begin + 3]
    model = pair.settings(tmp_path, config | {"stop_strings": [stop, "@@@@@@@@@"]})
    prompt, (wanted,) = pair.steady(tmp_path, lambda: prompt)
    ((answer,),) = model.completions([prompt])
    assert answer.tokens == wanted
    assert answer.text == Tokenizer(tmp_path).decode(wanted).partition(stop)[0]
    other = "end" if wanted[-1] in ENDS else "length"
    assert answer.finish == ("stop" if stop in Tokenizer(tmp_path).decode(wanted) else other)
    assert beams > 1 or answer.finish == "stop"


def test_keywords_and_lists(pair: Pair, tmp_path: Path) -> None:
    model = pair.settings(tmp_path, {"max_new_tokens": 9})
    text, pieces = "the other", list[str]()
    answer = model.generate(text, 6, emit=pieces.append)
    assert answer == "".join(pieces)
    assert model.generate([text, "a"], 6)[0] == answer
    ((wanted,),) = model.completions([text], GenerationSettings(max_new_tokens=6))
    assert answer == wanted.text == model.tokenizer.decode(wanted.tokens)
    several = model.generate([text, "a"], 6, num_return_sequences=2, temperature=2.0)
    assert [len(texts) for texts in several] == [2, 2] and several[0][0] != several[0][1]
    beams = model.generate(text, 6, num_beams=3, num_return_sequences=2)
    assert len({*beams}) == 2
    first = model.tokenizer.decode(wanted.tokens[:1])
    words = GenerationSettings(max_new_tokens=6, bad_words=(first,))
    ((without,),) = model.completions([text], words)
    assert model.tokenizer.encode(first) == wanted.tokens[:1]
    assert wanted.tokens[0] not in without.tokens
    with pytest.raises(Error, match="has no option beams"):
        model.generate(text, beams=2)
    with pytest.raises(Error, match="emit takes the pieces of one text"):
        model.generate([text, text], emit=pieces.append)
    with pytest.raises(Error, match=r"the prompt is 3; give text, or a list of texts"):
        model.generate([3])  # pyright: ignore[reportArgumentType]


def test_a_seed_gives_one_text_whatever_else_is_in_the_batch(pair: Pair, tmp_path: Path) -> None:
    model, random = pair.settings(tmp_path, {"max_new_tokens": NEW}), fresh(5)
    prompts = [pair.prompt(random) for _ in range(4)]  # 8 rows, of which 6 fit into a call
    hot = GenerationSettings(max_new_tokens=8, temperature=3.0, seed=4, num_return_sequences=2)
    rows: dict[int, list[int]] = {}

    def emit(row: int, token: int, text: str) -> None:
        rows.setdefault(row, []).append(token)

    batch = model.completions(prompts, hot, emit=emit)
    for prompt, answers in zip(prompts, batch, strict=True):
        assert answers[0].tokens != answers[1].tokens
        assert new_tokens(model.completions([prompt], hot)[0]) == new_tokens(answers)
    assert [rows[at] for at in sorted(rows)] == [a.tokens for answers in batch for a in answers]
    other = model.completions(prompts, GenerationSettings(**{**vars(hot), "seed": 5}))
    assert [new_tokens(answers) for answers in other] != [new_tokens(answers) for answers in batch]


def test_a_batch_ends_where_the_caches_are_full(pair: Pair, tmp_path: Path) -> None:
    model, prompts = (
        pair.settings(tmp_path, {"eos_token_id": []}),
        [[pair.letters[n]] * n for n in (85, 80, 90)],
    )
    for settings in (GenerationSettings(), GenerationSettings(num_beams=2)):
        batch = model.completions(prompts, settings)
        alone = [model.completions([prompt], settings)[0] for prompt in prompts]
        assert [new_tokens(answers) for answers in batch] == [new_tokens(x) for x in alone]
    assert [len(answers[0].tokens) for answers in batch] == [12, 17, 7]


def test_log_probabilities(pair: Pair, tmp_path: Path) -> None:
    model, prompt = pair.settings(tmp_path, {"repetition_penalty": 1.5}), pair.prompt(fresh(6))
    settings = model.defaults.changed({"max_new_tokens": 5, "temperature": 2.0, "logprobs": 3})
    ((answer,),) = model.completions([prompt], settings)
    with torch.no_grad():
        logits = pair.theirs[0](torch.tensor([prompt + answer.tokens])).logits[0]
    chances = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    wanted = chances[range(5), answer.tokens]
    np.testing.assert_allclose(answer.log_probs, wanted, atol=1e-3)
    best = [[chance for _, chance in tokens] for tokens in answer.best]
    np.testing.assert_allclose(best, chances.topk(3).values, atol=1e-3)


@pytest.mark.parametrize("mesh", ["tp=2", "tp=3", "tp=4", "dp=2"])
def test_ranks_draw_the_tokens_of_one(mesh: str, pair: Pair, tmp_path: Path) -> None:
    """With tp heads are split by vocabulary; with dp rows are, to which one is added here."""
    checkpoint = write_checkpoint(tmp_path / "checkpoint", session_seed())
    split = irc.compile(checkpoint, tmp_path / "split", mesh=mesh).model
    prompts = [pair.prompt(fresh(8), n) for n in (3, 5, 4)]
    for changes in ({"temperature": 0.8, "top_p": 0.9, "seed": 2}, {"num_beams": 2}):
        if mesh == "dp=2" and "num_beams" in changes:
            continue  # rows of ranks are not copied
        settings = GenerationSettings().changed({"max_new_tokens": 8, **changes})
        one, completions = (m.completions(prompts, settings) for m in (pair.model, split))
        assert [new_tokens(answers) for answers in completions] == [
            new_tokens(answers) for answers in one
        ]


@pytest.mark.parametrize("heat", [0.0, 1.5])
def test_guessed_tokens_change_nothing(heat: float, pair: Pair, tmp_path: Path) -> None:
    model, prompts = pair.settings(tmp_path, {}), [pair.letters[:n] * 3 for n in (2, 4)]
    settings = GenerationSettings(max_new_tokens=12, temperature=heat)
    told: list[tuple[int, int]] = []
    wanted = model.completions(prompts, settings)
    guessing = settings.changed({"prompt_lookup_num_tokens": 3})
    completions = model.completions(
        prompts, guessing, emit=lambda row, token, _: told.append((row, token))
    )
    drafted = model.completions(prompts, settings, draft=pair.model)
    for row, answers in enumerate(wanted):
        assert new_tokens(completions[row]) == new_tokens(drafted[row]) == new_tokens(answers)
        assert [token for at, token in told if at == row] == answers[0].tokens
