"""Reads the rope settings of a config.json."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...errors import Error, did_you_mean
from ..layers import Rope
from .config_reader import ConfigReader


def read_rope(
    config: ConfigReader,
    head_size: int,
    context: int,
    theta: float,
    fraction: float | None = None,
    layer_type: str = "full_attention",
    local_theta: str = "",
    others: str = "",
) -> Rope:
    """The rope of `rope_parameters` (transformers 5), or of `rope_scaling` and `rope_theta`.

    `head_size` is the number of features of a head, `context` max_position_embeddings; `theta` and
    `fraction`, the part of a head that is rotated, are the family's defaults. None: the family
    rotates whole heads. `layer_type` is the entry of rope_parameters to read, where it has one
    for each type of layers. Older files have the base of layers with a window in the key
    `local_theta`; their rope_scaling is for the other layers. `others` are keys among the
    settings that a family reads itself.
    """
    new, old = config.inner("rope_parameters"), config.inner("rope_scaling")
    if isinstance(new.get(layer_type), dict):
        new = new[layer_type]
    inner = ConfigReader(new if local_theta else old or new, "config.json: the rope settings")
    theta = inner.number("rope_theta", config.number(local_theta or "rope_theta", theta))
    inner.ignore("mrope_section mrope_interleaved")  # the positions of text are equal in all parts
    inner.ignore(others)
    kind = inner.word("rope_type", inner.word("type", "default"))
    if kind not in _KINDS:
        hint = did_you_mean(kind, _KINDS)
        raise Error(
            f"config.json: irc has no rope of type {kind!r}{hint}; expected {', '.join(_KINDS)}"
        )
    key = "partial_rotary_factor"
    part = inner.number(key, config.number(key, 1.0 if fraction is None else fraction))
    if part != 1 and kind == "default" and fraction is None:
        raise Error("config.json: partial_rotary_factor has no meaning in this model's rope")
    key = "original_max_position_embeddings"
    original = config.integer(key, inner.integer(key, context))
    if original < 1:
        raise Error(f"config.json: {key} is {original}; it must be at least 1")
    rotary_dim = 0 if part == 1 else int(head_size * part)
    if kind == "proportional":
        rotary_dim -= rotary_dim % 2
    if part != 1 and not 0 < rotary_dim <= head_size:
        raise Error(f"config.json: partial_rotary_factor is {part}; expected a part of {head_size}")
    fields = scaling_fields(kind, inner, context, original)
    rope = Rope(theta=theta, kind=kind, rotary_dim=rotary_dim, **fields)
    inner.finish(f"a rope of type {kind}")
    return rope


def scaling_fields(kind: str, inner: ConfigReader, context: int, original: int) -> dict[str, Any]:
    """The fields of Rope of a kind: from its settings, max_position_embeddings, original length."""
    return _KINDS[kind](inner, context, original)


def _llama3(inner: ConfigReader, context: int, original: int) -> dict[str, Any]:
    keys = ("factor", "low_freq_factor", "high_freq_factor")
    return {key: inner.number(key) for key in keys} | {"original_positions": original}


def _yarn(inner: ConfigReader, context: int, original: int) -> dict[str, Any]:
    return {
        "factor": inner.number("factor", context / original),
        "original_positions": original,
        "beta_fast": inner.number("beta_fast", 0.0) or 32.0,
        "beta_slow": inner.number("beta_slow", 0.0) or 1.0,
        "mscale": inner.number("mscale", 0.0),
        "mscale_all_dim": inner.number("mscale_all_dim", 0.0),
        "truncate": inner.flag("truncate", True),
        "attention_factor": inner.number("attention_factor", None),
    }


def _longrope(inner: ConfigReader, context: int, original: int) -> dict[str, Any]:
    return {
        "factor": inner.number("factor", context / original),
        "original_positions": original,
        "short_factors": inner.numbers("short_factor"),
        "long_factors": inner.numbers("long_factor"),
        "attention_factor": inner.number("attention_factor", None),
    }


# rope type -> the fields of Rope, from its settings, max_position_embeddings, original length
_KINDS: dict[Any, Callable[[ConfigReader, int, int], dict[str, Any]]] = {
    "default": lambda inner, context, original: {},
    "linear": lambda inner, context, original: {"factor": inner.number("factor")},
    # transformers scales from max_position_embeddings, not from the original length
    "dynamic": lambda inner, context, original: {
        "factor": inner.number("factor"),
        "original_positions": context,
    },
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": lambda inner, context, original: {"factor": inner.number("factor", 1.0)},
}
