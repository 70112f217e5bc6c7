"""Modules written to files: a dump after every pass, and a reproducer where one fails."""

from __future__ import annotations

import os
import shlex
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path

from ..atomic import whole_file
from ..core import Module
from ..errors import Error
from ..pipeline.run import Instrument, Step
from ..pipeline.text import Pipeline
from ..text.printer import print_module

INPUT = "000-input.irc"


class DumpDir(Instrument):
    """Writes `000-input.irc`, then `003-fuse-gated-mlp.irc` and so on, with locations.

    The first line of each is a comment with the command that makes it from the input; `loads` are
    the files given with `--load`, which the command has to name as well.
    """

    def __init__(self, folder: str | Path, loads: Sequence[str] = ()) -> None:
        self.folder, self.loads = Path(folder), loads

    def start(self, module: Module, pipeline: Pipeline) -> None:
        header = f"// the input of: {command(INPUT, pipeline, self.loads)}\n"
        _write(self.folder, INPUT, header + print_module(module, locs=True))

    def after(self, step: Step, module: Module) -> None:
        header = f"// {command(INPUT, step.so_far, self.loads)}\n"
        name = f"{step.index:03}-{step.pass_.name}.irc"
        _write(self.folder, name, header + print_module(module, locs=True))


class Reproducer(Instrument):
    """Where a pass fails, writes the module before it and the command that makes it fail again.

    Without a folder it makes one among the temporary files, unless the pass has only refused what
    the user gave it. `loads` as in DumpDir.
    """

    def __init__(self, folder: str | Path | None = None, loads: Sequence[str] = ()) -> None:
        self.folder = None if folder is None else Path(folder)
        self.loads = loads
        self.text = ""  # the module before the pass that runs, or ran last

    def before(self, step: Step, module: Module) -> None:
        self.text = print_module(module, locs=True)

    def failed(self, step: Step, module: Module, error: Exception) -> None:
        if step.refused and self.folder is None:
            return
        folder = self.folder or Path(tempfile.mkdtemp(prefix="irc-reproducer-"))
        path = folder / "reproducer.irc"
        again = command(str(path), step.remaining, self.loads)
        cause = error.__cause__ or error
        trace = "".join(traceback.format_exception(cause))
        comments = "".join(f"// {line}\n" for line in [again, *trace.splitlines()])
        _write(folder, path.name, comments + self.text)
        error.add_note(f"the module before this pass is in {path}; to see this again:\n    {again}")


def command(file: str, pipeline: Pipeline, loads: Sequence[str]) -> str:
    """The shell command that runs a pipeline over a file of IR text."""
    extra = [word for load in loads for word in ("--load", os.path.abspath(load))]
    return shlex.join(["irc", "opt", file, "--locs", *extra, "--passes", str(pipeline)])


def _write(folder: Path, name: str, text: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with whole_file(folder / name) as file:
            file.write(text.encode())
    except OSError as error:
        raise Error(f"cannot write {folder / name}: {error.strerror}") from error
