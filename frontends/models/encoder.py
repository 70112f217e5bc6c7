"""Encoders of tokens and of images: layers whose attention sees both sides, or causal ones (CLIP).

Their parameters have the names of this file in every family; `Stored` says where checkpoints have
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .. import functional as F
from ..layers import MLP, Attention, Conv2d, Embedding, GatedMLP, LayerNorm, Rope
from ..layers.masks import key_mask, local_mask
from ..layers.positions import RelativePositions, query_positions
from ..module import Module, ModuleList, Parameter
from ..tensor import Tensor


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """The sizes of an encoder.

    `pre_norm` normalizes what enters attention and feed-forward, else their sums with it;
    `first_norm`: the first attention has a norm as well. `embed_norm` and `final_norm` are norms in
    front of and behind the layers. `reaches` and `ropes` hold for each layer how many tokens a
    query sees on either side (0: all) and its rope.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    act: str
    eps: float
    pre_norm: bool = False
    first_norm: bool = True
    embed_norm: bool = True
    final_norm: bool = False
    attention_bias: bool = True
    output_bias: bool = True
    mlp_bias: bool = True
    norm_bias: bool = True
    gated: bool = False
    causal: bool = False
    reaches: Sequence[int] = ()
    ropes: Sequence[Rope] = ()
    relative: RelativePositions | None = None

    def norm(self, dtype: str, present: bool = True, size: int = 0) -> LayerNorm | None:
        """A norm of `size` features (0: hidden_size), or none."""
        size = size or self.hidden_size
        return LayerNorm(size, self.eps, bias=self.norm_bias, dtype=dtype) if present else None


@dataclass(frozen=True, kw_only=True)
class TextConfig(EncoderConfig):
    """The sizes of an encoder of tokens.

    The first token is at position 0, but with a `padding_id` tokens that are not padding are at
    padding_id + 1, + 2, ... (RoBERTa).
    """

    vocab_size: int
    max_position_embeddings: int
    learned_positions: bool = True
    padding_id: int | None = None
    type_vocab_size: int = 0


@dataclass(frozen=True, kw_only=True)
class VisionConfig(EncoderConfig):
    """The sizes of an encoder of images of `image_size`, in patches of `patch_size`.

    `class_token` is a learned token in front of the patches. `leading_ones`: a checkpoint has it
    as [1, 1, hidden_size], and the positions as [1, tokens, hidden_size].
    """

    image_size: tuple[int, int]
    patch_size: tuple[int, int]
    num_channels: int = 3
    class_token: bool = True
    leading_ones: bool = False
    patch_bias: bool = True


class EncoderLayer(Module):
    """Attention and a feed-forward, each with a norm and added to its input."""

    def __init__(self, config: EncoderConfig, index: int, dtype: str) -> None:
        size = config.hidden_size
        self.attention_norm = config.norm(dtype, config.first_norm or index > 0)
        self.attention = Attention(
            size,
            config.num_attention_heads,
            qkv_bias=config.attention_bias,
            output_bias=config.output_bias,
            rope=config.ropes[index] if config.ropes else None,
            causal=config.causal,
            relative=config.relative,
            dtype=dtype,
        )
        self.mlp_norm = config.norm(dtype)
        mlp = GatedMLP if config.gated else MLP
        self.mlp = mlp(size, config.intermediate_size, config.act, config.mlp_bias, dtype)
        self.pre_norm = config.pre_norm

    def forward(self, x: Tensor, positions: Tensor | None, mask: Tensor | None) -> Tensor:
        """x [B, S, hidden_size] to the same; positions i32 [B, S], mask bool [B|1, 1, S|1, S]."""
        if self.pre_norm:
            x = x + self.attention(_normed(self.attention_norm, x), positions, mask=mask)
            return x + self.mlp(_normed(self.mlp_norm, x))
        x = _normed(self.attention_norm, x + self.attention(x, positions, mask=mask))
        return _normed(self.mlp_norm, x + self.mlp(x))


def _normed(norm: Module | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


class Encoder(Module):
    """Layers between two norms; subclasses embed their inputs."""

    def add_layers(self, config: EncoderConfig, dtype: str) -> None:
        """Create the norms and layers."""
        layers = range(config.num_hidden_layers)
        self.embed_norm = config.norm(dtype, config.embed_norm)
        self.layers = ModuleList(EncoderLayer(config, i, dtype) for i in layers)
        self.final_norm = config.norm(dtype, config.final_norm)
        self.config = config

    def encode(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Embeddings to hidden states [B, S, hidden_size]; mask bool [B, 1, 1, S]."""
        x = _normed(self.embed_norm, x)
        rows, config = query_positions(x.shape[1]), self.config
        positions = rows.expand(*x.shape[:2]) if config.ropes else None
        masks = {0: mask}
        for index, layer in enumerate(self.layers):
            reach = config.reaches[index] if config.reaches else 0
            if reach not in masks:
                near = local_mask(rows, x.shape[1], reach)
                masks[reach] = near if mask is None else near & mask
            x = layer(x, positions, masks[reach])
        return _normed(self.final_norm, x)


class TextEncoder(Encoder):
    """Embeddings of tokens, positions and types, and the layers."""

    def __init__(self, config: TextConfig, dtype: str) -> None:
        size, count, types = (
            config.hidden_size,
            config.max_position_embeddings,
            config.type_vocab_size,
        )
        self.embed_tokens = Embedding(config.vocab_size, size, dtype)
        self.embed_positions = Embedding(count, size, dtype) if config.learned_positions else None
        self.token_type_embeddings = Embedding(types, size, dtype) if types else None
        self.padding_id = config.padding_id
        self.add_layers(config, dtype)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """Ids i32 [B, S] to hidden states [B, S, hidden_size]."""
        x = self.embed_tokens(input_ids)
        if self.token_type_embeddings is not None:
            types = self.token_type_embeddings
            x = x + (types.weight if token_type_ids is None else types(token_type_ids))
        if self.embed_positions is not None:
            x = x + self.embed_positions(self._positions(input_ids))
        return self.encode(x, key_mask(attention_mask, input_ids.shape[1]))

    def _positions(self, ids: Tensor) -> Tensor:
        """i32 [B|1, S]: the position of every token in the learned table."""
        if self.padding_id is None:
            return query_positions(ids.shape[1])
        present = F.ne(ids, self.padding_id).cast("i32")
        return F.cumsum(present, dim=1) * present + self.padding_id


class VisionEncoder(Encoder):
    """Patches of images as tokens, and the layers."""

    def __init__(self, config: VisionConfig, dtype: str) -> None:
        size, patch, ones = config.hidden_size, config.patch_size, (1,) * config.leading_ones
        (height, width), channels = config.image_size, config.num_channels
        count = (height // patch[0]) * (width // patch[1]) + config.class_token
        self.class_token = Parameter((*ones, *ones, size), dtype) if config.class_token else None
        self.patches = Conv2d(channels, size, patch, patch, bias=config.patch_bias, dtype=dtype)
        self.position_embeddings = Parameter((*ones, count, size), dtype)
        self.dtype = dtype
        self.add_layers(config, dtype)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Images f32 [B, channels, height, width] to hidden states [B, tokens, hidden_size]."""
        x = self.patches(pixel_values.cast(self.dtype))
        batch, size = x.shape[:2]
        x = x.reshape(batch, size, -1).permute(0, 2, 1)
        if self.class_token is not None:
            first = F.reshape(self.class_token, (1, 1, size)).expand(batch, 1, size)
            x = F.concat([first, x], 1)
        return self.encode(x + self.position_embeddings, None)
