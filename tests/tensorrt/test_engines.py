"""Engines of language models, built without a GPU: their kernels, as the builder lists them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest

import irc
from irc.backends.tensorrt.builder.report import Layer, Report
from irc.driver import Artifact
from tests.cli.runner import refused, works
from tests.layout import ROOT
from tests.tensorrt.emission import reports
from tests.tiny_checkpoint import write_checkpoint

pytestmark = pytest.mark.needs_rtx

CAPACITY = 96
DIMS = {"B": (1, 2, 4), "S": (1, 16, 64), "T": (1, 1, 4), "C": (CAPACITY, CAPACITY, CAPACITY)}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 48,
    "factor": 2.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
}
GROUPED = {
    "hidden_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 208,
}
BIASED = GROUPED | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "rope_parameters": LONG_ROPE,
    "tie_word_embeddings": True,
}


def built(folder: Path, source: Path, mesh: str = "", **engine: Any) -> Artifact:
    options: Any = {"backend": "tensorrt-rtx", "dtype": "bf16", "mesh": mesh, "dims": DIMS}
    return irc.compile(source, folder / "built", engine=engine, **options)


def kernels(report: Report, scope: str) -> list[Layer]:
    """The kernels of a scope in decoding, without copies, shapes and collectives."""
    others = ("shape_call", "copy", "custom_layer", "signal", "wait")
    layers = report.layers_of(scope, "decode")
    return [x for x in layers if x.kind not in others and not x.kind.startswith("comm_")]


def widened(artifact: Artifact, report: Report) -> list[str]:
    """Kernels with f32 results although every operation in them has bf16 results.

    RoPE computes its angles in f32.
    """
    narrow: dict[str, bool] = {}
    for op in artifact.module.ops():
        scope = op.loc.scope if op.loc is not None else ""
        key = f"{scope}/{op.opname}" if scope else op.opname
        only = all(value.type.dtype == "bf16" for value in op.results)
        narrow[key] = narrow.get(key, True) and only
    return [
        layer.name
        for layer in report.layers
        if layer.operations
        and not any("/rope" in operation for operation in layer.operations)
        and all(narrow.get(operation, False) for operation in layer.operations)
        and any(t.dtype == "f32" and not t.name.startswith("logits") for t in layer.outputs)
    ]


def expanded_caches(artifact: Artifact, report: Report) -> list[str]:
    """Kernels of decoding that write a value of a cache's length, other than the caches."""
    results = artifact.module.main.result_names()
    return [
        layer.name
        for layer in report.of_profile("decode")
        for tensor in layer.outputs
        if len(tensor.dims) > 2
        and CAPACITY in tensor.dims[-2:]
        and tensor.dims[-1] > 1
        and not tensor.name.startswith(tuple(results))
        and tensor.dims[-2:] != (1, CAPACITY)
    ]


def check_decode(artifact: Artifact, layers: int) -> None:
    """Decoding attends in one kernel a layer, expands no cache, and computes in bf16."""
    seen = 0
    for report in reports(artifact):
        fused = [x for x in report.of_profile("decode") if "_mha_" in x.name]
        seen += len(fused)
        assert all(x.kind == "kgen" for x in fused)
        assert not expanded_caches(artifact, report)
        assert not widened(artifact, report)
    assert seen == layers
    for layer in range(layers):
        mlp = [x for r in reports(artifact) for x in kernels(r, f"model.layers.{layer}.mlp")]
        assert 0 < len(mlp) <= 3, [x.name for x in mlp]


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("grouped") / "checkpoint", **GROUPED)


