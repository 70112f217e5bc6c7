"""The cache of engines: every byte of what it hands out is what was kept."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import irc
from irc import artifact
from irc.artifact import silent
from irc.backends.tensorrt.builder.cache import Cache
from irc.backends.tensorrt.builder.report import Report
from irc.checksums import sampled, sha256

LARGE = 65 << 20  # bytes: more than what samples cover whole
MODULE = """module @m {
  func @forward(%x: f16[4, 64]) -> (y: f16[4, 64]) {
    %y = relu %x : f16[4, 64]
    return %y
  }
}
"""


def report() -> Report:
    return Report("TensorRT", "tensorrt-11.4", (), (), (), (), 0, LARGE, False)


def engine_of(folder: Path) -> Path:
    path = folder / "rank0.engine"
    with path.open("wb") as file:
        file.truncate(LARGE)
    return path


def test_one_changed_byte_between_the_samples_is_seen(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    cache, engine = Cache(tmp_path / "kept"), engine_of(tmp_path)
    assert cache.keep("key", engine, report(), silent) == sha256(engine)
    again = tmp_path / "again.engine"
    kept = cache.take("key", again, silent)
    assert kept is not None and kept.hash == sha256(again)
    before = sampled(engine)
    with engine.open("r+b") as file:  # in place: one file with the one in the cache
        file.seek(LARGE // 63 // 2)
        file.write(b"\1")
    assert sampled(engine) == before
    again.unlink()
    assert cache.take("key", again, silent) is None
    assert not again.exists() and not list(cache.folder.iterdir())


def test_an_entry_with_a_sampled_hash_is_built_again(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    cache, engine = Cache(tmp_path / "kept"), engine_of(tmp_path)
    cache.keep("key", engine, report(), silent)
    entry = cache.folder / "key.json"
    entry.write_text(json.dumps(json.loads(entry.read_text()) | {"engine": sampled(engine)}))
    assert cache.take("key", tmp_path / "again.engine", silent) is None


def test_what_is_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    cache, engine = Cache(tmp_path / "kept"), engine_of(tmp_path)
    told: list[tuple[str, float]] = []
    cache.keep("key", engine, report(), lambda *each: told.append(each))
    assert told[-1] == ("keeping rank0.engine for another time", 1.0)
    cache.take("key", engine, lambda *each: told.append(each))
    assert told[-1] == ("reading rank0.engine, which was built before", 1.0)


@pytest.mark.needs_rtx
def test_an_engine_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest has the hash that the cache has computed."""
    read: list[str] = []

    def spy(path: Path, advance: artifact.Advance | None = None) -> str:
        read.append(path.name)
        return sha256(path, advance)

    monkeypatch.setattr(artifact, "sha256", spy)
    (tmp_path / "m.irc").write_text(MODULE)
    for name in ("first", "second"):
        made = irc.compile(
            tmp_path / "m.irc",
            tmp_path / name,
            backend="tensorrt-rtx",
            engine={"cache": tmp_path / "kept"},
        )
        engine = made.folder / "rank0.engine"
        assert made.manifest["files"]["rank0.engine"]["hash"] == sha256(engine)
        assert "hashes" not in made.manifest["program"]
    assert "rank0.onnx" in read and "rank0.engine" not in read
    assert made.notes == ["rank0.engine: built before, nothing to do"]
    os.truncate(engine, 100)  # in all three places
    third = irc.compile(
        tmp_path / "m.irc",
        tmp_path / "third",
        backend="tensorrt-rtx",
        engine={"cache": tmp_path / "kept"},
    )
    assert third.notes == [] and (third.folder / "rank0.engine").stat().st_size > 100
