"""`LoraParams`: adapters given at run time, which irc refuses; without any it is accepted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .linear import refuse_lora


@dataclass
class LoraParams:
    """The inputs of adapters: none of them, as scripts without adapters make it."""

    lora_ranks: Any = None
    lora_weights_pointers: Any = None
    host_context_lengths: Any = None
    max_context_length: Any = None
    max_encoder_context_length: Any = None
    host_request_types: Any = None
    host_encoder_input_lengths: Any = None
    weight_index: int | None = None
    lora_weights_pointers_list: Any = None

    def __post_init__(self) -> None:
        pointers = (self.lora_weights_pointers, self.lora_weights_pointers_list)
        refuse_lora(self.lora_ranks, *pointers)

    def get_layer_params(self, layer_idx: int) -> None:
        """None: no layer has an adapter."""
