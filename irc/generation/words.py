"""Stop and bad words of a batch: token sequences per row, as lists or as one array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import numpy as np

from ..errors import Error

WordLists: TypeAlias = list[list[int]]


def words_of(given: Any, rows: int) -> list[WordLists]:
    """The token sequences of stop or bad words, by row.

    Either lists of lists of tokens, for all rows or per row, or an array [rows, 2, n] or [2, n]:
    tokens, and behind them the ends of the words, filled with -1.
    """
    if given is None:
        return [[] for _ in range(rows)]
    items = list(cast("Sequence[Any]", given)) if isinstance(given, (list, tuple)) else []
    if not items or hasattr(items[0], "shape"):  # an array, or one per row
        array: np.ndarray[Any, Any] = np.asarray(cast("Any", given))
        words = [
            _split(*words_of_row.tolist())
            for words_of_row in (array[None] if array.ndim == 2 else array)
        ]
    elif _is_words(items):
        words = [[list(word) for word in items]]
    elif all(_is_words(words_of_row) for words_of_row in items):
        words = [[list(word) for word in words_of_row] for words_of_row in items]
    else:
        raise Error("expected stop and bad words as lists of tokens per row, or an array [B, 2, n]")
    if len(words) not in (1, rows):
        raise Error(f"there are words for {len(words)} rows, but the batch has {rows}")
    return words * rows if len(words) == 1 else words


def _is_words(given: Any) -> bool:
    """Whether this is a list of lists of tokens."""
    lists = (list, tuple)
    return isinstance(given, lists) and all(
        isinstance(word, lists) and all(isinstance(n, int | np.integer) for n in cast("Any", word))
        for word in cast("Sequence[Any]", given)
    )


def _split(tokens: list[int], ends: list[int]) -> WordLists:
    ends = [end for end in ends if end > 0]
    return [tokens[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def word_array(rows: Sequence[WordLists]) -> np.ndarray[Any, Any]:
    """i32 [B, 2, n] of the words of each row, see `words_of`."""
    width = max([1, *(sum(map(len, words)) for words in rows)])
    array = np.zeros((len(rows), 2, width), np.int32)
    array[:, 1] = -1
    for row, words in enumerate(rows):
        tokens = [token for word in words for token in word]
        array[row, 0, : len(tokens)] = tokens
        array[row, 1, : len(words)] = np.cumsum([len(word) for word in words])
    return array
