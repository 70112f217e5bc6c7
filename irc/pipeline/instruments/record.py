"""`DumpDir`, `Reproducer`, `PrintDiff`: modules to files after passes, or when one fails; diffs."""

from __future__ import annotations

import os
import shlex
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from ...artifact.atomic import whole_file
from ...errors import Error
from ...ir.core import Module
from ...text.diff import differences
from ...text.printer import print_module
from ..run import Instrument, Step
from ..text import Pipeline

INPUT = "000-input.irc"


class DumpDir(Instrument):
    """Writes `000-input.irc`, `003-fuse-gated-mlp.irc` and so on, with locations.

    The first line of each is a comment with the command that makes it from the input; `loads` are
    the files of `--load`, which the command names too.
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
    """When a pass fails, writes the module before it and the command that reproduces the failure.

    Without a folder it makes a temporary one, unless the pass refused the user's module or options.
    `loads` as in DumpDir.
    """

    def __init__(self, folder: str | Path | None = None, loads: Sequence[str] = ()) -> None:
        self.folder = None if folder is None else Path(folder)
        self.loads = loads
        self.text = ""  # the module before the current or last pass

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
        error.add_note(f"the module before this pass is in {path}; to reproduce:\n    {again}")


class PrintDiff(Instrument):
    """Writes a unified diff to `out` after every pass that changed the module.

    Values keep the names that they have before the pass.
    """

    def __init__(self, out: TextIO, context: int = 1) -> None:
        self.out, self.context = out, context
        self._text = ""
        self._label = "before"

    def start(self, module: Module, pipeline: Pipeline) -> None:
        self._text, self._label = print_module(module), "before"

    def after(self, step: Step, module: Module) -> None:
        new, label = print_module(module), f"after {step}"
        lines = differences(self._text, new, self._label, label, self.context)
        self.out.writelines(f"{line}\n" for line in lines)
        self._text, self._label = new, label


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
