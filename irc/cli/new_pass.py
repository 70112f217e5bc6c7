"""`irc new-pass`: writes a pass that works, with comments, and its test."""

from __future__ import annotations

import keyword
import re
import shlex
import sys
from argparse import ArgumentParser, Namespace
from importlib.resources import files
from pathlib import Path

from ..errors import Error
from .arguments import word_of

EXAMPLES = """
  irc new-pass fuse-square
  irc new-pass join-sums --kind sharding -o passes_of_mine
"""

KINDS = ("substitution", "fusion", "sharding")
_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_IMPORTED = {*sys.stdlib_module_names, "irc", "numpy", "pytest", "conftest"}


def configure(parser: ArgumentParser) -> None:
    """The arguments of `irc new-pass`."""
    add = parser.add_argument
    add("name", metavar="NAME", help="the name of the pass, such as fuse-square")
    what = "what to begin with: one operation for several; a fusion that says why not; a pass that "
    what += "reads how values are sharded (default: substitution)"
    add("--kind", metavar="|".join(KINDS), type=word_of(*KINDS), default=KINDS[0], help=what)
    add("-o", metavar="DIR", dest="folder", default=".", help="the folder to write to (default: .)")


def run(args: Namespace) -> int:
    """Write the two files, and print what to do with them."""
    stem, folder = _stem(args.name), Path(args.folder)
    paths = folder / f"{stem}.py", folder / f"test_{stem}.py"
    for path in paths:
        if path.exists():
            raise Error(f"{path} exists, and is left as it is; choose another name or folder")
    folder.mkdir(parents=True, exist_ok=True)
    templates = files("irc.testing.templates")
    for path, name in zip(paths, (args.kind, f"{args.kind}_test"), strict=True):
        text = (templates / f"{name}.py").read_text(encoding="utf-8")
        path.write_text(_renamed(text, args.name, stem), encoding="utf-8")
    load = f"--load {shlex.quote(str(paths[0]))}"
    print(f"wrote {paths[0]} and {paths[1]}; next:")
    print(f"  python -m pytest {shlex.quote(str(paths[1]))}")
    print(f"  irc opt MODEL {load} --passes {args.name} --diff --stats --why-not {args.name}")
    print(f'  irc compile MODEL -o DIR {load} --pipeline "default, after cse: {args.name}"')
    return 0


def _stem(name: str) -> str:
    """The name of the file of a pass, without its ending; an Error about a name that cannot be."""
    from .. import passes  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers them)
    from ..pipeline.base import PASSES, RESERVED

    if not _NAME.fullmatch(name):
        raise Error(
            f"{name!r} is no name of a pass: lower-case letters and digits, with - between words"
        )
    if name in RESERVED or keyword.iskeyword(name):
        raise Error(f"{name} is a word of pipelines or of Python; choose another name")
    if name in PASSES:
        raise Error(f"irc has a pass called {name} already; choose another name")
    stem = name.replace("-", "_")
    if stem in _IMPORTED:
        raise Error(f"{stem}.py would hide the Python module {stem}; choose another name")
    return stem


def _renamed(text: str, name: str, stem: str) -> str:
    """The text of a template for a pass of another name; its class hides nothing that it uses."""
    cls = "".join(word.capitalize() for word in name.split("-"))
    cls += "Pass" * bool(re.search(rf"\b{cls}\b", text))
    return text.replace("my-pass", name).replace("my_pass", stem).replace("MyPass", cls)
