"""Folders and files that appear complete or not at all: failures, several and killed writers."""

import ctypes
import errno
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from irc.artifact import atomic
from irc.artifact.atomic import orphaned_folders, whole_file, whole_folder
from irc.artifact.locks import locked
from irc.errors import Error
from tests.cli.conftest import MODULE
from tests.cli.runner import entries, works

fcntl = pytest.importorskip("fcntl")


def writing(output: Path, replaces: bool = False) -> AbstractContextManager[Path]:
    return whole_folder(output, lambda folder: replaces)


def write(output: Path, text: str = "new") -> None:
    with writing(output, replaces=True) as folder:
        (folder / "file").write_text(text)


def test_a_folder_appears_complete(tmp_path: Path) -> None:
    output = tmp_path / "a" / "b" / "out"
    with writing(output) as folder:
        (folder / "x").write_text("1")
        assert not output.exists()
        assert folder.parent == output.parent, "a rename works only within one file system"
    assert (output / "x").read_text() == "1"
    assert entries(output.parent) == ["out"]
    (tmp_path / "plain").mkdir()
    assert output.stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("others", [False, True])
def test_a_failure_leaves_nothing(
    tmp_path: Path, failure: type[BaseException], others: bool
) -> None:
    """Parents that others use stay."""
    with pytest.raises(failure), writing(tmp_path / "a" / "b" / "out") as folder:
        (folder / "x").write_text("1")
        if others:
            (tmp_path / "a" / "other").write_text("mine")
        raise failure
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "other"] * others


def test_a_folder_is_replaced_or_kept_after_a_failure(tmp_path: Path) -> None:
    output = tmp_path / "out"
    write(output, "old")
    with pytest.raises(ValueError, match=r"^$"), writing(output, replaces=True):
        raise ValueError
    assert (output / "file").read_text() == "old"
    with writing(output, replaces=True) as folder:
        (folder / "new").write_text("2")
        assert entries(output) == ["file"]
    assert entries(output) == ["new"]
    assert entries(tmp_path) == ["out"]


def test_a_folder_behind_a_link_is_replaced_there(tmp_path: Path) -> None:
    write(tmp_path / "real", "old")
    (tmp_path / "link").symlink_to("real")
    write(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "file").read_text() == "new"


@pytest.mark.parametrize("before", [True, False], ids=["before", "in the meantime"])
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("out", "is a file"),
        ("out/mine.txt", "is not empty and no artifact of irc, so it is left alone"),
    ],
)
def test_an_existing_output_is_left_alone(
    name: str, says: str, before: bool, tmp_path: Path
) -> None:
    def appear() -> None:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("my own")

    if before:
        appear()
    with pytest.raises(Error, match=says), writing(tmp_path / "out"):
        assert not before, "the block must not run"
        appear()
    assert (tmp_path / name).read_text() == "my own"
    assert entries(tmp_path) == ["out"]


@pytest.mark.parametrize("before", [True, False], ids=["before", "in the meantime"])
def test_an_empty_folder_is_replaced(before: bool, tmp_path: Path) -> None:
    output = tmp_path / "out"
    if before:
        output.mkdir()
    with writing(output) as folder:
        (folder / "new").write_text("1")
        output.mkdir(exist_ok=True)
    assert entries(output) == ["new"]


def test_failures_of_the_disk(tmp_path: Path) -> None:
    says = r"the disk is full .* nothing was left behind; free some space"
    with pytest.raises(Error, match=says), writing(tmp_path / "out"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert entries(tmp_path) == []
    (tmp_path / "file").write_text("")
    says = r"cannot write .*out: File exists .*nothing was left behind"
    with pytest.raises(Error, match=says), writing(tmp_path / "file" / "out"):
        pytest.fail("the block must not run")


def test_the_old_folder_is_restored_if_the_rename_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    write(output, "old")
    monkeypatch.setattr(atomic, "_exchange", lambda a, b: False)
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path.suffix == ".part":
            raise OSError(errno.EIO, "Input/output error")
        return rename(path, target)

    with pytest.raises(Error, match="Input/output error"), writing(output, replaces=True):
        monkeypatch.setattr(Path, "rename", refuse)
    assert (output / "file").read_text() == "old"
    assert entries(tmp_path) == ["out"]


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "renameat2"), reason="needs renameat2")
def test_the_name_is_never_unused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No name is given up before another folder has it."""
    output = tmp_path / "out"
    write(output, "old")
    rename = Path.rename

    def renamed(path: Path, target: Path) -> Path:
        assert path != output
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", renamed)
    write(output)
    assert (output / "file").read_text() == "new"
    assert entries(tmp_path) == ["out"]


def test_an_older_folder_that_cannot_be_removed_is_orphaned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    write(output, "old")

    def refuse(path: Path, **more: Any) -> None:
        raise OSError(errno.EACCES, "Permission denied", path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", refuse)
        write(output)
    assert (output / "file").read_text() == "new"
    assert [path.suffix for path in orphaned_folders(output)] == [".old"]


@pytest.mark.parametrize(
    ("fails", "error", "says", "left"),
    [
        ("another makes it", ValueError, r"^$", []),
        ("a file takes its name", Error, "File exists", ["a"]),
        ("the disk is full", Error, "nothing was left behind", []),
    ],
)
def test_parents(
    fails: str,
    error: type[Exception],
    says: str,
    left: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make = Path.mkdir

    def late(path: Path, *args: Any, **more: Any) -> None:
        if path.name == "a" and fails == "another makes it":
            make(path)
        elif path.name == "a" and fails == "a file takes its name":
            path.touch()
        elif path.name == "b" and fails == "the disk is full":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        make(path, *args, **more)

    monkeypatch.setattr(Path, "mkdir", late)
    with pytest.raises(error, match=says), writing(tmp_path / "a/b/out"):
        raise ValueError
    assert entries(tmp_path) == left


WRITER = """
    import os, shutil, signal, sys, time
    from pathlib import Path
    from irc.artifact import atomic
    from irc.artifact.atomic import whole_folder
    output, dies, exchanges = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    if not exchanges:
        atomic._exchange = lambda a, b: False

    def die(*arguments, **more):
        os.kill(os.getpid(), signal.SIGKILL)

    with whole_folder(output, lambda folder: True) as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "half").write_text(dies)
        rename = Path.rename
        if dies == "renaming":
            Path.rename = lambda path, to: die() if path.suffix == ".part" else rename(path, to)
        elif dies == "removing":
            shutil.rmtree = die
        else:
            print("writing", flush=True)
            time.sleep(60)
