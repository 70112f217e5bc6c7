"""`irc reduce`: a smaller module for which a command still fails."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from ..artifact.atomic import whole_file
from ..errors import Error
from .console import warn
from .opt import check_output
from .sources import read_module, weights_folder

if TYPE_CHECKING:
    from ..debug.reduce import Candidate

EXAMPLES = """
  irc reduce model.irc --keep "irc opt {} --load my_pass.py --passes my-pass"
  irc reduce build/llama --keep "python check.py {}" --message "not close" -o small.irc
"""


def configure(parser: ArgumentParser) -> None:
    """The arguments of `irc reduce`."""
    add = parser.add_argument
    add("source", metavar="FILE", help="a module, script.py, model.onnx, an artifact folder, or -")
    what = (
        "a shell command that fails, such as 'irc opt {} --load my_pass.py --passes my-pass'; {} "
    )
    what += "stands for the quoted path of a file with the module"
    add("--keep", metavar="COMMAND", required=True, help=what)
    what = "a text that the command has to print besides, where it may fail in several ways"
    add("--message", metavar="TEXT", default="", help=what)
    what = "the file to write (default: a new NAME.reduced.irc in the working folder)"
    add("-o", "--output", metavar="OUT", help=what)


def run(args: Namespace) -> int:
    """Reduce the module; the file has the smallest one at any time, also after ctrl-C."""
    from ..debug.checks import Command
    from ..debug.reduce import reduce_module, size_of
    from ..text.printer import print_module

    output = Path(args.output or f"{Path(args.source.strip('-') or 'module').stem}.reduced.irc")
    check_output(str(output), args.source)
    if args.output is None and output.exists():
        raise Error(f"{output} exists already; delete it, or give another file with -o")
    module, command = read_module(args.source), Command(args.keep)
    for key, file in module.files.items():  # the text is to lie in any folder
        module.files[key] = os.path.abspath(weights_folder(args.source) / file)
    text = print_module(module, locs=True)
    status, said, first = command.run(text)
    if status == 0:
        raise Error(f"the command succeeds on {args.source}; give one that fails there")
    if args.message not in said:
        raise Error(f"the command fails on {args.source}, but does not print {args.message!r}")
    last = first

    def write(text: str) -> None:
        with whole_file(output) as file:
            file.write(text.encode())

    def fails(candidate: Candidate) -> bool:
        nonlocal last
        now, says, line = command.run(candidate.text)
        if now != status or args.message not in says:
            return False
        last = line
        write(candidate.text)
        warn(f"irc: {size_of(candidate.module)} operations after {command.runs} runs: {output}")
        return True

    write(text)
    reduced = reduce_module(module, fails)
    print(f"{size_of(module)} -> {size_of(reduced)} operations in {command.runs} runs: {output}")
    if not args.message and first != last:
        print(
            f"the command prints something else than at first ({first!r}): {last!r}; see --message"
        )
    return 0
