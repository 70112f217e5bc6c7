"""Llama and its first relatives, of which test_transformers.py has more cases."""

from __future__ import annotations

from . import SIZES, Case

EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

DECODERS = {
    "llama": Case("llama", schemes=("w4a16",)),
    "mistral": Case("mistral", SIZES | {"sliding_window": 7}),
    "mixtral": Case("mixtral", SIZES | EXPERTS),
}