"""


@contextmanager
def writer(
    output: Path, dies: str = "", exchanges: bool = True
) -> Generator[subprocess.Popen[bytes]]:
    """A process that writes; without `dies` it waits in the block."""
    command = [sys.executable, "-c", textwrap.dedent(WRITER), str(output), dies]
    command.append("exchanges" * exchanges)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == (b"" if dies else b"writing\n")
            yield process
        finally:
            process.kill()


def killed(output: Path, dies: str = "", exchanges: bool = True) -> None:
    with writer(output, dies, exchanges) as process:
        process.kill()
        assert process.wait() == -signal.SIGKILL


def test_ctrl_c_in_another_process_leaves_nothing(tmp_path: Path) -> None:
    with writer(tmp_path / "out") as process:
        assert len(entries(tmp_path)) == 2  # the folder, and the lock
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=120)
    assert entries(tmp_path) == []


def test_one_process_at_a_time_writes_a_folder(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with writer(output):
        with pytest.raises(Error, match=r"another process is writing .*out; wait for it, or"):
            write(output)
        write(tmp_path / "beside")
        assert orphaned_folders(output) == []
    write(output)
    assert entries(tmp_path) == ["beside", "out"]


def test_orphaned_folders_are_removed(tmp_path: Path) -> None:
    output = tmp_path / "out"
    killed(output)
    ((path),) = orphaned_folders(output)
    assert (path / "inner" / "half").exists()
    foreign = [".out.abcdefgh.part", ".out.irc-mine.part", ".other.irc-abcdefgh.part"]
    for name in foreign:
        (tmp_path / name).mkdir()
    (tmp_path / ".out.irc-aaaaaaaa.part").write_text("a file")
    (tmp_path / ".out.irc-bbbbbbbb.part").symlink_to(tmp_path)
    write(output)
    kept = [*foreign, ".out.irc-aaaaaaaa.part", ".out.irc-bbbbbbbb.part", "out"]
    assert entries(tmp_path) == sorted(kept)


@pytest.mark.parametrize(
    ("dies", "exchanges"), [("renaming", False), ("removing", False), ("removing", True)]
)
def test_an_older_folder_that_was_moved_aside(dies: str, exchanges: bool, tmp_path: Path) -> None:
    """It is restored unless a new one is in its place."""
    output = tmp_path / "out"
    write(output, "old")
    killed(output, dies, exchanges)
    assert output.exists() == (dies == "removing")
    assert ".old" in [path.suffix for path in orphaned_folders(output)]
    with pytest.raises(ValueError, match=r"^$"), writing(output, replaces=True):
        raise ValueError
    assert entries(tmp_path) == ["out"]
    assert entries(output) == (["file"] if dies == "renaming" else ["inner"])


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EIO])
def test_a_disk_without_locks_locks_nothing(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then no folder counts as orphaned. Another error of the disk is an error."""

    def refuse(descriptor: int, how: int) -> None:
        raise OSError(number, os.strerror(number))

    output = tmp_path / "out"
    killed(output)
    (orphan,) = orphaned_folders(output)
    monkeypatch.setattr(fcntl, "flock", refuse)
    if number == errno.EIO:
        with pytest.raises(Error, match="Input/output error"):
            write(output)
        return
    with locked(tmp_path / "lock") as first, locked(tmp_path / "lock") as second:
        assert not first and not second
    assert orphaned_folders(output) == []
    write(output)
    assert entries(tmp_path) == [orphan.name, "out"]


def test_locked_waits(tmp_path: Path) -> None:
    path, order = tmp_path / "lock", list[str]()
    told = threading.Event()

    def second() -> None:
        with locked(path, told.set):
            order.append("second")

    with locked(path):
        thread = threading.Thread(target=second)
        thread.start()
        assert told.wait(60)
        order.append("first")
    thread.join()
    assert order == ["first", "second"] and entries(tmp_path) == []


def test_two_writers_of_one_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with whole_file(path) as last, whole_file(path) as first:
        last.write(b"a" * 99)
        first.write(b"b" * 99)
    assert path.read_bytes() == b"a" * 99
    assert entries(tmp_path) == ["file"]


def test_the_doctor_mentions_orphaned_folders(tmp_path: Path) -> None:
    output, model = tmp_path / "out", tmp_path / "model.irc"
    model.write_text(MODULE)
    works("compile", model, "-o", output)
    assert "orphaned" not in works("doctor", output).out
    killed(output)
    (path,) = orphaned_folders(output)
    assert f"{path}: the next compilation to {output} removes it" in works("doctor", output).out
