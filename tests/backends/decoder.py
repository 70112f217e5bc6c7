"""A small Llama with random weights on ONNX Runtime, and on the reference in f32."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import irc.passes
from irc.backends.onnxruntime import OnnxRuntimeProgram
from irc.backends.reference import ReferenceProgram
from irc.frontends import random_weights
from irc.frontends.models import DecoderConfig
from irc.frontends.models.families.llama import LLAMA
from irc.ir.core import Module
from irc.pipeline import run_pipeline
from irc.weights import Cast, RandomRef
from tests.backends.ranks import loaded
from tests.fresh import fresh

assert irc.passes
SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
DTYPES = {"bf16": ("bf16", "bf16"), "f16": ("f16", "f16"), "f32 of bf16": ("f32", "bf16")}
SHAPES: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha": {"num_key_value_heads": 4},
    "mqa": {"num_key_value_heads": 1, "vocab_size": 33},
    "window": {"sliding_window": 5},
    "odd": {"hidden_size": 30, "num_attention_heads": 12, "num_key_value_heads": 12}
    | {"head_dim": 4, "intermediate_size": 47},
    **{key: {} for key in DTYPES},
}


def build(name: str = "gqa", mesh: str = "", dtype: str = "", **sizes: Any) -> Module:
    """The model, on several ranks in the local view; its weights are those of the stored dtype."""
    computed, stored = DTYPES.get(name, ("f32", "f32"))
    dtype = dtype or computed
    config = DecoderConfig(**SIZES | SHAPES[name] | sizes)
    module = random_weights(LLAMA.trace(config, dtype, name="decoder"), 7)
    if stored != "f32":
        for weight in module.weights.values():
            assert isinstance(weight.ref, RandomRef)
            ref = replace(weight.ref, shape=weight.type.shape)
            weight.ref = ref.then(Cast(stored)).then(Cast(dtype))
    shard = f', shard{{mesh="{mesh}"}}, localize' if mesh else ""
    run_pipeline(module, f"inline, canonicalize, cse{shard}, fuse-gated-mlp, dce")
    return module


@dataclass(frozen=True)
class Decoder:
    """The model as a program of ONNX Runtime, and of one rank in numpy in f32, as ONNX Runtime
    computes: rounded to bf16 after every step, its results may be far from these."""

    program: OnnxRuntimeProgram
    reference: ReferenceProgram
    module: Module
    folder: Path

    @classmethod
    def of(cls, folder: Path, name: str = "gqa", mesh: str = "", **options: Any) -> Decoder:
        """Compiled into a folder."""
        module = build(name, mesh)
        reference = ReferenceProgram(build(name, dtype="f32"))
        return cls(loaded(module, folder, **options), reference, module, folder / "out")

    def open(self, rows: int, capacity: int) -> tuple[Any, Any]:
        """A stream of each program."""
        sizes = {"B": rows, "C": capacity}
        return self.program.open(sizes), self.reference.open(sizes)


def ids_of(rows: int, tokens: int) -> np.ndarray:
    """Random tokens."""
    return fresh(5).integers(0, 33, (rows, tokens))


def call(ids: np.ndarray, past: np.ndarray, wanted: int | None = None) -> dict[str, np.ndarray]:
    """The plain inputs of one call; `wanted` is the only position whose logits are returned."""
    batch, tokens = ids.shape
    places = np.arange(tokens) if wanted is None else np.array([wanted])
    return {
        "input_ids": ids.astype(np.int32),
        "positions": (past[:, None] + np.arange(tokens)).astype(np.int32),
        "past_lengths": past.astype(np.int32),
        "logit_positions": np.tile(places, (batch, 1)).astype(np.int32),
    }


def close(got: np.ndarray, want: np.ndarray, dtype: str = "f32") -> None:
    """Compare results, rounded once at the end to a dtype, with those in f32."""
    assert want.dtype == np.float32 and got.shape == want.shape
    limit = {"f32": 1e-5, "f16": 2.0**-11, "bf16": 2.0**-8}[dtype]
    assert np.linalg.norm(got.astype(np.float32) - want) <= limit * np.linalg.norm(want)


def write(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """A safetensors file in which the data begins at an odd byte."""
    header: dict[str, Any] = {}
    end = 0
    for key, array in arrays.items():
        begin, end = end, end + array.nbytes
        name = {"bfloat16": "BF16", "int8": "I8"}.get(str(array.dtype), f"F{array.itemsize * 8}")
        header[key] = {"dtype": name, "shape": list(array.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (1 - len(text) % 2)
    data = b"".join(array.tobytes() for array in arrays.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
