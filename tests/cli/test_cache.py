"""`irc cache`: engines are listed, counted and deleted."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from irc.artifact.manifest import silent
from irc.backends.tensorrt.builder.cache import Cache, default_folder
from irc.backends.tensorrt.builder.report import Report
from tests.cli.runner import refused, works


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    """Two engines of 1,500 bytes each, and a file of the user's."""
    made = Cache(tmp_path / "kept")
    made.folder.mkdir()
    (tmp_path / "rank0.engine").write_bytes(b"e" * 1500)
    for key in ("a" * 64, "b" * 64):
        report = Report("TensorRT-RTX 1.7", "tensorrt-rtx-1.7/sm_89", (), (), ())
        made.store(key, tmp_path / "rank0.engine", report, silent)
    (made.folder / "notes.txt").write_text("the user's")
    for name in ("resnet.engine", "resnet.json"):
        (made.folder / name).write_text("the user's")
    return made


def test_engines_are_listed(cache: Cache) -> None:
    *rows, last = works("cache", "--cache", cache.folder).out.splitlines()
    assert {row.split()[0] for row in rows[1:]} == {"a" * 12, "b" * 12}
    assert rows[1].split()[-1] == "tensorrt-rtx-1.7/sm_89"
    assert last == f"{cache.folder}: 2 engines, 3.0 kB of at most 34.4 GB"
    assert works("cache", "size", "--cache", cache.folder).out.splitlines() == [last]
    listed = works("cache", "--json", "--cache", cache.folder).json["list"]
    assert {each["key"]: each["size"] for each in listed} == {"a" * 64: 1500, "b" * 64: 1500}
    (cache.folder / f"{'a' * 64}.json").write_text("{")
    assert "damaged" in works("cache", "list", "--cache", cache.folder).out


def test_clear_deletes_engines_and_nothing_else(cache: Cache) -> None:
    found = works("cache", "clear", "--json", "--cache", cache.folder).json
    assert found["engines"] == 2 and found["size"] == 3000
    left = {path.name for path in cache.folder.iterdir()}
    assert left == {"notes.txt", "resnet.engine", "resnet.json"}
    assert "0 engines, 0 B of" in works("cache", "--cache", cache.folder).out


def test_kernels_of_cuda(cache: Cache) -> None:
    folder = cache.folder / "kernels"
    folder.mkdir()
    for name in (f"{'a' * 64}.cubin", f"{'b' * 64}.cubin", "mine.cubin"):
        (folder / name).write_bytes(bytes(1000))
    line = f"{folder}: 2 kernels of the backend cuda, 2.0 kB"
    assert works("cache", "--cache", cache.folder).out.splitlines()[0] == line
    found = works("cache", "size", "--json", "--cache", cache.folder).json["kernels"]
    assert found == {"folder": str(folder), "files": 2, "size": 2000}
    out = works("cache", "clear", "--cache", cache.folder).out
    assert line.replace(": 2", ": deleted 2") in out
    assert [path.name for path in folder.iterdir()] == ["mine.cubin"]


def test_an_engine_in_use_stays(cache: Cache) -> None:
    held, done = threading.Event(), threading.Event()

    def use() -> None:
        with cache.lock("a" * 64, lambda: None):
            held.set()
            done.wait()

    user = threading.Thread(target=use)
    user.start()
    held.wait()
    try:
        assert "deleted 1 engine, 1.5 kB" in works("cache", "clear", "--cache", cache.folder).out
    finally:
        done.set()
        user.join()
    assert [entry.key for entry in cache.entries()] == ["a" * 64]


def test_the_default_folder_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("IRC_CACHE", str(tmp_path / "none"))
    assert works("cache").out.startswith(f"{tmp_path / 'none'}: 0 engines")
    assert works("cache", "clear").status == 0
    assert not (tmp_path / "none").exists()
    monkeypatch.delenv("IRC_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert default_folder() is None
    assert "set IRC_CACHE" in refused("cache", "size")
