"""A model with a tokenizer: generated text, also where it ends inside a character."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irc
from irc.backends.base import Port, Ports
from irc.generation.model import Model
from irc.generation.settings import GenerationSettings
from irc.generation.tokenizer import Tokenizer
from irc.ir.dims import symbol
from tests.fresh import session_seed
from tests.tiny_checkpoint import write_checkpoint, write_tokenizer

B, S, C = map(symbol, "BSC")
VOCAB = 300


class Reciting:
    """Chooses the given tokens in turn, whatever its inputs are."""

    ports = Ports(
        (Port("input_ids", "i32", (B, S)),),
        (Port("k0", "f32", (B, 1, C, 4), True),),
        (Port("logits", "f32", (B, S, VOCAB)),),
    )

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = iter(tokens)

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"logits": np.zeros((1, 1, VOCAB)), "k0": inputs["k0"] + 1}

    def open(self, sizes: Mapping[str, int]) -> "Reciting":
        return self

    def step(self, inputs: Mapping[str, np.ndarray], first: int = 0) -> dict[str, np.ndarray]:
        logits = np.zeros((1, inputs["input_ids"].shape[1], VOCAB), np.float32)
        logits[0, -1, next(self.tokens)] = 1
        return {"logits": logits}

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        raise AssertionError("one row is not moved")

    def clear_rows(self, rows: Sequence[int]) -> None:
        raise AssertionError("rows are used once")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_tokenizer(path)
    return path


@pytest.mark.parametrize(
    ("text", "count", "wanted"),
    [
        *[(text, None, text) for text in ("the other", " naïve 日本", "👍")],
        ("a👍", -1, "a\ufffd"),  # it ends inside a character
        ("a<|end|>b", None, "a"),
    ],
)
def test_text(folder: Path, text: str, count: int | None, wanted: str) -> None:
    tokenizer = Tokenizer(folder)
    ids = tokenizer.encode(text)[:count]
    model = Model(Reciting(ids), {}, folder, ends=tokenizer.encode("<|end|>"))
    found = model.generate("say", len(ids))
    assert found.rstrip("\ufffd") + "\ufffd" * ("\ufffd" in found) == wanted


def test_states_that_the_model_created_are_not_returned(folder: Path) -> None:
    model = Model(Reciting([]), {}, folder)
    ids = np.zeros((1, 3), np.int32)
    assert list(model.run({"input_ids": ids})) == ["logits"]
    cache = np.zeros((1, 1, 8, 4), np.float32)
    assert list(model.run({"input_ids": ids, "k0": cache})) == ["logits", "k0"]


@pytest.mark.parametrize(
    ("own", "other"),
    [
        ({}, {}),
        (
            {"num_beams": 2, "num_return_sequences": 2, "early_stopping": True},
            {"num_beams": 2, "num_return_sequences": 2, "early_stopping": True},
        ),
        ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
    ],
)
def test_batches_are_continued_as_by_transformers(
    own: dict[str, Any], other: dict[str, Any], tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    checkpoint = write_checkpoint(tmp_path / "checkpoint", session_seed())
    oracle = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    irc.compile(checkpoint, tmp_path / "model", backend="reference")
    prompts, end = [[5, 7, 2], [250], [11, 12, 13, 14]], 299
    settings = GenerationSettings(max_new_tokens=8, **own)
    batch = irc.load(tmp_path / "model").model.completions(prompts, settings)
    for prompt, results in zip(prompts, batch, strict=True):
        ids = torch.tensor([prompt])
        settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": end, **other}
        rows = oracle.generate(ids, attention_mask=torch.ones_like(ids), **settings).tolist()
        for result, tokens in zip(results, rows, strict=True):
            new = tokens[len(prompt) :]
            assert result.tokens == new[: len(result.tokens)]
            assert {*new[len(result.tokens) :]} <= {end}


def test_hooks_of_a_batch(artifact: Path) -> None:
    model, seen = irc.load(artifact).model, list[list[list[int]]]()

    def processor(step: int, ids: np.ndarray, logits: np.ndarray) -> np.ndarray:
        seen.append(ids.tolist())
        return np.eye(VOCAB)[[step + 10] * len(logits)]

    batch = model.completions(
        [[1], [2, 3]], processor=processor, criteria=lambda step, ids, logits: step == 2
    )
    assert [results[0].tokens for results in batch] == [[10, 11, 12], [10, 11, 12]]
    assert seen[1] == [[1, 10, 0], [2, 3, 10]]
