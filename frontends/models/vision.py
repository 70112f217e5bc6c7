"""Encoders of images, and models of two encoders, of texts and of images (CLIP, SigLIP)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .. import functional as F
from ..module import Module, Parameter
from ..tensor import Tensor
from .config_reader import HARMLESS, ConfigReader
from .encoder import EncoderConfig, EncoderModel, read_encoder, signature, stored_in
from .family import Family, Signature, register
from .stored import Layout, Stored, renamed

BASE = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}


@dataclass(frozen=True)
class TwoEncoders:
    """Encoders of texts and of images, whose vectors are compared; SigLIP adds a bias to scores."""

    text: EncoderConfig
    vision: EncoderConfig
    bias: bool = False


class TwoEncoderModel(Module):
    """Vectors of texts and images of length 1, and their products as scores."""

    def __init__(self, config: TwoEncoders, dtype: str) -> None:
        self.text, self.vision = (
            EncoderModel(config.text, dtype),
            EncoderModel(config.vision, dtype),
        )
        ones = (1,) * config.bias
        self.logit_scale = Parameter(ones, dtype)
        self.logit_bias = Parameter(ones, dtype) if config.bias else None

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, pixel_values: Tensor
    ) -> dict[str, Tensor]:
        """Scores of B texts and N images, and their vectors [B, D] and [N, D]."""
        text = self.text(input_ids=input_ids, attention_mask=attention_mask)
        texts, images = _unit(text), _unit(self.vision(pixel_values=pixel_values))
        scores = F.matmul(texts, images.permute(1, 0)) * F.exp(F.cast(self.logit_scale, "f32"))
        if self.logit_bias is not None:
            scores = scores + F.cast(self.logit_bias, "f32")
        scored = {"logits_per_image": scores.permute(1, 0), "logits_per_text": scores}
        return {**scored, "text_embeds": texts, "image_embeds": images}


def _unit(results: dict[str, Tensor]) -> Tensor:
    """The last result [B, D], each row divided by its length."""
    x = [*results.values()][-1]
    return x / F.sqrt((x * x).sum(1, keep=True))


def _signature(config: TwoEncoders, dtype: str) -> Signature:
    text, vision = signature(config.text, dtype), signature(config.vision, dtype, "N")
    return Signature({**text.inputs, **vision.inputs}, {**text.dims, **vision.dims})


def register_two_encoders(
    model_type: str, architecture: str, read: Callable[[ConfigReader], TwoEncoders], layout: Layout
) -> Family[TwoEncoders]:
    """Register the family of a text and a vision encoder, each with this layout."""

    def stored(config: TwoEncoders) -> Sequence[Stored]:
        text = stored_in(config.text, layout, "text_model.", "text.")
        return [*text, *stored_in(config.vision, layout, "vision_model.", "vision.")]

    return register(
        Family(model_type, (architecture,), read, TwoEncoderModel, _signature, stored=stored)
    )


def read_vision(
    config: ConfigReader, defaults: Mapping[str, Any], patch: int = 16, **more: Any
) -> EncoderConfig:
    """An encoder of images; `defaults` as in `read_encoder`, `patch` is that of patch_size."""
    size, patch = config.integer("image_size", 224), config.integer("patch_size", patch)
    if not 1 <= patch <= size:
        raise config.error("patch_size", f"expected 1 to image_size {size}")
    return read_encoder(
        config,
        defaults=defaults,
        image_size=size,
        patch_size=patch,
        num_channels=config.integer("num_channels", 3),
        vocab_size=1,
        max_position_embeddings=1,
        **more,
    )


def read_inner(
    config: ConfigReader,
    key: str,
    read: Callable[[ConfigReader], EncoderConfig],
    defaults: Mapping[str, Any],
    **more: Any,
) -> EncoderConfig:
    """What `read` makes of the object at a key; old CLIPs repeat it in `key`_dict."""
    values = {**config.inner(key), **config.inner(f"{key}_dict")}
    if not values:
        raise config.error(key, "expected the sizes of an encoder")
    sizes = {"num_hidden_layers": 12, **BASE, **defaults, **values, **more}
    inner = ConfigReader(sizes, f"config.json: {key}")
    encoder = read(inner)
    inner.finish(key, HARMLESS)
    return encoder


def clip_names(config: EncoderConfig) -> Sequence[Stored]:
    """Where checkpoints of CLIP and SigLIP have an encoder."""
    names = {
        "embed_tokens": "embeddings.token_embedding",
        "embed_positions": "embeddings.position_embedding",
        "class_token": "embeddings.class_embedding",
        "patches": "embeddings.patch_embedding",
        "position_embeddings": "embeddings.position_embedding.weight",
        "embedding_norm": "pre_layrnorm",
        "layers.*.self_attn.o_proj": "encoder.layers.*.self_attn.out_proj",
        "layers.*.input_layernorm": "encoder.layers.*.layer_norm1",
        "layers.*.post_attention_layernorm": "encoder.layers.*.layer_norm2",
        "layers.*.mlp.up_proj": "encoder.layers.*.mlp.fc1",
        "layers.*.mlp.down_proj": "encoder.layers.*.mlp.fc2",
        "layers": "encoder.layers",
        "norm": "post_layernorm" if config.image_size else "final_layer_norm",
    }
    return renamed(names, "", "encoder.")
