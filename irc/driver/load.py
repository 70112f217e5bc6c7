"""Compiled artifacts: loading, checking and running them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..argument_checks import check_arrays, check_path
from ..artifact.folder import ArtifactFolder
from ..artifact.manifest import Manifest
from ..errors import Error
from ..ir.core import Module
from ..ir.verify import verify
from .sources import PathLike, artifact_of, read_text

if TYPE_CHECKING:
    from ..backends.base import Program
    from ..generation.model import Model


class Artifact:
    """A compiled folder. Nothing is loaded before the first run.

    `options` go to the backend that loads it. `notes` are sentences about its compilation, if it
    has just been compiled.
    """

    def __init__(
        self,
        opened: ArtifactFolder,
        options: Mapping[str, Any] | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self.opened, self.options, self.notes = opened, dict(options or {}), list(notes)

    @property
    def folder(self) -> Path:
        """The path of the folder."""
        return self.opened.path

    @property
    def manifest(self) -> Manifest:
        """The contents of its config.json."""
        return self.opened.manifest

    @cached_property
    def module(self) -> Module:
        """The module that was compiled, after all passes, its files by absolute paths."""
        module = read_text(self.opened.module)
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

        backend = get(self.opened.backend)
        facts = {**self.manifest, **self.opened.facts(backend.facts)}  # the backend's entries win
        return backend.load(self.folder, facts, **self.options)

    @cached_property
    def reference(self) -> Model:
        """The module run by the reference backend, whatever it was compiled for."""
        from ..backends.reference import ReferenceProgram

        return self._model(ReferenceProgram(self.module, self.folder))

    def _model(self, program: Program) -> Model:
        from ..generation.model import Model

        dims, ends = self.manifest["dims"], self.opened.end_tokens
        return Model(program, dims, self.folder, ends, lambda: self.module)

    def run(self, inputs: Mapping[str, object]) -> dict[str, Any]:
        """The outputs by name, as arrays; a language model needs `input_ids` [B, S] alone."""
        return self.model.run(inputs)

    def __call__(
        self, inputs: Mapping[str, object] | None = None, /, **named: object
    ) -> dict[str, Any]:
        """`run`, with inputs in a dictionary or by name: `artifact(ids=ids)`."""
        inputs = {} if inputs is None else inputs
        check_arrays(inputs)
        return self.run({**inputs, **named})

    def generate(
        self, prompt: str | Sequence[str], max_new_tokens: int | None = None, **settings: Any
    ) -> Any:
        """The text with which a language model continues `prompt`, or each of several prompts.

        `settings` are fields of GenerationSettings, by default those of the checkpoint, see
        `Model.generate`.
        """
        return self.model.generate(prompt, max_new_tokens, **settings)

    def __repr__(self) -> str:
        return f"<artifact {self.folder} for {self.opened.backend}>"


def load(folder: PathLike | ArtifactFolder, **options: Any) -> Artifact:
    """The artifact in a folder; an Error where a file of it, or a weight file, has changed.

    Options are the backend's. For `onnx`: `threads` of an operation (default: physical cores);
    `low_memory=True` reads weights from their files, which loads f32 weights at once and runs about
    a fifth slower (no effect where weights have 4 or 8 bits); for several ranks, `timeout`, the
    seconds (60) without progress after which they fail, or `communicator`, where this process is
    one of them (see backends/README.md). For `cuda`: `locked=True`, an Error where the GPU, a
    version or a kernel is not what the artifact says; the rest as in backends/cuda/execute/load.py.
    """
    if not isinstance(folder, ArtifactFolder):
        check_path("the artifact", folder)
        folder = ArtifactFolder.open(Path(folder))
    folder.check()
    return Artifact(folder, options)


def open_model(
    place: PathLike | ArtifactFolder, backend: str | None = None, **options: Any
) -> Model:
    """The model at `place`: an artifact, or a module's text run by the reference backend.

    Options are those of `load`; the reference backend has none.
    """
    path = place.path if isinstance(place, ArtifactFolder) else Path(place)
    if options and (path.is_file() or backend == "reference"):
        raise Error(f"the reference backend has no option {next(iter(options))}")
    if path.is_file():
        return _interpret(path, backend)
    artifact = load(place, **options)
    compiled_for = artifact.opened.backend
    if backend in (None, compiled_for):
        return artifact.model
    if backend == "reference":
        return artifact.reference
    from ..backends import get

    get(backend)  # an unknown name has an Error of its own
    raise Error(f"{path} is compiled for {compiled_for}; compile it again with --backend {backend}")


def _interpret(path: Path, backend: str | None) -> Model:
    if backend != "reference":
        raise Error(
            f"{path} is not compiled; compile it with irc compile {path} -o DIR, "
            "or let --backend reference interpret it"
        )
    from ..backends.reference import ReferenceProgram
    from ..generation.model import Model
    from ..generation.tokenizer import end_tokens

    module = read_text(path)
    verify(module)
    artifact = artifact_of(path)
    ends = artifact.end_tokens if artifact is not None else end_tokens(path.parent)
    return Model(
        ReferenceProgram(module, path.parent), module.dims, path.parent, ends, lambda: module
    )
