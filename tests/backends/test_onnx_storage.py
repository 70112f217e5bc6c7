"""Files of the weights of an ONNX model: the checkpoint in place, several folders, converted."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import irc
from irc.artifact.checksums import sha256
from irc.backends.onnx import backend
from irc.backends.onnx.weight_files import Writer
from irc.backends.reference import evaluate
from irc.errors import Error
from irc.ir.core import Module
from tests.backends.decoder import write
from tests.backends.emission import X, emitted, linear, module, places
from tests.backends.text import module as text_module


def files_of(facts: Mapping[str, Any]) -> tuple[str | None, list[str], list[str]]:
    """(the base, the checkpoint files below it, the weight files beside the model) of rank 0."""
    (rank,) = facts["ranks"]
    return facts["base"], rank["files"], rank["weights"]


def test_weights_are_read_in_place(folder: Path) -> None:
    facts, model = emitted(linear('@f["a"]'), folder)
    where = places(model)["w"]
    assert where["location"] == "m.safetensors" and int(where["offset"]) % 2 == 1
    assert sorted(os.listdir(folder / "out")) == ["rank0.onnx"]
    assert files_of(facts) == (str(folder), ["m.safetensors"], [])
    assert (folder / "out" / "rank0.onnx").stat().st_size < 2000


def test_rows_are_an_offset(folder: Path) -> None:
    m = module(
        'weight @w : f32[2, 5] = @f["c"][3:5, :]',
        "%n = slice %x {dim=1, start=0, stop=2} : f32[S, 2]\n"
        "%y = matmul %n, @w : f32[S, 5]\nreturn %y",
        "f32[S, 5]",
    )
    whole = places(emitted(linear('@f["c"][0:5, 0:4]'), folder)[1])
    assert whole["w"]["location"] == "rank0.weights"
    where = places(emitted(m, folder)[1])["w"]
    assert (where["location"], where["length"]) == ("m.safetensors", "40")


@pytest.mark.parametrize(
    ("ref", "dtype", "stored", "own"),
    [
        ('@f["b"]', "bf16", "BFLOAT16", False),
        ('@f["b"].cast(f32)', "f32", "BFLOAT16", False),  # widened in the graph, not in a file
        ('@f["b"].cast(f32)[0:5, :]', "f32", "BFLOAT16", False),
        ('@f["half"].cast(f32)', "f32", "FLOAT16", False),
        ('@f["a"].cast(bf16)', "bf16", "BFLOAT16", True),
        ('@f["a"].cast(bf16).cast(f32)', "f32", "BFLOAT16", True),
        ('@f["half"].cast(bf16)', "bf16", "BFLOAT16", True),
        ('@f["c"][0:5, 0:4]', "f32", "FLOAT", True),
        ('@f["c"].transpose(1, 0)[:, 1:5]', "f32", "FLOAT", True),
        ('concat(@f["a"][0:2, :], @f["c"][0:3, 0:4]; 0)', "f32", "FLOAT", True),
        ('random("k", 3, 0.5)', "f32", "FLOAT", True),
    ],
)
def test_only_what_needs_conversion_is_written(
    folder: Path, ref: str, dtype: str, stored: str, own: bool
) -> None:
    facts, model = emitted(linear(ref, dtype), folder)
    (proto,) = (t for t in model.graph.initializer if t.name == "w")
    assert onnx.TensorProto.DataType.Name(proto.data_type) == stored
    assert places(model)["w"]["location"] == ("rank0.weights" if own else "m.safetensors")
    assert files_of(facts)[2] == (["rank0.weights"] if own else [])


def two_files(folder: Path) -> Module:
    """One weight in place, in another folder than a second, and a third that is converted."""
    for name in ("one", "two/deep"):
        (folder / name).mkdir(parents=True)
        write(
            folder / name / "m.safetensors",
            {"w": np.arange(16, dtype=np.float32).reshape(4, 4) / 8},
        )
    files = {"one": "one/m.safetensors", "two": "two/deep/m.safetensors"}
    return module(
        'weight @a : f32[4, 4] = @one["w"]\nweight @b : f32[4, 4] = @two["w"]\n'
        'weight @c : f32[4, 4] = @two["w"].transpose(1, 0)',
        "%1 = linear %x, @a : f32[S, 4]\n%2 = linear %1, @b : f32[S, 4]\n"
        "%3 = linear %2, @c : f32[S, 4]\nreturn %3",
        "f32[S, 4]",
        files,
    )


@pytest.mark.parametrize("beside", [False, True])
def test_files_in_several_folders(beside: bool, folder: Path) -> None:
    """The model's own folder, with converted weights and perhaps a given file, can be moved."""
    m = two_files(folder)
    wanted = {"a": "one/m.safetensors", "b": "two/deep/m.safetensors", "c": "rank0.weights"}
    if beside:
        m.files["one"] = "out/beside.safetensors"
        (folder / "one/m.safetensors").rename(folder / "out/beside.safetensors")
        wanted |= {"a": "beside.safetensors", "b": "m.safetensors"}
    facts, model = emitted(m, folder)
    assert {name: place["location"] for name, place in places(model).items()} == wanted
    if beside:
        own = ["beside.safetensors", "rank0.weights"]
        assert files_of(facts) == (str(folder / "two/deep"), ["m.safetensors"], own)
    else:
        assert facts["base"] == str(folder)
    result = evaluate(m, X, folder)["result0"]
    moved = folder / "elsewhere" / "out"
    moved.parent.mkdir()
    (folder / "out").rename(moved)
    found = backend.load(moved, facts, threads=1).run(X)
    np.testing.assert_array_equal(found["result0"], result)


