"""Text and tokens: streaming never hands out half a character, and all of the text comes out."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from irc.errors import Error
from irc.generation.tokenizer import TextStream, Tokenizer, end_tokens
from tests.tiny_checkpoint import write_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return Tokenizer(folder)


TEXTS = [
    "the other the",
    " leading and trailing ",
    "naïve café, größer",
    "日本語テキスト",
    "👩‍👩‍👧‍👦 family 🇩🇪",
    "tabs\tand\nnew lines\r\n",
    "",
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", TEXTS)
def test_streamed_pieces_are_whole_characters(tokenizer: Tokenizer, text: str) -> None:
    """Each byte of these texts is a token of its own."""
    stream = TextStream(tokenizer)
    pieces = [stream.add(token) for token in tokenizer.encode(text)]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert stream.finish() == ""


def test_pieces_come_as_soon_as_they_are_certain(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer)
    pieces = [stream.add(token) for token in tokenizer.encode("aéb")]
    assert pieces == ["a", "", "é", "b"]


def test_a_prompt_is_context_and_no_output(tokenizer: Tokenizer) -> None:
    prompt, rest = tokenizer.encode("größ"), tokenizer.encode("er")
    stream = TextStream(tokenizer, prompt)
    assert "".join(stream.add(token) for token in rest) == "er"


def test_a_prompt_may_end_inside_a_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("é")
    stream = TextStream(tokenizer, ids[:1])
    assert len(ids) == 2
    text = stream.add(ids[1]) + stream.finish()
    assert len(text) <= 1


def test_broken_bytes_come_out_at_last(tokenizer: Tokenizer) -> None:
    """A text that stops inside a character shows that it does; one that goes on does not wait."""
    half = tokenizer.encode("é")[:1]
    stream = TextStream(tokenizer)
    assert stream.add(half[0]) == ""
    assert stream.finish() == "\ufffd"
    stream = TextStream(tokenizer)
    pieces = [stream.add(half[0]) for _ in range(20)]
    assert any(pieces), "twenty broken bytes are no character that is still to come"


def test_random_bytes_stream_like_they_decode(tokenizer: Tokenizer) -> None:
    """What is handed out is the text, whatever the tokens: valid parts are never lost."""
    source = random.Random(0)
    letters = "aé日👍 \n"
    for _ in range(200):
        text = "".join(source.choices(letters, k=30))
        ids = tokenizer.encode(text)
        stream = TextStream(tokenizer)
        assert "".join(stream.add(token) for token in ids) + stream.finish() == text


class Words:
    """Like sentencepiece: a word's leading space is dropped where it is first."""

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(f"w{i}" for i in ids)


def test_the_space_before_a_word_is_kept() -> None:
    stream = TextStream(Words(), [1, 2])
    assert [stream.add(3), stream.add(4), stream.finish()] == [" w3", " w4", ""]


def test_special_tokens_are_left_out(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a<|end|>b")
    assert len(ids) == 3
    assert tokenizer.decode(ids) == "ab"


def test_a_folder_without_tokenizer_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(Error, match=r"has no tokenizer.json; put one into the checkpoint"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(Error, match=r"tokenizer.json cannot be read as a tokenizer: "):
        Tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({}, []),
        ({"config.json": {"eos_token_id": 2}}, [2]),
        ({"config.json": {"eos_token_id": None}}, []),
        ({"config.json": {"eos_token_id": [1, 2]}}, [1, 2]),
        ({"config.json": {"eos_token_id": 2}, "generation_config.json": {"eos_token_id": 3}}, [3]),
        ({"config.json": {"eos_token_id": 2}, "generation_config.json": {}}, [2]),
        ({"generation_config.json": []}, []),
    ],
)
def test_the_end_of_text(tmp_path: Path, files: dict[str, object], ends: list[int]) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert end_tokens(tmp_path) == ends


def test_a_broken_generation_config_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(Error, match=r"generation_config.json is not JSON"):
        end_tokens(tmp_path)
