"""Llama folders of real shapes with random weights, created once and kept.

    python -m benchmarks.checkpoints 1b FOLDER [--dtype f32]

Weights are normal numbers of scale 0.02, written tensor by tensor from one repeated block of
random bytes, so that making 16 GB costs disk time and no memory. No two matrices are equal.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from irc.ir.dtypes import numpy_dtype
from irc.weights.safetensors import lay_out

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"layers": 2, "hidden": 64, "ffn": 160, "heads": 4, "kv_heads": 2, "vocab": 1000},
    "1b": {"layers": 16, "hidden": 2048, "ffn": 8192, "heads": 32, "kv_heads": 8, "vocab": 128256},
    "8b": {"layers": 32, "hidden": 4096, "ffn": 14336, "heads": 32, "kv_heads": 8, "vocab": 128256},
}
_DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}  # as a config.json names them
_BLOCK = 1 << 22  # elements of the repeated block
# Elements by which the block is shifted from tensor to tensor: equal tensors would be kept once.
_STRIDE = 7919
_TOKENIZER = Path(__file__).resolve().parent.parent / "examples" / "tiny_llama"


def config(shape: str, dtype: str) -> dict[str, Any]:
    """config.json of a shape. Embeddings are tied at 1B, as in Llama 3.2."""
    s = SHAPES[shape]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": s["hidden"],
        "intermediate_size": s["ffn"],
        "num_hidden_layers": s["layers"],
        "num_attention_heads": s["heads"],
        "num_key_value_heads": s["kv_heads"],
        "head_dim": s["hidden"] // s["heads"],
        "vocab_size": s["vocab"],
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-05,
        "rope_theta": 500000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": shape != "8b",
        "bos_token_id": 0,
        "eos_token_id": 0,
        "torch_dtype": _DTYPES[dtype],
    }


def tensors(shape: str) -> dict[str, tuple[int, ...]]:
    """Checkpoint names and shapes."""
    s = SHAPES[shape]
    hidden, ffn, kv = s["hidden"], s["ffn"], s["hidden"] // s["heads"] * s["kv_heads"]
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (s["vocab"], hidden)}
    for i in range(s["layers"]):
        layer = f"model.layers.{i}"
        found |= {
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.self_attn.q_proj.weight": (hidden, hidden),
            f"{layer}.self_attn.k_proj.weight": (kv, hidden),
            f"{layer}.self_attn.v_proj.weight": (kv, hidden),
            f"{layer}.self_attn.o_proj.weight": (hidden, hidden),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{layer}.mlp.gate_proj.weight": (ffn, hidden),
            f"{layer}.mlp.up_proj.weight": (ffn, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, ffn),
        }
    found["model.norm.weight"] = (hidden,)
    if shape == "8b":
        found["lm_head.weight"] = (s["vocab"], hidden)
    return found


def make(shape: str, folder: Path, dtype: str = "bf16") -> Path:
    """The folder, created unless a complete one exists."""
    done = folder / "config.json"
    wanted = json.dumps(config(shape, dtype), indent=2) + "\n"
    if done.exists() and done.read_text() == wanted:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    done.unlink(missing_ok=True)
    _write_weights(folder / "model.safetensors", tensors(shape), dtype)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (_TOKENIZER / name).exists():
            shutil.copy(_TOKENIZER / name, folder / name)
    done.write_text(wanted)
    return folder


def _write_weights(path: Path, shapes: dict[str, tuple[int, ...]], dtype: str) -> None:
    kind = numpy_dtype(dtype)
    header, placed = lay_out({name: (dtype, shape) for name, shape in shapes.items()})
    block = (np.random.default_rng(0).standard_normal(_BLOCK, np.float32) * 0.02).astype(kind)
    ones = np.ones(max(s[0] for s in shapes.values() if len(s) == 1), kind)
    with path.open("wb") as file:
        file.write(header)
        for i, tensor in enumerate(placed.values()):
            left = tensor.nbytes // kind.itemsize
            source = ones if len(tensor.shape) == 1 else block
            begin = i * _STRIDE % source.size
            while left > 0:
                part = source[begin : begin + left]
                file.write(part.tobytes())
                left, begin = left - part.size, 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", choices=_DTYPES, default="bf16")
    options = parser.parse_args()
    print(make(options.shape, options.folder, options.dtype))


if __name__ == "__main__":
    main()
