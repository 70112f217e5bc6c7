"""Model repositories for Triton: what stands in them, and what cannot be served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from irc.backends.tensorrt.triton import write as write_triton
from irc.core import Module
from irc.errors import Error
from irc.text import parse_module
from tests.sharded.models import MODELS
from tests.tensorrt.runtime_world import write

Facts = dict[str, Any]

MLP = """
module @mlp dims(B=1:4:16) {
  weight @mlp.up_proj.weight : bf16[8, 6] = random("up", 1, 0.5)
  weight @mlp.down_proj.weight : bf16[6, 8] = random("down", 2, 0.5)
  func @forward(%x: bf16[B, 6]) -> (y: bf16[B, 6]) {
    %h = linear %x, @mlp.up_proj.weight : bf16[B, 8]
    %a = silu %h : bf16[B, 8]
    %y = linear %a, @mlp.down_proj.weight : bf16[B, 6]
    return %y
  }
}
"""


def mlp() -> Module:
    return parse_module(MLP, "mlp.irc")


def parsed(text: str) -> list[str]:
    """The lines without comments; brackets fit each other."""
    lines = [line.strip() for line in text.splitlines() if not line.startswith("#")]
    body = "".join(lines)
    for opening, closing in ("[]", "{}"):
        assert body.count(opening) == body.count(closing)
    return lines


def test_one_rank_with_caches(tmp_path: Path) -> None:
    facts = write(tmp_path / "tiny-llama", MODELS["gqa"]())
    needs = write_triton(tmp_path / "tiny-llama", facts, {"irc": "1"}, tmp_path / "repository")
    model = tmp_path / "repository" / "tiny_llama"
    assert (model / "1" / "model.plan").read_bytes() == (
        tmp_path / "tiny-llama" / "rank0.engine"
    ).read_bytes()
    text = (model / "config.pbtxt").read_text()
    lines = parsed(text)
    assert lines[:3] == ['name: "tiny_llama"', 'backend: "tensorrt"', "max_batch_size: 0"]
    for line in (
        'name: "input_ids"',
        "dims: [ -1, -1, 37 ]",  # of the logits
        'input_name: "k0"',
        'output_name: "k0.out"',
        "dims: [ 1, 3, 32, 4 ]",
        'count: 1  kind: KIND_GPU  gpus: [ 0 ]  profile: [ "0", "1" ]',
        'input { key: "input_ids" value { dim: [ 1, 1 ] } }',
    ):
        assert line in lines, line
    assert lines.count("use_same_buffer_for_input_output: true") == 6
    assert needs and all(f"# {each}" in text for each in needs)
    assert "tensorrt-rtx" in needs[0]


def test_several_ranks(tmp_path: Path) -> None:
    facts = write(tmp_path / "mlp", mlp(), "tp=2", weights="inside", collectives="native")
    facts["target"] = "tensorrt-11.4/sm_90"
    needs = write_triton(tmp_path / "mlp", facts, {}, tmp_path / "repository")
    assert needs == [
        "Triton's tensorrt backend must be built with TRITON_ENABLE_TENSORRT_MULTI_DEVICE=ON."
    ]
    version = tmp_path / "repository" / "mlp" / "1"
    for rank in (0, 1):
        engine = tmp_path / "mlp" / f"rank{rank}.engine"
        assert (version / f"model.plan.rank{rank}").read_bytes() == engine.read_bytes()
    assert (version / "model.plan").resolve() == version / "model.plan.rank0"
    lines = parsed((version.parent / "config.pbtxt").read_text())
    for line in (
        'count: 1  kind: KIND_MODEL  profile: [ "0" ]',
        'key: "enable_multi_device"  value: { string_value: "true" }',
        'key: "multi_device_gpus"  value: { string_value: "0,1" }',
        'key: "multi_device_per_rank_engines"  value: { string_value: "true" }',
        "data_type: TYPE_BF16",
        "dims: [ -1, 6 ]",
    ):
        assert line in lines, line
    assert not any("graphs" in line for line in lines)
    again = write_triton(tmp_path / "mlp", facts, {}, tmp_path / "repository")
    assert again == needs  # over what is there


def test_what_several_ranks_need(tmp_path: Path) -> None:
    facts = write(tmp_path / "llama", MODELS["gqa"](), "tp=2", weights="inside")
    needs = write_triton(tmp_path / "llama", facts, {}, tmp_path / "repository")
    assert [each for each in needs if "IrcCollective" in each]
    assert [each for each in needs if "caches" in each]


@pytest.mark.parametrize(
    ("mesh", "options", "says"),
    [
        ("tp=2", {}, "compile with --weights inside"),
        ("pp=2", {"weights": "inside"}, "compile with a mesh without pp"),
    ],
)
def test_what_cannot_be_served(mesh: str, options: Facts, says: str, tmp_path: Path) -> None:
    facts = write(tmp_path / "llama", MODELS["gqa"](), mesh, **options)
    with pytest.raises(Error, match=says):
        write_triton(tmp_path / "llama", facts, {}, tmp_path / "repository")
    assert not (tmp_path / "repository").exists()
    facts["ranks"][0]["engine"] = None
    with pytest.raises(Error, match="has no engines"):
        write_triton(tmp_path / "llama", facts, {}, tmp_path / "repository")


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    facts = write(tmp_path / "llama", MODELS["gqa"]())
    (tmp_path / "file").write_text("")
    with pytest.raises(Error, match="cannot write"):
        write_triton(tmp_path / "llama", facts, {}, tmp_path / "file")
