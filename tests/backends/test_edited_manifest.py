"""Manifests that somebody edited, with the right checksum: an Error, or the program runs."""

import copy
import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irc
from irc.backends import get
from irc.errors import Error
from tests.cli.runner import refused

ONE = """module @m dims(B=1:2:4) {
  func @forward(%x: f32[B, 8], %c: f32[B, 8]) -> (y: f32[B, 8], c: f32[B, 8] aliases %c) {
    %a = neg %x : f32[B, 8]
    %d = add %a, %c : f32[B, 8]
    return %a, %d
  }
}
"""
TWO = """module @m mesh(tp=2) dims(B=1:2:4) {
  func @forward(%x: f32[B, 8@tp]) -> (y: f32[B, 8@tp]) {
    %a = neg %x : f32[B, 8@tp]
    return %a
  }
}
"""
X = np.ones((2, 8), np.float32)
VALUES = (None, -1, 7, 10**30, True, 1.5, "", "zz", "a\0b", "\ud800", [], [1], {})


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every part of a JSON value."""
    items = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list) else items
    for key, part in items:
        yield (*at, key)
        yield from places(part, (*at, key))


def write(path: Path, manifest: dict[str, Any]) -> None:
    """Write a manifest with the checksum of its other entries."""
    rest = {key: value for key, value in manifest.items() if key != "manifest"}
    text = json.dumps(rest, indent=2, ensure_ascii=False) + "\n"
    hash = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
    path.write_text(json.dumps({**rest, "manifest": f"sha256:{hash}"}))


def edited(manifest: dict[str, Any], at: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """A copy with another value at a path, or without the entry where the value is Ellipsis."""
    copied = copy.deepcopy(manifest)
    inner: Any = copied
    for key in at[:-1]:
        inner = inner[key]
    if value is ...:
        del inner[at[-1]]
    else:
        inner[at[-1]] = value
    return copied


@pytest.mark.parametrize(("text", "inputs"), [(ONE, {"x": X, "c": X}), (TWO, {"x": X})])
def test_any_edit(text: str, inputs: dict[str, Any], tmp_path: Path) -> None:
    irc.compile(irc.parse(text), tmp_path / "out", pipeline="localize")
    path = tmp_path / "out" / "config.json"
    manifest = json.loads(path.read_text())
    edits = [(at, value) for at in places(manifest) for value in (*VALUES, ...)]
    refused = 0
    for at, value in random.sample(edits, 200):
        write(path, edited(manifest, at, value))
        try:
            irc.load(path.parent).run(inputs)
        except Error as error:
            assert str(error)
            refused += 1
        except Exception as error:
            raise AssertionError(f"{value!r} at {at}") from error
    assert refused > 100
    write(path, manifest)
    irc.load(path.parent).run(inputs)


@pytest.mark.parametrize("text", [ONE, TWO])
@pytest.mark.parametrize("backend", ["onnx", "tensorrt-rtx"])
def test_the_types_name_every_fact(backend: str, text: str, tmp_path: Path) -> None:
    engine = {} if backend == "onnx" else {"build": False}
    source = irc.parse(text)
    made = irc.compile(
        source, tmp_path / "out", backend=backend, pipeline="localize", engine=engine
    )
    program = json.loads((made.folder / "config.json").read_text())["program"]
    found = made.opened.facts(get(backend).facts)
    assert json.loads(json.dumps(found)) == program


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (("mesh",), 3, r"config.json is damaged: Expected `str`, got `int` - at `\$.mesh`"),
        (("dims", "B"), [1, 2], r"Expected `array` of length 3, got 2 - at `\$.dims\[...\]`"),
        (("program", "ranks", 0, "stage"), 7, r"contradicts itself .*stages \[7\]"),
        (("program", "ranks"), ..., r"Object missing required field `ranks`"),
        (("program", "stages", 0, "grows"), 1, r"Expected `str \| null`, got `int`"),
        (("program", "results"), ["q"], r"contradicts itself \(KeyError\('q'\)\); compile again"),
    ],
)
def test_messages(at: tuple[Any, ...], value: Any, message: str, tmp_path: Path) -> None:
    irc.compile(irc.parse(ONE), tmp_path / "out")
    path = tmp_path / "out" / "config.json"
    write(path, edited(json.loads(path.read_text()), at, value))
    with pytest.raises(Error, match=message):
        irc.load(path.parent).run({"x": X, "c": X})


def test_facts_of_engines(tmp_path: Path) -> None:
    irc.compile(irc.parse(ONE), tmp_path / "out")
    path = tmp_path / "out" / "config.json"
    write(path, edited(json.loads(path.read_text()), ("program", "engine"), 3))
    words = ["-o", tmp_path / "other", "--backend", "tensorrt-rtx"]
    assert "is damaged: Expected `object" in refused("compile", tmp_path / "out", *words)


@pytest.mark.parametrize("text", ['{"irc_artifact": "\\ud800"}', '{"irc_artifact": ' + "[" * 99999])
def test_no_text_and_too_deep(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    assert "is not a manifest of irc" in refused("generate", tmp_path, "--prompt", "x")
