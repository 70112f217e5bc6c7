"""Compiling for TensorRT from every kind of source, without building engines."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import onnx
import pytest

import irc
from irc.artifact.manifest import Progress
from irc.backends.tensorrt.builder import build as builder
from irc.backends.tensorrt.builder.report import Report
from irc.backends.tensorrt.builder.request import BuildRequest, Built
from irc.backends.tensorrt.options import EngineOptions
from irc.backends.tensorrt.ranges import profiles_of
from irc.driver import Artifact
from irc.errors import Error
from irc.pipeline.options import options_of
from irc.text import parse_module
from tests.cli.runner import npz_files, refused, works
from tests.layout import ROOT
from tests.tiny_checkpoint import write_checkpoint
from tests.user_code import restored_registries

WAITING = "waiting for another process that builds"
DIMS = {"B": (1, 1, 2), "S": (1, 8, 24), "T": (1, 1, 2), "C": (24, 24, 24)}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("source") / "checkpoint")


def compiled(source: Path, folder: Path, **options: Any) -> Artifact:
    engine = {"build": False, "self_test": False} | options.pop("engine", {})
    return irc.compile(source, folder, backend="tensorrt-rtx", engine=engine, **options)


@pytest.mark.parametrize(
    ("options", "least", "most", "tokens"),
    [
        ({"mesh": "tp=2", "sequence": True}, 2, 96, 8),
        ({"mesh": "tp=3", "sequence": True}, 3, 96, 6),
        ({"mesh": "tp=3,pp=2", "sequence": True}, 3, 96, 6),
        ({"dims": {"C": (4, 4, 4)}}, 1, 4, 4),
    ],
)
def test_profiles(
    options: Any, least: int, most: int, tokens: int, checkpoint: Path, tmp_path: Path
) -> None:
    """Sharded tokens are multiples of the group size; a call has no more than the cache."""
    artifact = compiled(checkpoint, tmp_path / "out", engine={"self_test": True}, **options)
    program = artifact.manifest["program"]
    decode, prefill = program["stages"][0]["profiles"]
    assert decode["shapes"]["input_ids"][2] == [8, least]
    assert prefill["shapes"]["input_ids"][2][1] == most
    assert len(program["self_test"]["ids"]) == tokens


def test_an_artifact_without_engines_says_why(checkpoint: Path, tmp_path: Path) -> None:
    folder = compiled(checkpoint, tmp_path / "out", dims=DIMS).folder
    words = npz_files(tmp_path, input_ids=[[1]])
    assert "has no engines, since it was compiled with --no-build" in refused("run", folder, *words)
    assert "compile without --no-build" in refused("show", folder, "--kernels")


def test_a_checkpoint_that_has_moved(checkpoint: Path, tmp_path: Path) -> None:
    here = tmp_path / "here"
    shutil.copytree(checkpoint, here)
    first = compiled(here, tmp_path / "first", mesh="tp=2", dims=DIMS)
    here.rename(tmp_path / "there")
    with pytest.raises(Error, match=r"is gone; (?s:.*)give --checkpoint"):
        compiled(first.folder, tmp_path / "again")
    again = compiled(first.folder, tmp_path / "again", checkpoint=tmp_path / "there")
    assert again.manifest["program"]["base"] == str(tmp_path / "there")
    other = write_checkpoint(tmp_path / "other", hidden_size=64)
    with pytest.raises(Error, match=r"had .* bytes and has .* now; give the checkpoint"):
        compiled(first.folder, tmp_path / "wrong", checkpoint=other)


def test_the_model_of_one_rank_cannot_be_compiled(checkpoint: Path, tmp_path: Path) -> None:
    artifact = compiled(checkpoint, tmp_path / "out", mesh="tp=2", dims=DIMS)
    with pytest.raises(Error, match="is the program of one rank of 2"):
        compiled(artifact.folder / "stage0.onnx", tmp_path / "again")


PLUGIN = """
from irc.backends.tensorrt.plugins import PluginSpec, Tensor, attributes_of, register
from irc.backends.tensorrt.lowering.table import CHOICES

