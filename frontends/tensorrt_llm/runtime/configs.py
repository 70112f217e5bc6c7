"""`SamplingConfig`, `ModelConfig`, words: settings of a generation, by TensorRT-LLM's names."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np

from irc.errors import Error, did_you_mean
from irc.generation.sampling import Sampling, random_of_row
from irc.json_files import read_object
from irc.source import here

from ..context import signatures
from ..dtypes import as_array
from ..quantization import QuantMode

Words: TypeAlias = list[list[int]]

# Fields with their defaults. Values of the numeric ones may be given per row, as arrays.
_HONOURED: dict[str, Any] = {
    "end_id": None,
    "pad_id": None,
    "max_new_tokens": 20,
    "num_beams": 1,
    "output_sequence_lengths": False,
    "return_dict": False,
    "max_attention_window_size": None,
    "sink_token_length": None,
    "stop_words_list": None,
    "bad_words_list": None,
    "length_penalty": 1.0,
    "early_stopping": 1,
    "random_seed": 0,
    "output_cum_log_probs": False,
    "output_log_probs": False,
}
_PER_ROW: dict[str, Any] = {
    "temperature": 1.0,
    "top_k": 1,
    "top_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_length": 1,
    "no_repeat_ngram_size": 0,
}
# Fields that have no effect here, or that have one only at other values: these are refused.
_FIXED: dict[str, tuple[Any, str]] = {
    "use_beam_hyps": (True, "finished beams are always kept as hypotheses"),
    "num_return_sequences": (1, "give the prompt once per sequence, with a random_seed each"),
    "top_p_decay": (None, "top_p is the same for all tokens"),
    "top_p_min": (None, "top_p is the same for all tokens"),
    "top_p_reset_ids": (None, "top_p is the same for all tokens"),
    "beam_search_diversity_rate": (0.0, "beams are ranked by probability alone"),
}
_KNOWN = {**_HONOURED, **_PER_ROW, **{name: default for name, (default, _) in _FIXED.items()}}


# The fields of ModelConfig of all versions with their defaults.
_SIZES = """
    max_batch_size max_beam_width max_input_len max_output_len max_seq_len vocab_size num_layers
    num_heads num_kv_heads hidden_size head_size kv_cache_type lora_target_modules
    trtllm_modules_to_hf_modules quant_mode
"""
_SWITCHES = """
    gpt_attention_plugin remove_input_padding paged_kv_cache cross_attention lora_plugin
    has_token_type_embedding use_prompt_tuning gather_all_token_logits gather_context_logits
    gather_generation_logits use_custom_all_reduce use_context_fmha_for_generation
    skip_cross_attn_blocks
