"""Models of five kinds written plainly in torch, and what torch.onnx.export makes of them."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from tests.fresh import fresh

Arrays = Mapping[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Example:
    """A model with inputs, whose `axes` are dimensions of any size by name."""

    model: Any
    inputs: Arrays
    axes: Mapping[str, Mapping[int, str]]

    def resized(self, sizes: Mapping[str, int]) -> dict[str, np.ndarray[Any, Any]]:
        """Inputs whose dimensions have other sizes: the first elements of each."""
        arrays: dict[str, np.ndarray[Any, Any]] = {}
        for name, array in self.inputs.items():
            axes = self.axes.get(name, {})
            ends = [sizes.get(axes.get(i, ""), size) for i, size in enumerate(array.shape)]
            arrays[name] = array[tuple(map(slice, ends))]
        return arrays

    def computed(self, inputs: Arrays) -> list[np.ndarray[Any, Any]]:
        """What torch computes."""
        torch: Any = import_module("torch")
        with torch.no_grad():
            results = self.model(*(torch.from_numpy(array) for array in inputs.values()))
        return [x.numpy() for x in (results if isinstance(results, tuple) else (results,))]

    def export(self, path: Path, dynamo: bool) -> None:
        """Write the file by the exporter of graphs, or by that of scripts."""
        torch: Any = import_module("torch")
        words: dict[str, Any] = {"dynamic_axes": self.axes}
        if dynamo:
            dims = {
                name: torch.export.Dim(name) for at in self.axes.values() for name in at.values()
            }
            shapes = ({i: dims[n] for i, n in self.axes[name].items()} for name in self.inputs)
            words = {"dynamic_shapes": tuple(shapes)}
        exported(self.model, self.inputs, path, dynamo=dynamo, **words)


def exported(module: Any, given: Arrays, path: Path, **words: Any) -> Any:
    """What torch computes, whose file is written."""
    torch: Any = import_module("torch")
    tensors = tuple(torch.from_numpy(x) for x in given.values())
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        torch.onnx.export(module.eval(), tensors, str(path), input_names=[*given], **words)
        return module(*tensors)


def resnet(torch: Any) -> Example:
    transformers = import_module("transformers")
    sizes = {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 2], "num_labels": 12}
    config = transformers.ResNetConfig(**sizes, layer_type="bottleneck")

    class ResNet(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = transformers.ResNetForImageClassification(config)

        def forward(self, x: Any) -> Any:
            return self.inner(x).logits

    inputs = {"x": fresh(1).standard_normal((3, 3, 32, 32)).astype(np.float32)}
    return Example(ResNet(), inputs, {"x": {0: "batch"}})


def clip(torch: Any) -> Example:
    transformers = import_module("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    sizes |= {"num_hidden_layers": 2}
    text = {**sizes, "vocab_size": 64, "max_position_embeddings": 16, "eos_token_id": 63}
    config = transformers.CLIPConfig(
        text_config=text, vision_config={**sizes, "image_size": 16, "patch_size": 8}
    )

    class Clip(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = transformers.CLIPModel(config)

        def forward(self, ids: Any, mask: Any, pixels: Any) -> Any:
            results = self.inner(input_ids=ids, attention_mask=mask, pixel_values=pixels)
            return results.logits_per_image, results.text_embeds, results.image_embeds

    ids = fresh(3).integers(0, 60, (3, 7))
    ids[:, 4], ids[0, 4:] = 63, [20, 10, 63]
    mask = (np.arange(7) <= np.array([[6], [4], [4]])).astype(np.int64)
    pixels = fresh(4).standard_normal((3, 3, 16, 16)).astype(np.float32)
    rows = {0: "texts", 1: "seq"}
    axes = {"ids": rows, "mask": rows, "pixels": {0: "images"}}
    inputs = {"ids": ids, "mask": mask, "pixels": pixels}
    return Example(Clip(), inputs, axes)


def gru4rec_step(torch: Any) -> Example:
    """One event of every session of a batch (Hidasi et al., 2016); a session that starts has no
    state."""
    nn = torch.nn

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.gru = nn.Embedding(50, 12), nn.GRU(12, 16, 2)
            self.out = nn.Linear(16, 50)

        def forward(self, item: Any, state: Any, starts: Any) -> Any:
            kept = state * (1 - starts)[None, :, None]
            hidden, state = self.gru(self.table(item)[None], kept)
            return self.out(hidden[0]), state

    rng = fresh(5)
    inputs = {
        "item": rng.integers(0, 50, 3),
        "state": rng.standard_normal((2, 3, 16)).astype(np.float32),
        "starts": np.array([0, 1, 0], np.float32),
    }
    axes = {"item": {0: "batch"}, "state": {1: "batch"}, "starts": {0: "batch"}}
    return Example(Step(), inputs, axes)


def dlrm(torch: Any) -> Example:
    """Bags of three features and dense ones, whose dot products are features (Naumov et al.,
    2019)."""
    nn = torch.nn

    class Dlrm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = (40, 21, 30)
            self.tables = nn.ModuleList(nn.EmbeddingBag(n, 8, mode="sum") for n in sizes)
            self.bottom = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU())
            self.top = nn.Sequential(nn.Linear(14, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid())

        def forward(self, dense: Any, ids: Any, offsets: Any) -> Any:
            x = self.bottom(dense)
            bags = [table(ids[i], offsets[i]) for i, table in enumerate(self.tables)]
            features = torch.cat([x, *bags], 1).view(x.shape[0], -1, x.shape[1])
            products = torch.bmm(features, features.transpose(1, 2))
            rows, columns = torch.tril_indices(4, 4, -1)
            return self.top(torch.cat([x, products[:, rows, columns]], 1))

    rng = fresh(6)
    inputs = {
        "dense": rng.standard_normal((4, 5)).astype(np.float32),
        "ids": rng.integers(0, 21, (3, 10)),
        "offsets": np.array([[0, 2, 2, 7], [0, 3, 5, 9], [0, 1, 2, 3]]),
    }
    axes = {"dense": {0: "batch"}, "ids": {1: "ids"}, "offsets": {1: "batch"}}
    return Example(Dlrm(), inputs, axes)


def cached_layer(torch: Any) -> Example:
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
    inputs = {
        "x": rng.standard_normal((2, 5, 32)).astype(np.float32),
        "positions": np.tile(np.arange(3, 8), (2, 1)),
        "past_key": past[0],
        "past_value": past[1],
    }
    rows, cache = {0: "batch", 1: "seq"}, {0: "batch", 2: "past"}
    axes = {"x": rows, "positions": rows, "past_key": cache, "past_value": cache}
    return Example(Layer(), inputs, axes)


MODELS = {"resnet": resnet, "clip": clip, "gru4rec step": gru4rec_step, "dlrm": dlrm}


def example(name: str) -> Example:
    """One of the models, with parameters that are neither 0 nor 1."""
    torch: Any = import_module("torch")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    chosen = (MODELS | {"cached layer": cached_layer})[name](torch)
    with torch.no_grad():
        for parameter in chosen.model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(-0.5, 0.5)
        for key, buffer in chosen.model.named_buffers():
            if "running" in key:
                buffer.uniform_(0.5, 2)
    chosen.model.eval()
    return chosen