register(PluginSpec(
    name="TestTwice", version="3", namespace="example", doc="y = 2 x", fields=(),
    types={"T": ("f32",)}, inputs=(Tensor("x", "T"),), outputs=(Tensor("y", "T"),),
    shapes=lambda fields, x: (x,),
    enqueue=lambda fields, inputs, outputs: lambda *launch: None,
))

@CHOICES.lower("test_twice", choice="TestTwice", reason="a test", source="a test")
def twice(e, op):
    return e.add("TestTwice", e.get(op.x), **attributes_of("TestTwice", {}, "example"))
"""
MODEL = '''
import irc
from irc.ir.declare import Operand, operation, REGISTRY
from irc.ir.core import Op
from irc.ir.types import TensorType

if "test_twice" not in REGISTRY:
    @operation("test_twice")
    class TestTwice(Op):
        """2 x."""

        x: Operand

        def infer(self) -> TensorType:
            return self.x.type

        def evaluate(self, x):
            return 2 * x

def build():
    return irc.parse("""module @m {
      func @forward(%x: f32[3]) -> (f32[3]) {
        %y = test_twice %x : f32[3]
        return %y
      }
    }""")
'''


def test_a_plugin_lowers_an_operation_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "plugin.py").write_text(PLUGIN)
    (tmp_path / "model.py").write_text(MODEL)
    with restored_registries():
        engine = {"plugins": str(tmp_path / "plugin.py")}
        artifact = compiled(tmp_path / "model.py", tmp_path / "out", engine=engine)
        assert artifact.manifest["program"]["plugins"] == {"example::TestTwice": "3"}
        (node,) = onnx.load(str(artifact.folder / "rank0.onnx")).graph.node
        assert node.op_type == "TestTwice"
        with pytest.raises(Error, match="in the namespace 'example', not in 'irc'"):
            from irc.backends.tensorrt.plugins import find

            find("TestTwice")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight": "inside"}, "no option weight; did you mean 'weights'"),
        ({"weights": "here"}, "weights is 'here'; it can be inside or outside"),
        ({"workspace": "x"}, "workspace is 'x'; give a whole number"),
        ({"workspace": -5}, "workspace is -5; give a whole number of at least 1"),
        ({"plugins": 5}, "plugins is 5; give the path of a file, or a list of paths"),
        ({"plugins": [5]}, "give the path of a file"),
        ({"self_test": "always"}, "self_test is 'always'; give True or False"),
        ({"cache": "x", "caching": False}, "a cache is named, and caching is off"),
    ],
)
def test_bad_options(options: Any, message: str) -> None:
    with pytest.raises(Error, match=message):
        options_of(EngineOptions, options)


def test_options_of_other_types() -> None:
    options = options_of(EngineOptions, {"cache": "x", "plugins": "a.py", "target": None})
    assert (options.cache, options.plugins, options.target) == (Path("x"), ("a.py",), "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--backend", "onnx", "--weights", "inside"],
            "the backend onnx has no option weights: --weights is for --backend tensorrt or",
        ),
        (["--backend", "tensorrt-rtx", "--target", "tensorrt-11.4"], "not for the backend"),
        (["--backend", "tensorrt-rtx", "--no-build", "--dims", "B=0"], "the range of B ends at 0"),
        (
            ["--backend", "tensorrt-rtx", "--no-build", "--mesh", "tp=2", "--pipeline", "shard"],
            "add localize to the pipeline",
        ),
    ],
)
def test_bad_commands(words: list[str], message: str, checkpoint: Path, tmp_path: Path) -> None:
    """A dry run has the errors of a compilation."""
    for more in (["--dry-run"], ["-o", tmp_path / "out"]):
        assert message in refused("compile", checkpoint, *words, *more)
    assert not (tmp_path / "out").exists()


def test_a_self_test_of_a_model_that_generates_nothing(tmp_path: Path) -> None:
    source, engine = ROOT / "examples" / "two_tower.py", {"self_test": True}
    with pytest.raises(Error, match="there is nothing to test"):
        compiled(source, tmp_path / "out", random_weights=1, engine=engine)


DRY = ["--backend", "tensorrt-rtx", "--no-build", "--dry-run"]


@pytest.mark.parametrize(
    ("words", "models"),
    [
        ([], ["rank0.onnx"]),
        (["--weights", "inside", "--mesh", "tp=2"], ["rank0.onnx", "rank1.onnx"]),
        (["--mesh", "tp=2,pp=2"], ["stage0.onnx", "stage1.onnx"]),
    ],
)
def test_a_dry_run_lints_the_models(
    words: list[str], models: list[str], checkpoint: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Byte by byte the models that a compilation writes."""
    from irc.backends.tensorrt import lint

    command = ["compile", checkpoint, "-o", tmp_path / "out", *words]
    real, seen = lint.lint, list[bytes]()

    def spy(model: onnx.ModelProto, *more: Any) -> list[lint.Finding]:
        seen.append(model.SerializeToString(deterministic=True))
        return real(model, *more)

    monkeypatch.setattr(lint, "lint", spy)
    answer = works(*command, *DRY)
    assert all(f"{name} was linted" in answer.out for name in models)
    assert not list(tmp_path.iterdir())
    dry, seen[:] = list(seen), []
    works(*command, *DRY[:-1])
    assert dry == seen == [(tmp_path / "out" / name).read_bytes() for name in models]


