"""`Tokenizer` and `TextStream`: text to token ids and back, with the `tokenizers` package."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from ..errors import Error
from ..json_files import read_object

TOKENIZER, CONFIG = "tokenizer.json", "tokenizer_config.json"
# The files of a checkpoint that an artifact copies, if they exist.
FILES = (
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "sentence_bert_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
)
# What is written without its spaces where `clean_up_tokenization_spaces` is set, in this order.
_MARKS = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")
_BROKEN = "\ufffd"  # the replacement character of a decoder for incomplete characters
_LONGEST = 8  # tokens to wait for; a character has at most four bytes


class Tokenizer:
    """The tokenizer of a checkpoint or an artifact folder."""

    def __init__(self, folder: Path) -> None:
        path = folder / TOKENIZER
        if not path.is_file():
            raise Error(
                f"{folder} has no {TOKENIZER}; add one to the checkpoint (convert a "
                "tokenizer.model to it) and compile again, or use token ids (--raw-ids) without "
                "stop strings, bad words and constraints"
            )
        from tokenizers import Tokenizer as Engine

        with _failures_named(f"{path} cannot be read as a tokenizer"):
            engine: Any = Engine.from_file(str(path))
        engine.no_padding()
        engine.no_truncation()
        with _failures_named(f"{folder / CONFIG} has tokens that cannot be added"):
            _configure(engine, _object(folder / CONFIG), special_tokens(folder).values())
        self._engine, self._path = engine, path

    def encode(self, text: str, special: bool = True) -> list[int]:
        """The ids of `text`, with the `special` tokens that the tokenizer adds around it."""
        with _failures_named(f"{self._path} cannot encode this text"):
            return list(self._engine.encode(text, add_special_tokens=special).ids)

    def encode_cut(self, text: str, most: int) -> list[int]:
        """`encode`, of as much of the beginning of `text` as makes at most `most` ids."""
        ids = self.encode(text)
        if len(ids) <= most:
            return ids
        special = self._engine.num_special_tokens_to_add(False)
        with _failures_named(f"{self._path} cannot cut this text to {most} tokens"):
            encoded: Any = self._engine.encode(text, add_special_tokens=False)
            encoded.truncate(max(most - special, 0))
            return list(self._engine.post_process(encoded).ids)

    def begin(self) -> list[int]:
        """The special tokens that the tokenizer adds before a text."""
        with _failures_named(f"{self._path} cannot encode a text"):
            encoded: Any = self._engine.encode("a")
        marks = encoded.special_tokens_mask
        count = next((i for i, special in enumerate(marks) if not special), 0)
        return list(encoded.ids)[:count]

    def decoder(
        self, prompt: Sequence[int], special: bool = False
    ) -> Callable[[Sequence[int]], str]:
        """A function that gives the text of ids behind those of a prompt."""
        head = list(prompt[-_LONGEST:])
        before = len(self.decode(head, special))
        return lambda ids: self.decode([*head, *ids], special)[before:]

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """The text of `ids`, with or without the `special` tokens among them."""
        with _failures_named(f"{self._path} cannot decode these tokens"):
            return self._engine.decode(list(ids), skip_special_tokens=not special)

    def as_json(self) -> str:
        """The tokenizer as the text of a tokenizer.json."""
        return self._engine.to_str()

    @property
    def size(self) -> int:
        """One more than the largest token id."""
        return max(self._engine.get_vocab().values(), default=-1) + 1


def special_tokens(folder: Path) -> dict[str, str]:
    """The special tokens of a folder by name, such as bos_token."""
    config = _object(folder / CONFIG)
    if "added_tokens_decoder" not in config:  # files of older releases of transformers
        config |= _object(folder / "special_tokens_map.json")
    extra = config.get("extra_special_tokens")
    named = config | cast("dict[str, Any]", extra) if isinstance(extra, dict) else config
    tokens = {name: _content(token) for name, token in named.items() if name.endswith("_token")}
    return {name: text for name, text in tokens.items() if text}


def _content(token: object) -> str:
    """The text of a token that is a text or an object; empty if it is neither."""
    text = cast("dict[str, Any]", token).get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def _configure(engine: Any, config: Mapping[str, Any], special: Iterable[str]) -> None:
    """Follow a tokenizer_config.json as transformers does where there is a tokenizer.json.

    It adds tokens: one that the vocabulary lacks gets the next id, whatever id the file gives it.
    It cleans the spaces of decoded words. The tokens of begin and end are those of tokenizer.json.
    """
    from tokenizers import AddedToken, decoders

    listed: dict[str, Any] = config.get("added_tokens_decoder") or {}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or ()
    tokens = [AddedToken(**listed[i]) for i in sorted(listed, key=int)]
    present_tokens = list(engine.get_added_tokens_decoder().values())
    present = {token.content for token in [*present_tokens, *tokens]} | {""}
    names = [name for name in [*special, *map(_content, extra)] if name not in present]
    tokens += [AddedToken(name, special=True) for name in names]
    engine.add_tokens([token for token in tokens if repr(token) not in map(repr, present_tokens)])
    is_bpe = type(engine.model).__name__ == "BPE"
    if config.get("clean_up_tokenization_spaces") and engine.decoder and not is_bpe:
        marks = [decoders.Replace(mark, mark.strip(" ")) for mark in _MARKS]
        engine.decoder = decoders.Sequence([engine.decoder, decoders.Fuse(), *marks])


def _object(path: Path) -> dict[str, Any]:
    """The object in a file; empty if there is no such file."""
    return read_object(path) if path.is_file() else {}


@contextmanager
def _failures_named(what: str) -> Generator[None]:
    """Turn what the package raises, bare Exceptions and Rust's panics, into Errors."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise Error(f"{what}: {error}") from error
        raise


