"""Collects tests/passes/*.irc: modules with a pipeline and the expected result.

A file holds cases, separated by lines `// -----`. Each begins with `// RUN: --passes '...'` and a
module, and ends in one of
    // EXPECT            and the exact module below it; `pytest --update` writes it
    // CHECK: text       lines of the output that hold the texts in this order;
    // CHECK-NOT: text   a text that no line of the output has
    // ERROR: text       the Error the pipeline ends in
The module is evaluated before and after every pass too, unless the case has a line
`// NUMERICS: off (reason)`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import irc.passes
from irc.backends.reference import evaluate
from irc.errors import Error
from irc.pipeline import run_pipeline
from irc.pipeline.instruments import CheckNumerics, Instrument, VerifyEach
from irc.text import parse_module

assert irc.passes  # importing it registers the passes

CUT = "// -----\n"
EXPECT = "// EXPECT\n"
DIRECTIVE = re.compile(r"^// (RUN|CHECK|CHECK-NOT|ERROR|NUMERICS): *(.*)$", re.MULTILINE)


def pytest_collect_file(parent: pytest.Collector, file_path: Path) -> pytest.Collector | None:
    if file_path.suffix == ".irc":
        return IrcFile.from_parent(parent, path=file_path)
    return None


class IrcFile(pytest.File):
    def collect(self) -> Iterator[pytest.Item]:
        for index, text in enumerate(self.path.read_text(encoding="utf-8").split(CUT)):
            name = re.search(r"^module @([\w.]+)", text, re.MULTILINE)
            assert name is not None, f"{self.path}: case {index} has no module"
            yield IrcCase.from_parent(self, name=name[1], index=index, text=text)


class IrcCase(pytest.Item):
    def __init__(self, *, index: int, text: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.index, self.text = index, text

    def runtest(self) -> None:
        directives = DIRECTIVE.findall(self.text)
        source, expects, expected = self.text.partition(EXPECT)
        checks = [d for d in directives if d[0] in ("CHECK", "CHECK-NOT")]
        errors = [text for kind, text in directives if kind == "ERROR"]
        if not (expects or checks or errors):
            raise Mismatch("the case expects nothing: give it EXPECT, CHECK or ERROR")
        numerics = not any(kind == "NUMERICS" for kind, _ in directives)
        passes = pipeline_of(directives)
        if errors:
            self.check_error(source, passes, errors[0])
            return
        output = transformed(source, passes, numerics)
        if checks:
            check_lines(output, checks)
        if expects and output != expected:
            self.differ(source, expected, output)

    def check_error(self, source: str, passes: str, wanted: str) -> None:
        try:
            transformed(source, passes, numerics=False)
        except Error as error:
            if wanted not in str(error):
                raise Mismatch(f"expected an Error with {wanted!r}, not\n{error}") from error
            return
        raise Mismatch(f"expected an Error with {wanted!r}, but there was none")

    def differ(self, source: str, expected: str, output: str) -> None:
        if not self.config.getoption("--update"):
            raise Mismatch(f"expected\n{expected}\nfound\n{output}")
        cases = self.path.read_text(encoding="utf-8").split(CUT)
        cases[self.index] = source + EXPECT + output
        self.path.write_text(CUT.join(cases), encoding="utf-8")

    def repr_failure(self, excinfo: Any, style: Any = None) -> Any:
        if isinstance(excinfo.value, (Mismatch, Error)):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, self.index, f"{self.path.name}: {self.name}"


class Mismatch(Exception):
    """The output is not what the case expects."""


def pipeline_of(directives: list[tuple[str, str]]) -> str:
    """The text after --passes in the RUN line."""
    runs = [shlex.split(text) for kind, text in directives if kind == "RUN"]
    if len(runs) != 1 or len(runs[0]) != 2 or runs[0][0] != "--passes":
        raise Mismatch("a case has one line // RUN: --passes '...'")
    return runs[0][1]


def transformed(source: str, passes: str, numerics: bool) -> str:
    """The module after the pipeline, as text."""
    module = parse_module(source)
    instruments: list[Instrument] = [VerifyEach()]
    if numerics:
        instruments.append(CheckNumerics(lambda module, inputs: evaluate(module, inputs)))
    run_pipeline(module, passes, instruments)
    return str(module)


def check_lines(output: str, checks: list[tuple[str, str]]) -> None:
    """Every CHECK text in order, one line each; no line with a CHECK-NOT text."""
    lines = [" ".join(line.split()) for line in output.splitlines()]
    left = iter(lines)
    for kind, text in checks:
        wanted = " ".join(text.split())
        if kind == "CHECK" and not any(wanted in line for line in left):
            raise Mismatch(f"no line, after those of earlier checks, holds {wanted!r} in\n{output}")
        if kind == "CHECK-NOT" and any(wanted in line for line in lines):
            raise Mismatch(f"a line holds {wanted!r} in\n{output}")
