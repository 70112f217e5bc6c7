"""Artifacts that are there: loading, checking, running them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..artifact import Manifest, check, read_manifest
from ..core import Module
from ..errors import Error
from ..given import check_path
from ..verify import verify
from .sources import PathLike, ends_of, read_module

if TYPE_CHECKING:
    from ..backends.base import Program
    from ..generation.model import Model


class Artifact:
    """A compiled folder. Nothing is loaded before the first run.

    `options` go to the backend that loads it. `notes` are sentences about its compilation, where
    that has just been done.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        options: Mapping[str, Any] | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self.folder, self.manifest, self.options = folder, manifest, dict(options or {})
        self.notes = list(notes)

    @cached_property
    def module(self) -> Module:
        """The module that was compiled, after all passes, its files by absolute paths."""
        module = read_module(self.folder)
        for name, file in module.files.items():
            module.files[name] = os.path.abspath(self.folder / file)
        return module

    @cached_property
    def model(self) -> Model:
        """The program of the backend that the artifact was compiled for."""
        return self._model(self.program)

    @cached_property
    def program(self) -> Program:
        """What the backend loaded: its ports, `run` and `open` on plain arrays."""
        from ..backends import get

        facts = {**self.manifest, **self.manifest["program"]}  # what emit said wins
        return get(self.manifest["backend"]).load(self.folder, facts, **self.options)

    @cached_property
    def reference(self) -> Model:
        """The module run by the reference backend, whatever it was compiled for."""
        from ..backends.reference import ReferenceProgram

        return self._model(ReferenceProgram(self.module, self.folder))

    def _model(self, program: Program) -> Model:
        from ..generation.model import Model

        manifest = self.manifest
        return Model(program, manifest["dims"], self.folder, manifest.get("end_tokens", ()))

    def run(self, inputs: Mapping[str, object]) -> dict[str, Any]:
        """The outputs by name, as arrays; a language model needs `input_ids` [B, S] alone."""
        return self.model.run(inputs)

    def generate(self, prompt: str, max_new_tokens: int = 100) -> str:
        """The text that a language model lets follow on `prompt`, chosen greedily."""
        return self.model.generate(prompt, max_new_tokens)

    def __repr__(self) -> str:
        return f"<artifact {self.folder} for {self.manifest['backend']}>"


def load(folder: PathLike, **options: Any) -> Artifact:
    """The artifact in a folder; an Error where a file of it, or a weight file, has changed.

    Options are the backend's. For `onnx`: `threads`, how many an operation may use (physical cores
    by default); `low_memory=True` uses weights where they lie in their files rather than repacked
    copies, which loads f32 weights at once and runs about a fifth slower; of several ranks,
    `timeout`, for how many seconds (60) they wait while none of them moves, or `communicator`,
    where this process runs one of them (see backends/README.md).
    """
    check_path("the artifact", folder)
    path = Path(folder)
    manifest = read_manifest(path)
    check(path, manifest)
    return Artifact(path, manifest, options)


def open_model(place: PathLike, backend: str | None = None, **options: Any) -> Model:
    """What can be run at `place`: an artifact, or a module's text by the reference backend.

    Options are those of `load`; the reference backend has none.
    """
    path = Path(place)
    if options and (path.is_file() or backend == "reference"):
        raise Error(f"the reference backend has no option {next(iter(options))}")
    if path.is_file():
        return _interpreted(path, backend)
    artifact = load(path, **options)
    made_for = artifact.manifest["backend"]
    if backend in (None, made_for):
        return artifact.model
    if backend == "reference":
        return artifact.reference
    from ..backends import get

    get(backend)  # an unknown name has an Error of its own
    raise Error(f"{path} is compiled for {made_for}; compile it again with --backend {backend}")


def _interpreted(path: Path, backend: str | None) -> Model:
    if backend != "reference":
        raise Error(
            f"{path} is not compiled; compile it with irc compile {path} -o DIR, "
            "or let --backend reference interpret it"
        )
    from ..backends.reference import ReferenceProgram
    from ..generation.model import Model

    module = read_module(path)
    verify(module)
    program = ReferenceProgram(module, path.parent)
    return Model(program, module.dims, path.parent, ends_of(path))
