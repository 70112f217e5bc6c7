"""Progress, colours, tables."""

import io
import threading
import time

import pytest

from irc.cli.console import Progress, error_line
from irc.report import markdown_table, paint, table


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Progress, "AFTER", 0.05)
    monkeypatch.setattr(Progress, "EVERY", 0.0)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")


def wait_for(stream: io.StringIO, text: str) -> None:
    end = time.monotonic() + 120
    while text not in stream.getvalue():
        assert time.monotonic() < end, stream.getvalue()
        time.sleep(0.005)


def test_a_short_stage_prints_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Progress, "AFTER", 3600.0)
    stream, timers = Terminal(), list[threading.Timer | None]()
    with Progress(stream) as progress:
        for stage in ("reading", "writing"):
            progress(stage, 0.5)
            timers.append(progress.timer)
    for timer in timers:
        assert timer is not None and timer.finished.is_set(), "it was cancelled"
    progress._begin("reading")  # as if it had run before it was cancelled
    assert stream.getvalue() == ""


def test_a_log_has_a_line_per_stage() -> None:
    stream = io.StringIO()
    with Progress(stream) as progress:
        progress("reading")
        wait_for(stream, "reading")
        progress("reading", 0.5)
        progress("writing", 0.25)
        wait_for(stream, "writing")
    assert stream.getvalue() == "irc: reading ...\nirc: writing ... 25%\n"


def test_a_terminal_has_one_line_that_is_overwritten_and_erased() -> None:
    stream = Terminal()
    with Progress(stream) as progress:
        progress("reading")
        wait_for(stream, "reading")
        progress("reading", 0.5)
    assert stream.getvalue() == "\r\033[Kirc: reading ...\r\033[Kirc: reading ... 50%\r\033[K"


def test_the_timer_of_an_earlier_stage_prints_nothing() -> None:
    stream = Terminal()
    with Progress(stream) as progress:
        progress("writing")
        progress._begin("reading")
        assert stream.getvalue() == ""


def test_only_terminals_have_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    assert paint("x", "red", io.StringIO()) == "x"
    assert paint("x", "red", Terminal()) == "\033[31;1mx\033[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert paint("x", "red", Terminal()) == "x"
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert paint("x", "red", Terminal()) == "x"


def test_tables() -> None:
    assert table([("a", "bb"), ("ccc", "d")]) == "a    bb\nccc  d"
    assert table([]) == ""
    assert markdown_table([["a|b", "c"]], ["x", "y"]) == "| x | y |\n| --- | --- |\n| a\\|b | c |"


def test_an_error_line_has_the_word_error_once() -> None:
    assert error_line("a sentence").endswith(" a sentence")
    assert error_line("m.irc:1:2: error: x\n  y") == "m.irc:1:2: error: x\n  y"
