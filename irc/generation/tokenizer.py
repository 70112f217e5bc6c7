"""Text to token ids and back through the `tokenizers` package, piece by piece when streaming."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from ..errors import Error

TOKENIZER = "tokenizer.json"
# What an artifact takes along from a checkpoint, where it is there.
FILES = (TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
_BROKEN = "\ufffd"  # what a decoder puts where bytes are no character (yet)
_LONGEST = 8  # pieces: a character has at most four bytes, so a longer wait is for nothing


class Decoder(Protocol):
    """Anything that turns token ids into text."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`."""
        ...


class Tokenizer:
    """The tokenizer of a checkpoint or an artifact folder."""

    def __init__(self, folder: Path) -> None:
        path = folder / TOKENIZER
        if not path.is_file():
            raise Error(
                f"{folder} has no {TOKENIZER}; put one into the checkpoint (a tokenizer.model has "
                "to be converted to it) and compile again, or give token ids with --raw-ids"
            )
        from tokenizers import Tokenizer as Engine

        try:
            engine: Any = Engine.from_file(str(path))
        except Exception as error:  # the package raises bare Exceptions
            raise Error(f"{path} cannot be read as a tokenizer: {error}") from error
        engine.no_padding()
        engine.no_truncation()
        self._engine = engine

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, with the special tokens that the tokenizer adds itself."""
        return list(self._engine.encode(text).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens left out."""
        return self._engine.decode(list(ids), skip_special_tokens=True)


class TextStream:
    """Text that grows with each token, handed out only where it can no longer change.

    Token ids cut characters: bytes that are no whole UTF-8 character wait for the next token. Two
    windows of the last ids are decoded at each step and compared, so that a token's leading space,
    which depends on what is before it, comes out right.
    """

    def __init__(self, decoder: Decoder, prompt: Sequence[int] = ()) -> None:
        self._decoder = decoder
        self._ids = list(prompt)
        self._from = max(0, len(self._ids) - _LONGEST)  # the window begins here
        self._done = len(self._ids)  # ids before this are handed out

    def add(self, token: int) -> str:
        """The text that became certain with this token, often a word, sometimes nothing."""
        self._ids.append(token)
        before, now = self._window()
        if now.endswith(_BROKEN) and len(self._ids) - self._done < _LONGEST:
            return ""
        if len(now) <= len(before):
            return ""
        self._from, self._done = self._done, len(self._ids)
        return now[len(before) :]

    def finish(self) -> str:
        """What is still held back, broken characters and all."""
        before, now = self._window()
        self._from = self._done = len(self._ids)
        return now[len(before) :]

    def _window(self) -> tuple[str, str]:
        decode = self._decoder.decode
        return decode(self._ids[self._from : self._done]), decode(self._ids[self._from :])


def end_tokens(folder: Path) -> list[int]:
    """The ids that end a text: of generation_config.json, else of the checkpoint's config.json."""
    for name in ("generation_config.json", "config.json"):
        found = _read(folder / name).get("eos_token_id")
        if isinstance(found, int):
            return [found]
        if isinstance(found, list):
            ids = cast("list[Any]", found)
            return [i for i in ids if isinstance(i, int)]
    return []


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found: Any = json.loads(path.read_bytes())
    except ValueError as error:
        raise Error(f"{path} is not JSON: {error}") from None
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}
