"""`DumpDir`, `Reproducer`, `PrintDiff`: modules to files after passes, or when one fails; diffs."""

from __future__ import annotations

import os
import re
import shlex
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from ...artifact.atomic import whole_file
from ...errors import Error
from ...ir.core import Module
from ...text.diff import differences
from ...text.printer import print_module
from ..run import Instrument, Step
from ..text import Pipeline
from .limit import Limit

INPUT, REPRODUCER = "000-input.irc", "reproducer.irc"
_WRITTEN = re.compile(rf"\d{{3,}}-[\w-]+\.irc|{re.escape(REPRODUCER)}")


@dataclass(frozen=True)
class Replay:
    """How `irc opt` repeats a run: its options beside the passes, and the limits of passes.

    `base` is the folder at which relative paths of weight files start.
    """

    options: Sequence[str] = ()
    limit: Limit | None = None
    base: str = ""

    def command(self, file: str, pipeline: Pipeline, made: Mapping[str, int] | None = None) -> str:
        """The shell command that runs a pipeline over a file, after the rewrites `made`."""
        limits = self.limit.limits if self.limit is not None else {}
        words = ["irc", "opt", file, "--locs", *self.options]
        for name in dict.fromkeys(pass_.name for pass_ in pipeline):
            if name in limits:
                left = max(0, limits[name] - (made or {}).get(name, 0))
                words += ["--limit", f"{name}={left}"]
        return shlex.join([*words, "--passes", str(pipeline)])

    def text(self, module: Module) -> str:
        """The module as a text that can lie in any folder."""
        files = module.files
        module.files = {name: os.path.join(self.base, path) for name, path in files.items()}
        try:
            return print_module(module, locs=True)
        finally:
            module.files = files


class DumpDir(Instrument):
    """Writes `000-input.irc`, `003-fuse-gated-mlp.irc` and so on, with locations.

    The first line of each is a comment with the command that makes it from the input. Those of an
    earlier run are deleted.
    """

    def __init__(self, folder: str | Path, replay: Replay | None = None) -> None:
        self.folder, self.replay = Path(folder), replay or Replay()

    def start(self, module: Module, pipeline: Pipeline) -> None:
        for path in self.folder.glob("*.irc"):
            if _is_written(path):
                path.unlink()
        self._write(INPUT, f"the input of: {self.replay.command(INPUT, pipeline)}", module)

    def after(self, step: Step, module: Module) -> None:
        name = f"{step.index:03}-{step.pass_.name}.irc"
        self._write(name, self.replay.command(INPUT, step.so_far), module)

    def _write(self, name: str, header: str, module: Module) -> None:
        _write(self.folder, name, f"// {header}\n{self.replay.text(module)}")


class Reproducer(Instrument):
    """When a pass fails, writes the module before it and the command that reproduces the failure.

    Without a folder it makes a temporary one, unless the pass refused the user's module or options.
    """

    def __init__(self, folder: str | Path | None = None, replay: Replay | None = None) -> None:
        self.folder = None if folder is None else Path(folder)
        self.replay = replay or Replay()
        self.text = ""  # the module before the current or last pass

    def before(self, step: Step, module: Module) -> None:
        self.text = self.replay.text(module)

    def failed(self, step: Step, module: Module, error: Exception) -> None:
        if step.refused and self.folder is None:
            return
        folder = self.folder or Path(tempfile.mkdtemp(prefix="irc-reproducer-"))
        path = folder / REPRODUCER
        limit = self.replay.limit
        made = limit.made if limit is not None else None
        again = self.replay.command(str(path), step.remaining, made)
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


def _is_written(path: Path) -> bool:
    """Whether a file is a dump or a reproducer."""
    if not _WRITTEN.fullmatch(path.name):
        return False
    with path.open("rb") as file:
        return file.read(2) == b"//" and b"irc opt " in file.readline()


def _write(folder: Path, name: str, text: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with whole_file(folder / name) as file:
            file.write(text.encode())
    except OSError as error:
        raise Error(f"cannot write {folder / name}: {error.strerror}") from error