"""
_MODEL_FIELDS: dict[str, Any] = {
    **dict.fromkeys(_SIZES.split()),
    **dict.fromkeys(_SWITCHES.split(), False),
    **dict.fromkeys(("max_prompt_embedding_table_size", "max_medusa_tokens"), 0),
    **dict.fromkeys(("num_medusa_heads", "redrafter_num_beams"), 0),
    "model_name": "",
    "dtype": "",
    "has_position_embedding": True,
    "tokens_per_block": 64,
    "gpu_weights_percent": 1.0,
}
# Their names in config.json since 0.8.
_NEW_NAMES = {
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "num_hidden_layers": "num_layers",
    "architecture": "model_name",
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
        for name, value in {"end_id": end_id, "pad_id": pad_id, **fields}.items():
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
        """The sampling of one row of the batch; a temperature of 0 takes the likeliest token."""
        values = {name: type(default)(self._at(name, row)) for name, default in _PER_ROW.items()}
        if values["temperature"] == 0:
            values |= {"temperature": 1.0, "top_k": 1}
        return Sampling(**values)

    def random(self, row: int) -> np.random.Generator:
        """The random numbers of one row; the same for one seed, whatever the other rows are."""
        return random_of_row(int(self._at("random_seed", row)), row)

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
    """What a script says about its engine, as attributes.

    The artifact states the facts, so that only `vocab_size`, behind which logits are padding, and
    `gather_generation_logits` (`gather_all_token_logits`) change what a session returns.
    """

    @signatures(
        a="vocab_size, num_layers, num_heads, num_kv_heads, hidden_size, gpt_attention_plugin",
        b="max_batch_size, max_beam_width, vocab_size, num_layers, num_heads, num_kv_heads",
    )
    def __init__(self, **fields: Any) -> None:
        for name in fields:
            if name not in _MODEL_FIELDS:
                near = did_you_mean(name, _MODEL_FIELDS)
                raise Error(f"ModelConfig has no field {name!r}{near}", loc=here())
        vars(self).update({**_MODEL_FIELDS, "quant_mode": QuantMode(0), **fields})

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"ModelConfig has no field {name!r}{did_you_mean(name, vars(self))}")

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """What the config.json in the folder of an engine says; sizes are those of a rank."""
        path = folder / "config.json"
        config: dict[str, Any] = read_object(path) if path.is_file() else {}
        fields, plugins = config.get("builder_config", {}), config.get("plugin_config", {})
        tp = fields.get("tensor_parallel", 1)
        if "pretrained_config" in config:
            model, build = config["pretrained_config"], config.get("build_config", {})
            plugins, tp = build.get("plugin_config", {}), model.get("mapping", {}).get("tp_size", 1)
            fields = {**build, **{_NEW_NAMES.get(name, name): x for name, x in model.items()}}
        fields = {**fields, **plugins}
        mode, kv_heads = fields.get("quant_mode"), fields.get("num_kv_heads") or tp
        given = {name: x for name, x in fields.items() if name in _MODEL_FIELDS}
        given |= {name: given[name] // tp for name in ("num_heads", "hidden_size") if name in given}
        given |= {
            "num_kv_heads": -(-kv_heads // tp),
            "dtype": fields.get("dtype") or fields.get("precision") or "",
            "quant_mode": QuantMode(mode if isinstance(mode, int) else 0),
        }
        return cls(**given)


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
        words = [[list(word) for word in items]]
    elif all(_is_words(each) for each in items):
        words = [[list(word) for word in each] for each in items]
    else:
        raise Error("expected stop and bad words as lists of tokens per row, or an array [B, 2, n]")
    if len(words) not in (1, rows):
        raise Error(f"there are words for {len(words)} rows, but the batch has {rows}")
    return words * rows if len(words) == 1 else words


def _is_words(given: Any) -> bool:
    """Whether this is a list of lists of tokens."""
    lists = (list, tuple)
    return isinstance(given, lists) and all(
        isinstance(word, lists) and all(isinstance(token, int | np.integer) for token in word)
        for word in cast("Sequence[Any]", given)
    )


def _split(tokens: list[int], ends: list[int]) -> Words:
    ends = [end for end in ends if end > 0]
    return [tokens[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def decode_words_list(
    word_dict: Sequence[Sequence[Any]], tokenizer: Any = None, add_special_tokens: bool = False
) -> list[Words]:
    """The tokens of the words of each row; texts are encoded by `tokenizer`."""
    if tokenizer is None and any(
        isinstance(word, str | bytes) for row in word_dict for word in row
    ):
        raise Error("the words are texts; give a tokenizer to encode them", loc=here())

    def encoded(word: Any) -> list[int]:
        if tokenizer is None or not isinstance(word, str | bytes):
            return list(word)
        text = word.decode() if isinstance(word, bytes) else word
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))

    return [[tokens for word in row if (tokens := encoded(word))] for row in word_dict]


def to_word_list_format(
    word_dict: Sequence[Sequence[Any]], tokenizer: Any = None, add_special_tokens: bool = False
) -> np.ndarray[Any, Any]:
    """i32 [B, 2, n] of the words of each row, see `words_of`.

    Texts are encoded by `tokenizer`; a row of one text is a line of CSV.
    """
    lines = [row[0] if len(row) == 1 else None for row in word_dict]
    texts = [line.decode() if isinstance(line, bytes) else line for line in lines]
    split = [
        next(csv.reader([text])) if isinstance(text, str) else row
        for text, row in zip(texts, word_dict, strict=True)
    ]
    rows = decode_words_list(split, tokenizer, add_special_tokens)
    width = max([1, *(sum(map(len, words)) for words in rows)])
    array = np.zeros((len(rows), 2, width), np.int32)
    array[:, 1] = -1
    for row, words in enumerate(rows):
        tokens = [token for word in words for token in word]
        array[row, 0, : len(tokens)] = tokens
        array[row, 1, : len(words)] = np.cumsum([len(word) for word in words])
    return array
