"""A model with a tokenizer: generated text, also where it ends inside a character."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from irc.backends.base import Port, Ports
from irc.generation.model import Model
from irc.generation.tokenizer import Tokenizer
from irc.ir.dims import symbol
from tests.tiny_checkpoint import write_tokenizer

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

    def step(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        logits = np.zeros((1, inputs["input_ids"].shape[1], VOCAB), np.float32)
        logits[0, -1, next(self.tokens)] = 1
        return {"logits": logits}


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
