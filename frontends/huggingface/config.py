"""config.json to a model: the families that irc knows, and what each reads."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

from ... import core
from ...errors import Error, did_you_mean
from ...weights import Ref
from ..layers import Rope
from ..models.language_model import Dims, trace_language_model
from ..models.llama import Llama, LlamaConfig
from ..models.mixtral import Mixtral, MixtralConfig, fused_names
from .settings import HARMLESS, Settings

_DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


@dataclass(frozen=True)
class Model:
    """A model that a config.json describes.

    `other_names` maps a weight to names that it may have in files instead (tied embeddings),
    `other_refs` weights to where they are in files that were written in another form.
    """

    config: LlamaConfig
    name: str
    other_names: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    other_refs: Mapping[str, Ref] = field(default_factory=dict[str, Ref])

    def trace(self, dtype: str, dims: Dims | None = None) -> core.Module:
        """The module, its weights unbound."""
        config = self.config
        mixture = isinstance(config, MixtralConfig)
        model = Mixtral(config, dtype) if mixture else Llama(config, dtype)
        return trace_language_model(model, self.config, dtype, dims, self.name)


def read_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The object in a folder's config.json."""
    path = Path(folder) / "config.json"
    try:
        found: object = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        hint = "" if Path(folder).is_dir() else "; there is no such folder"
        raise Error(f"{folder} is no checkpoint folder: it has no config.json{hint}") from None
    except OSError as error:
        raise Error(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise Error(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise Error(f"{path} holds no JSON object")
    return cast("dict[str, Any]", found)


def checkpoint_dtype(config: Mapping[str, Any]) -> str:
    """The dtype that a config names, f32 where it names none."""
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    found = _DTYPES.get(str(name).removeprefix("torch."))
    if found is None:
        raise Error(f"config.json: no dtype {name!r} in irc; give one of f32, f16, bf16 yourself")
    return found


def model_of(config: Mapping[str, Any], ignore: Sequence[str] = ()) -> Model:
    """The model that a config describes; an Error about every key that irc would leave out."""
    model_type = config.get("model_type")
    known = ", ".join(MODEL_TYPES)
    if not isinstance(model_type, str):
        raise Error(f"config.json names no model_type; irc loads {known}")
    read = MODEL_TYPES.get(model_type)
    if read is None:
        hint = did_you_mean(model_type, MODEL_TYPES)
        raise Error(
            f"irc has no model of model_type {model_type!r}{hint}; it loads {known}. Write the "
            "model as a script and compile that with --checkpoint"
        )
    settings = Settings(config, "config.json")
    _check_head(settings)
    sizes = read(settings)
    settings.finish(f"model_type {model_type}", HARMLESS.union(ignore))
    other = {"model.embed_tokens.weight": ("lm_head.weight",)} if sizes.tie_word_embeddings else {}
    fused = dict(fused_names(sizes)) if isinstance(sizes, MixtralConfig) else {}
    return Model(sizes, model_type, other, fused)


def _check_head(settings: Settings) -> None:
    """A checkpoint with another head than the language model's is another model."""
    for name in settings.words("architectures"):
        if not name.endswith("ForCausalLM"):
            raise Error(
                f"config.json: the architecture is {name}, but irc loads language models "
                "(...ForCausalLM); write this one as a script"
            )


def _llama(settings: Settings) -> LlamaConfig:
    bias = settings.flag("attention_bias")
    return _sizes(
        settings, 2048, qkv_bias=bias, output_bias=bias, mlp_bias=settings.flag("mlp_bias")
    )


def _mistral(settings: Settings) -> LlamaConfig:
    window = settings.integer("sliding_window", 0)
    return _sizes(settings, 4096 * 32, kv_heads=8, sliding_window=window)


def _mixtral(settings: Settings) -> MixtralConfig:
    settings.number("router_jitter_noise", 0.0)  # noise and loss of training
    settings.number("router_aux_loss_coef", 0.0)
    return _sizes(
        settings,
        4096 * 32,
        kv_heads=8,
        kind=MixtralConfig,
        eps=1e-5,
        theta=1e6,
        sliding_window=settings.integer("sliding_window", 0),
        num_local_experts=settings.integer("num_local_experts", 8),
        num_experts_per_tok=settings.integer("num_experts_per_tok", 2),
    )


def _qwen2(settings: Settings) -> LlamaConfig:
    for unused in ("sliding_window", "max_window_layers"):  # without use_sliding_window
        settings.integer(unused, 0)
    kinds = set(settings.words("layer_types")) - {"full_attention"}
    if settings.flag("use_sliding_window") or kinds:
        raise Error("config.json: irc does not support qwen2 with a sliding window in some layers")
    return _sizes(settings, 32768, qkv_bias=True)


# What each model_type reads; defaults are those of transformers' configuration classes.
MODEL_TYPES: dict[str, Callable[[Settings], LlamaConfig]] = {
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
}


Sizes = TypeVar("Sizes", bound=LlamaConfig)


def _sizes(
    settings: Settings,
    positions: int,
    kv_heads: int | None = None,
    kind: type[Sizes] = LlamaConfig,
    eps: float = 1e-6,
    theta: float = 10000.0,
    **more: Any,
) -> Sizes:
    heads = settings.integer("num_attention_heads")
    hidden = settings.integer("hidden_size")
    head_dim = settings.integer("head_dim", None)
    longest = settings.integer("max_position_embeddings", positions)
    features = head_dim or hidden // max(1, heads)
    return kind(
        vocab_size=settings.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=settings.integer("intermediate_size"),
        num_hidden_layers=settings.integer("num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=settings.integer("num_key_value_heads", kv_heads),
        head_dim=head_dim,
        hidden_act=settings.word("hidden_act", "silu"),
        max_position_embeddings=longest,
        rms_norm_eps=settings.number("rms_norm_eps", eps),
        rope=_rope(settings, features, longest, theta),
        tie_word_embeddings=settings.flag("tie_word_embeddings"),
        **more,
    )


def _rope(settings: Settings, features: int, longest: int, theta: float) -> Rope:
    """From `rope_parameters` (transformers 5), or `rope_scaling` and `rope_theta` (before)."""
    new, old = settings.inner("rope_parameters"), settings.inner("rope_scaling")
    inner = Settings(old or new, "config.json: the rope settings")
    theta = inner.number("rope_theta", settings.number("rope_theta", theta))
    legacy = inner.word("type", "default")
    kind = inner.word("rope_type", legacy)
    read = _ROPES.get(kind)
    if read is None:
        hint = did_you_mean(kind, _ROPES)
        raise Error(
            f"config.json: no rope of type {kind!r} in irc{hint}; it has {', '.join(_ROPES)}"
        )
    fraction = inner.number("partial_rotary_factor", settings.number("partial_rotary_factor", 1.0))
    if fraction != 1 and kind == "default":
        raise Error("config.json: partial_rotary_factor has no meaning in this model's rope")
    rotary = 0 if fraction == 1 else int(features * fraction)
    original = settings.integer(
        "original_max_position_embeddings",
        inner.integer("original_max_position_embeddings", longest),
    )
    if original < 1:
        name = "original_max_position_embeddings"
        raise Error(f"config.json: {name} is {original}; it must be at least 1")
    rope = Rope(theta=theta, rotary_dim=rotary, **read(inner, longest, original))
    inner.finish(f"a rope of type {kind}")
    return rope


def _llama3(inner: Settings, longest: int, original: int) -> dict[str, Any]:
    return {
        "kind": "llama3",
        "factor": inner.number("factor"),
        "low_freq_factor": inner.number("low_freq_factor"),
        "high_freq_factor": inner.number("high_freq_factor"),
        "original_positions": original,
    }


def _yarn(inner: Settings, longest: int, original: int) -> dict[str, Any]:
    return {
        "kind": "yarn",
        "factor": inner.number("factor", longest / original),
        "original_positions": original,
        "beta_fast": inner.number("beta_fast", 0.0) or 32.0,
        "beta_slow": inner.number("beta_slow", 0.0) or 1.0,
        "mscale": inner.number("mscale", 0.0),
        "mscale_all_dim": inner.number("mscale_all_dim", 0.0),
        "truncate": inner.flag("truncate", True),
        "attention_factor": inner.number("attention_factor", None),
    }


def _longrope(inner: Settings, longest: int, original: int) -> dict[str, Any]:
    return {
        "kind": "longrope",
        "factor": inner.number("factor", longest / original),
        "original_positions": original,
        "short_factors": inner.numbers("short_factor"),
        "long_factors": inner.numbers("long_factor"),
        "attention_factor": inner.number("attention_factor", None),
    }


_ROPES: dict[str, Callable[[Settings, int, int], dict[str, Any]]] = {
    "default": lambda inner, longest, original: {},
    "linear": lambda inner, longest, original: {
        "kind": "linear",
        "factor": inner.number("factor"),
    },
    "dynamic": lambda inner, longest, original: {
        "kind": "dynamic",
        "factor": inner.number("factor"),
        # transformers stretches from the model's own length
        "original_positions": longest,
    },
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
