"""Text and tokens: a stream returns complete characters only, and all of the text."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from irc.errors import Error
from irc.generation.tokenizer import TextStream, Tokenizer, end_tokens
from tests.fresh import session_seed
from tests.tiny_checkpoint import write_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return Tokenizer(folder)


def test_pieces_come_as_soon_as_they_are_certain(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer)
    pieces = [stream.add(token) for token in tokenizer.encode("aéb")]
    assert pieces == ["a", "", "é", "b"]


def test_a_prompt_is_context_and_no_output(tokenizer: Tokenizer) -> None:
    prompt, rest = tokenizer.encode("größ"), tokenizer.encode("er")
    stream = TextStream(tokenizer, prompt)
    assert "".join(stream.add(token) for token in rest) == "er"
    first, second = tokenizer.encode("é")
    stream = TextStream(tokenizer, [first])  # it ends inside a character
    assert len(stream.add(second) + stream.finish()) <= 1


def test_incomplete_characters_are_replaced(tokenizer: Tokenizer) -> None:
    half = tokenizer.encode("é")[0]
    stream = TextStream(tokenizer)
    assert (stream.add(half), stream.finish()) == ("", "\ufffd")
    stream = TextStream(tokenizer)
    assert any(stream.add(half) for _ in range(20)), "it waits for a character without end"


def test_streamed_pieces_are_complete_characters(tokenizer: Tokenizer) -> None:
    """Each byte of these characters, some of which join others, is a token of its own."""
    source = random.Random(session_seed())
    for count in range(100):
        text = "".join(source.choices("the é日👍👩‍🇩🇪 \t\r\n", k=count))
        tokens = tokenizer.encode(text)
        assert tokenizer.decode(tokens) == text
        stream = TextStream(tokenizer)
        pieces = [stream.add(token) for token in tokens]
        assert "".join(pieces) == text
        assert not any("\ufffd" in piece for piece in pieces)
        assert stream.finish() == ""


class Words:
    """A tokenizer like sentencepiece, which drops the leading space of the first word."""

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(f"w{i}" for i in ids)


def test_the_space_before_a_word_is_kept() -> None:
    stream = TextStream(cast("Any", Words()), [1, 2])
    assert [stream.add(3), stream.add(4), stream.finish()] == [" w3", " w4", ""]


def test_special_tokens_are_not_decoded(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a<|end|>b")
    assert len(ids) == 3
    assert tokenizer.decode(ids) == "ab"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(Error, match=r"has no tokenizer.json; add one to the checkpoint"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(Error, match=r"tokenizer.json cannot be read as a tokenizer: "):
        Tokenizer(tmp_path)
    write_tokenizer(tmp_path)
    facts = json.loads((tmp_path / "tokenizer.json").read_text())
    pattern = {"Regex": "(a+)+$"}  # takes exponential time, which the package ends by a panic
    facts["pre_tokenizer"] = {
        "type": "Split",
        "pattern": pattern,
        "behavior": "Isolated",
        "invert": False,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(facts))
    with pytest.raises(Error, match=r"tokenizer.json cannot encode this text: "):
        Tokenizer(tmp_path).encode("a" * 40 + "b")
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(Error, match=r"generation_config.json is not JSON"):
        end_tokens(tmp_path)


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({}, []),
        ({"config.json": {"eos_token_id": 2}}, [2]),
        ({"config.json": {"eos_token_id": None}}, []),
        ({"config.json": {"eos_token_id": [1, 2]}}, [1, 2]),
        ({"config.json": {"eos_token_id": 2}, "generation_config.json": {"eos_token_id": 3}}, [3]),
        ({"config.json": {"eos_token_id": 2}, "generation_config.json": {}}, [2]),
    ],
)
def test_the_end_of_text(tmp_path: Path, files: dict[str, object], ends: list[int]) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert end_tokens(tmp_path) == ends
