"""Checkpoints that need no torch: weights from raw random bits, written as safetensors.

The bits of numpy's bit generators are the same in every version, so the golden file holds the
results of transformers only, not the weights.
"""

import json
import zlib
from pathlib import Path

import numpy as np

from irc.frontends import huggingface

from .shapes import SHAPES

GOLDEN = Path(__file__).with_name("golden.npz")
PROMPT, DECODED, GREEDY = 9, 8, 64


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers between -a and a; norms lie around 1."""
    count = int(np.prod(shape))
    bits = np.random.PCG64(zlib.crc32(name.encode())).random_raw(count)
    values = (bits >> np.uint64(40)).astype(np.float64) / 2**23 - 1
    scaled = 1 + 0.3 * values if name.endswith("norm.weight") else 0.25 * values
    return scaled.astype(np.float32).reshape(shape)


def write_checkpoint(folder: Path, name: str) -> Path:
    """A folder as Hugging Face writes it, with a single weight file."""
    folder.mkdir(parents=True)
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SHAPES[name]}
    (folder / "config.json").write_text(json.dumps(config))
    model = huggingface.model_of(config).trace("f32")
    write_safetensors(
        folder / "model.safetensors",
        {key: weight(key, found.type.shape) for key, found in model.weights.items()},  # type: ignore[arg-type]
    )
    return folder


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Arrays as a safetensors file."""
    kinds = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3"}
    kinds |= {"int64": "I64", "int32": "I32", "int8": "I8", "uint8": "U8"}
    header: dict[str, object] = {}
    at = 0
    for key, array in tensors.items():
        offsets = [at, at + array.nbytes]
        header[key] = {
            "dtype": kinds[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": offsets,
        }
        at += array.nbytes
    text = json.dumps(header).encode()
    data = b"".join(array.tobytes() for array in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def prompt(name: str, count: int) -> np.ndarray:
    """Token ids [1, count] of a shape's vocabulary."""
    bits = np.random.PCG64(zlib.crc32(name.encode())).random_raw(count)
    return (bits % np.uint64(SHAPES[name]["vocab_size"])).astype(np.int64)[None]
