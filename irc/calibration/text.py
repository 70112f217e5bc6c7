"""Windows of tokens of text files, read piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from io import TextIOWrapper
from pathlib import Path

from ..errors import Error
from ..files import open_file
from ..generation.tokenizer import Tokenizer

_PIECE = 1 << 14  # characters that are tokenized together


def token_windows(
    files: Sequence[Path], tokenizer: Tokenizer, length: int
) -> Iterator[tuple[list[int], float]]:
    """Windows of `length` tokens, the last one shorter, and the fraction of the files read.

    Every window begins with the tokens that the tokenizer puts before a text.
    """
    begin = tokenizer.begin()
    room = length - len(begin)
    if room < 1:
        raise Error(f"the length {length} has no room for text after {len(begin)} special tokens")
    total = max(1, sum(path.stat().st_size for path in files))
    waiting: list[int] = []
    fraction = 0.0
    for text, done in _pieces(files):
        fraction = done / total
        waiting += tokenizer.encode(text, special=False)
        cut = len(waiting) - len(waiting) % room
        for at in range(0, cut, room):
            yield begin + waiting[at : at + room], fraction
        del waiting[:cut]
    if waiting:
        yield begin + waiting, 1.0


def _pieces(files: Sequence[Path]) -> Iterator[tuple[str, int]]:
    """The text in pieces that end before a space or newline, and the bytes read so far."""
    before = 0
    for path in files:
        rest = ""
        try:
            with open_file(path) as raw, TextIOWrapper(raw, "utf-8") as file:
                while piece := file.read(_PIECE):
                    text = rest + piece
                    cut = max(text.rfind(" "), text.rfind("\n"))
                    cut = cut if cut > 0 else len(text)
                    yield text[:cut], before + raw.tell()
                    rest = text[cut:]
        except OSError as error:
            raise Error(f"cannot read {path}: {error.strerror or error}") from None
        except UnicodeDecodeError as error:
            raise Error(f"{path} is not text in UTF-8 ({error.reason})") from None
        before += path.stat().st_size
        if rest:
            yield rest, before
