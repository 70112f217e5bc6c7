"""Calls the command line: in this process (fast), or in one of its own (for signals and pipes)."""

import io
import json
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from irc.cli.main import main
from tests.layout import ROOT

PROGRAM = [sys.executable, "-m", "irc"]


@dataclass
class Answer:
    """What a command printed, and its exit status."""

    status: int
    out: str
    err: str

    @property
    def reports(self) -> list[str]:
        """Lines on standard error, without the progress on a slow machine."""
        return [line for line in self.err.splitlines() if not line.startswith("irc: ")]

    @property
    def json(self) -> Any:
        """The JSON document on standard output."""
        return json.loads(self.out)


def irc(*words: str | Path, stdin: str | bytes = "") -> Answer:
    """Run a command in this process. A traceback on standard error fails the test."""
    data = stdin.encode() if isinstance(stdin, str) else stdin
    out, err = io.StringIO(), io.StringIO()
    source = io.TextIOWrapper(io.BytesIO(data))
    with mock.patch("sys.stdin", source), redirect_stdout(out), redirect_stderr(err):
        status = main([str(word) for word in words])
    assert "Traceback" not in err.getvalue(), err.getvalue()
    return Answer(status, out.getvalue(), err.getvalue())


def works(*words: str | Path, stdin: str | bytes = "") -> Answer:
    """Run a command that has to succeed."""
    answer = irc(*words, stdin=stdin)
    assert answer.status == 0, answer.err
    return answer


def refused(*words: str | Path, stdin: str | bytes = "", status: int = 1) -> str:
    """Run a command that has to fail, with nothing on standard output; its message."""
    answer = irc(*words, stdin=stdin)
    assert answer.status == status, answer
    assert answer.out == ""
    return answer.err


def run_arrays(source: Path, folder: Path, *words: str, **inputs: Any) -> dict[str, np.ndarray]:
    """The outputs of `irc run`; its files, in.npz and out.npz, lie in `folder`."""
    works("run", source, *npz_files(folder, **inputs), *words)
    with np.load(folder / "out.npz") as found:
        return dict(found)


def npz_files(folder: Path, **inputs: Any) -> list[str | Path]:
    """The words that name in.npz, which is written here, and out.npz in a folder."""
    np.savez(folder / "in.npz", **inputs)
    return ["--inputs", folder / "in.npz", "--outputs", folder / "out.npz"]


def shell(*words: str | Path, timeout: float = 240, cwd: Path = ROOT) -> Answer:
    """Run a command in a process of its own."""
    command = [*PROGRAM, *map(str, words)]
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert "Traceback" not in done.stderr, done.stderr
    return Answer(done.returncode, done.stdout, done.stderr)


def entries(folder: Path) -> list[str]:
    """The names in a folder, sorted."""
    return sorted(path.name for path in folder.iterdir())
