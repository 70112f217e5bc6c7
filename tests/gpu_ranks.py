"""Ranks of tests on real GPUs: processes, in which `benchmarks.process` calls `run` of a module."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.process import start_ranks
from irc.backends.cuda.runtime import device_count

SECONDS = 240.0  # in which the ranks end


def needs_gpus(count: int) -> None:
    """Skip the test where there are fewer GPUs."""
    if device_count() < count:
        pytest.skip(f"needs {count} GPUs")


def ran(ranks: int, module: str, folder: Path, *arguments: str) -> tuple[int, str]:
    """(exit status, end of standard error) of ranks of a module, run with a folder and words."""
    with (folder / "err").open("wb") as errors:
        started = start_ranks(ranks, module, str(folder), *arguments, stderr=errors)
        try:
            status = started.wait(SECONDS)
        finally:
            started.kill()
    return status, (folder / "err").read_text()[-3000:]
