"""`ConfigReader`: typed reading of config.json that reports every key nobody read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, cast

from ...errors import Error

# Keys that do not change what a forward pass computes: origin of the checkpoint, training
# (dropout, initializers), text generation, and how a product is split over devices.
_HARMLESS = """
    _attn_implementation_autoset _name_or_path architectures attention_dropout
    attention_probs_dropout_prob auto_map bad_words_ids base_model_tp_plan begin_suppress_tokens
    bos_token_id cache_implementation chunk_size_feed_forward classifier_dropout cls_token_id
    decoder_start_token_id diversity_penalty do_sample dropout dtype early_stopping embd_pdrop
    encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id hidden_dropout hidden_dropout_prob id2label
    initializer_factor initializer_range label2id
    length_penalty max_length max_new_tokens min_length model_type no_repeat_ngram_size
    num_beam_groups num_beams num_return_sequences output_attentions output_hidden_states
    output_scores pad_token_id prefix pretraining_tp problem_type remove_invalid_values
    repetition_penalty resid_pdrop return_dict return_dict_in_generate sep_token_id
    suppress_tokens task_specific_params temperature tf_legacy_loss tokenizer_class top_k top_p
    torch_dtype torchscript tp_plan transformers_version typical_p unsloth_version use_bfloat16
    use_cache
"""
HARMLESS = frozenset(_HARMLESS.split())
MOST_LAYERS = 1 << 10  # each is traced, so that many more would take minutes and memory
REQUIRED: Any = object()  # the default of a key that must be present
_LARGEST = 2**31 - 1
_SWITCHED_OFF: tuple[Any, ...] = (None, False, [], {}, "")


class ConfigReader:
    """The keys of a config.json, or of an object in it, and which of them were read.

    A key that is absent or null has its default; without a default it is required. `architecture`
    is the class of transformers that the model is to compute.
    """

    def __init__(
        self, values: Mapping[str, Any], title: str = "config.json", architecture: str = ""
    ) -> None:
        self._values, self.title, self.architecture = values, title, architecture
        self._read: set[str] = set()

    def integer(self, key: str, default: Any = REQUIRED, most: int = _LARGEST) -> Any:
        """An int of at most `most` in magnitude, by default of 32 bits."""
        value = self._take(key, default, (int,), "a whole number")
        if isinstance(value, int) and not -most <= value <= most:
            raise self.error(key, f"expected a number of at most {most} in magnitude")
        return value

    def layers(self, key: str = "num_hidden_layers", default: Any = REQUIRED) -> Any:
        """The number of layers."""
        return self.integer(key, default, MOST_LAYERS)

    def number(self, key: str, default: Any = REQUIRED) -> Any:
        """A float."""
        value = self._take(key, default, (int, float), "a number")
        return self._float(key, value)

    def is_null(self, key: str) -> bool:
        """Whether a key is present and null, which is not its default in every family."""
        return key in self._values and self._values[key] is None

    def flag(self, key: str, default: Any = False) -> bool:
        """true or false."""
        return self._take(key, default, (bool,), "true or false")

    def word(self, key: str, default: Any = REQUIRED) -> Any:
        """A string."""
        return self._take(key, default, (str,), "a string")

    def words(self, key: str) -> list[str]:
        """A list of strings, empty by default."""
        return self._list(key, (str,), "a list of strings")

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of numbers, empty by default."""
        values = self._list(key, (int, float), "a list of numbers")
        return tuple(self._float(key, value) for value in values)

    def inner(self, key: str) -> dict[str, Any]:
        """A nested object, empty by default."""
        return self._take(key, {}, (dict,), "an object")

    def key(self, names: str) -> str:
        """The first of several names with | between them that is a key, else the first."""
        choices = names.split("|")
        return next((name for name in choices if name in self._values), choices[0])

    def ignore(self, keys: str) -> None:
        """Pass over keys, separated by spaces, that do not change what the model computes."""
        self._read.update(keys.split())

    def require(self, key: str, value: Any, reason: str) -> None:
        """An Error with this reason unless a key is absent or has the one supported value."""
        if self._take(key, value, (object,), "a value") != value:
            raise self.error(key, reason)

    def error(self, key: str, reason: str) -> Error:
        """An Error that names a key, its value and why irc does not support it."""
        shown = f"{key}={_short(self._values[key])}" if key in self._values else key
        return Error(f"{self.title} sets {shown}: {reason}")

    def unread(self, harmless: Iterable[str] = ()) -> dict[str, Any]:
        """The keys that nobody read, unless they are null, false or empty, with their values."""
        passed = self._read.union(harmless)
        return {
            key: value
            for key, value in self._values.items()
            if key not in passed and not any(value is x or value == x != 0 for x in _SWITCHED_OFF)
        }

    def finish(self, what: str, harmless: Iterable[str] = ()) -> None:
        """Raise an Error about the keys in `unread`."""
        unread = self.unread(harmless)
        if unread:
            shown = ", ".join(f"{key}={_short(value)}" for key, value in unread.items())
            raise Error(
                f"{self.title} sets {shown}, which irc does not support in {what}. Where it does "
                f"not change what the model computes, give --set ignore={','.join(unread)}"
            )

    def _float(self, key: str, value: Any) -> Any:
        """An int as a float; other values as they are."""
        try:
            return float(value) if isinstance(value, int) else value
        except OverflowError:
            raise self.error(key, "expected a number of at most 1e308") from None

    def _list(self, key: str, kinds: tuple[type, ...], wanted: str) -> list[Any]:
        stored: list[Any] = self._take(key, [], (list,), wanted)
        items = [math.inf if item == {"__float__": "Infinity"} else item for item in stored]
        if any(not isinstance(item, kinds) or isinstance(item, bool) for item in items):
            raise Error(f"{self.title}: {key} is {_short(items)}; expected {wanted}")
        return items

    def _take(self, key: str, default: Any, kinds: tuple[type, ...], wanted: str) -> Any:
        self._read.add(key)
        value = self._values.get(key)
        if value is None:
            if default is REQUIRED:
                raise Error(f"{self.title} lacks the key {key}, which this model requires")
            return default
        is_bool = isinstance(value, bool) and not {bool, object} & {*kinds}
        if not isinstance(value, kinds) or is_bool:
            raise Error(f"{self.title}: {key} is {_short(value)}; expected {wanted}")
        return value


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(cast('dict[str, Any]', value))}}}"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
