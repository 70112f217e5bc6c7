"""`irc cache`: engines, kernels and choices that are kept, their size, and how to delete them."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from ..analysis.units import amount
from ..errors import Error
from .arguments import add_json, word_of
from .console import print_json, table

if TYPE_CHECKING:
    from ..backends.tensorrt.builder.cache import Cache, Entry

EXAMPLES = """
  irc cache
  irc cache size
  irc cache clear
"""


def configure(parser: ArgumentParser) -> None:
    """The arguments of `irc cache`."""
    what = (
        "list (the default), size, or clear: delete the kernels and choices of the backend cuda, "
        "and all engines that no process is using"
    )
    kind = word_of("list", "size", "clear")
    parser.add_argument("action", metavar="ACTION", nargs="?", type=kind, default="list", help=what)
    what = "another folder than $IRC_CACHE, or engines and kernels in ~/.cache/irc"
    parser.add_argument("--cache", metavar="DIR", type=Path, help=what)
    add_json(parser)


def run(args: Namespace) -> int:
    """List, measure or delete; artifacts keep their engines."""
    from ..backends.cuda.execute.compile import default_folder as folder_of_kernels
    from ..backends.cuda.execute.compile import kept
    from ..backends.tensorrt.builder.cache import VARIABLE, Cache, default_folder

    folder = args.cache or default_folder()
    kernels = args.cache / "kernels" if args.cache else folder_of_kernels()
    if folder is None or kernels is None:
        raise Error(f"this user has no home folder for a cache of engines; set {VARIABLE}")
    cache = Cache(folder)
    files = {path: path.stat().st_size for path in kept(kernels)}
    entries = cache.clear() if args.action == "clear" else cache.entries()
    if args.action == "clear":
        for path in files:
            path.unlink(missing_ok=True)
    if args.json:
        of_cuda = {"folder": str(kernels), "files": len(files), "size": sum(files.values())}
        print_json(_facts(cache, entries, args.action) | {"kernels": of_cuda})
        return 0
    if files:
        deleted = "deleted " if args.action == "clear" else ""
        kinds = f"{len(files)} kernels and choices of the backend cuda"
        print(f"{kernels}: {deleted}{kinds}, {amount(sum(files.values()))}")
    count, size = len(entries), amount(sum(entry.size for entry in entries))
    engines = f"{count} engine{'' if count == 1 else 's'}, {size}"
    if args.action == "clear":
        print(f"{folder}: deleted {engines}")
        return 0
    if args.action == "list" and entries:
        print(table(_rows(cache, entries), ["engine", "size", "last used", "target"]))
    print(f"{folder}: {engines} of at most {amount(cache.limit)}")
    return 0


def _rows(cache: Cache, entries: list[Entry]) -> list[tuple[str, str, str, str]]:
    return [
        (
            entry.key[:12],
            amount(entry.size),
            f"{datetime.fromtimestamp(entry.used):%Y-%m-%d %H:%M}",
            _target(cache, entry),
        )
        for entry in entries
    ]


def _target(cache: Cache, entry: Entry) -> str:
    report = cache.report(entry.key)
    return "damaged" if report is None else report.target


def _facts(cache: Cache, entries: list[Entry], action: str) -> dict[str, object]:
    found: dict[str, object] = {
        "folder": str(cache.folder),
        "limit": cache.limit,
        "engines": len(entries),
        "size": sum(entry.size for entry in entries),
    }
    if action == "list":
        found["list"] = [asdict(entry) | {"target": _target(cache, entry)} for entry in entries]
    return found
