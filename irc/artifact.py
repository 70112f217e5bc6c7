"""The artifact folder: its manifest, and the checks that what lies on disk is what was compiled."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias, cast

from .checksums import SAMPLED, sampled, sha256
from .errors import Error

FORMAT = 1
MANIFEST = "config.json"
MODULE = "module.irc"
REPORT = "report.html"
BUNDLE = "rank0.safetensors"  # the weights, where the artifact keeps a copy
_OWN = "manifest"  # the key of the manifest's own hash
# Loading reads files up to this size whole; of larger ones it reads samples, `irc doctor` all.
_READ_WHOLE = 64 * 1024 * 1024

Manifest: TypeAlias = dict[str, Any]
Advance: TypeAlias = Callable[[int], None]
Progress: TypeAlias = Callable[[str, float], None]  # what is being done, the fraction done
_KEYS: dict[str, type] = {
    "irc": str,
    "backend": str,
    "mesh": str,
    "pipeline": str,
    "dtype": str,
    "dims": dict,
    "program": dict,
    "files": dict,
    "weights": dict,
}


def silent(stage: str, fraction: float) -> None:
    """A Progress that nobody watches."""


def is_artifact(folder: Path) -> bool:
    """Whether a folder holds a manifest of irc (a checkpoint's config.json is none)."""
    path = folder / MANIFEST
    if not path.is_file():
        return False
    try:
        found = json.loads(path.read_bytes())
    except ValueError:
        return False
    return isinstance(found, dict) and "irc_artifact" in found


def write_manifest(
    folder: Path,
    facts: Mapping[str, Any],
    weights: Mapping[str, Path],
    progress: Progress | None = None,
    known: Mapping[str, str] | None = None,
) -> Manifest:
    """Add the checksums of every file in `folder` and of the `weights` outside; write config.json.

    `weights` maps each path as module.irc writes it to the file it means. `known` are the checksums
    of files in `folder` that need not be read for them.
    """
    manifest: Manifest = {"irc_artifact": FORMAT, **facts}
    names, known = _names(folder), known or {}
    unread = [folder / name for name in names if name not in known]
    advance = advancing("computing checksums", unread, progress)
    manifest["files"] = {name: _entry(folder / name, known.get(name), advance) for name in names}
    manifest["weights"] = {
        written: {"size": path.stat().st_size, "hash": sampled(path)}
        for written, path in weights.items()
    }
    manifest[_OWN] = _own_hash(manifest)
    (folder / MANIFEST).write_text(_json(manifest), encoding="utf-8")
    return manifest


def _own_hash(manifest: Manifest) -> str:
    """The hash of everything else in a manifest, so that an edited one is not believed."""
    rest = {key: value for key, value in manifest.items() if key != _OWN}
    return f"sha256:{hashlib.sha256(_json(rest).encode()).hexdigest()}"


def _json(manifest: Manifest) -> str:
    """JSON with a line per entry, and per entry of an entry."""
    lines: list[str] = []
    for key, value in manifest.items():
        text = json.dumps(value, ensure_ascii=False)
        if isinstance(value, dict) and value:
            entries = cast("dict[str, Any]", value).items()
            inner = [
                f"    {json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in entries
            ]
            text = "{\n" + ",\n".join(inner) + "\n  }"
        lines.append(f"  {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of an artifact folder; an Error says what is wrong with it."""
    if not folder.is_dir():
        what = "is a file, not an artifact folder" if folder.exists() else "does not exist"
        raise Error(f"{folder} {what}; write one with: irc compile SRC -o {folder}")
    path = folder / MANIFEST
    if not path.is_file():
        raise Error(
            f"{folder} has no {MANIFEST}, so it is no artifact; irc compile writes artifacts"
        )
    try:
        found: Any = json.loads(path.read_bytes())
    except ValueError as error:
        raise Error(f"{path} is not JSON ({error}); compile again") from None
    if not isinstance(found, dict) or "irc_artifact" not in found:
        raise Error(
            f"{path} is no manifest of irc; if {folder} is a checkpoint, "
            f"compile it first: irc compile {folder} -o DIR"
        )
    manifest = cast("Manifest", found)
    if manifest["irc_artifact"] != FORMAT:
        raise Error(
            f"{folder} has the artifact format {manifest['irc_artifact']!r}, and this irc reads "
            f"format {FORMAT}; compile again with this irc"
        )
    for key, kind in _KEYS.items():
        if not isinstance(manifest.get(key), kind):
            raise Error(f"{path} has no {key!r} of the right kind; compile again")
    if manifest.get(_OWN) != _own_hash(manifest):
        raise Error(f"{path} was changed after it was compiled; compile again")
    return manifest


def check(
    folder: Path, manifest: Manifest, whole: bool = False, advance: Advance | None = None
) -> None:
    """Raise about the first file that is not as the manifest says."""
    for problem in problems(folder, manifest, whole, advance):
        raise Error(problem)


def problems(
    folder: Path, manifest: Manifest, whole: bool = False, advance: Advance | None = None
) -> Iterator[str]:
    """A sentence per file that is missing or changed. `whole` reads every byte in the folder."""
    for name, entry in _entries(manifest, "files"):
        yield from _compare(folder, name, entry, whole, advance)
    for name, entry in _entries(manifest, "weights"):
        yield from _compare_weights(folder, name, entry)


def _entries(manifest: Manifest, kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
    entries: dict[str, Any] = manifest[kind]
    for name, entry in entries.items():
        if not isinstance(entry, dict) or not {"size", "hash"} <= entry.keys():
            raise Error(f"the manifest says neither size nor hash of {name!r}; compile again")
        yield name, cast("dict[str, Any]", entry)


def _compare(
    folder: Path, name: str, entry: dict[str, Any], whole: bool, advance: Advance | None
) -> Iterator[str]:
    path = folder / name
    if Path(name).is_absolute() or ".." in Path(name).parts:
        yield f"the manifest names the file {name!r}, which leaves {folder}; compile again"
    elif not path.is_file():
        yield f"{path} is missing; compile again"
    elif (size := path.stat().st_size) != entry["size"]:
        yield f"{path} has {size} bytes, and the manifest says {entry['size']}; compile again"
    elif not _same(path, entry, whole, advance):
        yield f"{path} was changed after it was compiled; compile again"


def _same(path: Path, entry: dict[str, Any], whole: bool, advance: Advance | None) -> bool:
    if not whole and SAMPLED in entry:
        return sampled(path) == f"{SAMPLED}:{entry[SAMPLED]}"
    return sha256(path, advance) == entry["hash"]


def _compare_weights(folder: Path, name: str, entry: dict[str, Any]) -> Iterator[str]:
    path = folder / name
    again = "compile again (with --bundle the artifact keeps a copy of its own)"
    if not path.is_file():
        yield f"the weight file {path} is gone; put it back, or {again}"
    elif (size := path.stat().st_size) != entry["size"]:
        yield f"the weight file {path} had {entry['size']} bytes and has {size} now; {again}"
    elif not str(entry["hash"]).startswith(SAMPLED + ":"):
        yield f"the manifest has an unknown kind of hash for {path}: {entry['hash']}; compile again"
    elif sampled(path) != entry["hash"]:
        yield f"the weight file {path} was changed after the model was compiled; {again}"


def _names(folder: Path) -> list[str]:
    """Every file below a folder but the manifest, as sorted relative paths with slashes."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path.relative_to(folder).as_posix() for path in files)


def advancing(stage: str, paths: Iterable[Path], progress: Progress | None) -> Advance | None:
    """Counts the bytes read from files, and tells which fraction of all that is."""
    if progress is None:
        return None
    total = max(1, sum(path.stat().st_size for path in paths if path.is_file()))
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress(stage, done / total)

    return advance


def _entry(path: Path, known: str | None, advance: Advance | None) -> dict[str, Any]:
    found = sha256(path, advance) if known is None else known
    entry: dict[str, Any] = {"size": path.stat().st_size, "hash": found}
    if entry["size"] > _READ_WHOLE:
        entry[SAMPLED] = sampled(path).partition(":")[2]
    return entry
