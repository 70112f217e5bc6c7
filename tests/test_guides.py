"""The guide of irc/ names every file and folder that is there, and no other."""

from __future__ import annotations

import re

from tests.layout import LINKED, ROOT


def test_the_table_of_files_is_complete() -> None:
    guide = (
        (ROOT / "irc" / "README.md").read_text(encoding="utf-8").partition("Where things are")[2]
    )
    named = {name.rstrip("/") for row in re.findall(r"^\| (`.*?) \|", guide, re.MULTILINE)
             for name in re.findall(r"`([^`]+)`", row)}  # fmt: skip
    there = {
        path.name
        for path in (ROOT / "irc").iterdir()
        if path.suffix == ".py" or (path.is_dir() and any(path.iterdir()))
    }
    assert named == there - {*LINKED, "__init__.py", "__main__.py", "__pycache__"}