class TextStream:
    """Text that grows with each token, returned only once it can no longer change.

    A token may end inside a character: bytes that are no complete UTF-8 character wait for the next
    token. Each step decodes two windows of the last ids and compares them, because a token's
    leading space depends on the tokens before it. `special`: whether the text has special tokens.

    The text ends before the string of `stops` that is complete first; `stopped` is then True.
    Text that may begin one waits for the next token.
    """

    def __init__(
        self,
        decoder: Tokenizer,
        prompt: Sequence[int] = (),
        stops: Sequence[str] = (),
        special: bool = False,
    ) -> None:
        self._decoder, self._special = decoder, special
        self._stops = [stop for stop in stops if stop]
        self.stopped = False
        self._held: str = ""  # text that may begin a stop string
        self._ids = list(prompt)
        self._from = max(0, len(self._ids) - _LONGEST)  # the begin of the window
        self._done = len(self._ids)  # the text of the ids before this was returned

    def add(self, token: int) -> str:
        """The text that this token completes, often a word, possibly empty."""
        self._ids.append(token)
        before, now = self._window()
        if now.endswith(_BROKEN) and len(self._ids) - self._done < _LONGEST:
            return ""
        if len(now) <= len(before):
            return ""
        self._from, self._done = self._done, len(self._ids)
        return self._before_stop(now[len(before) :])

    def finish(self) -> str:
        """The remaining text, with incomplete characters."""
        before, now = self._window()
        self._from = self._done = len(self._ids)
        text, self._held = self._before_stop(now[len(before) :]) + self._held, ""
        return text

    def _before_stop(self, text: str) -> str:
        """The held text and `text`, up to a stop string, without what may begin one."""
        if self.stopped:
            return ""
        text, self._held = self._held + text, ""
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self.stopped = True
            return text[: min(places)]
        rest = len(text) - begun(text, self._stops)
        self._held = text[rest:]
        return text[:rest]

    def _window(self) -> tuple[str, str]:
        decode, begin, special = self._decoder.decode, self._from, self._special
        return decode(self._ids[begin : self._done], special), decode(self._ids[begin:], special)


def begun(text: str, patterns: Iterable[str]) -> int:
    """How many characters at the end of `text` may be the begin of a pattern."""
    sizes = (
        size
        for pattern in patterns
        for size in range(1, min(len(pattern), len(text) + 1))
        if text.endswith(pattern[:size])
    )
    return max(sizes, default=0)


def end_tokens(folder: Path) -> list[int]:
    """The end tokens of generation_config.json, else of config.json."""
    for name in ("generation_config.json", "config.json"):
        value = _object(folder / name).get("eos_token_id")
        if isinstance(value, int):
            return [value]
        if isinstance(value, list):
            ids = cast("list[Any]", value)
            return [i for i in ids if isinstance(i, int)]
    return []
