"""Choices by target: lowerings, collectives, caches, weights; options that artifacts record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest

import irc
from irc.backends.tensorrt import backend as tensorrt
from irc.backends.tensorrt.backend import TensorRTBackend
from irc.backends.tensorrt.builder.library import Library
from irc.backends.tensorrt.lowering.table import Choices, rows
from irc.backends.tensorrt.options import EngineOptions
from irc.backends.tensorrt.target import Target
from irc.cli.arguments import Parser, add_settings, given_settings
from irc.driver import find_source
from irc.driver.options import chosen_backend
from irc.errors import Error
from irc.ir.declare import REGISTRY
from irc.ops import Silu
from irc.pipeline.options import options_of, settings_of
from irc.text import parse_module
from tests.tensorrt.emission import emitted

BODIES = {
    "largest": """%y = all_reduce %x {axis="tp", op="max", group_size=2} : f32[4, 8]
      return %y""",
    "largest and more": """%a = all_reduce %x {axis="tp", op="max", group_size=2} : f32[4, 8]
      %r = rank {axis="tp"} : i32[]{varies tp}
      %s = reshape %a {shape=[2, 2, 8]} : f32[2, 2, 8]
      %b = gather %s, %r {dim=0} : f32[2, 8]{varies tp}
      %y = all_gather %b {axis="tp", dim=0, group_size=2} : f32[4, 8]
      return %y""",
}


def compiled(body: str, folder: Path, mesh: str = "tp=2", **engine: Any) -> irc.Artifact:
    """The artifact of a module in the local view, without engines."""
    text = f"module @m local mesh({mesh}) {{ func @forward(%x: f32[4, 8]) -> (y: f32[4, 8]) {{ "
    module = parse_module(text + body + " } }")
    options = {"build": False, "self_test": False} | engine
    flavour = Target.parse(str(options["target"])).flavour
    return irc.compile(module, folder, backend=flavour, pipeline="dce", engine=options)


@pytest.mark.parametrize("target", ["tensorrt-11.4/sm_90", "tensorrt-rtx-1.7"])
@pytest.mark.parametrize("body", BODIES)
def test_collectives_are_those_of_the_plugin(target: str, body: str, tmp_path: Path) -> None:
    artifact = compiled(BODIES[body], tmp_path / "out", target=target)
    model = onnx.load(artifact.folder / artifact.manifest["program"]["ranks"][0]["model"])
    kinds = {node.op_type for node in model.graph.node if "Collective" in node.op_type}
    assert kinds == {"IrcCollective"}
    assert artifact.manifest["program"]["plugins"] == {"IrcCollective": "1"}
    (note,) = [note for note in artifact.notes if " collective" in note]
    count = "1 collective" if body == "largest" else "2 collectives"
    assert note == f"stage 0: {count} by NCCL (IrcCollective)"


CACHE = """module @m { func @forward(%k: f32[1, 2, 8, 4], %new: f32[1, 1, 8], %past: i32[1])
      -> (k: f32[1, 2, 8, 4] aliases %k) {
    %done = cache_update %k, %new, %past : f32[1, 2, 8, 4]
    return %done } }"""


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        ("tensorrt-11.2/sm_121", "ScatterElements"),
        ("tensorrt-11.2/sm_90+sm_121", "ScatterElements"),
        ("tensorrt-11.2/sm_90", "TensorScatter"),
        ("tensorrt-11.3/sm_121", "TensorScatter"),
        ("tensorrt-rtx-1.7/sm_121", "TensorScatter"),
    ],
)
def test_caches_are_copied_where_native_ones_are_wrong(
    target: str, kind: str, tmp_path: Path
) -> None:
    parsed = Target.parse(target)
    made = [node.op_type for node in emitted(parse_module(CACHE), parsed).graph.node]
    assert kind in made and ({"ScatterElements", "TensorScatter"} & {*made}) == {kind}
    (row,) = [row for row in rows(parsed) if row.op == "cache_update"]
    assert row.choice == kind
    engine = {"target": target, "build": False}
    artifact = irc.compile(
        parse_module(CACHE), tmp_path / "out", backend=parsed.flavour, engine=engine
    )
    copied = artifact.manifest["program"]["stages"][0]["copied"]
    assert copied == (["k"] if kind == "ScatterElements" else [])


@pytest.mark.parametrize(
    ("target", "here", "wanted"),
    [("", 121, (121,)), ("tensorrt/sm_90", 121, (90,)), ("", None, ())],
)
def test_the_target_of_a_build(
    target: str, here: int | None, wanted: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    from irc.backends.tensorrt.builder import library

    monkeypatch.setattr(tensorrt, "capability", lambda: here)
    monkeypatch.setattr(library, "find", lambda flavour: Library(flavour, None, "11.2.0.1"))
    options = options_of(EngineOptions, {"target": target})
    found = TensorRTBackend("tensorrt", options).target
    assert (found.version, found.architectures) == ((11, 2), wanted)


@pytest.mark.parametrize(
    ("dtype", "ranks", "engine", "outside", "reason"),
    [
        ("f32", 1, {}, False, ""),
        ("f32", 2, {}, True, ""),
        ("f32", 1, {"weights": "outside"}, True, ""),
        ("i4", 1, {}, False, "the weight @w is i4"),
        ("f32", 1, {"strip": True}, False, "--strip applies to weights inside the engine"),
        ("f32", 2, {"strip": True}, False, "--strip applies to weights inside the engine"),
        ("f32", 1, {"refit": True}, False, "--refit applies to"),
        ("f32", 1, {"weight_streaming": True}, False, "--weight-streaming applies to"),
    ],
)
def test_weights_inside_or_outside(
    dtype: str, ranks: int, engine: dict[str, Any], outside: bool, reason: str
) -> None:
    weight = f'weight @w : {dtype}[4, 4] = random("k", 1, 1.0)'
    module = parse_module(f"module @m mesh(tp={ranks}) {{ {weight} }}")
    assert options_of(EngineOptions, engine).outside(module) == outside
    if reason:
        with pytest.raises(Error, match=f"{reason}.*give --weights inside"):
            options_of(EngineOptions, {**engine, "weights": "outside"}).outside(module)


def test_an_artifact_is_compiled_again_as_it_was(tmp_path: Path) -> None:
    options = {"target": "tensorrt-rtx-1.7", "workspace": 1 << 20, "weights": "inside"}
    before = compiled(BODIES["largest"], tmp_path / "before", **options)
    after = irc.compile(before.folder, tmp_path / "after", engine={"build": False})
    assert after.manifest["backend"] == "tensorrt-rtx"
    assert after.manifest["program"]["engine"] == before.manifest["program"]["engine"]
    other = irc.compile(
        before.folder, tmp_path / "other", engine={"build": False, "workspace": 2 << 20}
    )
    assert other.manifest["program"]["engine"]["workspace"] == 2 << 20
    assert other.manifest["program"]["weights"] == "inside"
    cpu = irc.compile(before.folder, tmp_path / "cpu", backend="onnx")
    assert cpu.manifest["backend"] == "onnx"


@pytest.mark.parametrize("name", ["strip", "refit", "weight_streaming"])
def test_a_remembered_flag_can_be_switched_off(name: str, tmp_path: Path) -> None:
    def parsed(*words: str) -> dict[str, Any]:
        parser = Parser("compile", "compile", "")
        add_settings(parser, settings_of(EngineOptions).values())
        return given_settings(parser.parse(words), settings_of(EngineOptions))

    word = name.replace("_", "-")
    answers = parsed(), parsed(f"--{word}"), parsed(f"--no-{word}")
    assert answers == ({}, {name: True}, {name: False})
    engine = {"build": False, "target": "tensorrt-rtx-1.7", name: True}
    irc.compile(parse_module(CACHE), tmp_path, backend="tensorrt-rtx", engine=engine)
    source = find_source(tmp_path)
    assert getattr(chosen_backend(source, {}).options, name)
    assert not getattr(chosen_backend(source, {name: False}).options, name)


# -- the table of lowerings, and targets


@pytest.mark.parametrize("text", ["tensorrt-rtx-1.7/sm_89", "tensorrt-11.4/sm_90", "tensorrt-11.0"])
def test_every_operation_has_one_row_with_a_reason_and_a_source(text: str) -> None:
    found = rows(Target.parse(text))
    assert sorted({row.op for row in found}) == sorted(REGISTRY)
    assert [row.op for row in found] == sorted(row.op for row in found)
    assert len(found) == len(REGISTRY)
    assert all(row.choice and row.reason and row.source for row in found)


def test_the_first_choice_that_fits_wins() -> None:
    choices = Choices()
    for choice, since in (("new", (11, 3)), ("old", (0, 0))):
        register = choices.lower(
            Silu, choice=choice, reason="-", source="-", since=since, flavour="tensorrt"
        )
        register(lambda e, op: "")
    fitting = {
        text: getattr(choices.find(Silu, Target.parse(text)), "choice", None)
        for text in ("tensorrt-11.4", "tensorrt-11.0", "tensorrt-rtx-1.7")
    }
    assert fitting == {"tensorrt-11.4": "new", "tensorrt-11.0": "old", "tensorrt-rtx-1.7": None}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tensort", "did you mean"),
        ("tensorrt-rtx-1.7/sm_90", "no engine is for sm_90; there are sm_75, "),
        ("tensorrt-11.4/sm_999", "no engine is for sm_999; there are .*sm_90, "),
        ("tensorrt-rtx-1.7/ada", "'ada' is not an architecture"),
        ("tensorrt-rtx-1.7/", "'' is not an architecture; write sm_89"),
        ("tensorrt-rtx-1.7/sm_89+", "'' is not an architecture"),
        ("tensorrt-rtx-1.7.", "write it as"),
        ("tensorrt-10.3", "needs tensorrt 11.0 or newer"),
        ("", "write it as"),
    ],
)
def test_bad_targets(text: str, message: str) -> None:
    with pytest.raises(Error, match=message):
        Target.parse(text)


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("tensorrt-rtx-1.7/sm_80+sm_89", ""),
        ("tensorrt-11.4/sm_90", ""),
        ("tensorrt-rtx-1.7.1.116/sm_89", "tensorrt-rtx-1.7/sm_89"),
    ],
)
def test_targets_read_back(text: str, written: str) -> None:
    assert str(Target.parse(text)) == (written or text)
