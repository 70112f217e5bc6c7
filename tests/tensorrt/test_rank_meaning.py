"""The one graph of all ranks, with the bindings and scalars of each, equals the module."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irc
from irc.backends.base import local_ports_of, state_shape
from irc.backends.reference import evaluate_ranks
from irc.backends.tensorrt.runtime.plan import RankPlan
from irc.driver import Artifact
from irc.frontends.onnx import import_onnx
from irc.generation.inputs import complete
from irc.ir.dtypes import numpy_dtype
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
    """The weights and scalars of one rank, by the graph's input names."""
    program = dict(artifact.manifest["program"])
    program["ranks"][rank]["engine"] = "not built"
    plan, found = RankPlan.of_facts(artifact.folder, program, rank), {}
    assert plan.bindings
    for name, each in plan.bindings.items():
        raw = np.fromfile(each.range.path, np.uint8, each.range.size, offset=each.range.offset)
        found[name] = raw.view(numpy_dtype(each.dtype)).reshape(each.shape)
    for name, axes in plan.stage.scalars.items():
        found[name] = np.array(plan.mesh.index(rank, axes), np.int32)
    return found


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("mesh", ["tp=2", "tp=3", "dp=2,tp=2"])
def test_every_rank_agrees_with_the_module(mesh: str, dtype: str, tmp_path: Path) -> None:
    artifact = artifact_of(tmp_path, mesh, dtype)
    (name,) = {entry["model"] for entry in artifact.manifest["program"]["ranks"]}
    shutil.copy(artifact.folder / name, tmp_path / "alone.onnx")  # no manifest beside it
    read, ports = (
        import_onnx(tmp_path / "alone.onnx", mesh=mesh),
        local_ports_of(artifact.module.main),
    )
    ranks = range(artifact.module.mesh.ranks)
    weights = [bound(artifact, rank) for rank in ranks]
    states = {
        port.name: np.zeros(
            state_shape(port, {"B": ROWS, "B_dp": ROWS, "C": 24}), numpy_dtype(port.dtype)
        )
        for port in ports.states
    }
    caches = [states] * len(ranks)
    for past, tokens in ((0, TOKENS), (TOKENS, 1)):
        ids = fresh(71).integers(0, SHAPE["vocab_size"], (ROWS, tokens)).astype(np.int32)
        plain = {"input_ids": ids, "past_lengths": np.full(ROWS, past, np.int32)}
        inputs = [complete(ports, {**plain, **caches[rank]}) for rank in ranks]
        wanted = evaluate_ranks(artifact.module, by_name(inputs))
        found = evaluate_ranks(read, by_name([inputs[r] | weights[r] for r in ranks]))
        for got, want in zip(found, wanted, strict=True):
            for key, array in want.items():
                scale = max(1.0, float(np.abs(array.astype(np.float64)).max()))
                differ = np.abs(got[key].astype(np.float64) - array.astype(np.float64)).max()
                # in bf16 every node rounds, also the nodes of one operation
                assert differ <= (2e-5 if dtype == "f32" else 8e-2) * scale, f"{key}: {differ}"
        caches = [{name: wanted[rank][name] for name in states} for rank in ranks]


def by_name(ranks: list[dict[str, np.ndarray]]) -> dict[str, list[Any]]:
    return {key: [each[key] for each in ranks] for key in ranks[0]}
