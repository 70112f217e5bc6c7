"""The safetensors files of a checkpoint folder: which tensor lies in which file, read lazily."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, cast

from ...errors import Error, did_you_mean
from ...safetensors import Tensor, read_header

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class Checkpoint:
    """The tensors of a folder by key. Only headers are read, never the bytes of a tensor.

    With an index, a file's header is read when one of its tensors is asked for.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._headers: dict[str, dict[str, Tensor]] = {}
        if not self.folder.is_dir():
            raise Error(f"there is no checkpoint folder {folder}")
        self._where = self._find()

    def __iter__(self) -> Iterator[str]:
        """The key of every tensor, in the order of the index or of the headers."""
        return iter(self._where)

    def __contains__(self, key: str) -> bool:
        return key in self._where

    def file(self, key: str) -> str:
        """The file of a tensor, relative to the folder."""
        return self._where[key]

    def tensor(self, key: str) -> Tensor:
        """dtype, shape and place of a tensor."""
        name = self._where[key]
        header = self._header(name)
        if key not in header:
            hint = did_you_mean(key, header)
            raise Error(
                f"{self.folder / INDEX} says that {key!r} is in {name}, but it is not{hint}"
            )
        return header[key]

    def _header(self, name: str) -> dict[str, Tensor]:
        if name not in self._headers:
            self._headers[name] = read_header(self.folder / name)
        return self._headers[name]

    def _find(self) -> dict[str, str]:
        if (self.folder / INDEX).exists():
            return self._index(self.folder / INDEX)
        names = [SINGLE] if (self.folder / SINGLE).exists() else self._loose()
        where: dict[str, str] = {}
        for name in names:
            for key in self._header(name):
                if key in where:
                    raise Error(
                        f"{self.folder}: both {where[key]} and {name} hold {key!r}; an index file "
                        f"({INDEX}) would say which counts"
                    )
                where[key] = name
        return where

    def _loose(self) -> list[str]:
        """Files without an index; an Error says why there are none."""
        names = sorted(path.name for path in self.folder.iterdir())
        found = [name for name in names if name.endswith(".safetensors")]
        if found:
            return found
        pickles = [name for name in names if name.endswith(PICKLES)]
        if pickles:
            raise Error(
                f"{self.folder} has its weights only as {pickles[0]}, a pickle, which runs code "
                "when it is read; irc reads safetensors only. Where you trust the file, convert it "
                "once: transformers.AutoModelForCausalLM.from_pretrained(folder)"
                ".save_pretrained(new_folder)"
            )
        raise Error(f"{self.folder} has no weights: no {SINGLE}, no {INDEX}, no *.safetensors")

    def _index(self, path: Path) -> dict[str, str]:
        try:
            found: object = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise Error(f"cannot read {path}: {error}") from None
        table: object = (
            cast("dict[str, Any]", found).get("weight_map") if _is_object(found) else None
        )
        if not isinstance(table, dict):
            raise Error(f"{path} has no weight_map from tensors to files")
        where = cast("dict[str, Any]", table)
        for name in dict.fromkeys(where.values()):
            self._check_name(path, name)
        return dict(where)

    def _check_name(self, path: Path, name: Any) -> None:
        """An index may name files below its folder only; links there are the folder's business."""
        if not isinstance(name, str) or not name:
            raise Error(f"{path}: {name!r} is no name of a file")
        parts = PurePosixPath(name.replace("\\", "/"))
        if parts.is_absolute() or ".." in parts.parts or ":" in name:
            raise Error(f"{path} names the file {name!r}, which lies outside its folder")
        if not name.endswith(".safetensors"):
            raise Error(f"{path} names the file {name!r}, which is no safetensors file")
        if not (self.folder / name).exists():
            raise Error(f"{path} names {name!r}, which is not there; download the whole checkpoint")


def _is_object(found: object) -> bool:
    return isinstance(found, dict)