def test_links_of_a_cache_are_followed(folder: Path) -> None:
    blobs, snapshot = folder / "blobs", folder / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    (folder / "m.safetensors").rename(blobs / "0123")
    (snapshot / "m.safetensors").symlink_to("../../blobs/0123")
    m = linear('@f["a"]')
    out = folder / "out"
    facts = backend.emit(m, out, base=snapshot).facts
    assert files_of(facts) == (str(blobs), ["0123"], [])
    found = backend.load(out, facts, threads=1).run(X)
    wanted = evaluate(m, X, snapshot)["result0"]
    np.testing.assert_allclose(found["result0"], wanted, rtol=1e-5, atol=1e-5)


def test_checker_accepts_a_model_beside_its_weights(folder: Path) -> None:
    facts = backend.emit(linear('@f["a"]'), folder, base=folder).facts
    assert files_of(facts) == (None, [], ["m.safetensors"])
    onnx.checker.check_model(str(folder / "rank0.onnx"), full_check=True)


def test_a_weight_unlike_its_file_is_refused(folder: Path) -> None:
    with pytest.raises(Error, match=r"weight @w is f32\[5, 4\], but @f\[\"c\"\] is f32\[6, 5\]"):
        backend.emit(linear('@f["c"]'), folder / "out", base=folder)


def test_weights_of_four_bits_are_packed_by_two(folder: Path) -> None:
    m = module(
        'weight @w : i4[3, 5] = random("k", 1, 4.0)',
        """%wide = cast @w {dtype="f32"} : f32[3, 5]
           %n = slice %x {dim=1, start=0, stop=1} : f32[S, 1]
           %one = slice %wide {dim=0, start=2, stop=3} : f32[1, 5]
           %y = mul %n, %one : f32[S, 5]
           return %y""",
        "f32[S, 5]",
    )
    facts, _ = emitted(m, folder)
    assert (folder / "out" / "rank0.weights").stat().st_size == 8
    (found,) = backend.load(folder / "out", facts).run(X).values()
    (wanted,) = evaluate(m, X).values()
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(("ranks", "step"), [(1, ".transpose(1, 0)"), (3, ".shard(1, tp)")])
def test_writing_weights_takes_no_memory(ranks: int, step: str, tmp_path: Path) -> None:
    path, size = sparse_checkpoint(tmp_path, 60_000, 999), 60_000 * 999 * 4
    type = "f32[999, 60000]" if ranks == 1 else "f32[60000, 333] of f32[60000, 999@tp]"
    m = text_module(
        "%x: f32[1]",
        type,
        "return @w",
        f"local mesh(tp={ranks})",
        f'  file @f = "{path.name}"\n  weight @w : {type} = @f["x"]{step}',
    )
    before = resident()
    facts = backend.emit(m, tmp_path, base=tmp_path).facts
    assert resident() - before < 60 << 20
    for rank in range(ranks):
        assert facts["ranks"][rank]["weights"] == [f"rank{rank}.weights"]
        assert (tmp_path / f"rank{rank}.weights").stat().st_size == size // ranks


def test_written_weights_are_not_read_for_their_hashes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """module @m mesh(dp=2, tp=2) {
  file @f = "m.safetensors"
  weight @a : f32[6, 5@tp] = @f["c"].cast(f16).cast(f32)
  weight @b : f32[5, 6@dp.tp] = @f["c"].transpose(1, 0).cast(f16).cast(f32)
  weight @c : f32[6, 5] = @f["c"].cast(f16).cast(f32)
  func @forward(%x: f32[1]) -> (f32[1], f32[6, 5@tp], f32[5, 6@dp.tp], f32[6, 5]) {
    %a = neg @a : f32[6, 5@tp]
    %b = neg @b : f32[5, 6@dp.tp]
    %c = neg @c : f32[6, 5]
    return %x, %a, %b, %c
  }
}
"""
    read: list[str] = []

    def counted(path: Path, *advance: Any) -> str:
        read.append(path.name)
        return sha256(path, *advance)

    monkeypatch.setattr("irc.artifact.manifest.sha256", counted)
    monkeypatch.chdir(folder)
    made = irc.compile(irc.parse(text), folder / "out", pipeline="localize")
    weights = [path.name for path in made.folder.glob("*.weights")]
    assert sorted(weights) == [*(f"rank{rank}.weights" for rank in range(4)), "shared.weights"]
    assert read and not {*read} & {*weights}
    assert list(made.opened.problems(whole=True)) == []


def test_bytes_out_of_order_have_no_hash(tmp_path: Path) -> None:
    """As where shards of one weight take turns in the file that several ranks share."""
    writer = Writer(tmp_path / "w")
    with writer.file:
        for offset in (0, 3, 4096):
            assert writer.write(offset, memoryview(b"abc")) == 3
        writer.file.flush()
        assert writer.hash == sha256(tmp_path / "w")
        writer.write(9, memoryview(b"abc"))
        writer.write(9999, memoryview(b"abc"))
    assert writer.hash == ""


def sparse_checkpoint(folder: Path, *shape: int) -> Path:
    """A file of one f32 tensor "x", of zeros that take no space on disk."""
    size = 4 * math.prod(shape)
    header = {"x": {"dtype": "F32", "shape": list(shape), "data_offsets": [0, size]}}
    text = json.dumps(header).encode()
    path = folder / "big.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + size)
    return path


def resident() -> int:
    """Bytes of memory of this process, mapped files included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_a_folder_that_cannot_be_written_is_an_error(folder: Path) -> None:
    with pytest.raises(Error, match=r"cannot write .*nowhere/rank0\.onnx: No such file"):
        backend.emit(linear('@f["a"]'), folder / "nowhere", base=folder)
    with pytest.raises(Error, match=r"cannot write .*nowhere/rank0\.weights: No such file"):
        backend.emit(linear('@f["b"].cast(f16)', "f16"), folder / "nowhere", base=folder)
