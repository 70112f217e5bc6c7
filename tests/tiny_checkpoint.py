"""Writes a small Llama checkpoint folder with a tokenizer, for tests of everything behind it."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from irc.frontends.huggingface import model_of
from tests.models.golden import write_safetensors

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float32",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 299,
}


def write_checkpoint(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A folder with config.json, model.safetensors and tokenizer.json; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIG | changes
    (folder / "config.json").write_text(json.dumps(config))
    module = model_of(config).trace("f32")
    random = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {}
    for name, weight in module.weights.items():
        shape = tuple(int(str(dim)) for dim in weight.type.shape)
        values = random.standard_normal(shape, np.float32) * 0.3
        tensors[name] = values if len(shape) > 1 else np.ones(shape, np.float32)
    write_safetensors(folder / "model.safetensors", tensors)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer: 256 bytes, a few merges, and an end of text that is never written."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("e", "r")]
    words = [*letters, *(a + b for a, b in merges)]
    vocab = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
