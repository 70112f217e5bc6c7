"""Guessed tokens: the same tokens and distributions as without guesses, in fewer calls."""

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import irc
from irc.backends.base import Port, Ports
from irc.errors import Error
from irc.generation.decoding import Decoding
from irc.generation.model import Model
from irc.generation.rules import DecodingRules
from irc.generation.sampling import candidates
from irc.generation.search import Sampled
from irc.generation.settings import GenerationSettings
from irc.generation.speculation import PromptLookup, drafter_of
from irc.ir.dims import symbol
from tests.fresh import fresh
from tests.tiny_checkpoint import write_checkpoint

B, S, T, C = map(symbol, "BSTC")
CACHE, FIXED = Port("k0", "f32", (B, 1, C, 1), True), Port("k0", "f32", (B, 1), True, fixed=True)


class Table:
    """A model whose logits depend on the last two tokens, which it keeps in its cache."""

    def __init__(self, table: np.ndarray, cache: Port = CACHE) -> None:
        inputs = [Port("input_ids", "i32", (B, S)), Port("past_lengths", "i32", (B,))]
        inputs.append(Port("logit_positions", "i32", (B, T)))
        logits = Port("logits", "f32", (B, T, len(table)))
        self.ports = Ports(tuple(inputs), (cache,), (logits,))
        self.table, self.calls, self.cache = table, 0, np.zeros((0, 0), int)

    def open(self, sizes: Mapping[str, int]) -> "Table":
        self.cache = np.full((sizes["B"], sizes.get("C", 64)), -1)
        return self

    def clear_rows(self, rows: Sequence[int]) -> None:
        self.cache[list(rows)] = -1

    def step(self, inputs: Mapping[str, np.ndarray], first: int = 0) -> dict[str, np.ndarray]:
        self.calls += 1
        rows, past = np.arange(len(self.cache))[:, None], inputs["past_lengths"][:, None]
        self.cache[rows, past + np.arange(inputs["input_ids"].shape[1])] = inputs["input_ids"]
        at = past + inputs["logit_positions"]
        return {"logits": self.table[self.cache[rows, at - 1], self.cache[rows, at]]}


def model(table: np.ndarray, ends: tuple[int, ...] = (), **dims: tuple[int, int, int]) -> Model:
    return Model(cast("Any", Table(table)), dims, Path(), ends)


def table(size: int, stream: int = 0) -> np.ndarray:
    return fresh(stream).standard_normal((size, size, size)) * 1.5


def continued(
    one: Model, prompts: list[list[int]], draft: Model | None = None, **settings: Any
) -> tuple[list[list[int]], int]:
    """The new tokens of each row, as they were emitted, and the calls of the program."""
    program, emitted = cast("Table", one.program), dict[int, list[int]]()
    calls, chosen = program.calls, GenerationSettings(**settings)

    def emit(row: int, token: int, text: str) -> None:
        emitted.setdefault(row, []).append(token)

    answers = one.completions(prompts, chosen, emit=emit, draft=draft)
    tokens = [answer.tokens for answer in itertools.chain(*answers)]
    assert tokens == [emitted[row] for row in range(len(tokens))]
    return tokens, program.calls - calls


