"""`Checkpoint`: the tensors of a folder of safetensors files, whose headers are read lazily."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, cast

from ...errors import Error, did_you_mean
from ...files import open_file
from ...json_files import read_object
from ...weights.safetensors import Tensor, read_header

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ORIGINAL = "compile the checkpoint folder with config.json and *.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_HUB = re.compile(r"(?:https:/+huggingface\.co/)?(\w[\w.-]*)/(\w[\w.-]*?)/?", re.ASCII)
_BLOCK = 1 << 24  # bytes that are compared at a time


def hub_hint(place: str | os.PathLike[str]) -> str:
    """For a path that does not exist, but looks like ORG/NAME of the Hub: how to download it."""
    match = _HUB.fullmatch(os.fspath(place))
    if match is None or Path(match[1]).exists():
        return ""
    return (
        f"; irc downloads nothing: for the model {match[1]}/{match[2]} of the Hugging Face Hub, hf "
        f"download {match[1]}/{match[2]} --local-dir {match[2]}, then give {match[2]}"
    )


def gguf_hint(folder: str | os.PathLike[str]) -> str:
    """For a folder with files of llama.cpp: what to give instead."""
    name = next((path.name for path in sorted(Path(folder).glob("*.gguf"))), "")
    return f"; irc does not read {name}: {ORIGINAL} that it was made from" if name else ""


def is_below(name: str) -> bool:
    """Whether a path in a file of a folder names something in that folder."""
    parts = PurePosixPath(name.replace("\\", "/"))
    return not (parts.is_absolute() or ".." in parts.parts or ":" in name)


class Checkpoint:
    """The tensors of a folder by key; reads headers only.

    With an index, the header of a file is read when one of its tensors is requested.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._headers: dict[str, dict[str, Tensor]] = {}
        if not self.folder.is_dir():
            raise Error(f"there is no checkpoint folder {folder}")
        self._files = self._find()

    def __iter__(self) -> Iterator[str]:
        """The key of every tensor, in the order of the index or of the headers."""
        return iter(self._files)

    def __contains__(self, key: str) -> bool:
        return key in self._files

    def file(self, key: str) -> str:
        """The file of a tensor, relative to the folder."""
        return self._files[key]

    def tensor(self, key: str) -> Tensor:
        """dtype, shape and offset of a tensor."""
        name = self._files[key]
        header = self._header(name)
        if key not in header:
            hint = did_you_mean(key, header)
            raise Error(
                f"{self.folder / INDEX} has {key!r} in {name}, but that file lacks it{hint}"
            )
        return header[key]

    def has_equal(self, a: str, b: str) -> bool:
        """Whether two tensors have the same dtype, shape and bytes."""
        first, second = self.tensor(a), self.tensor(b)
        if (first.dtype, first.shape) != (second.dtype, second.shape):
            return False
        with (
            open_file(self.folder / self.file(a)) as left,
            open_file(self.folder / self.file(b)) as right,
        ):
            left.seek(first.offset)
            right.seek(second.offset)
            blocks = [_BLOCK] * (first.nbytes // _BLOCK) + [first.nbytes % _BLOCK]
            return all(left.read(size) == right.read(size) for size in blocks)

    def _header(self, name: str) -> dict[str, Tensor]:
        if name not in self._headers:
            self._headers[name] = read_header(self.folder / name)
        return self._headers[name]

    def _find(self) -> dict[str, str]:
        if (self.folder / INDEX).exists():
            return self._index(self.folder / INDEX)
        names = [SINGLE] if (self.folder / SINGLE).exists() else self._unindexed()
        file_of: dict[str, str] = {}
        for name in names:
            for key in self._header(name):
                if key in file_of:
                    raise Error(
                        f"{self.folder}: {file_of[key]} and {name} both have {key!r}; add an index "
                        f"file ({INDEX}) that chooses one"
                    )
                file_of[key] = name
        return file_of

    def _unindexed(self) -> list[str]:
        """The safetensors files of a folder without an index; an Error if there are none."""
        names = sorted(path.name for path in self.folder.iterdir())
        tensors_files = [name for name in names if name.endswith(".safetensors")]
        if tensors_files:
            return tensors_files
        pickles = [name for name in names if name.endswith(PICKLES)]
        if pickles:
            raise Error(
                f"{self.folder} has its weights only as {pickles[0]}, a pickle, which runs code "
                "when it is read; irc reads safetensors only. If you trust the file, convert it: "
                "transformers.AutoModelForCausalLM.from_pretrained(folder)"
                ".save_pretrained(new_folder)"
            )
        reason = f"no {SINGLE}, no {INDEX}, no *.safetensors{gguf_hint(self.folder)}"
        raise Error(f"{self.folder} has no weights: {reason}")

    def _index(self, path: Path) -> dict[str, str]:
        table: object = read_object(path).get("weight_map")
        if not isinstance(table, dict):
            raise Error(f"{path} has no weight_map from tensors to files")
        files = cast("dict[str, Any]", table)
        for name in dict.fromkeys(files.values()):
            self._check_name(path, name)
        return dict(files)

    def _check_name(self, path: Path, name: Any) -> None:
        """Raise an Error unless an index names an existing safetensors file below its folder."""
        if not isinstance(name, str) or not name:
            raise Error(f"{path}: {name!r} is not a file name")
        if not is_below(name):
            raise Error(f"{path} names the file {name!r}, which is outside its folder")
        if not name.endswith(".safetensors"):
            raise Error(f"{path} names the file {name!r}, which is not a safetensors file")
        if not (self.folder / name).exists():
            raise Error(
                f"{path} names {name!r}, which does not exist; download all files of the checkpoint"
            )