@pytest.fixture(scope="module")
def two_ranks(grouped: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return built(tmp_path_factory.mktemp("ranks"), grouped, "tp=2", caching=False)


def test_weights_inside_the_engine(grouped: Path, tmp_path: Path) -> None:
    artifact = built(tmp_path, grouped, weights="inside")
    check_decode(artifact, layers=2)
    (report,) = reports(artifact)
    (rank,) = artifact.manifest["program"]["ranks"]
    assert rank["bindings"] is None and report.profiles == ("decode", "prefill")
    text = works("show", artifact.folder, "--kernels", "--scope", "model.layers.1.mlp").out
    heads = [line for line in text.splitlines() if line.startswith("rank0.engine, profile ")]
    assert [line.split()[2].rstrip(":") for line in heads] == ["decode", "prefill"]
    assert "model.layers.1.mlp/silu" in text and "model.layers.0" not in text
    assert [*works("show", artifact.folder, "--kernels", "--json").json] == ["rank0.engine"]
    assert "has no engines" in refused("show", grouped, "--kernels")
    assert "does not exist" in refused("show", tmp_path / "gone", "--kernels")


def test_grouped_heads_biases_and_long_rope(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "checkpoint", **BIASED)
    artifact = built(tmp_path, source, weights="outside")
    check_decode(artifact, layers=2)
    (rank,) = artifact.manifest["program"]["ranks"]
    bindings = json.loads((artifact.folder / rank["bindings"]).read_text())
    table, rows = (bindings[f"model.embed_tokens.weight{more}"] for more in ("", ".rows"))
    assert table == rows  # tied: looked up and multiplied, two inputs of the same bytes


def test_two_ranks_share_one_engine(two_ranks: Artifact) -> None:
    check_decode(two_ranks, layers=2)
    program = two_ranks.manifest["program"]
    assert {rank["engine"] for rank in program["ranks"]} == {"stage0.engine"}
    assert program["stages"][0]["scalars"] == {"rank.tp": ["tp"]}
    (report,) = reports(two_ranks)
    # two in each layer, one behind the embedding, and the logits are gathered
    assert report.kinds("decode")["custom_layer"] == 6
    model = onnx.load(two_ranks.folder / "stage0.onnx", load_external_data=False)
    collectives = [
        {field.name: onnx.helper.get_attribute_value(field) for field in node.attribute}
        for node in model.graph.node
        if node.op_type == "IrcCollective"
    ]
    assert {(n["group"], n["group_size"]) for n in collectives} == {(b"tp", b"2")}
    operations = [n["operation"] for n in collectives]
    assert operations.count(b"all_reduce_rms_norm") == 3  # not behind the last


def test_stages_have_an_engine_each(grouped: Path, tmp_path: Path) -> None:
    artifact = built(tmp_path, grouped, "tp=2,pp=2")
    check_decode(artifact, layers=2)
    ranks = artifact.manifest["program"]["ranks"]
    assert [rank["engine"] for rank in ranks] == [f"stage{r['stage']}.engine" for r in ranks]
    assert {rank["stage"] for rank in ranks} == {0, 1}


def test_an_engine_that_is_no_language_model(tmp_path: Path) -> None:
    source = ROOT / "examples" / "two_tower.py"
    artifact = irc.compile(source, tmp_path / "built", backend="tensorrt-rtx", random_weights=1)
    (report,) = reports(artifact)
    assert report.profiles == ("all",)
    assert artifact.manifest["program"]["self_test"] is None


def test_two_builds_are_the_same_bytes(two_ranks: Artifact, grouped: Path, tmp_path: Path) -> None:
    again = built(tmp_path, grouped, "tp=2", caching=False)
    first, second = (
        {path.name: path.read_bytes() for path in artifact.folder.iterdir()}
        for artifact in (two_ranks, again)
    )
    assert first.keys() == second.keys()
    assert not [name for name in first if first[name] != second[name]]


def test_an_artifact_folder_is_enough_to_build_for_another_gpu(
    two_ranks: Artifact, grouped: Path, tmp_path: Path
) -> None:
    options: Any = {"backend": "tensorrt-rtx", "engine": {"target": "tensorrt-rtx/sm_89"}}
    with pytest.raises(irc.Error, match=r"would get a copy of @model\.embed_tokens"):
        irc.compile(two_ranks.folder, tmp_path / "again", **options)
    again = irc.compile(two_ranks.folder, tmp_path / "again", checkpoint=grouped, **options)
    assert again.manifest["program"]["target"] == "tensorrt-rtx-1.7/sm_89"
    assert (again.folder / "stage0.engine").stat().st_size
    models = [(each.folder / "stage0.onnx").read_bytes() for each in (two_ranks, again)]
    assert models[0] == models[1]
