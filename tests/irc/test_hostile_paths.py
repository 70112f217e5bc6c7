"""Files that are no regular files, paths that no file can have, and very long names."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import irc
from irc.errors import Error
from tests.cli.runner import refused

TEXT = """module @m {
  file @a = "PATH"
  weight @w : f32[4] = REF
  func @forward(%x: f32[4]) -> (f32[4]) {
    %y = add %x, @w : f32[4]
    return %y
  }
}
"""
LONG = "a_name" * 2000


def pipe(path: Path) -> None:
    """A pipe, which nobody writes to: opening it waits forever."""
    os.mkfifo(path)


@pytest.mark.timeout(100)
@pytest.mark.parametrize("ref", ['@a["w"]', "bytes(@a, 0, f32[4])"])
@pytest.mark.parametrize(
    ("path", "make", "message"),
    [
        ("w.safetensors", pipe, "not a regular file"),
        ("w.safetensors", Path.mkdir, "Is a directory"),
        ("\\u0000", None, r"has a NUL character; correct it"),
        ("w\\u0000.safetensors", None, r"has a NUL character; correct it"),
        ("\\ud800", None, "cannot read the string"),
    ],
)
def test_weights(
    path: str, make: Callable[[Path], None] | None, message: str, ref: str, tmp_path: Path
) -> None:
    if make is not None:
        make(tmp_path / path)
    source = tmp_path / "m.irc"
    source.write_text(TEXT.replace("PATH", path).replace("REF", ref))
    assert message in refused("compile", source, "-o", tmp_path / "out")


@pytest.mark.timeout(100)
@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "model.safetensors.index.json", "model.onnx"]
)
@pytest.mark.parametrize("in_folder", [True, False])
def test_pipes_in_place_of_a_model(in_folder: bool, name: str, tmp_path: Path) -> None:
    if in_folder and name != "config.json":
        (tmp_path / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 1}')
    pipe(tmp_path / name)
    source = tmp_path if in_folder else tmp_path / name
    assert "error: " in refused("compile", source, "-o", tmp_path / "out")


def test_a_script_whose_path_is_no_text(tmp_path: Path) -> None:
    source = tmp_path / os.fsdecode(b"model\xff.py")
    source.write_text("def model(): pass")
    assert "is not UTF-8; rename it" in refused("compile", source, "-o", tmp_path / "out")


def test_a_key_that_is_no_text(tmp_path: Path) -> None:
    header = rb'{"\ud800": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}'
    (tmp_path / "w.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    source = tmp_path / "m.irc"
    source.write_text(TEXT.replace("PATH", "w.safetensors").replace("REF", '@a["w"]'))
    message = refused("compile", source, "-o", tmp_path / "out")
    assert "is not a safetensors file: its header is not JSON" in message


def test_a_path_with_a_nul_character(tmp_path: Path) -> None:
    with pytest.raises(Error, match=r"the folder to write is .*; give a path without NUL"):
        irc.compile(irc.parse("module @m {}"), f"{tmp_path}/a\0b")


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (2, (LONG,)),
        (1, ("show", LONG)),
        (1, ("opt", "--passes", LONG, "m.irc")),
        (2, ("opt", "m.irc", f"--{LONG}")),
        (1, ("compile", "m.irc", "-o", LONG, "--random-weights", "1")),
        (2, ("compile", "m.irc", "-o", "out", "--dtype", LONG)),
        (1, ("opt", "long.irc")),
    ],
)
def test_a_long_name_is_shortened(
    status: int, words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = TEXT.replace("PATH", "p").replace("REF", 'unbound("w")')
    Path("m.irc").write_text(text)
    Path("long.irc").write_text(text.replace("add", LONG))
    message = refused(*words, status=status)
    assert "a_namea_name" in message and len(message) < 1000
