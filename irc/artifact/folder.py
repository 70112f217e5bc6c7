"""An existing artifact folder, opened once per command: its manifest, and checks of its files."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from ..errors import Error
from ..schema import checked
from .atomic import whole_folder
from .checksums import SAMPLED, sampled, sha256
from .manifest import (
    MANIFEST,
    MODULE,
    Entry,
    Manifest,
    add_facts,
    find_manifest,
    is_replaceable,
    read_manifest,
    write_manifest,
)

T = TypeVar("T")
Advance: TypeAlias = Callable[[int], None]  # gets the number of bytes read since the last call


@dataclass(frozen=True)
class ArtifactFolder:
    """The path of an artifact, and its manifest, which was read and checked when it was opened."""

    path: Path
    manifest: Manifest

    @classmethod
    def open(cls, path: Path) -> ArtifactFolder:
        """The artifact in a folder; an Error says what is wrong with it."""
        return cls(path, read_manifest(path))

    @classmethod
    def find(cls, path: Path) -> ArtifactFolder | None:
        """The artifact in a folder, None where it holds none."""
        manifest = find_manifest(path)
        return None if manifest is None else cls(path, manifest)

    @property
    def backend(self) -> str:
        """The name of the backend that it was compiled for."""
        return self.manifest["backend"]

    @property
    def program(self) -> Mapping[str, Any]:
        """The facts that the backend's `emit` returned."""
        return self.manifest["program"]

    def facts(self, schema: type[T]) -> T:
        """The facts of the program with the types that a backend declares."""
        return checked(self.program, schema, f"the program in {self.path / MANIFEST}")

    @property
    def end_tokens(self) -> list[int]:
        """The token ids that end a text; empty for what is not a language model."""
        return list(self.manifest.get("end_tokens", ()))

    @property
    def module(self) -> Path:
        """The file with the text of the module that was compiled."""
        return self.path / MODULE

    def check(self, *, text: bool = True, weights: bool = True) -> None:
        """An Error about the first file that differs from the manifest.

        Without `text` the module's text may differ, without `weights` the weight files elsewhere.
        """
        for problem in self.problems(text=text, weights=weights):
            raise Error(problem)

    @contextmanager
    def rewritten(self, without: Collection[str], program: Mapping[str, Any]) -> Generator[Path]:
        """A folder with links to these files, but for those and the folders `without`; it takes the
        artifact's place, with other facts of the program, if the block ends without an error."""
        old = self.manifest
        kept = {name: e for name, e in old["files"].items() if name.split("/")[0] not in without}
        own = ("irc_artifact", "files", "weights", "manifest")
        facts = {key: value for key, value in old.items() if key not in own}
        with whole_folder(self.path, is_replaceable) as folder:
            for name in kept:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                try:
                    os.link(self.path / name, folder / name)
                except OSError:  # a disk without links
                    shutil.copyfile(self.path / name, folder / name)
            yield folder
            weights = {name: self.path / name for name in old["weights"]}
            hashes = {name: entry["hash"] for name, entry in kept.items()}
            write_manifest(folder, {**facts, "program": program}, weights, known=hashes)
            add_facts(folder, json.loads((self.path / MANIFEST).read_bytes()))

    def problems(
        self,
        *,
        text: bool = True,
        weights: bool = True,
        whole: bool = False,
        advance: Advance | None = None,
    ) -> Iterator[str]:
        """A sentence per file that is missing or has changed; see `check`.

        `whole` reads every byte in the folder, of large files too. `advance` is called as they are.
        """
        for name, entry in self.manifest["files"].items():
            problem = _file_problem(self.path, name, entry, whole, advance)
            if problem and (text or name != MODULE):
                yield f"{problem}; compile again"
        again = "compile again (with --bundle the artifact keeps a copy of its own)"
        for name, entry in self.manifest["weights"].items() if weights else ():
            if problem := weights_problem(self.path / name, entry, again):
                yield problem


def _file_problem(
    folder: Path, name: str, entry: Entry, whole: bool, advance: Advance | None
) -> str:
    path = folder / name
    if not path.is_file():
        return f"{path} is missing"
    if (size := path.stat().st_size) != entry["size"]:
        return f"{path} has {size} bytes, and the manifest says {entry['size']}"
    if not whole and SAMPLED in entry:
        same = sampled(path) == f"{SAMPLED}:{entry[SAMPLED]}"
    else:
        same = sha256(path, advance) == entry["hash"]
    return "" if same else f"{path} was changed after it was compiled"


def weights_problem(path: Path, entry: Entry, advice: str) -> str:
    """How a weight file differs from its entry in the manifest; empty if it is the same."""
    if not path.is_file():
        return f"the weight file {path} is gone; put it back, or {advice}"
    if (size := path.stat().st_size) != entry["size"]:
        return f"the weight file {path} had {entry['size']} bytes and has {size} now; {advice}"
    if sampled(path) != entry["hash"]:
        return f"the weight file {path} differs from that of the compilation; {advice}"
    return ""
