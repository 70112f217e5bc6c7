"""The manifest of an artifact folder, config.json: written with checksums, read and checked."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NotRequired, TypeAlias, TypedDict, cast

from ..errors import Error
from ..schema import checked, parsed
from .checksums import SAMPLED, sampled, sha256

FORMAT = 1
MANIFEST = "config.json"
MODULE = "module.irc"
INPUT = "input.irc"  # the module before the passes
REPORT = "report.html"
CERTIFICATE = "certificate.json"
BUNDLE = "rank0.safetensors"  # the weights, where the artifact keeps a copy
_OWN = "manifest"  # the key of the manifest's own hash
# Loading reads files up to this size whole; of larger ones it reads samples, `irc doctor` all.
_READ_WHOLE = 64 * 1024 * 1024

# What the manifest knows of a file.
Entry = TypedDict("Entry", {"size": int, "hash": str, "sampled-sha256-v1": NotRequired[str]})


class Manifest(TypedDict):
    """config.json: how the artifact was compiled, and the checksums of its files."""

    irc_artifact: int
    irc: str
    name: NotRequired[str]
    backend: str
    mesh: str
    pipeline: str
    dtype: str
    dims: dict[str, tuple[int, int, int]]
    inputs: NotRequired[dict[str, str]]  # types by name, as are states and outputs
    states: NotRequired[dict[str, str]]
    outputs: NotRequired[dict[str, str]]
    end_tokens: NotRequired[list[int]]
    program: dict[str, Any]  # the backend's own facts
    files: dict[str, Entry]
    weights: dict[str, Entry]
    manifest: str  # the hash of all other entries


Progress: TypeAlias = Callable[[str, float], None]  # what is being done, the fraction done


def silent(stage: str, fraction: float) -> None:
    """A Progress that does nothing."""


def is_artifact(folder: Path) -> bool:
    """Whether a folder holds a manifest of irc (a checkpoint's config.json is none)."""
    return _parsed(folder / MANIFEST) is not None


def is_replaceable(folder: Path) -> bool:
    """Whether a folder is an artifact; an Error names files in it that irc did not write."""
    manifest = _parsed(folder / MANIFEST)
    if manifest is None:
        return False
    files = manifest.get("files")
    written = {MANIFEST, *(cast("dict[str, Any]", files) if isinstance(files, dict) else {})}
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())
    if others := sorted(set(names) - written):
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        raise Error(
            f"{folder} would be replaced, and with it {others[0]}{more}, which irc did not write; "
            "move them, or choose another folder with -o"
        )
    return True


def _parsed(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file, None where it is not a manifest of irc."""
    try:
        value: Any = parsed(path.read_bytes()) if path.is_file() else None
    except (OSError, ValueError):
        return None
    return cast("Any", value) if isinstance(value, dict) and "irc_artifact" in value else None


def write_manifest(
    folder: Path,
    facts: Mapping[str, Any],
    weights: Mapping[str, Path],
    progress: Progress | None = None,
    known: Mapping[str, str] | None = None,
) -> Manifest:
    """Write config.json: the facts, and the checksums of the files in `folder` and of `weights`.

    `weights` maps each path as module.irc writes it to the file it means. `known` are the checksums
    of files in `folder` that need not be read for them.
    """
    manifest: dict[str, Any] = {"irc_artifact": FORMAT, **facts}
    files = (path for path in folder.rglob("*") if path.is_file())
    names, known = sorted(path.relative_to(folder).as_posix() for path in files), known or {}
    unread = [folder / name for name in names if name not in known]
    advance = advancing("computing checksums", unread, progress)
    manifest["files"] = {name: _entry(folder / name, known.get(name), advance) for name in names}
    manifest["weights"] = {
        written: {"size": path.stat().st_size, "hash": sampled(path)}
        for written, path in weights.items()
    }
    manifest[_OWN] = _own_hash(manifest)
    (folder / MANIFEST).write_text(_json(manifest), encoding="utf-8")
    return cast("Manifest", manifest)


def add_facts(folder: Path, facts: Mapping[str, Any]) -> None:
    """Add entries to config.json that irc itself does not read, such as those of other tools."""
    manifest = _parsed(folder / MANIFEST) or {}
    manifest = {**json.loads(json.dumps(facts, default=str)), **manifest}
    manifest[_OWN] = _own_hash(manifest)
    (folder / MANIFEST).write_text(_json(manifest), encoding="utf-8")


def find_manifest(folder: Path) -> Manifest | None:
    """The manifest of an artifact folder, None where it holds none; an Error where it is bad."""
    manifest = _parsed(folder / MANIFEST)
    return None if manifest is None else _checked(folder, manifest)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of an artifact folder; an Error says what is wrong with it."""
    manifest = find_manifest(folder)
    if manifest is not None:
        return manifest
    path = folder / MANIFEST
    if not folder.is_dir():
        what = "is a file, not an artifact folder" if folder.exists() else "does not exist"
        raise Error(f"{folder} {what}; write one with: irc compile SRC -o {folder}")
    if not path.is_file():
        raise Error(f"{folder} has no {MANIFEST}, so it is not an artifact; compile one first")
    raise Error(
        f"{path} is not a manifest of irc; if {folder} is a checkpoint, "
        f"compile it first: irc compile {folder} -o DIR"
    )


def _checked(folder: Path, manifest: dict[str, Any]) -> Manifest:
    if manifest["irc_artifact"] != FORMAT:
        raise Error(
            f"{folder} has the artifact format {manifest['irc_artifact']!r}, and this irc reads "
            f"format {FORMAT}; compile again with this irc"
        )
    if manifest.get(_OWN) != _own_hash(manifest):
        raise Error(f"{folder / MANIFEST} was changed after it was compiled; compile again")
    return checked(manifest, Manifest, str(folder / MANIFEST))


def _own_hash(manifest: Mapping[str, Any]) -> str:
    """The hash of all other entries of a manifest, by which an edited one is recognized."""
    rest = {key: value for key, value in manifest.items() if key != _OWN}
    return f"sha256:{hashlib.sha256(_json(rest).encode()).hexdigest()}"


def _json(manifest: Mapping[str, Any]) -> str:
    return json.dumps(manifest, indent=2, ensure_ascii=False) + "\n"


def advancing(
    stage: str, paths: Iterable[Path], progress: Progress | None
) -> Callable[[int], None]:
    """Returns a function to call with each number of bytes read from files; reports progress."""
    progress = progress or silent
    total = max(1, sum(path.stat().st_size for path in paths if path.is_file()))
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress(stage, done / total)

    return advance


def _entry(path: Path, known: str | None, advance: Callable[[int], None]) -> Entry:
    entry: Entry = {"size": path.stat().st_size, "hash": known or sha256(path, advance)}
    if entry["size"] > _READ_WHOLE:
        entry[SAMPLED] = sampled(path).partition(":")[2]
    return entry