def test_sampled_tokens_have_the_joint_distribution_of_the_model() -> None:
    """Chi-square of the second and third token, which are often drawn from one call."""
    size, rows, runs, prompt = 5, 2000, 51, [3, 1, 2, 0, 3, 1]
    logits, random, counts = table(size), fresh(2), np.zeros((size, size))
    chosen = GenerationSettings(max_new_tokens=3, temperature=0.8, top_k=4)
    rules, one = DecodingRules(chosen, 3, scored=False), model(logits)
    drafts = (model(logits + table(size, 1) / 3), model(-logits))
    drafters = [PromptLookup(3), *(drafter_of(chosen, one, draft) for draft in drafts)]
    for run in range(runs):
        searches = [Sampled(prompt, rules, random) for _ in range(rows)]
        for _ in Decoding(one.program, {}, searches, drafter=drafters[run % 3]).steps():
            pass
        tokens_of_rows = np.array([search.sequences[0][-2:] for search in searches])
        np.add.at(counts, tuple(tokens_of_rows.T), 1)
    wanted = np.zeros((size, size))

    def chances(*last: int) -> np.ndarray:
        kept, weights = candidates(logits[last], chosen)
        return np.bincount(np.arange(size) if kept is None else kept, weights / weights.sum(), size)

    for one, two in itertools.product(range(size), range(size)):
        wanted[two] += chances(3, 1)[one] * chances(1, one)[two] * chances(one, two)
    wanted *= rows * runs
    assert not counts[wanted == 0].any()
    kept = wanted > 0
    statistic, freedom = ((counts - wanted)[kept] ** 2 / wanted[kept]).sum(), kept.sum() - 1
    spread = 2 / (9 * freedom)  # Wilson and Hilferty (1931); 6 sigma: 1e-9
    assert ((statistic / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5 < 6


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 1.2, "top_p": 0.9},
        {"temperature": 0.7, "repetition_penalty": 1.3, "no_repeat_ngram_size": 4},
        {"frequency_penalty": 0.5, "min_new_tokens": 25},
    ],
)
def test_tokens_of_a_batch_are_those_without_guesses(settings: dict[str, Any]) -> None:
    """A draw costs one random number, so that equal seeds give equal tokens. Each row accepts its
    own number of guesses."""
    logits, limit = table(11), 31
    prompts = [fresh(n).integers(0, 11, n).tolist() for n in (2, 7, 3, 4)]
    one, settings = model(logits, (4,)), {"max_new_tokens": limit, "seed": 7, **settings}
    wanted, most = continued(one, prompts, **settings)
    fewest = 1 + -(-(most - 1) // 6)  # a call has the last token and five guesses
    for draft, lookup, certain in (
        (model(logits), 0, fewest),
        (model(logits + table(11, 1) / 4), 0, 0),
        (model(-logits), 0, most),
        (None, 5, 0),
    ):
        more: dict[str, Any] = {"draft": draft, "prompt_lookup_num_tokens": lookup}
        tokens_of_rows, calls = continued(one, prompts, **settings, **more)
        assert tokens_of_rows == wanted and fewest <= calls <= most
        assert calls == certain or not certain or len(settings) > 2, "where tokens are greedy"


@pytest.mark.parametrize("dims", [{"C": (22, 22, 22)}, {"S": (1, 2, 3)}, {"S": (1, 1, 1)}])
def test_guesses_fit_the_caches_and_a_call(dims: dict[str, Any]) -> None:
    """Also where the caches of one row are full, and another goes on."""
    logits, prompts = table(9), [[1, 2, 3, 4, 5, 6, 7, 8], [4, 5]]
    one = model(logits, **dims)
    wanted, most = continued(one, prompts, max_new_tokens=20)
    for draft in (model(logits), model(logits, C=(14, 14, 14)), None):  # one is full before
        more: dict[str, Any] = {} if draft else {"prompt_lookup_num_tokens": 50}
        tokens_of_rows, calls = continued(one, prompts, draft, max_new_tokens=20, **more)
        assert tokens_of_rows == wanted
        assert calls < most if draft and dims != {"S": (1, 1, 1)} else calls <= most


@pytest.mark.parametrize("mesh", ["", "tp=2"])
def test_texts_of_onnx_runtime(mesh: str, tmp_path: Path) -> None:
    """With a constraint, stop strings and unequal prompts; a draft of one rank serves several."""
    one, other = write_checkpoint(tmp_path / "0"), write_checkpoint(tmp_path / "1", 1)
    whole, bad = (irc.compile(folder, folder / "made").model for folder in (one, other))
    split = irc.compile(one, tmp_path / "split", mesh=mesh).model if mesh else whole
    prompts, answers = ["the the", "ererererer there"], list[Any]()
    settings = {"regex": "[a-z ]*", "stop": ["the"], "temperature": 0.7, "max_new_tokens": 40}
    for draft, count in ((None, 0), (whole, 0), (bad, 0), (None, 4)):
        chosen = GenerationSettings(**settings, prompt_lookup_num_tokens=count)
        answers.append(split.completions(prompts, chosen, draft=draft))
    assert all(answer == answers[0] for answer in answers)
    assert all(re.fullmatch("[a-z ]*", answer.text) for (answer,) in answers[0])


def test_repeated_tokens_are_those_of_transformers() -> None:
    torch: Any = pytest.importorskip("torch")
    generator: Any = pytest.importorskip("transformers.generation.candidate_generator")
    random = fresh()
    for _ in range(200):
        tokens = random.integers(0, random.integers(2, 9), random.integers(2, 30)).tolist()
        count = int(random.integers(1, 6))
        theirs = generator.PromptLookupCandidateGenerator(None, count, 2, max_length=99)
        wanted, _ = theirs.get_candidates(torch.tensor([tokens]))
        (tokens_of_rows,) = PromptLookup(count).guess([tokens], 99)
        assert tokens + tokens_of_rows == wanted[0].tolist()


def test_what_takes_no_guesses_is_said() -> None:
    one = model(table(5))
    lookup: dict[str, Any] = {"prompt_lookup_num_tokens": 3}
    fixed = Model(cast("Any", Table(table(5), FIXED)), {}, Path())
    with pytest.raises(Error, match="wrong ones could not be forgotten, because of a state of a"):
        continued(fixed, [[1, 2]], **lookup)
    with pytest.raises(Error, match="the draft model has 4 tokens, but the model has 5; give"):
        continued(one, [[1, 2]], model(table(4)))
    for more in (lookup, {"num_beams": 2}):
        with pytest.raises(Error, match="needs prompt_lookup_num_tokens=0 and num_beams=1"):
            continued(one, [[1, 2]], one, **more)
