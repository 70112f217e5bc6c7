"""Model repositories for Triton: what stands in them, and what cannot be served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import irc
from irc.backends.tensorrt.builder import build as builder
from irc.backends.tensorrt.options import EngineOptions
from irc.backends.tensorrt.triton import check, check_place
from irc.backends.tensorrt.triton import write as write_repository
from irc.core import Module
from irc.errors import Error
from irc.text import parse_module
from tests.cli.runner import refused
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


def write_triton(folder: Path, facts: Facts, output: Path) -> list[str]:
    return write_repository(folder, {"irc": "1", "program": facts}, output)


def parsed(text: str) -> list[str]:
    """The lines without comments; brackets fit each other."""
    lines = [line.strip() for line in text.splitlines() if not line.startswith("#")]
    body = "".join(lines)
    for opening, closing in ("[]", "{}"):
        assert body.count(opening) == body.count(closing)
    return lines


def test_one_rank_with_caches(tmp_path: Path) -> None:
    facts = write(tmp_path / "tiny-llama", MODELS["gqa"]())
    needs = write_triton(tmp_path / "tiny-llama", facts, tmp_path / "repository")
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
    assert needs[0].startswith("warning: the plans are of tensorrt-rtx")


def test_several_ranks(tmp_path: Path) -> None:
    facts = write(tmp_path / "mlp", mlp(), "tp=2", weights="inside", collectives="native")
    facts["target"] = "tensorrt-11.4/sm_90"
    needs = write_triton(tmp_path / "mlp", facts, tmp_path / "repository")
    assert needs == [
        "warning: Triton's tensorrt backend must be built with "
        "TRITON_ENABLE_TENSORRT_MULTI_DEVICE=ON"
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
    again = write_triton(tmp_path / "mlp", facts, tmp_path / "repository")
    assert again == needs  # over what is there


@pytest.mark.parametrize(
    ("model", "mesh", "plugins", "says"),
    [
        ("gqa", "", ["SoftCap"], "the plugin SoftCap, which is Python .* compile without it"),
        ("mlp", "tp=2", ["IrcCollective"], "a mesh with one axis has them"),
        ("gqa", "tp=2", [], "caches too, and every rank has other heads"),
        ("gqa", "pp=2", [], "compile with a mesh without pp"),
        ("mlp", "dp=2", [], "%x is split over the ranks"),
    ],
)
def test_what_cannot_be_served(
    model: str, mesh: str, plugins: list[str], says: str, tmp_path: Path
) -> None:
    module = mlp() if model == "mlp" else MODELS[model]()
    write(tmp_path / "built", module, mesh, weights="inside")
    with pytest.raises(Error, match=says):
        check(module, plugins)


def test_a_dtype_that_triton_lacks() -> None:
    text = "module @m { func @f(%x: f64[2]) -> (f64[2]) { return %x } }"
    with pytest.raises(Error, match="Triton has no dtype for x, which is f64"):
        check(parse_module(text), [])


@pytest.mark.parametrize("inner", ["", "deep/models"])
def test_the_repository_lies_outside_the_artifact(inner: str, tmp_path: Path) -> None:
    with pytest.raises(Error, match="choose a folder outside it"):
        check_place(tmp_path / "built" / inner, tmp_path / "built")
    check_place(tmp_path / "built2", tmp_path / "built")
    (tmp_path / "file").write_text("")
    with pytest.raises(Error, match="is a file; choose another folder"):
        check_place(tmp_path / "file", tmp_path / "built")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"weights": "outside"}, "leave --weights out"),
        ({"build": False}, "--no-build builds none"),
        ({"triton": 5}, "triton is 5, and must be of the type Path"),
    ],
)
def test_options_that_do_not_go_together(given: Facts, says: str) -> None:
    with pytest.raises(Error, match=says):
        EngineOptions.of({"triton": "served"} | given)


def test_what_is_left_open_is_chosen_so_that_it_can_be_served() -> None:
    found = EngineOptions.of({"triton": "served"})
    assert (found.triton, found.weights, found.collectives) == (Path("served"), "inside", "native")
    assert EngineOptions.of({"triton": "x", "collectives": "plugin"}).collectives == "plugin"


@pytest.mark.needs_rtx
@pytest.mark.parametrize("mesh", ["", "tp=2"])
def test_a_repository_beside_an_artifact(mesh: str, tmp_path: Path) -> None:
    (tmp_path / "mlp.irc").write_text(MLP)
    served, options = tmp_path / "served", Facts()
    options |= {"backend": "tensorrt-rtx", "mesh": mesh, "engine": {"triton": str(served)}}
    made = irc.compile(tmp_path / "mlp.irc", tmp_path / "built", **options)
    names = [f"model.plan.rank{rank}" for rank in (0, 1)] if mesh else []
    assert sorted(path.name for path in (served / "built" / "1").iterdir()) == [
        "model.plan",
        *names,
    ]
    warnings = [note for note in made.notes if note.startswith("warning: ")]
    assert len(warnings) == (3 if mesh else 1)
    assert any("Triton runs no self-test" in each for each in warnings) == bool(mesh)
    assert made.manifest["program"]["weights"] == "inside"


@pytest.mark.needs_rtx
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--mesh", "tp=2", "--collectives", "plugin"], "a mesh with one axis has them"),
        (["--mesh", "pp=2"], "compile with a mesh without pp"),
        (["--weights", "outside"], "leave --weights out"),
        (["--triton", "out/served"], "choose a folder outside it"),
    ],
)
def test_nothing_is_built_that_cannot_be_served(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(builder, "build", None)  # nothing may come so far
    text = MLP if "pp=2" not in words else str(MODELS["gqa"]())
    Path("m.irc").write_text(text)
    command = ["compile", "m.irc", "--backend", "tensorrt-rtx", "--triton", "served", *words]
    assert says in refused(*command, "-o", "out")
    assert [path.name for path in tmp_path.iterdir()] == ["m.irc"]
    if "--triton" not in words:
        assert says in refused(*command, "--dry-run")


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    facts = write(tmp_path / "llama", MODELS["gqa"]())
    (tmp_path / "file").write_text("")
    with pytest.raises(Error, match="cannot write"):
        write_triton(tmp_path / "llama", facts, tmp_path / "file")
