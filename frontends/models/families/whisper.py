"""Whisper: an encoder of log-mel spectrograms, and a decoder of text. Radford et al., 2022."""

from __future__ import annotations

from dataclasses import dataclass

from ... import functional as F
from ...module import Module, Parameter
from ...tensor import Tensor
from ...trace import Spec
from ..config_reader import ConfigReader
from ..encoder_decoder import (
    BART_STORED,
    BART_UNUSED,
    EncoderDecoderConfig,
    EncoderPart,
    read_bart,
    register_encoder_decoder,
)
from ..family import Signature
from ..stored import Stored


@dataclass(frozen=True)
class WhisperConfig(EncoderDecoderConfig):
    """The sizes of a Whisper, whose spectrograms all have two frames per position."""

    num_mel_bins: int = 80


class Conv1d(Module):
    """Convolution of 3 frames, zeros around them; weight [out_channels, in_channels, 3]."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, dtype: str) -> None:
        self.weight = Parameter((out_channels, in_channels, 3), dtype)
        self.bias = Parameter((out_channels,), dtype)
        self.strides = (stride,)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, in_channels, frames] to [B, out_channels, frames / stride]."""
        return F.conv(x, self.weight, bias=self.bias, strides=self.strides, before=(1,), after=(1,))


class WhisperEncoder(EncoderPart):
    """The encoder of `input_features` f32 [B, num_mel_bins, frames]."""

    def __init__(self, config: WhisperConfig, dtype: str) -> None:
        super().__init__(config, dtype)
        self.conv1 = Conv1d(config.num_mel_bins, config.hidden_size, 1, dtype)
        self.conv2 = Conv1d(config.hidden_size, config.hidden_size, 2, dtype)

    def embed_source(self, source: Tensor) -> Tensor:
        """Features to embeddings [B, E, hidden_size]."""
        x = F.gelu(self.conv1(source.cast(self.dtype)))
        return F.gelu(self.conv2(x)).permute(0, 2, 1)


def _signature(config: WhisperConfig, dtype: str) -> Signature:
    frames = 2 * config.of_encoder.max_position_embeddings
    features = Spec("f32", ("B", config.num_mel_bins, frames))
    return Signature({"input_features": features}, {"B": (1, 1, 8)})


def _read(config: ConfigReader) -> WhisperConfig:
    config.ignore("scale_embedding use_weighted_layer_sum classifier_proj_size num_labels")
    config.ignore("apply_spec_augment median_filter_width forced_decoder_ids")
    for name in ("prob", "length", "min_masks"):
        config.ignore(f"mask_time_{name} mask_feature_{name}")
    longest = "max_source_positions", "max_target_positions"
    mels = config.integer("num_mel_bins", 80)
    return read_bart(
        config, WhisperConfig, longest, key_bias=False, padded=False, num_mel_bins=mels
    )


_STORED = [
    Stored("lm_head", "proj_out"),
    Stored("conv1", "model.encoder.conv1"),
    Stored("conv2", "model.encoder.conv2"),
    *BART_STORED,
]
register_encoder_decoder(
    "whisper",
    "WhisperForConditionalGeneration",
    _read,
    _STORED,
    unused=BART_UNUSED,
    head="proj_out.weight",
    encoder=WhisperEncoder,
    inputs=_signature,
)
