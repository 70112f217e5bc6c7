"""Output of commands: colours on a terminal, JSON, tables, and progress on standard error."""

from __future__ import annotations

import json
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any, Self, TextIO

from ..errors import printable
from ..report import Columns, Report, Table, paint


def warn(text: str) -> None:
    """A line on standard error."""
    try:
        print(text, file=sys.stderr, flush=True)
    except BrokenPipeError:
        return  # the reader has gone


def error_line(message: str) -> str:
    """`error: ...`; a message that has `error:` after its place stays as it is."""
    if ": error: " in message.partition("\n")[0]:
        return printable(message)
    return f"{paint('error:', 'red', sys.stderr)} {printable(message)}"


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def answer(args: Namespace, report: Report) -> int:
    """Print a report, as text or with --json; its exit status."""
    for note in report.notes:
        warn(f"note: {note}")
    if args.json:
        print_json(report.facts)
    else:
        for part in filter(None, map(str, report.text)):
            print(part)
    return report.status


def option_lines(title: str, options: Sequence[Mapping[str, Any]]) -> list[str | Table]:
    """A title, and a line per option: its name, what it takes, its default, its flag if any."""
    return [f"\n{title}:", Table(options, _OPTIONS, headings=False)] if options else []


_OPTIONS: Columns = {
    "name": "  {name}",
    "takes": "{takes}",
    "default": lambda row: "required" if row["default"] is None else row["default"],
    "flag": lambda row: row.get("flag") or "",
}


class Progress:
    """Prints stages that take more than a second to a stream, by default standard error.

    Call it with the stage and the fraction done, within a `with`. A terminal gets one line that
    changes, a log one line per stage.
    """

    AFTER, EVERY = 1.0, 0.1

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = sys.stderr if stream is None else stream
        self.tty = self.stream.isatty()
        self.lock = threading.Lock()
        self.stage, self.fraction, self.shown, self.last = "", 0.0, False, 0.0
        self.timer: threading.Timer | None = None

    def __call__(self, stage: str, fraction: float = 0.0) -> None:
        with self.lock:
            if stage != self.stage:
                self._end()
                self.stage = stage
                self.timer = threading.Timer(self.AFTER, self._begin, (stage,))
                self.timer.daemon = True
                self.timer.start()
            self.fraction = fraction
            if self.shown and self.tty and time.monotonic() - self.last > self.EVERY:
                self._draw()

    def _begin(self, stage: str) -> None:
        with self.lock:
            if stage == self.stage:
                self.shown = True
                self._draw()

    def _draw(self) -> None:
        self.last = time.monotonic()
        done = f" {self.fraction:.0%}" if self.fraction else ""
        text = f"irc: {self.stage} ...{done}"
        self.stream.write(f"\r\033[K{text}" if self.tty else f"{text}\n")
        self.stream.flush()

    def _end(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
        if self.shown and self.tty:
            self.stream.write("\r\033[K")
            self.stream.flush()
        self.stage, self.fraction, self.shown, self.timer = "", 0.0, False, None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self._end()
