"""Reports: what a command answers, from which both its text and its JSON derive."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any, TextIO, TypeAlias

from .analysis.units import amount

Row: TypeAlias = Mapping[str, Any]
Columns: TypeAlias = Mapping[str, str | Callable[[Any], str]]
_STYLES = {"red": "31;1", "green": "32", "yellow": "33", "dim": "2", "bold": "1"}


class _Units(Formatter):
    """Formats with two more units: `{size:bytes}` and `{seconds:ms}`, of seconds."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec == "bytes":
            return amount(value)
        if format_spec == "ms":
            return f"{value * 1e3:.1f} ms"
        return super().format_field(value, format_spec)


_UNITS = _Units()


@dataclass(frozen=True)
class Table:
    """Rows of facts by name, and what each column shows of a row.

    `columns` are headings, each with a format, `{size:bytes} of {name}`, or a function of the row;
    without `headings` they are not printed.
    """

    rows: Sequence[Row]
    columns: Columns
    headings: bool = True

    def cells(self) -> list[list[str]]:
        """The text of every cell."""
        return [
            [
                _UNITS.vformat(column, (), row) if isinstance(column, str) else column(row)
                for column in self.columns.values()
            ]
            for row in self.rows
        ]

    def __str__(self) -> str:
        return table(self.cells(), [*self.columns] if self.headings else ())


@dataclass(frozen=True)
class Report:
    """What a command answers: the facts, for programs, and the lines and tables about them.

    `notes` are for standard error.
    """

    facts: Any
    text: Sequence[str | Table] = ()
    status: int = 0
    notes: Sequence[str] = ()


def coloured(stream: TextIO) -> bool:
    """Whether a stream is a terminal that shows colours, or leads to one (FORCE_COLOR)."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return stream.isatty() or bool(os.environ.get("FORCE_COLOR"))


def paint(text: str, style: str, stream: TextIO | None = None) -> str:
    """`text` in a colour if the stream (standard output) shows colours."""
    if not coloured(sys.stdout if stream is None else stream):
        return text
    return f"\033[{_STYLES[style]}m{text}\033[0m"


def table(
    rows: Iterable[Sequence[str]], header: Sequence[str] = (), numbers_right: bool = False
) -> str:
    """Rows as columns of equal width, two spaces between them; numbers perhaps to the right."""
    lines = [list(header)] * bool(header) + [list(row) for row in rows]
    if not lines:
        return ""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    columns = zip(*lines, strict=True)
    numeric = [numbers_right and all(c[:1].isdigit() or not c for c in cells) for cells in columns]
    formats = [f"{'>' if right else '<'}{w}" for w, right in zip(widths, numeric, strict=True)]
    padded = [[f"{cell:{f}}" for cell, f in zip(line, formats, strict=True)] for line in lines]
    return "\n".join("  ".join(line).rstrip() for line in padded)


def markdown_table(rows: Iterable[Sequence[str]], header: Sequence[str]) -> str:
    """Rows as a Markdown table."""
    cells = [[cell.replace("|", r"\|") for cell in row] for row in rows]
    lines = [header, ["---"] * len(header), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
