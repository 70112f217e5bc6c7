"""`CheckpointSettings`: what generation_config.json says about text of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, cast

from ..errors import Error
from ..json_files import read_object
from .settings import GenerationSettings

FILE = "generation_config.json"
Tokens: TypeAlias = tuple[int, ...]

# The fields of GenerationSettings that a checkpoint may set; `stop_strings` is `stop`.
_HONOURED = (
    "max_new_tokens", "min_new_tokens", "max_length", "min_length", "temperature", "top_k", "top_p",
    "min_p", "typical_p", "repetition_penalty", "no_repeat_ngram_size", "num_beams",
    "num_beam_groups", "diversity_penalty", "length_penalty", "early_stopping",
    "prompt_lookup_num_tokens",
)  # fmt: skip
_TOKENS = (
    "bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id",
    "forced_eos_token_id",
)  # fmt: skip
_SAMPLED_TOP_K = 50  # of transformers where `do_sample` is set, and `top_k` is not

# What changes the tokens of transformers and is not done here, by the value that changes nothing.
_IGNORED: dict[str, Any] = {
    "encoder_repetition_penalty": 1, "encoder_no_repeat_ngram_size": 0, "sequence_bias": None,
    "exponential_decay_length_penalty": None, "guidance_scale": 1, "epsilon_cutoff": 0,
    "eta_cutoff": 0, "top_h": None, "watermarking_config": None, "force_words_ids": None,
    "constraints": None, "forced_decoder_ids": None, "penalty_alpha": 0, "dola_layers": None,
    "num_return_sequences": 1, "max_time": None,
}  # fmt: skip


@dataclass(frozen=True)
class CheckpointSettings:
    """The settings of a checkpoint, and its tokens that text may not have, or must have.

    `defaults` hold where a user says nothing else. `forced_bos_token_id` follows a prompt of one
    token, one of `forced_eos_token_ids` is the last where the length is at its limit.
    """

    defaults: GenerationSettings = field(default_factory=GenerationSettings)
    bad_words_ids: tuple[Tokens, ...] = ()
    suppress_tokens: Tokens = ()
    begin_suppress_tokens: Tokens = ()
    forced_bos_token_id: int | None = None
    forced_eos_token_ids: Tokens = ()
    decoder_start_token_id: int | None = None

    @staticmethod
    def of_folder(folder: Path) -> CheckpointSettings:
        """The settings in the generation_config.json of a folder; none where there is no file."""
        path = folder / FILE
        if not path.is_file():
            return CheckpointSettings()
        try:
            return _settings_of(read_object(path))
        except (Error, TypeError, ValueError) as error:
            raise Error(f"{path} cannot be used: {error}; correct it") from error


def _settings_of(config: Mapping[str, Any]) -> CheckpointSettings:
    words = [_ids("bad_words_ids", word) for word in config.get("bad_words_ids") or ()]
    lists = {
        name: _ids(name, config.get(name)) for name in (*_TOKENS[1:], "decoder_start_token_id")
    }
    return CheckpointSettings(
        _defaults(config),
        tuple(words),
        lists["suppress_tokens"],
        lists["begin_suppress_tokens"],
        next(iter(lists["forced_bos_token_id"]), None),
        lists["forced_eos_token_id"],
        next(iter(lists["decoder_start_token_id"]), None),
    )


def _defaults(config: Mapping[str, Any]) -> GenerationSettings:
    given = {name: config[name] for name in _HONOURED if config.get(name) is not None}
    beams = given.get("num_beams", 1)
    if config.get("do_sample") and beams == 1:
        given = {"temperature": 1.0, "top_k": _SAMPLED_TOP_K, **given}
    else:
        given["temperature"] = 0.0
    if (stop := config.get("stop_strings")) is not None:
        given["stop"] = stop
    return GenerationSettings().changed(given, FILE)


def _ids(name: str, value: Any) -> Tokens:
    """The token ids of an entry that is a number, a list, or absent."""
    if value is None:
        return ()
    ids = cast("list[Any]", value if isinstance(value, list) else [value])
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise Error(f"{name} is {value!r}; expected token ids")
    return tuple(token for token in ids if token >= 0)


def settings_in(config: Mapping[str, Any]) -> list[str]:
    """The names of the settings in a config.json that change the tokens of transformers."""
    given = {name: config.get(name) for name in ("do_sample", *_HONOURED, *_TOKENS)}
    return [name for name, value in given.items() if value is True or value not in (None, 0, 1, [])]


def ignored_settings(config: Mapping[str, Any]) -> list[str]:
    """The names of the settings in a generation_config.json that irc does not follow."""
    names = [name for name, no in _IGNORED.items() if (config.get(name) or no) != no]
    sampled_beams = config.get("do_sample") and (config.get("num_beams") or 1) > 1
    return [*names, *(["do_sample of beams"] if sampled_beams else [])]
