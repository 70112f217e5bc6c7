"""The manifest of an artifact folder, checksums, and how often a command reads and verifies."""

import hashlib
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irc
from irc.artifact.checksums import sampled, sha256
from irc.artifact.folder import ArtifactFolder
from irc.artifact.manifest import Manifest, read_manifest, write_manifest
from irc.driver import build, sources
from irc.errors import Error
from irc.pipeline import run
from tests.cli.runner import works

FACTS: dict[str, Any] = dict.fromkeys(("mesh", "pipeline"), "") | {"dims": {}, "program": {}}
FACTS |= {"irc": "0", "backend": "onnx", "dtype": "f32"}


def make(folder: Path, weights: dict[str, Path] | None = None, **files: bytes) -> Manifest:
    folder.mkdir(exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return write_manifest(folder, FACTS, weights or {})


def test_a_valid_artifact(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(os.urandom(1000))
    written = make(tmp_path / "out", {str(weights): weights}, a=b"1", b=b"2")
    manifest = read_manifest(tmp_path / "out")
    assert manifest == written
    assert list(manifest["files"]) == ["a", "b"]
    assert manifest["files"]["a"]["hash"].startswith("sha256:6b86b273ff34fce1")
    assert list(ArtifactFolder(tmp_path / "out", manifest).problems(whole=True)) == []
    ArtifactFolder(tmp_path / "out", manifest).check()


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


@pytest.mark.parametrize(
    ("damage", "file", "weights"),
    [
        (Path.unlink, "a is missing; compile again", "is gone; put it back, or compile again"),
        (grow, "has 1001 bytes, and the manifest says 1000", "had 1000 bytes and has 1001 now"),
        (flip, "a was changed after it was compiled", "differs from that of the compilation"),
    ],
)
def test_a_damaged_file_is_named(
    tmp_path: Path, damage: Callable[[Path], None], file: str, weights: str
) -> None:
    outside = tmp_path / "model.safetensors"
    outside.write_bytes(os.urandom(1000))
    manifest = make(tmp_path / "out", {str(outside): outside}, a=bytes(1000))
    for path, message in ((outside, weights), (tmp_path / "out" / "a", file)):
        data = path.read_bytes()
        damage(path)
        with pytest.raises(Error, match=message):
            ArtifactFolder(tmp_path / "out", manifest).check()
        path.write_bytes(data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not a manifest of irc"),
        ("[]", "is not a manifest of irc"),
        ('{"model_type": "llama"}', r"is not a manifest of irc; if .* is a checkpoint, compile it"),
        ('{"irc_artifact": 99}', "has the artifact format 99, and this irc reads format 1"),
        ('{"irc_artifact": 1}', "config.json was changed after it was compiled; compile again"),
    ],
)
def test_a_wrong_manifest(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(Error, match=message):
        read_manifest(tmp_path)


def test_folders_without_a_manifest(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name, message in (
        ("nowhere", "nowhere does not exist; write one with: irc compile"),
        ("file", "is a file, not an artifact folder"),
        ("", "has no config.json"),
    ):
        with pytest.raises(Error, match=message):
            read_manifest(tmp_path / name)


def test_the_whole_hash_reports_its_progress(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(5 << 20))
    seen: list[int] = []
    sha256(path, seen.append)
    assert sum(seen) == 5 << 20
    assert len(seen) > 1


def test_the_sampled_hash_covers_all_of_a_small_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(9_000_000))
    before = sampled(path)
    for at in (0, 5_000_001, 8_999_999):
        data = bytearray(9_000_000)
        data[at] = 1
        path.write_bytes(data)
        assert sampled(path) != before, at


@pytest.mark.parametrize(
    ("at", "seen"), [(8, True), (300_000, True), (64 * 1024 * 1100 - 1, True), (3_000_000, False)]
)
def test_the_sampled_hash_of_a_large_file(tmp_path: Path, at: int, seen: bool) -> None:
    """It covers the header of a safetensors file and the ends, not every byte between blocks."""
    path, size = tmp_path / "x.safetensors", 64 * 1024 * 1100
    path.write_bytes((400_000).to_bytes(8, "little"))
    os.truncate(path, size)
    before = sampled(path)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"\1")
    assert (sampled(path) != before) is seen


def test_the_sampled_hash_of_a_large_file_is_as_documented(tmp_path: Path) -> None:
    path, size = tmp_path / "x.bin", 70_000_019
    data = os.urandom(size)
    path.write_bytes(data)
    digest = hashlib.sha256(size.to_bytes(8, "little"))
    for i in range(64):
        begin = i * (size - 65536) // 63
        digest.update(data[begin : begin + 65536])
    assert sampled(path) == f"sampled-sha256-v1:{digest.hexdigest()}"


def test_large_files_are_read_completely_only_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("irc.artifact.manifest._READ_WHOLE", 6 << 20)
    folder = tmp_path / "out"
    manifest = make(folder, big=bytes(66 << 20))
    with (folder / "big").open("r+b") as file:
        file.seek(70_000)  # between the first two blocks
        file.write(b"\1")
    assert list(ArtifactFolder(folder, manifest).problems()) == []
    assert len(list(ArtifactFolder(folder, manifest).problems(whole=True))) == 1


def test_a_command_reads_a_folder_and_verifies_its_module_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And once more after each pass."""
    text = "module @m { func @main(%x: f32[2]) -> (y: f32[2]) { %0 = neg %x : f32[2] return %0 } }"
    irc.compile(irc.parse(text), tmp_path / "a")
    count: Counter[str] = Counter()

    def counting(where: Any, name: str, key: Callable[[Any], str]) -> None:
        original = getattr(where, name)

        def counted(first: Any, *rest: Any, **more: Any) -> Any:
            if key(first) in ("config.json", "module.irc", "verify"):
                count[key(first)] += 1
            return original(first, *rest, **more)

        monkeypatch.setattr(where, name, counted)

    counting(Path, "read_bytes", lambda path: path.name)
    counting(Path, "read_text", lambda path: path.name)
    counting(sources, "open_file", lambda path: path.name)
    counting(build, "verify", lambda module: "verify")
    counting(run, "verify", lambda module: "verify")
    irc.compile(tmp_path / "a", tmp_path / "b", pipeline="cse, dce")
    assert count == {"config.json": 1, "module.irc": 1, "verify": 3}
    count.clear()
    irc.load(tmp_path / "b").run({"x": [1, 2]})
    assert count == {"config.json": 1}
    count.clear()
    np.savez(tmp_path / "in.npz", x=np.ones(2, np.float32))
    works("run", tmp_path / "b", "--inputs", tmp_path / "in.npz", "--outputs", tmp_path / "out.npz")
    assert count == {"config.json": 1}
    count.clear()
    irc.run_passes(irc.parse(text), "cse")
    assert count == {"verify": 2}
