"""What an artifact remembers about its engines, and what new options make of it."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest

import irc
from irc.backends import get
from irc.backends.tensorrt.backend import TensorRTBackend
from irc.backends.tensorrt.options import EngineOptions
from irc.cli.engines import add_engine, engine_options
from irc.driver.options import backend_of
from irc.text import parse_module

TEXT = """module @m {
  weight @w : f32[4, 4] = random("w", 1, 1.0)
  func @forward(%x: f32[2, 4]) -> (y: f32[2, 4]) {
    %y = linear %x, @w : f32[2, 4]
    return %y
  }
}"""


def again(folder: Path, before: dict[str, Any], **new: Any) -> EngineOptions:
    """The options of engines of an artifact that is compiled again."""
    engine = {"build": False, "self_test": False, "target": "tensorrt-rtx-1.7"} | before
    module = parse_module(TEXT)
    irc.compile(module, folder / "out", backend="tensorrt-rtx", engine=engine)
    backend = backend_of(folder / "out", {"engine": new})
    assert isinstance(backend, TensorRTBackend)
    return backend.options


def given(*words: str) -> dict[str, Any]:
    """The options that the words of a command are."""
    parser = ArgumentParser()
    add_engine(parser)
    return engine_options(parser.parse_args(words))


def test_what_is_not_said_holds_on(tmp_path: Path) -> None:
    found = again(tmp_path, {"weights": "outside", "collectives": "plugin"}, workspace=1 << 20)
    assert (found.weights, found.collectives) == ("outside", "plugin")
    assert (found.self_test, found.workspace) == (False, 1 << 20)


def test_triton_takes_an_artifact_with_weights_outside(tmp_path: Path) -> None:
    before = {"weights": "outside", "collectives": "plugin"}
    found = again(tmp_path, before, triton=tmp_path / "served")
    assert (found.weights, found.collectives) == ("inside", "native")
    assert found.self_test is False, "all else holds on"
    assert again(tmp_path, before, triton=None).weights == "outside"


def test_what_the_user_says_beside_triton_counts(tmp_path: Path) -> None:
    new = {"triton": tmp_path / "served", "collectives": "plugin"}
    assert again(tmp_path, {"collectives": "native"}, **new).collectives == "plugin"


@pytest.mark.parametrize("name", ["strip", "refit", "weight_streaming"])
def test_a_flag_is_switched_off_again(name: str, tmp_path: Path) -> None:
    word = name.replace("_", "-")
    assert given() == {}
    assert given(f"--{word}") == {name: True}
    assert given(f"--no-{word}") == {name: False}
    assert getattr(again(tmp_path, {name: True}), name)
    assert not getattr(again(tmp_path, {name: True}, **given(f"--no-{word}")), name)


def test_a_backend_without_engines_forgets_them(tmp_path: Path) -> None:
    again(tmp_path, {"strip": True})
    assert backend_of(tmp_path / "out", {"backend": "onnx"}) is get("onnx")


def test_a_backend_of_any_name_may_build_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it can be configured decides."""
    again(tmp_path, {"strip": True})
    other = TensorRTBackend("tensorrt-rtx")
    monkeypatch.setattr("irc.backends.get", lambda name: other)
    found = backend_of(tmp_path / "out", {"backend": "mine"})
    assert isinstance(found, TensorRTBackend) and found.options.strip
