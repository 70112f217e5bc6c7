"""Decoders of the time before Llama, with learned or no positions and layer norms."""

from __future__ import annotations

from . import Case

GPT2 = {"vocab_size": 96, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64}

DECODERS = {"gpt2": Case("gpt2", GPT2 | {"initializer_range": 0.15})}
