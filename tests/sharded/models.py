"""Small models with odd sizes, their random weights, and conversations with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from irc.backends.reference import ReferenceProgram
from irc.frontends import random_weights
from irc.frontends.models import DecoderConfig
from irc.frontends.models.families.llama import LLAMA
from irc.frontends.models.families.mixtral import MIXTRAL
from irc.frontends.models.mixture import Mixture
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


def _llama(query: int = 6, kv: int = 3, **sizes: Any) -> Build:
    heads = {"num_attention_heads": query, "num_key_value_heads": kv, "head_dim": 4}
    return lambda: tiny_llama(**heads | sizes)


MODELS: dict[str, Build] = {
    "gqa": _llama(),
    "gqa_8_2": _llama(8, 2, qk_norm=True),
    "mqa": _llama(6, 1, sliding_window=3),
    "mha_7": _llama(7, 7, hidden_size=21, head_dim=2),
    "tied": _llama(tie_word_embeddings=True),
    "tied_prime": _llama(tie_word_embeddings=True, vocab_size=41, intermediate_size=13),
    "vocab_5": _llama(vocab_size=5),
    "ffn_1": _llama(intermediate_size=1),
    "qkv_bias": _llama(qkv_bias=True, hidden_act="gelu"),
    "all_bias": _llama(qkv_bias=True, output_bias=True, mlp_bias=True, vocab_size=39),
    "five_layers": _llama(num_hidden_layers=5, tie_word_embeddings=True),
}


def mixtral(experts: int = 5, chosen: int = 2, **sizes: Any) -> Module:
    """A Mixtral of two layers."""
    own: dict[str, Any] = {"intermediate_size": 10, "num_hidden_layers": 2, "head_dim": 4}
    own = TINY | own | sizes
    mixture = Mixture(own["intermediate_size"], experts, chosen, names=("w1", "w3", "w2"))
    config = DecoderConfig(**own, mixture=mixture)
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


def check_logits(got: np.ndarray, wanted: np.ndarray, what: str, limit: float = 1e-5) -> None:
    """Raise unless logits agree to rounding."""
    worst = np.max(np.abs(got - wanted)) / np.max(np.abs(wanted))
    assert worst <= limit, f"{what}: off by {worst}"
