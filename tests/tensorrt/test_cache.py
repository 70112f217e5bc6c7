"""The cache of engines: intact entries are used, damaged and old ones deleted."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import irc
from irc.artifact import manifest as artifact
from irc.artifact.checksums import sampled, sha256
from irc.artifact.folder import Advance
from irc.artifact.manifest import silent
from irc.backends.tensorrt.builder.cache import Cache, default_folder, open_cache
from irc.backends.tensorrt.builder.report import Report
from irc.errors import Error

LARGE = 65 << 20  # bytes: more than a sampled hash covers
REPORT = Report("TensorRT", "tensorrt-11.4", (), (), ())
MODULE = """module @m {
  func @forward(%x: f16[4, 64]) -> (y: f16[4, 64]) {
    %y = relu %x : f16[4, 64]
    return %y
  }
}
"""


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    (tmp_path / "kept").mkdir()
    return Cache(tmp_path / "kept", limit=250)


def engine_of(folder: Path, size: int = LARGE) -> Path:
    path = folder / "rank0.engine"
    with path.open("wb") as file:
        file.truncate(size)
    return path


def test_one_changed_byte_is_detected(tmp_path: Path, cache: Cache) -> None:
    told: list[tuple[str, float]] = []
    engine, again = engine_of(tmp_path), tmp_path / "again.engine"
    assert cache.store("key", engine, REPORT, lambda *step: told.append(step)) == sha256(engine)
    assert told[-1] == ("writing rank0.engine to the cache", 1.0)
    kept = cache.fetch("key", again, lambda *step: told.append(step))
    assert kept == {"engine": sha256(again), "report": REPORT}
    assert told[-1] == ("reading again.engine from the cache", 1.0)
    before = sampled(engine)
    with engine.open("r+b") as file:  # a hard link: one file with the one in the cache
        file.seek(LARGE // 63 // 2)
        file.write(b"\1")
    assert sampled(engine) == before
    again.unlink()
    assert cache.fetch("key", again, silent) is None
    assert not again.exists() and not list(cache.folder.iterdir())


@pytest.mark.parametrize("text", ["{", "[]", json.dumps({"engine": "sampled-sha256-v1:0"})])
def test_a_damaged_entry_is_deleted(text: str, tmp_path: Path, cache: Cache) -> None:
    cache.store("key", engine_of(tmp_path, 100), REPORT, silent)
    (cache.folder / "key.json").write_text(text)
    assert cache.fetch("key", tmp_path / "again.engine", silent) is None
    assert not list(cache.folder.iterdir())


def test_the_least_recently_used_engines_are_deleted(tmp_path: Path, cache: Cache) -> None:
    a, b, c = (letter * 64 for letter in "abc")
    for age, key in ((20, a), (30, b)):
        cache.store(key, engine_of(tmp_path, 100), REPORT, silent)
        (tmp_path / "rank0.engine").unlink()
        os.utime(cache.folder / f"{key}.json", (age, age))
    assert cache.fetch(a, tmp_path / "taken", silent) is not None
    cache.store(c, engine_of(tmp_path, 120), REPORT, silent)
    for ending in ("engine", "json"):
        assert {path.stem for path in cache.folder.glob(f"*.{ending}")} == {a, c}


def test_the_default_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("IRC_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    assert default_folder() == Path("/home/me/.cache/irc/engines")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # no home folder
    with pytest.raises(Error, match=r"no home folder .*; set IRC_CACHE or --cache to another fold"):
        open_cache(None)
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert default_folder() == Path("/caches/irc/engines")
    monkeypatch.setenv("IRC_CACHE", "engines")
    assert default_folder() == Path("engines")


@pytest.mark.needs_rtx
def test_an_engine_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest has the hash that the cache computed."""
    read: list[str] = []

    def spy(path: Path, advance: Advance | None = None) -> str:
        read.append(path.name)
        return sha256(path, advance)

    def compiled(name: str) -> irc.Artifact:
        engine = {"cache": tmp_path / "kept"}
        return irc.compile(
            tmp_path / "m.irc", tmp_path / name, backend="tensorrt-rtx", engine=engine
        )

    monkeypatch.setattr(artifact, "sha256", spy)
    (tmp_path / "m.irc").write_text(MODULE)
    for name, notes in (("first", []), ("second", ["rank0.engine: found in the cache"])):
        made = compiled(name)
        engine = made.folder / "rank0.engine"
        assert made.manifest["files"]["rank0.engine"]["hash"] == sha256(engine)
        assert "hashes" not in made.manifest["program"] and made.notes == notes
    assert "rank0.onnx" in read and "rank0.engine" not in read
    os.truncate(engine, 100)  # both artifacts and the cache have one file
    third = compiled("third")
    assert third.notes == [] and (third.folder / "rank0.engine").stat().st_size > 100
