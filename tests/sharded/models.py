"""Small models with odd sizes, their random weights, and conversations with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from irc.backends.reference import ReferenceProgram
from irc.frontends import random_weights
from irc.frontends.layers import Rope
from irc.frontends.models import DecoderConfig
from irc.frontends.models.llama import LLAMA
from irc.frontends.models.mixtral import MIXTRAL, MixtralConfig
from irc.ir.core import Module
from tests.choices import settled

Build = Callable[[], Module]
CAPACITY = 16
PROMPT = 6  # divides by 2, 3 and 6: with sequence parallelism it is sharded


TINY: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 24,
    "intermediate_size": 22,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 32,
}


def tiny_llama(seed: int = 3, **sizes: Any) -> Module:
    """A small f32 Llama with random weights."""
    return random_weights(LLAMA.trace(DecoderConfig(**TINY | sizes), "f32", name="tiny"), seed)


def _llama(**sizes: Any) -> Build:
    return lambda: tiny_llama(**{"head_dim": 4} | sizes)


def _heads(query: int, kv: int, **more: Any) -> Build:
    return _llama(num_attention_heads=query, num_key_value_heads=kv, **more)


MODELS: dict[str, Build] = {
    "even": _heads(8, 8, vocab_size=48, intermediate_size=48),
    "gqa": _heads(6, 3),
    "gqa_8_2": _heads(8, 2),
    "gqa_12_4": _heads(12, 4),
    "gqa_15_5": _heads(15, 5, hidden_size=20),
    "gqa_14_2": _heads(14, 2),
    "mqa": _heads(6, 1),
    "mqa_7": _heads(7, 1, hidden_size=28),
    "mha_5": _heads(5, 5, hidden_size=20),
    "mha_7": _heads(7, 7, hidden_size=21, head_dim=2),
    "one_head": _heads(1, 1),
    "tied": _llama(tie_word_embeddings=True),
    "tied_prime": _llama(tie_word_embeddings=True, vocab_size=41, intermediate_size=13),
    "vocab_5": _llama(vocab_size=5),
    "ffn_1": _llama(intermediate_size=1),
    "ffn_prime": _llama(intermediate_size=17, hidden_size=18),
    "qkv_bias": _llama(qkv_bias=True),
    "all_bias": _llama(qkv_bias=True, output_bias=True, mlp_bias=True, vocab_size=39),
    "bias_7_heads": _heads(7, 7, qkv_bias=True, output_bias=True, hidden_size=28),
    "window": _llama(sliding_window=3),
    "qk_norm": _llama(qk_norm=True),
    "gelu": _llama(hidden_act="gelu", mlp_bias=True),
    "rope_yarn": _llama(rope=Rope(kind="linear", factor=2.0)),
    "one_layer": _llama(num_hidden_layers=1),
    "five_layers": _llama(num_hidden_layers=5, tie_word_embeddings=True),
}


def mixtral(experts: int = 5, chosen: int = 2, **sizes: Any) -> Module:
    """A Mixtral of two layers."""
    own: dict[str, Any] = {"intermediate_size": 10, "num_hidden_layers": 2, "head_dim": 4}
    own |= {"num_local_experts": experts, "num_experts_per_tok": chosen}
    config = MixtralConfig(**TINY | own | sizes)
    return random_weights(MIXTRAL.trace(config, "f32", name="tiny"), 4)


def prompt_of(module: Module, rng: np.random.Generator, rows: int = 2) -> np.ndarray:
    """Random ids [rows, PROMPT]; every row begins with another one, so that none repeats."""
    table = next(weight for name, weight in module.weights.items() if "embed_tokens" in name)
    known = int(table.type.shape[0])  # pyright: ignore[reportArgumentType]

    def drawn() -> np.ndarray:
        first = rng.permutation(known)[:rows, None]
        more = rng.integers(0, known, (rows, PROMPT - 1))
        return np.concatenate([first, more], axis=1).astype(np.int32)

    return settled(drawn, module, lambda ids: logits(module, ids))


class Conversation:
    """A model on the reference backend: its prompt in one call, then tokens in another."""

    def __init__(self, module: Module, rows: int = 2) -> None:
        sizes = {"B": rows, "B_dp": rows // 2, "C": CAPACITY}
        self.stream = ReferenceProgram(module).open(sizes)
        self.past = np.zeros(rows, np.int32)

    def step(self, ids: np.ndarray) -> Mapping[str, np.ndarray]:
        """The results of one call."""
        rows, tokens = ids.shape
        steps = np.arange(tokens, dtype=np.int32)
        inputs = {
            "input_ids": ids,
            "positions": self.past[:, None] + steps,
            "past_lengths": self.past,
            "logit_positions": np.tile(steps, (rows, 1)),
        }
        self.past = self.past + np.int32(tokens)
        return self.stream.step(inputs)


def logits(module: Module, ids: np.ndarray, whole_calls: bool = False) -> np.ndarray:
    """Logits [rows, PROMPT, vocab]: two calls, so that the second reads what the first cached."""
    talk = Conversation(module, len(ids))
    cut = PROMPT if whole_calls else PROMPT - 1
    parts = [ids[:, :cut], ids[:, cut:]]
    return np.concatenate([talk.step(part)["logits"] for part in parts if part.size], axis=1)
