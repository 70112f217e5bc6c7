"""Runs a script that uses engines: `python -m irc.frontends.tensorrt_llm run.py ARGS`."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from ...errors import Error
from ...extensions.user_files import blamed
from .aliases import aliases
from .api import RELEASES
from .context import new_session
from .lint import find_release, parse_script


def main() -> int:
    """Run the script with irc in place of tensorrt_llm; 1 after an Error, whose text is printed."""
    if len(sys.argv) < 2:
        print("usage: python -m irc.frontends.tensorrt_llm SCRIPT [ARGS]", file=sys.stderr)
        return 2
    path = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(path).resolve().parent)
    try:
        release = find_release(parse_script(path), Path(path))
        with new_session(RELEASES[release]), aliases(), blamed(Path(path)):
            runpy.run_path(path, run_name="__main__")
    except Error as error:
        if isinstance(error.__cause__, SystemExit):
            raise error.__cause__ from None
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
