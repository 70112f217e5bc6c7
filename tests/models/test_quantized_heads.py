"""Llamas whose layers and head are quantized, against transformers with the rounded weights."""

from pathlib import Path
from typing import Any

import pytest

import irc
from irc.quantization.formats import decode, encode
from tests.fresh import fresh
from tests.tiny_checkpoint import write_checkpoint

from .runners import Runner, relative

LAYERS = {"w8a16": ("int8", (1, 0), "absmax"), "w4a16": ("int4", (1, 0), "mse")}
HEAD = ("int8", (1, 0), "absmax")
SIZES: dict[str, Any] = {"vocab_size": 301, "intermediate_size": 64}


def rounded(weight: Any, format: str, block: tuple[int, int], method: str) -> Any:
    """A parameter of torch as codes and scales represent it."""
    import torch

    return torch.nn.Parameter(
        torch.tensor(decode(encode(weight.numpy(), format, block, method=method)))
    )


def oracle(folder: Path, scheme: str) -> Any:
    """The model of transformers with rounded weights; its embedding keeps the stored ones."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear):
                row = HEAD if name == "lm_head" else LAYERS[scheme]
                module.weight = rounded(module.weight.detach(), *row)
    return model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("scheme", "backend", "mesh"),
    [
        ("w4a16", "onnx", ""),
        ("w4a16", "reference", ""),
        ("w8a16", "onnx", "tp=2"),
        ("w8a16", "onnx", "tp=3"),
        ("w8a16", "reference", "tp=2"),
    ],
)
def test_logits(scheme: str, backend: str, mesh: str, tied: bool, tmp_path: Path) -> None:
    """Also where ranks hold uneven parts of the vocabulary of 301."""
    folder = write_checkpoint(tmp_path / "model", tie_word_embeddings=tied, **SIZES)
    options: dict[str, Any] = {"mesh": mesh} if mesh else {}
    artifact = irc.compile(folder, tmp_path / "a", backend=backend, quantize=scheme, **options)
    weights = artifact.module.weights
    kinds = {
        name: weights[name].type.dtype for name in ("lm_head.weight", "model.embed_tokens.weight")
    }
    assert kinds == {"lm_head.weight": "i8", "model.embed_tokens.weight": "f32"}
    ranks = int(mesh[-1:] or 1)
    assert weights["lm_head.weight"].type.shape[0] == weights["lm_head.scale"].type.shape[0]
    assert weights["lm_head.weight"].type.shape[0] == -(-SIZES["vocab_size"] // ranks)
    ids = fresh(2).integers(0, 300, (2, 7))
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        wanted = oracle(folder, scheme)(torch.tensor(ids)).logits.numpy()
    assert relative(Runner(artifact.program, 2).step(ids), wanted) < 3e-4
