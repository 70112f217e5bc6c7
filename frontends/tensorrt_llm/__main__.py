"""Runs a script that uses engines: `python -m irc.frontends.tensorrt_llm run.py ARGS`."""

from __future__ import annotations

import runpy
import sys
from argparse import REMAINDER, ArgumentParser
from pathlib import Path

from ...errors import Error
from ...extensions.user_files import blamed
from .script import prepared
from .utilities import process


def main() -> int:
    """Run the script with irc in place of tensorrt_llm; 1 after an Error, whose text is printed."""
    parser = ArgumentParser(prog="python -m irc.frontends.tensorrt_llm")
    add = parser.add_argument
    what = "the version that the script is written for, such as 0.7 (default: as it reads)"
    add("--tensorrt-llm", metavar="VERSION", help=what)
    what = "your copy of TensorRT-LLM's sources, for what irc does not have"
    add("--tensorrt-llm-sources", metavar="DIR", type=Path, help=what)
    what = "how many processes the script counts, of which it is the first (default: 1)"
    add("--processes", metavar="N", type=int, default=1, help=what)
    add("script", metavar="SCRIPT", type=Path)
    add("arguments", metavar="ARGS", nargs=REMAINDER)
    args = parser.parse_args()
    sys.path[0] = str(args.script.resolve().parent)
    release, sources = args.tensorrt_llm, args.tensorrt_llm_sources
    try:
        with (
            prepared(args.script, args.arguments, release, sources),
            process(0, args.processes),
            blamed(args.script),
        ):
            runpy.run_path(str(args.script), run_name="__main__")
    except Error as error:
        if isinstance(error.__cause__, SystemExit):
            raise error.__cause__ from None
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
