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

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        return " ".join(f"w{i}" for i in ids)


def test_the_space_before_a_word_is_kept() -> None:
    stream = TextStream(cast("Any", Words()), [1, 2])
    assert [stream.add(3), stream.add(4), stream.finish()] == [" w3", " w4", ""]


def test_special_tokens_are_not_decoded(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a<|end|>b")
    assert len(ids) == 3
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, special=True) == "a<|end|>b"
    stream = TextStream(tokenizer, special=True)
    assert [stream.add(token) for token in ids] == ["a", "<|end|>", "b"]


def test_text_ends_before_a_stop_string(tokenizer: Tokenizer) -> None:
    """The text ends where the first complete stop string begins, and is never taken back."""
    source = random.Random(session_seed())
    for count in range(200):
        text = "".join(source.choices("abé", k=count % 40))
        stops = ["".join(source.choices("abé", k=source.randint(1, 5))) for _ in range(count % 4)]
        ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
        end = sum(min(ends, default=(len(text), 0)))
        stream = TextStream(tokenizer, stops=stops)
        streamed = ""
        for token in tokenizer.encode(text):
            streamed += stream.add(token)
            assert text[:end].startswith(streamed)
            if stream.stopped:
                break
        assert stream.stopped == any(stop in text for stop in stops)
        assert streamed + stream.finish() == text[:end]
    stream = TextStream(tokenizer, stops=["abc", ""])  # only the begin of one waits
    pieces = [stream.add(token) for token in tokenizer.encode("xababd")]
    assert ("".join(pieces), pieces[0], pieces[-1], stream.stopped) == ("xababd", "x", "abd", False)


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
    (tmp_path / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"x": {}}}')
    with pytest.raises(Error, match=r"tokenizer_config.json has tokens that cannot be added: "):
        Tokenizer(tmp_path)
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


def write_folder(folder: Path, kind: str, config: dict[str, object]) -> Any:
    """A folder with a tokenizer of a kind and its configuration; transformers' tokenizer of it."""
    from tokenizers import Tokenizer as Engine
    from tokenizers import decoders, models, pre_tokenizers, processors
    from transformers import AutoTokenizer

    write_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    words = ["<unk>", "<s>", "</s>", *"▁.?'", *"itsdonwvea", "we", "ve", "n't", "do", "it"]
    engine: Any = None
    if kind == "Unigram":
        engine = Engine(models.Unigram([(word, -1.0) for word in words], 0))
        engine.pre_tokenizer, engine.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        engine.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    elif kind == "WordPiece":
        pieces = [*words, *(f"##{word}" for word in words[7:])]
        engine = Engine(models.WordPiece({w: i for i, w in enumerate(pieces)}, unk_token="<unk>"))
        engine.pre_tokenizer = pre_tokenizers.Whitespace()
        engine.decoder = decoders.WordPiece(cleanup=False)
    if engine is not None:
        engine.save(str(folder / "tokenizer.json"))
    return cast("Any", AutoTokenizer).from_pretrained(str(folder))


def token(content: str, **flags: bool) -> dict[str, object]:
    names = ("special", "single_word", "lstrip", "rstrip", "normalized")
    return {"content": content, **dict.fromkeys(names, False), **flags}


CONFIGS: dict[str, dict[str, object]] = {
    "plain": {"clean_up_tokenization_spaces": False},
    "spaces": {"clean_up_tokenization_spaces": True, "add_bos_token": False},
    "added": {
        "added_tokens_decoder": {
            "9001": token("<far>", special=True, rstrip=True),
            "9000": token("<tool>", lstrip=True),
            "1": token("<s>", special=True),
        },
        "add_eos_token": True,
        "bos_token": "<s>",
        "pad_token": "<pad>",
        "additional_special_tokens": ["<tool>", "<extra>"],
    },
}


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("kind", ["BPE", "Unigram", "WordPiece"])
def test_ids_and_texts_are_those_of_transformers(kind: str, config: str, tmp_path: Path) -> None:
    peer = write_folder(tmp_path, kind, CONFIGS[config])
    ours, source = Tokenizer(tmp_path), random.Random(session_seed())
    words = ["it", " 's", "do n't", "' ", " ", ".", " ?", "we 've", "<tool>", "<far>", "<pad>"]
    for size in range(60):
        text = "".join(source.choices([*words, "<extra>", "<s>", "a"], k=size))
        ids = ours.encode(text, special=False)
        assert ids == peer.encode(text, add_special_tokens=False)
        assert ours.encode(text) == peer.encode(text)
        ids = source.choices(range(len(peer)), k=20) + ids
        for special in (False, True):
            whole = peer.decode(ids, skip_special_tokens=not special)
            assert ours.decode(ids, special) == whole
            stream = TextStream(ours, special=special)
            streamed = "".join(stream.add(i) for i in ids) + stream.finish()
            if kind == "BPE":  # whose ids drawn at random are no characters
                continue
            if config == "spaces":  # around a mark of several tokens they stay in a stream
                assert "".join(streamed.split()) == "".join(whole.split())
            else:
                assert streamed == whole
