"""What killed processes leave beside an artifact, and that nobody's living folder is touched."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from irc import leftovers as module
from irc import locks
from irc.artifact import is_artifact
from irc.atomic import whole_folder
from irc.leftovers import clear, leftovers
from tests.cli.runner import entries, works

fcntl = pytest.importorskip("fcntl")

WRITER = """
    import os, shutil, signal, sys, time
    from pathlib import Path
    from irc.atomic import whole_folder
    output, dies = Path(sys.argv[1]), sys.argv[2]

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
def writer(output: Path, dies: str = "") -> Generator[subprocess.Popen[bytes]]:
    """A process that writes; without `dies` it waits in the midst of it."""
    command = [sys.executable, "-c", textwrap.dedent(WRITER), str(output), dies]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == (b"" if dies else b"writing\n")
            yield process
        finally:
            process.kill()


def killed(output: Path, dies: str = "") -> None:
    with writer(output, dies) as process:
        process.kill()
        assert process.wait() == -signal.SIGKILL


def write(output: Path, text: str = "new") -> None:
    with whole_folder(output, lambda folder: True) as folder:
        (folder / "file").write_text(text)


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    output = tmp_path / "out"
    killed(output)
    ((path, dead),) = leftovers(output)
    assert dead and (path / "inner" / "half").exists()
    write(output)
    assert entries(tmp_path) == ["out"]


def test_a_living_process_keeps_its_folder(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with writer(output) as process:
        ((path, dead),) = leftovers(output)
        assert not dead
        write(output)
        assert (path / "inner" / "half").exists()
        process.kill()
    assert leftovers(output) == [(path, True)]
    clear(output)
    assert entries(tmp_path) == ["out"]


def test_what_may_be_anothers_is_left_alone(tmp_path: Path) -> None:
    output = tmp_path / "out"
    killed(output)
    ((path, _),) = leftovers(output)
    away = path.rename(tmp_path / ".out.00000000.abcdefgh.part")  # of a host, or before a restart
    foreign = [".out.abcdefgh.part", ".out.b.12345678.abcdefgh.part", ".out.mine.part"]
    for name in foreign:
        (tmp_path / name).mkdir()
    own = module._prefix(output)
    (tmp_path / f"{own}aaaaaaaa.part").write_text("a file")
    (tmp_path / f"{own}bbbbbbbb.part").symlink_to(tmp_path)
    before = entries(tmp_path)
    write(output)
    assert entries(tmp_path) == sorted([*before, "out"])
    assert leftovers(output) == [(away, False)]


def test_an_older_artifact_that_stepped_aside_comes_back(tmp_path: Path) -> None:
    output = tmp_path / "out"
    write(output, "old")
    killed(output, "renaming")
    assert not output.exists() and len(entries(tmp_path)) == 2
    with (
        pytest.raises(ValueError, match=r"^$"),
        whole_folder(output, lambda folder: True),
    ):
        raise ValueError
    assert entries(tmp_path) == ["out"]
    assert (output / "file").read_text() == "old"


def test_an_older_artifact_that_was_being_removed_goes(tmp_path: Path) -> None:
    output = tmp_path / "out"
    write(output, "old")
    killed(output, "removing")
    assert (output / "inner").exists()
    assert [path.suffix for path, dead in leftovers(output) if dead] == [".old"]
    write(output)
    assert entries(tmp_path) == ["out"]
    assert (output / "file").read_text() == "new"


def test_the_older_artifact_is_held_while_it_is_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, seen = tmp_path / "out", list[list[bool]]()
    write(output, "old")
    remove = shutil.rmtree

    def look(path: Path) -> None:
        seen.append([dead for _, dead in leftovers(output)])
        remove(path)

    monkeypatch.setattr(shutil, "rmtree", look)
    write(output)
    assert seen == [[False]]


def test_a_folder_that_was_taken_before_it_was_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, names = tempfile.mkdtemp, list[str]()

    def taken(**options: str) -> str:
        names.append(make(**options))  # type: ignore[call-overload]
        if len(names) == 1:
            clear(tmp_path / "out")
        return names[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", taken)
    write(tmp_path / "out")
    assert len(names) == 2
    assert entries(tmp_path) == ["out"]


@pytest.mark.parametrize("lack", ["of the system", "of the disk"])
def test_without_locks_nothing_is_removed(
    lack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, how: int) -> None:
        raise OSError(95, "Operation not supported")

    output = tmp_path / "out"
    killed(output)
    if lack == "of the system":
        monkeypatch.setattr(locks, "find_spec", lambda name: None)
    else:
        monkeypatch.setattr(fcntl, "flock", refuse)
    ((path, dead),) = leftovers(output)
    assert not dead
    write(output)
    assert entries(tmp_path) == [path.name, "out"]


def test_the_doctor_mentions_them(tmp_path: Path) -> None:
    output = tmp_path / "out"
    model = tmp_path / "model.irc"
    model.write_text(
        "module @m {\n  func @main(%x: f32[2]) -> (y: f32[2]) {\n"
        "    %0 = add %x, %x : f32[2]\n    return %0\n  }\n}\n"
    )
    works("compile", model, "-o", output)
    assert is_artifact(output)
    assert "left over" not in works("doctor", output).out
    killed(output)
    ((path, _),) = leftovers(output)
    assert f"{path}: the next compilation to {output} removes it" in works("doctor", output).out
    away = path.rename(path.with_name(".out.00000000.abcdefgh.part"))
    found = works("doctor", output).out
    assert f"{away}: a compilation writes it, or one on another host" in found
    works("compile", model, "-o", output)
    assert away.exists()
