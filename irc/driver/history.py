"""`replay`: runs the passes of an artifact or of a dump folder again, and records what they did."""

from __future__ import annotations

import itertools
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..artifact.folder import ArtifactFolder
from ..artifact.manifest import INPUT
from ..errors import Error
from ..ir.core import Module
from ..pipeline import Pass, Pipeline, parse_pipeline
from ..pipeline.instruments.history import History
from ..pipeline.instruments.record import INPUT as DUMPED
from ..text.diff import bodies
from ..text.printer import print_module
from .build import run_passes
from .sources import PathLike, read_text

_FROM_FOLDER = ("plan", "calibration")  # options of passes that name files


def recorded_run(place: PathLike, load: Sequence[str] = ()) -> tuple[Module, Pipeline]:
    """The module before the passes of an artifact or of a folder of `--dump-dir`, and the passes.

    `load` are files that register passes and operations, as `--load`. Files of the module have
    absolute paths.
    """
    from .. import passes  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers them)
    from ..pipeline import load_file

    for file in load:
        load_file(file)
    folder = Path(place)
    path, text, files = _dumped(folder) if (folder / DUMPED).is_file() else _compiled(folder)
    for file in files:
        load_file(file)
    module = read_text(path)
    for name, file in module.files.items():
        module.files[name] = os.path.abspath(folder / file)
    return module, Pipeline(tuple(_placed(step, folder) for step in parse_pipeline(text)))


def replay(place: PathLike, load: Sequence[str] = ()) -> History:
    """What every pass did that made an artifact, or a folder of `--dump-dir`.

    The passes run again over the recorded module. An Error where they give another text than the
    artifact has, as after an update of irc.
    """
    module, pipeline = recorded_run(place, load)
    history = history_of(module, pipeline)
    compiled = ArtifactFolder.find(Path(place)) if not (Path(place) / DUMPED).is_file() else None
    if compiled is not None and bodies(print_module(read_text(compiled.module))) != bodies(
        print_module(module)
    ):
        raise Error(
            f"the passes of {place} give another module than {compiled.module} today (it was "
            f"compiled by irc {compiled.manifest['irc']}); compile it again"
        )
    return history


def history_of(module: Module, pipeline: str | Pipeline) -> History:
    """Run passes over a module, in place, and record what they do."""
    history = History()
    run_passes(module, str(pipeline), [history])
    return history


def _compiled(folder: Path) -> tuple[Path, str, list[str]]:
    """The input, the pipeline and the files to load of an artifact."""
    artifact = ArtifactFolder.open(folder)
    path = folder / INPUT
    if not path.is_file():
        raise Error(f"{folder} has no {INPUT}, which artifacts of this irc have; compile it again")
    return path, artifact.manifest["pipeline"], []


def _dumped(folder: Path) -> tuple[Path, str, list[str]]:
    """The same of a folder of `--dump-dir`, whose first dump has the command."""
    path = folder / DUMPED
    with path.open(encoding="utf-8") as file:
        header = re.match(r"// the input of: irc opt (.*)", file.readline())
    words = shlex.split(header[1]) if header else []
    if "--passes" not in words[:-1]:
        raise Error(f"{path} does not begin with the command that made it; dump again")
    pairs = list(itertools.pairwise(words))
    files = [value for flag, value in pairs if flag == "--load"]
    return path, next(value for flag, value in pairs if flag == "--passes"), files


def _placed(step: Pass, folder: Path) -> Pass:
    """A pass with the paths of its files from the working folder, not the artifact's."""
    changed = {
        name: str(folder / value)
        for name in _FROM_FOLDER
        if (value := getattr(step, name, ""))
        and isinstance(value, str)
        and not os.path.exists(value)
        and (folder / value).exists()
    }
    return replace(step, **changed) if changed else step
