"""A model with a tokenizer: all of the text comes out, also where it stops inside a character."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from irc.backends.base import Port, Ports
from irc.dims import symbol
from irc.generation.model import Model
from irc.generation.tokenizer import Tokenizer
from tests.tiny_checkpoint import write_tokenizer

B, S, C = map(symbol, "BSC")
VOCAB = 300


class Reciting:
    """Says the given tokens, one after the other, whatever it is fed."""

    ports = Ports(
        (Port("input_ids", "i32", (B, S)),),
        (Port("k0", "f32", (B, 1, C, 4), True),),
        (Port("logits", "f32", (B, S, VOCAB)),),
    )

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.said = 0

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"logits": np.zeros((1, 1, VOCAB)), "k0": inputs["k0"] + 1}

    def open(self, sizes: Mapping[str, int]) -> "Reciting":
        return self

    def step(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        logits = np.zeros((1, inputs["input_ids"].shape[1], VOCAB), np.float32)
        logits[0, -1, self.tokens[self.said]] = 1
        self.said += 1
        return {"logits": logits}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_tokenizer(path)
    return path


@pytest.mark.parametrize("text", ["the other", " naïve 日本", "👍"])
def test_text_comes_out_whole(folder: Path, text: str) -> None:
    ids = Tokenizer(folder).encode(text)
    model = Model(Reciting(ids), {}, folder)
    assert model.generate("say", len(ids)) == text


def test_a_text_cut_inside_a_character_shows_it(folder: Path) -> None:
    ids = Tokenizer(folder).encode("a👍")[:-1]
    model = Model(Reciting(ids), {}, folder)
    text = model.generate("say", len(ids))
    assert text[0] == "a"
    assert set(text[1:]) == {"\ufffd"}


def test_an_end_token_is_not_text(folder: Path) -> None:
    ids = Tokenizer(folder).encode("a<|end|>b")
    model = Model(Reciting(ids), {}, folder, ends=[ids[1]])
    assert model.generate("say", 3) == "a"


def test_filled_states_are_not_given_back(folder: Path) -> None:
    model = Model(Reciting([]), {}, folder)
    ids = np.zeros((1, 3), np.int32)
    assert list(model.run({"input_ids": ids})) == ["logits"]
    cache = np.zeros((1, 1, 8, 4), np.float32)
    assert list(model.run({"input_ids": ids, "k0": cache})) == ["logits", "k0"]
