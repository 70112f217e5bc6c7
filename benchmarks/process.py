"""Run a command in its own process: seconds, peak memory, output."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Run:
    """One finished process. `peak_mb` is the largest resident set of it and its children, in MB;
    `cpu_seconds` is the time that all its threads computed."""

    seconds: float
    peak_mb: float
    output: str
    cpu_seconds: float


def measure(command: Sequence[str], environment: dict[str, str] | None = None) -> Run:
    """Run `command`; raise with its output if it fails."""
    with tempfile.TemporaryFile() as output:
        start = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | (environment or {})
        )
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        text = output.read().decode(errors="replace")
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{text[-3000:]}")
    cpu = usage.ru_utime + usage.ru_stime
    return Run(seconds, usage.ru_maxrss * 1024 / 1e6, text, cpu)


def python(module: str, *arguments: str | Path) -> list[str]:
    """The command that runs a module with this interpreter."""
    return [sys.executable, "-m", module, *map(str, arguments)]
