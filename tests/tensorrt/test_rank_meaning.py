"""The one graph of all ranks, with the bindings and scalars of each, means what the module does."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irc
from irc.backends.reference import evaluate_ranks
from irc.backends.tensorrt.ranges import number
from irc.dims import Dim
from irc.driver import Artifact
from irc.dtypes import numpy_dtype
from irc.frontends.onnx import import_onnx
from tests.fresh import fresh
from tests.tiny_checkpoint import write_checkpoint

ROWS, TOKENS = 2, 5
SHAPE = {
    "hidden_size": 64,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "vocab_size": 301,
    "intermediate_size": 83,
    "tie_word_embeddings": True,
}
Arrays = dict[str, list[Any]]


def artifact_of(folder: Path, mesh: str, dtype: str, **engine: Any) -> Artifact:
    """An artifact without engines, from a checkpoint of odd sizes."""
    return irc.compile(
        write_checkpoint(folder / "checkpoint", seed=5, **SHAPE),
        folder / "built",
        backend="tensorrt-rtx",
        dtype=dtype,
        mesh=mesh,
        dims={"B": (1, 1, 4), "S": (1, 4, 16), "T": (1, 4, 16), "C": (24, 24, 24)},
        engine={"build": False, "self_test": False, **engine},
    )


def bound(artifact: Artifact, rank: int) -> dict[str, np.ndarray]:
    """The weights and scalars of one rank, read as a runtime does, by the graph's input names."""
    program = artifact.manifest["program"]
    entry = program["ranks"][rank]
    bindings = json.loads((artifact.folder / entry["bindings"]).read_text())
    base = Path(program["base"] or artifact.folder)
    found: dict[str, np.ndarray] = {}
    for name, fact in bindings.items():
        path = (base if fact["under"] == "base" else artifact.folder) / fact["file"]
        raw = np.fromfile(path, np.uint8, fact["bytes"], offset=fact["offset"])
        found[name] = raw.view(numpy_dtype(fact["dtype"])).reshape(fact["shape"])
    mesh = artifact.module.mesh
    for name, axes in program["stages"][entry["stage"]]["scalars"].items():
        found[name] = np.array(mesh.index(rank, tuple(axes)), np.int32)
    return {re.sub(r"\W", "_", name): array for name, array in found.items()}


def first_call(artifact: Artifact, rng: np.random.Generator) -> Arrays:
    """The arguments of a first call, the same on every rank."""
    steps = np.arange(TOKENS, dtype=np.int32)
    known = {
        "input_ids": rng.integers(0, SHAPE["vocab_size"], (ROWS, TOKENS)).astype(np.int32),
        "positions": np.tile(steps, (ROWS, 1)),
        "past_lengths": np.zeros(ROWS, np.int32),
        "logit_positions": np.tile(steps, (ROWS, 1)),
    }
    ranks = artifact.module.mesh.ranks
    found: Arrays = {}
    for arg in artifact.module.main.args:
        shape = tuple(_size(dim) for dim in arg.type.shape)
        zeros = np.zeros(shape, numpy_dtype(arg.type.dtype))
        found[str(arg.name)] = [known.get(str(arg.name), zeros)] * ranks
    return found


def _size(dim: Any) -> int:
    return number(dim, dict.fromkeys(dim.symbols(), ROWS)) if isinstance(dim, Dim) else dim


def next_call(before: Arrays, results: list[dict[str, np.ndarray]]) -> Arrays:
    """One more token of each row, with the caches that the first call left."""
    ranks = range(len(results))
    found: Arrays = {}
    for name, arrays in before.items():
        if name in results[0]:
            found[name] = [results[rank][name] for rank in ranks]
        elif name == "past_lengths":
            found[name] = [np.full(ROWS, TOKENS, np.int32)] * len(results)
        elif name == "positions":
            found[name] = [np.full((ROWS, 1), TOKENS, np.int32)] * len(results)
        elif name == "logit_positions":
            found[name] = [np.zeros((ROWS, 1), np.int32)] * len(results)
        else:
            found[name] = [array[:, :1] for array in arrays]
    return found


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(
    ("mesh", "collectives"),
    [("tp=2", "native"), ("tp=2", "plugin"), ("tp=3", "plugin"), ("dp=2,tp=2", "plugin")],
)
def test_every_rank_computes_its_part(
    mesh: str, collectives: str, dtype: str, tmp_path: Path
) -> None:
    artifact = artifact_of(tmp_path, mesh, dtype, collectives=collectives)
    (name,) = {entry["model"] for entry in artifact.manifest["program"]["ranks"]}
    shutil.copy(artifact.folder / name, tmp_path / "alone.onnx")  # no manifest beside it
    read = import_onnx(tmp_path / "alone.onnx", mesh=mesh)
    ranks = [bound(artifact, rank) for rank in range(artifact.module.mesh.ranks)]
    more: Arrays = {key: [each[key] for each in ranks] for key in ranks[0]}
    inputs = first_call(artifact, fresh(71))
    tolerance = 2e-5 if dtype == "f32" else 3e-2
    for _ in range(2):
        wanted = evaluate_ranks(artifact.module, inputs)
        found = evaluate_ranks(read, inputs | more)
        for got, want in zip(found, wanted, strict=True):
            for key, array in want.items():
                scale = max(1.0, float(np.abs(array.astype(np.float64)).max()))
                differ = np.abs(got[key].astype(np.float64) - array.astype(np.float64)).max()
                assert differ <= tolerance * scale, f"{key} differs by {differ}"
        inputs = next_call(inputs, wanted)
