"""`SamplingConfig` and `ModelConfig`: the settings of a generation, with TensorRT-LLM's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

import numpy as np

from irc.errors import Error, did_you_mean
from irc.generation.sampling import Sampling
from irc.source import here

from ..context import signatures
from ..dtypes import as_array

Words: TypeAlias = list[list[int]]

# Fields with their defaults. Values of the numeric ones may be given per row, as arrays.
_HONOURED: dict[str, Any] = {
    "max_new_tokens": 20,
    "num_beams": 1,
    "output_sequence_lengths": False,
    "return_dict": False,
    "stop_words_list": None,
    "bad_words_list": None,
    "temperature": 1.0,
    "top_k": 1,
    "top_p": 0.0,
    "length_penalty": 1.0,
    "early_stopping": 1,
    "repetition_penalty": 1.0,
    "min_length": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "no_repeat_ngram_size": 0,
    "random_seed": 0,
    "output_cum_log_probs": False,
    "output_log_probs": False,
}
# Fields that have no effect here, or that have one only at other values: these are refused.
_FIXED: dict[str, tuple[Any, str]] = {
    "use_beam_hyps": (True, "finished beams are always kept as hypotheses"),
    "max_attention_window_size": (None, "the window of an engine is set where it is built"),
    "sink_token_length": (None, "sink tokens are not supported; keep the whole context"),
    "num_return_sequences": (1, "give the prompt once per sequence, with a random_seed each"),
    "top_p_decay": (None, "top_p is the same for all tokens"),
    "top_p_min": (None, "top_p is the same for all tokens"),
    "top_p_reset_ids": (None, "top_p is the same for all tokens"),
    "beam_search_diversity_rate": (0.0, "beams are ranked by probability alone"),
}
_KNOWN = {"end_id": None, "pad_id": None} | _HONOURED | {k: v for k, (v, _) in _FIXED.items()}
_PER_ROW: dict[str, type] = {
    **dict.fromkeys(("top_k", "min_length", "no_repeat_ngram_size"), int),
    **dict.fromkeys(("temperature", "top_p", "repetition_penalty"), float),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), float),
}


class SamplingConfig:
    """How tokens are chosen. An unknown field, or one that would not be honoured, is an Error.

    `end_id` ends a sequence (-1: none does), `pad_id` is accepted: outputs are filled with end_id.
    """

    @signatures(
        a="end_id, pad_id, num_beams, temperature, top_k, top_p, length_penalty",
        b="end_id, pad_id, max_new_tokens, num_beams, num_return_sequences",
    )
    def __init__(self, end_id: int | None, pad_id: int | None = None, **fields: Any) -> None:
        self.__dict__.update(_KNOWN)
        self.end_id, self.pad_id = end_id, pad_id
        for name, value in fields.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _KNOWN:
            near = did_you_mean(name, _KNOWN)
            raise Error(f"SamplingConfig has no field {name!r}{near}", loc=here())
        if name in _FIXED:
            default, why = _FIXED[name]
            if value is not None and not np.isin(as_array(value), [default, 0]).all():
                raise Error(f"SamplingConfig: {name}={value} is not supported: {why}", loc=here())
        self.__dict__[name] = _KNOWN[name] if value is None else value

    def update(self, **fields: Any) -> dict[str, Any]:
        """Set the fields that there are; returns the others."""
        for name in fields.keys() & _KNOWN.keys():
            setattr(self, name, fields[name])
        return {name: value for name, value in fields.items() if name not in _KNOWN}

    def of_row(self, row: int) -> Sampling:
        """The sampling of one row of the batch."""
        return Sampling(**{name: kind(self._at(name, row)) for name, kind in _PER_ROW.items()})

    def random(self, row: int) -> np.random.Generator:
        """The random numbers of one row; the same for one seed, whatever the other rows are."""
        return np.random.default_rng([int(self._at("random_seed", row)) % 2**64, row])

    def _at(self, name: str, row: int) -> Any:
        """The value of a field for a row."""
        array = as_array(getattr(self, name)).reshape(-1)
        if len(array) != 1 and row >= len(array):
            raise Error(f"{name} has {len(array)} values; expected one, or one for each prompt")
        return array[row % len(array)].item()

    def ends(self) -> tuple[int, ...]:
        """The token that ends a sequence, if there is one."""
        return () if self.end_id is None or self.end_id < 0 else (int(self.end_id),)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"SamplingConfig has no field {name!r}{did_you_mean(name, _KNOWN)}")


class ModelConfig:
    """What a script says about its engine: `vocab_size` is used, to leave out padded tokens.

    All other fields are accepted, because the artifact states them.
    """

    @signatures(
        a="vocab_size, num_layers, num_heads, num_kv_heads, hidden_size, gpt_attention_plugin",
        b="max_batch_size, max_beam_width, vocab_size, num_layers, num_heads, num_kv_heads",
    )
    def __init__(self, **fields: Any) -> None:
        self.vocab_size: int | None = fields.pop("vocab_size", None)
        self.fields = fields

    def __getattr__(self, name: str) -> Any:
        fields: Mapping[str, Any] = self.__dict__.get("fields", {})
        if name not in fields:
            raise AttributeError(f"this ModelConfig was made without {name}")
        return fields[name]


def words_of(given: Any, rows: int) -> list[Words]:
    """The token sequences of stop or bad words, by row.

    Either lists of lists of tokens, for all rows or per row, or an array [rows, 2, n] or [2, n]:
    tokens, and behind them the ends of the words, filled with -1.
    """
    if given is None:
        return [[] for _ in range(rows)]
    items = list(cast("Sequence[Any]", given)) if isinstance(given, (list, tuple)) else []
    if not items or hasattr(items[0], "shape"):  # an array, or one per row
        array = as_array(given)
        words = [_split(*each.tolist()) for each in (array[None] if array.ndim == 2 else array)]
    elif _is_words(items):
        words = [_as_words(items)]
    elif all(_is_words(each) for each in items):
        words = [_as_words(each) for each in items]
    else:
        raise Error("expected stop and bad words as lists of tokens per row, or an array [B, 2, n]")
    if len(words) not in (1, rows):
        raise Error(f"there are words for {len(words)} rows, but the batch has {rows}")
    return words * rows if len(words) == 1 else words


def _is_words(given: Any) -> bool:
    """Whether this is a list of lists of tokens."""
    kinds = (list, tuple)
    if not isinstance(given, kinds):
        return False
    words = cast("Sequence[Any]", given)
    return all(isinstance(word, kinds) and _is_tokens(cast("Any", word)) for word in words)


def _is_tokens(word: Sequence[Any]) -> bool:
    return all(isinstance(token, (int, np.integer)) for token in word)


def _as_words(given: Sequence[Any]) -> Words:
    return [list(map(int, word)) for word in given]


def _split(tokens: list[int], ends: list[int]) -> Words:
    found = [end for end in ends if end > 0]
    return [tokens[a:b] for a, b in zip([0, *found], found, strict=False)]


def to_word_list_format(
    word_dict: Sequence[Sequence[Any]], tokenizer: Any = None, add_special_tokens: bool = False
) -> np.ndarray[Any, Any]:
    """i32 [B, 2, n] of the words of each row; texts are encoded by `tokenizer`."""
    rows: list[list[list[int]]] = []
    for words in word_dict:
        texts = [w.decode() if isinstance(w, bytes) else w for w in words]
        # A row may be one text in CSV, as in the first versions.
        texts = texts[0].split(",") if len(texts) == 1 and isinstance(texts[0], str) else texts
        rows.append([_encoded(word, tokenizer, add_special_tokens) for word in texts])
    width = max([1, *(sum(map(len, words)) for words in rows)])
    array = np.zeros((len(rows), 2, width), np.int32)
    array[:, 1] = -1
    for row, words in enumerate(rows):
        tokens = [token for word in words for token in word]
        array[row, 0, : len(tokens)] = tokens
        array[row, 1, : len(words)] = np.cumsum([len(word) for word in words])
    return array


def _encoded(word: Any, tokenizer: Any, special: bool) -> list[int]:
    if not isinstance(word, str):
        return list(word)
    if tokenizer is None:
        raise Error("to_word_list_format got texts but no tokenizer; give one", loc=here())
    return list(tokenizer.encode(word, add_special_tokens=special))
