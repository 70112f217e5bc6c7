"""The report about a defect of irc: a file to send, and a sentence about it."""

from __future__ import annotations

import os
import platform
import re
import shlex
import sys
import tempfile
import traceback
from itertools import pairwise

from .. import __version__


def crash_report(error: Exception, words: list[str]) -> str:
    """Write the report; one sentence about it."""
    what = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    what_failed = f"irc failed because of a defect in irc ({what})"
    try:
        place = _write(error, words)
    except OSError as unwritable:
        return (
            f"{what_failed}; no report could be written ({unwritable}), so please report it with "
            "what this command prints with --traceback"
        )
    return f"{what_failed}; please report it, with the file {place}"


def _write(error: Exception, words: list[str]) -> str:
    words = [
        "..." if before == "--api-key" else re.sub("^--api-key=.*", "--api-key=...", word)
        for before, word in pairwise(["", *words])
    ]
    lines = [
        f"irc {__version__}, Python {sys.version.split()[0]}, {platform.platform()}",
        f"command: irc {shlex.join(words)}",
        f"folder: {os.getcwd()}",
        "",
        *traceback.format_exception(error),
    ]
    descriptor, place = tempfile.mkstemp(prefix="irc-crash-", suffix=".txt")
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write("\n".join(lines))
    return place
