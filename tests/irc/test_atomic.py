"""Writers that meet others: at the place they write to, above it, and on a disk without locks."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from irc import locks
from irc.atomic import whole_file, whole_folder
from irc.errors import Error
from tests.cli.runner import entries


def never(folder: Path) -> bool:
    return False


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_what_appears_in_the_meantime_is_left_alone(kind: str, tmp_path: Path) -> None:
    output = tmp_path / "out"
    thesis = output / "thesis.tex" if kind == "folder" else output
    says = "is not empty and no artifact" if kind == "folder" else "is a file"
    with pytest.raises(Error, match=says), whole_folder(output, never) as folder:
        (folder / "new").write_text("1")
        thesis.parent.mkdir(exist_ok=True)
        thesis.write_text("years of work")
    assert thesis.read_text() == "years of work"
    assert entries(tmp_path) == ["out"]


def test_an_empty_folder_that_appears_in_the_meantime_is_used(tmp_path: Path) -> None:
    with whole_folder(tmp_path / "out", never) as folder:
        (folder / "new").write_text("1")
        (tmp_path / "out").mkdir()
    assert entries(tmp_path / "out") == ["new"]


def test_a_parent_that_another_makes_first_is_used_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = Path.mkdir

    def late(path: Path) -> None:
        if path.name == "a":
            make(path)
        make(path)

    monkeypatch.setattr(Path, "mkdir", late)
    with pytest.raises(ValueError, match=r"^$"), whole_folder(tmp_path / "a/b/out", never):
        raise ValueError
    assert entries(tmp_path) == ["a"] and entries(tmp_path / "a") == []
    with whole_folder(tmp_path / "a/b/out", never):
        pass
    assert entries(tmp_path / "a" / "b") == ["out"]


def test_a_file_that_takes_the_name_of_a_parent_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(path: Path) -> None:
        path.touch()
        raise FileExistsError(errno.EEXIST, "File exists", str(path))

    monkeypatch.setattr(Path, "mkdir", late)
    with (
        pytest.raises(Error, match=r"cannot write .*out: File exists"),
        whole_folder(tmp_path / "a" / "out", never),
    ):
        pytest.fail("the block must not run")


def test_a_parent_goes_again_where_the_next_cannot_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = Path.mkdir

    def full(path: Path) -> None:
        if path.name == "b":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        make(path)

    monkeypatch.setattr(Path, "mkdir", full)
    with (
        pytest.raises(Error, match="nothing was left behind"),
        whole_folder(tmp_path / "a/b/out", never),
    ):
        pytest.fail("the block must not run")
    assert entries(tmp_path) == []


def test_threads_that_write_one_file_do_not_meet(tmp_path: Path) -> None:
    path = tmp_path / "file"
    writing, written = threading.Barrier(2), threading.Barrier(2)
    failures: list[BaseException] = []

    def write(text: bytes) -> None:
        try:
            with whole_file(path) as file:
                writing.wait(60)
                file.write(text)
                file.flush()
                written.wait(60)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(each * 99,)) for each in (b"a", b"b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert path.read_bytes() in (b"a" * 99, b"b" * 99)
    assert entries(tmp_path) == ["file"]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EIO])
def test_a_disk_without_locks_locks_nothing(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fcntl = pytest.importorskip("fcntl")

    def refuse(descriptor: int, how: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    path, ran = tmp_path / "lock", list[int]()
    if number == errno.EIO:
        with pytest.raises(OSError, match="Input/output error"), locks.locked(path):
            pytest.fail("the block must not run")
        return
    with locks.locked(path), locks.locked(path):
        ran.append(1)
    assert ran and entries(tmp_path) == []
