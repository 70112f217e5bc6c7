"""Exports of torch: the module computes what torch does, and so does what it compiles to."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irc
import irc.passes
from irc.backends.onnx import backend
from irc.backends.reference import evaluate
from irc.pipeline import run_pipeline
from tests.backends.checked_models import emit_checked
from tests.fresh import fresh
from tests.frontends.onnx_models import on_ort, read

pytestmark = pytest.mark.oracle
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}


def ids(*shape: int) -> np.ndarray[Any, Any]:
    return fresh(3).integers(0, 60, shape)


def tower(torch: Any) -> tuple[Any, dict[str, Any]]:
    """Two towers with a dot product, as recommenders have them."""
    nn = torch.nn

    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(64, 16)
            self.user = nn.Sequential(
                nn.Linear(16, 32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 8)
            )
            self.item = nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Linear(32, 8))

        def forward(self, ids: Any, features: Any) -> Any:
            user = nn.functional.normalize(self.user(self.table(ids).mean(1)), dim=-1)
            item = nn.functional.normalize(self.item(features), dim=-1)
            return (user * item).sum(-1), torch.softmax(user @ item.T, -1)

    features = fresh(4).standard_normal((3, 10)).astype(np.float32)
    return Towers(), {"ids": ids(3, 5), "features": features}


def transformer(torch: Any, inner: Any, result: str) -> Any:
    """A model of transformers with one result."""

    class Wrapped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, input_ids: Any, attention_mask: Any = None) -> Any:
            given = {"input_ids": input_ids, "attention_mask": attention_mask}
            return getattr(self.inner(**given, use_cache=False), result)

    return Wrapped()


def bert(torch: Any) -> tuple[Any, dict[str, Any]]:
    transformers = import_module("transformers")
    inner = transformers.BertModel(transformers.BertConfig(**SIZES))
    mask = np.ones((3, 7), np.int64)
    mask[1, 4:] = 0
    inputs = {"input_ids": ids(3, 7), "attention_mask": mask}
    return transformer(torch, inner, "last_hidden_state"), inputs


def llama(torch: Any) -> tuple[Any, dict[str, Any]]:
    transformers = import_module("transformers")
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2)
    inner = transformers.LlamaForCausalLM(config)
    return transformer(torch, inner, "logits"), {"input_ids": ids(3, 7)}


def cached(torch: Any) -> tuple[Any, dict[str, Any]]:
    """A decoder layer whose caches grow by concatenation, as optimum exports them."""
    nn, heads, groups, width = torch.nn, 4, 2, 8

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = nn.Linear(32, heads * width, bias=False)
            self.k = nn.Linear(32, groups * width, bias=False)
            self.v = nn.Linear(32, groups * width, bias=False)
            self.o = nn.Linear(heads * width, 32, bias=False)
            self.scale = nn.Parameter(torch.rand(32))

        def forward(self, x: Any, positions: Any, past_key: Any, past_value: Any) -> Any:
            batch, count, _ = x.shape
            x = self.scale * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
            q, k, v = (
                layer(x).view(batch, count, -1, width).transpose(1, 2)
                for layer in (self.q, self.k, self.v)
            )
            turns = 1.0 / (10000 ** (torch.arange(0, width, 2).float() / width))
            angles = positions[:, None, :, None].float() * turns
            angles = torch.cat((angles, angles), -1)

            def turned(t: Any) -> Any:
                a, b = t[..., : width // 2], t[..., width // 2 :]
                return t * angles.cos() + torch.cat((-b, a), -1) * angles.sin()

            key = torch.cat([past_key, turned(k)], 2)
            value = torch.cat([past_value, v], 2)
            many = [t.repeat_interleave(heads // groups, 1) for t in (key, value)]
            scores = turned(q) @ many[0].transpose(2, 3) / width**0.5
            before = past_key.shape[2]
            seen = torch.arange(before + count)[None] <= torch.arange(count)[:, None] + before
            scores = torch.where(seen, scores, torch.finfo(torch.float32).min)
            mixed = torch.softmax(scores, -1) @ many[1]
            return self.o(mixed.transpose(1, 2).reshape(batch, count, -1)), key, value

    rng = fresh(7)
    past = [rng.standard_normal((2, groups, 3, width)).astype(np.float32) for _ in range(2)]
    return Layer(), {
        "x": rng.standard_normal((2, 5, 32)).astype(np.float32),
        "positions": np.tile(np.arange(3, 8), (2, 1)),
        "past_key": past[0],
        "past_value": past[1],
    }


def images(torch: Any) -> tuple[Any, dict[str, Any]]:
    """What networks of images are made of: pools, norms, upsampling, samples of a grid."""
    nn, functional = torch.nn, torch.nn.functional

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            conv = nn.Conv2d(3, 8, 7, 2, 3, bias=False)
            pool = nn.MaxPool2d(3, 2, 1, ceil_mode=True)
            self.stem = nn.Sequential(conv, nn.BatchNorm2d(8), nn.ReLU(), pool)
            self.norm, self.mean = nn.LocalResponseNorm(5), nn.AvgPool2d(3, 2, 1, ceil_mode=True)
            self.up = nn.ConvTranspose2d(8, 4, 3, 2, 1, 1)
            self.out = nn.Linear(8, 8)

        def forward(self, x: Any) -> Any:
            h = self.norm(self.stem(x))
            row = self.out(functional.adaptive_avg_pool2d(h, 1).flatten(1))
            grid = torch.tanh(row).reshape(-1, 2, 2, 2)
            blocks = functional.pixel_shuffle(self.up(self.mean(h)), 2)
            wide = functional.interpolate(blocks, size=(20, 5), mode="bicubic", antialias=True)
            top, places = functional.max_pool2d(h, 2, return_indices=True)
            return row, wide, top, places, functional.grid_sample(h, grid, align_corners=False)

    return Network(), {"x": fresh(8).standard_normal((3, 3, 32, 30)).astype(np.float32)}


ROWS = {0: "batch", 1: "seq"}
DYNAMIC = {
    "tower": {"ids": ROWS, "features": {0: "batch"}},
    "bert": {"input_ids": ROWS, "attention_mask": ROWS},
    "llama": {"input_ids": ROWS},
    "images": {"x": {0: "batch"}},
    "cached": {"x": ROWS, "positions": ROWS}
    | {key: {0: "batch", 2: "past"} for key in ("past_key", "past_value")},
}
MODELS = {"tower": tower, "bert": bert, "llama": llama, "cached": cached, "images": images}


@pytest.mark.parametrize("name", list(MODELS))
def test_an_export_of_torch(name: str, tmp_path: Path) -> None:
    path, inputs, wanted = exported(name, tmp_path)
    module = read(path)
    found = list(evaluate(module, inputs).values())
    assert len(found) == len(wanted)
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    other = {name: array[1:] for name, array in inputs.items()}  # one row less
    wanted = on_ort(path, other)
    for got, want in zip(evaluate(module, other).values(), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    for got, want in zip(compiled(module, tmp_path, other), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert any(op.loc is not None and op.loc.file.endswith(".py") for op in module.ops())


def compiled(module: irc.Module, folder: Path, inputs: Mapping[str, Any]) -> list[Any]:
    """What ONNX Runtime computes of our own file of the module."""
    out = folder / "out"
    out.mkdir()
    run_pipeline(module, backend.default_pipeline)
    facts = emit_checked(module, out, base=folder)
    return list(backend.load(out, facts, threads=1).run(inputs).values())


def exported(name: str, folder: Path) -> tuple[Path, dict[str, Any], list[Any]]:
    """(the file, inputs, what torch computes of them)."""
    pytest.importorskip("onnxscript")  # what torch's exporter is written with
    torch: Any = import_module("torch")
    torch.set_num_threads(1)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    torch.manual_seed(0)
    model, inputs = MODELS[name](torch)
    model = model.eval()
    tensors = {key: torch.tensor(array) for key, array in inputs.items()}
    dims = {
        key: {i: torch.export.Dim(dim) for i, dim in entry.items()}
        for key, entry in DYNAMIC[name].items()
    }
    path = folder / f"{name}.onnx"
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            model, (), kwargs=tensors, dynamo=True, dynamic_shapes=dims, verbose=False
        )
        assert program is not None
        program.save(str(path))
        wanted = model(**tensors)
    many = wanted if isinstance(wanted, tuple) else (wanted,)
    return path, inputs, [tensor.numpy() for tensor in many]
