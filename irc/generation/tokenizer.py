"""`Tokenizer` and `TextStream`: text to token ids and back, with the `tokenizers` package."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from ..errors import Error
from ..json_files import read_object

TOKENIZER = "tokenizer.json"
# The files of a checkpoint that an artifact copies, if they exist.
FILES = (TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
_BROKEN = "\ufffd"  # the replacement character of a decoder for incomplete characters
_LONGEST = 8  # tokens to wait for; a character has at most four bytes


class Tokenizer:
    """The tokenizer of a checkpoint or an artifact folder."""

    def __init__(self, folder: Path) -> None:
        path = folder / TOKENIZER
        if not path.is_file():
            raise Error(
                f"{folder} has no {TOKENIZER}; add one to the checkpoint (convert a "
                "tokenizer.model to it) and compile again, or use token ids with --raw-ids"
            )
        from tokenizers import Tokenizer as Engine

        with _failures_named(f"{path} cannot be read as a tokenizer"):
            engine: Any = Engine.from_file(str(path))
        engine.no_padding()
        engine.no_truncation()
        self._engine, self._path = engine, path

    def encode(self, text: str, special: bool = True) -> list[int]:
        """The ids of `text`, with the `special` tokens that the tokenizer adds around it."""
        with _failures_named(f"{self._path} cannot encode this text"):
            return list(self._engine.encode(text, add_special_tokens=special).ids)

    def begin(self) -> list[int]:
        """The special tokens that the tokenizer adds before a text."""
        with _failures_named(f"{self._path} cannot encode a text"):
            encoded: Any = self._engine.encode("a")
        marks = encoded.special_tokens_mask
        count = next((i for i, special in enumerate(marks) if not special), 0)
        return list(encoded.ids)[:count]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids` without special tokens."""
        with _failures_named(f"{self._path} cannot decode these tokens"):
            return self._engine.decode(list(ids), skip_special_tokens=True)


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
    leading space depends on the tokens before it.
    """

    def __init__(self, decoder: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._decoder = decoder
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
        return now[len(before) :]

    def finish(self) -> str:
        """The remaining text, with incomplete characters."""
        before, now = self._window()
        self._from = self._done = len(self._ids)
        return now[len(before) :]

    def _window(self) -> tuple[str, str]:
        decode = self._decoder.decode
        return decode(self._ids[self._from : self._done]), decode(self._ids[self._from :])


def end_tokens(folder: Path) -> list[int]:
    """The end tokens of generation_config.json, else of config.json."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        value = read_object(path).get("eos_token_id") if path.is_file() else None
        if isinstance(value, int):
            return [value]
        if isinstance(value, list):
            ids = cast("list[Any]", value)
            return [i for i in ids if isinstance(i, int)]
    return []
