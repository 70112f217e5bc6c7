"""`SamplingConfig`, `ModelConfig`, words: settings of a generation, by TensorRT-LLM's names."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any

import numpy as np

from irc.errors import Error, did_you_mean
from irc.generation.sampling import Sampling, random_of_row
from irc.generation.words import WordLists, word_array
from irc.json_files import read_object

from ..api import api, fields
from ..dtypes import as_array
from ..errors import ScriptError
from ..quantization import QuantMode


class _Record:
    """Fields as attributes; those that were not given have the defaults of the table."""

    path: str

    def __init__(self, **given: Any) -> None:
        vars(self).update({name: value for name, value in given.items() if value is not None})

    def __getattr__(self, name: str) -> Any:
        defaults = fields(self.path, every=True)
        if name not in defaults:
            title = self.path.rpartition(".")[2]
            raise AttributeError(f"{title} has no field {name!r}{did_you_mean(name, defaults)}")
        return defaults[name]


@api("runtime.generation.SamplingConfig")
class SamplingConfig(_Record):
    """How tokens are chosen. An unknown field, or one that would not be honoured, is an Error.

    `end_id` ends a sequence (-1: none does), `pad_id` is accepted: outputs are filled with end_id.
    Numbers may be given per row, as arrays.
    """

    path = "runtime.generation.SamplingConfig"

    def __setattr__(self, name: str, value: Any) -> None:
        type(self)(**{"end_id": None, "pad_id": None, name: value})  # checks it
        vars(self)[name] = value

    def update(self, **given: Any) -> dict[str, Any]:
        """Set the fields that there are; returns the others."""
        names = given.keys() & fields(self.path, every=True).keys()
        for name in names:
            setattr(self, name, given[name])
        return {name: value for name, value in given.items() if name not in names}

    def of_row(self, row: int) -> Sampling:
        """The sampling of one row of the batch; a temperature of 0 takes the likeliest token."""
        values: dict[str, Any] = {}
        for field in fields_of(Sampling):
            if getattr(self, field.name) is not None:
                values[field.name] = type(field.default)(self._at(field.name, row))
        if values["temperature"] == 0:
            values |= {"temperature": 1.0, "top_k": 1}
        return Sampling(**values)

    def random(self, row: int) -> np.random.Generator:
        """The random numbers of one row; the same for one seed, whatever the other rows are."""
        return random_of_row(int(self._at("random_seed", row) or 0), row)

    def _at(self, name: str, row: int) -> Any:
        """The value of a field for a row."""
        array = as_array(getattr(self, name)).reshape(-1)
        if len(array) != 1 and row >= len(array):
            raise Error(f"{name} has {len(array)} values; expected one, or one for each prompt")
        return array[row % len(array)] if array.dtype == object else array[row % len(array)].item()

    def ends(self) -> tuple[int, ...]:
        """The token that ends a sequence, if there is one."""
        return () if self.end_id is None or self.end_id < 0 else (int(self.end_id),)


@api("runtime.generation.ModelConfig")
class ModelConfig(_Record):
    """What a script says about its engine, as attributes.

    The artifact states the facts, so that only `vocab_size`, behind which logits are padding, and
    `gather_generation_logits` (`gather_all_token_logits`) change what a session returns.
    """

    path = "runtime.generation.ModelConfig"
    quant_mode = QuantMode(0)
    max_input_len: int | None = None
    max_output_len: int | None = None
    max_seq_len: int | None = None

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """What the config.json in the folder of an engine says; sizes are those of a rank."""
        path = folder / "config.json"
        config: dict[str, Any] = read_object(path) if path.is_file() else {}
        given: dict[str, Any] = config.get("builder_config", {})
        plugins: dict[str, Any] = config.get("plugin_config", {})
        tp = given.get("tensor_parallel", 1)
        if "pretrained_config" in config:
            model, build = config["pretrained_config"], config.get("build_config", {})
            plugins, tp = build.get("plugin_config", {}), model.get("mapping", {}).get("tp_size", 1)
            given = build | {_NEW_NAMES.get(str(name), str(name)): x for name, x in model.items()}
        given = {**given, **plugins}
        given |= {name: given[name] // tp for name in ("num_heads", "hidden_size") if name in given}
        given["num_kv_heads"] = -(-(given.get("num_kv_heads") or tp) // tp)
        given["dtype"] = given.get("dtype") or given.get("precision")
        mode = given.get("quant_mode")
        given["quant_mode"] = QuantMode(mode) if isinstance(mode, int) else None
        record = cls.__new__(cls)  # the table's names of one release do not bind it
        vars(record).update({name: value for name, value in given.items() if value is not None})
        return record


# The names of fields in config.json since 0.8.
_NEW_NAMES = {
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "num_hidden_layers": "num_layers",
    "architecture": "model_name",
}


@api("runtime.generation.decode_words_list")
def decode_words_list(
    word_dict: Sequence[Sequence[Any]], tokenizer: Any = None, add_special_tokens: bool = False
) -> list[WordLists]:
    """The tokens of the words of each row; texts are encoded by `tokenizer`."""

    def encoded(word: Any) -> list[int]:
        if not isinstance(word, str | bytes):
            return list(word)
        if tokenizer is None:
            raise ScriptError("the words are texts; give a tokenizer to encode them")
        text = word.decode() if isinstance(word, bytes) else word
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))

    return [[tokens for word in row if (tokens := encoded(word))] for row in word_dict]


@api("runtime.generation.to_word_list_format")
def to_word_list_format(
    word_dict: Sequence[Sequence[Any]], tokenizer: Any = None, add_special_tokens: bool = False
) -> np.ndarray[Any, Any]:
    """i32 [B, 2, n] of the words of each row, see `words_of`.

    Texts are encoded by `tokenizer`; a row of one text is a line of CSV.
    """
    split: list[Sequence[Any]] = []
    for row in word_dict:
        text = row[0].decode() if isinstance(row[0], bytes) else row[0]
        split.append(next(csv.reader([text])) if len(row) == 1 and isinstance(text, str) else row)
    return word_array(decode_words_list(split, tokenizer, add_special_tokens))
