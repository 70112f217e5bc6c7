"""Quantized weights in an artifact: written once for all ranks, and continued after ctrl-C."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import irc
from irc.artifact.atomic import orphaned_folders, unfinished_folder
from irc.artifact.checksums import sha256
from irc.backends.onnx import storage, weight_files
from irc.errors import Error
from irc.ir.core import Module
from irc.weights.checkpoint import Reader
from tests.backends.decoder import write
from tests.fresh import fresh

COUNT = 6  # quantized weights
TEXT = """module @m mesh(MESH) {
  file @f = "m.safetensors"
WEIGHTS
  func @forward(%x: f32[3, 8]) -> (f32[3, 8]) {
OPS
    return %y
  }
}
"""


def module(mesh: str = "", shard: str = "", format: str = "uint4") -> Module:
    """A chain of linears whose weights are quantized in rows."""
    weights, ops = [""] * COUNT, [""] * COUNT
    for i in range(COUNT):
        parts = (("codes", "u4", 8), ("scales", "f32", 1), ("zeros", "u4", 1))
        for part, kind, size in parts:
            ref = f'quantized(@f["w{i}"], "{part}", "{format}", [1, 0]){shard}'
            weights[i] += f"  weight @{part}{i} : {kind}[8, {size}] = {ref}\n"
        wide = f"%w{i} = dequantize @codes{i}, @scales{i}, zero=@zeros{i} : f32[8, 8]"
        out = "y" if i == COUNT - 1 else f"x{i}"
        source = f"x{i - 1}" if i else "x"
        ops[i] = f"    {wide}\n    %{out} = linear %{source}, %w{i} : f32[3, 8]"
    text = TEXT.replace("MESH", mesh).replace("WEIGHTS", "".join(weights))
    return irc.parse(text.replace("OPS", "\n".join(ops)))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a checkpoint, which is the working directory; every byte counts as many."""
    rng = fresh()
    arrays = {f"w{i}": rng.standard_normal((8, 8)).astype(np.float32) for i in range(COUNT)}
    write(tmp_path / "m.safetensors", arrays)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(storage, "RESUMED", 1)
    return tmp_path


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets the number of weights that each compilation computes."""
    found: list[int] = []
    stream = Reader.stream

    def counted(reader: Reader, tensors: list[object], as_bytes: bool = False) -> object:
        found.append(len(tensors))
        return stream(reader, tensors, as_bytes)  # type: ignore[arg-type]

    monkeypatch.setattr(Reader, "stream", counted)
    return found


def interrupt(monkeypatch: pytest.MonkeyPatch, error: BaseException, after: int) -> None:
    """Raise an error at a write, once."""
    left = [after]
    real = weight_files.Writer.write

    def stopping(writer: weight_files.Writer, offset: int, block: memoryview) -> int:
        left[0] -= 1
        if left[0] == -1:
            raise error
        return real(writer, offset, block)

    monkeypatch.setattr(weight_files.Writer, "write", stopping)


@pytest.mark.parametrize("after", [0, 1, 7, 3 * COUNT - 1])
def test_the_next_compilation_continues(
    folder: Path, computed: list[int], after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = irc.compile(module(), folder / "whole").folder
    interrupt(monkeypatch, KeyboardInterrupt(), after)
    with pytest.raises(KeyboardInterrupt):
        irc.compile(module(), folder / "out")
    kept = unfinished_folder(folder / "out")
    assert orphaned_folders(folder / "out") == [kept] and not (folder / "out").exists()
    made = irc.compile(module(), folder / "out")
    assert computed == [3 * COUNT, 3 * COUNT, 3 * COUNT - after]
    for name in os.listdir(whole):
        if name.endswith(".weights"):
            assert (made.folder / name).read_bytes() == (whole / name).read_bytes()
    assert list(made.opened.problems(whole=True)) == []
    assert not kept.exists() and not orphaned_folders(folder / "out")


@pytest.mark.parametrize(
    "journal", ["[1]", "{}", "5", '{"identity": IT, "count": null}', "[" * 9999, "IT", "COUNT"]
)
def test_a_damaged_journal_begins_anew(
    journal: str, folder: Path, computed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(monkeypatch, KeyboardInterrupt(), 4)
    with pytest.raises(KeyboardInterrupt):
        irc.compile(module(), folder / "out")
    path = unfinished_folder(folder / "out") / "finished.json"
    written = json.loads(path.read_text())
    journal = json.dumps(written | {"count": -5}) if journal == "COUNT" else journal
    path.write_text(journal.replace("IT", json.dumps(written["identity"])))
    artifact = irc.compile(module(), folder / "out")
    assert computed == [3 * COUNT] * 2
    assert list(artifact.opened.problems(whole=True)) == []


def test_weights_that_were_lost_are_written_again(
    folder: Path, computed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a power failure, when the journal was on the disk and the weights were not."""
    interrupt(monkeypatch, KeyboardInterrupt(), 4)
    with pytest.raises(KeyboardInterrupt):
        irc.compile(module(), folder / "out")
    (weights,) = unfinished_folder(folder / "out").glob("*.weights")
    os.truncate(weights, weights.stat().st_size // 2)
    with pytest.raises(Error, match="lacks weights that its journal counts as finished"):
        irc.compile(module(), folder / "out")
    irc.compile(module(), folder / "out")
    assert computed == [3 * COUNT] * 2


def test_other_weights_begin_anew(
    folder: Path, computed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another format, and a checkpoint that was written again."""
    for _ in range(2):
        interrupt(monkeypatch, KeyboardInterrupt(), 4)
        with pytest.raises(KeyboardInterrupt):
            irc.compile(module(), folder / "out")
        shutil.copy("m.safetensors", "n.safetensors")
        os.replace("n.safetensors", "m.safetensors")
    interrupt(monkeypatch, KeyboardInterrupt(), 4)
    with pytest.raises(KeyboardInterrupt):
        irc.compile(module(shard=".pad(0, 0)"), folder / "out")
    irc.compile(module(), folder / "out")
    assert computed == [3 * COUNT] * 4


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), Error("bad weight")])
def test_after_an_error_nothing_stays(
    folder: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(monkeypatch, error, 5)
    with pytest.raises(Error, match=r"No space left|bad weight"):
        irc.compile(module(), folder / "out")
    assert [path.name for path in folder.iterdir() if "irc-unf" in path.name] == []
    assert not orphaned_folders(folder / "out")


@pytest.mark.parametrize("format", ["int4", "nvfp4"])
def test_weights_that_no_scale_represents(folder: Path, format: str) -> None:
    values = np.ones((4, 4, 16), np.float32)
    values[1, 2, 3] = np.inf
    write(folder / "m.safetensors", {"w": values})
    kind, block = ("i4", "[1, 1, 0]") if format == "int4" else ("f4e2m1", "[1, 1, 16]")
    m = irc.parse(f"""module @m {{
      file @f = "m.safetensors"
      weight @codes : {kind}[4, 4, 16] = quantized(@f["w"], "codes", "{format}", {block})
      func @forward() -> ({kind}[4, 4, 16]) {{ return @codes }}
    }}""")
    expected = r'^cannot quantize @f\["w"\]: the values have NaN or infinities, which no scale'
    with pytest.raises(Error, match=expected):
        irc.evaluate(m, {})


def test_ranks_share_the_bytes_that_they_have_in_common(folder: Path) -> None:
    made = irc.compile(module("dp=2"), folder / "out", pipeline="localize")
    names = [path.name for path in made.folder.glob("*.weights")]
    assert names == ["shared.weights"]
    alone = irc.compile(module(), folder / "alone").folder
    assert sha256(made.folder / names[0]) == sha256(alone / "rank0.weights")