def test_a_dry_run_prints_errors_of_the_linter(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from irc.backends.tensorrt.lint import RULES, Rule

    rule = Rule("no-rope", "graph", "", lambda graph: [(None, ())], "turn back")
    monkeypatch.setitem(RULES, rule.name, rule)
    for more in (DRY, [*DRY[:-1], "-o", tmp_path / "out"]):
        error = refused("compile", checkpoint, *more)
        assert "TensorRT would miscompute rank0.onnx" in error
        assert "error: turn back [no-rope]" in error


RANGES = """module @m {{
  func @forward(%x: f32[{0}], %y: f32[{1}]) -> (a: f32[{0}], b: f32[{1}]) {{
    %a = relu %x : f32[{0}]
    %b = relu %y : f32[{1}]
    return %a, %b }} }}"""


def test_all_symbols_without_a_range_are_named() -> None:
    functions = [parse_module(RANGES.format(*dims)).main for dims in (("B, 4", "S"), ("B", "2*T"))]
    with pytest.raises(Error) as caught:
        profiles_of(functions, {"S": (1, 2, 4)})
    wanted = "B=min:typical:max,T=min:typical:max"
    assert str(caught.value) == f"an engine needs ranges for B, T; give --dims {wanted}"
    with pytest.raises(Error, match=r"needs a range for T; give --dims T=min:typical:max$"):
        profiles_of(functions, {"S": (1, 2, 4), "B": (1, 1, 1)})
    profiles = profiles_of(functions, dict.fromkeys("BST", (1, 2, 4)))
    assert profiles[1][0].shapes == {"x": ((1,), (2,), (4,)), "y": ((2,), (4,), (8,))}


@pytest.mark.needs_rtx
def test_steps_and_fractions(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, float]] = []

    def build(request: BuildRequest, tell: Progress) -> Built:
        name = request.engine.name
        tell(f"waiting for another process that builds {name}", 0.0)
        tell(f"building {name}", 0.0)
        tell(f"building {name}", 1.0)
        request.engine.write_bytes(b"")
        if name == "stage1.engine":
            raise Error("stop here")
        return Built(request.engine, Report("", "", (), (), ()), cached=False)

    monkeypatch.setattr(builder, "build", build)
    engine = {"build": True, "self_test": None}
    with pytest.raises(Error, match="stop here"):
        compiled(
            checkpoint, tmp_path / "out", mesh="pp=2", dtype="bf16", engine=engine,
            progress=lambda *step: told.append(step),
        )  # fmt: skip
    stages = list(dict.fromkeys(stage for stage, _ in told))
    assert stages == [
        "reading the model",
        "running passes",
        "writing the program",
        "writing the weights",
        "checking the graphs",
        "running the reference for the self-test",
        *(f"{step} stage{i}.engine" for i in (0, 1) for step in (WAITING, "building")),
    ]
    for name in stages:
        fractions = [fraction for stage, fraction in told if stage == name]
        assert fractions == sorted(fractions)
