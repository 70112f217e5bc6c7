"""IrcCollective on GPUs: right results, time over bare NCCL, and no rank that hangs on a lost one.

    python -m benchmarks.plugin_collectives [--ranks 4] [--out FOLDER] [--minutes 6] [--phase P]...

An MPI process per GPU calls the plugin as TensorRT does (benchmarks/plugin_host.py): TensorRT
is not needed. Every phase has processes of its own and a deadline. FOLDER gets
plugin_collectives.json, written after every phase, and plugin_collectives.md.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.plugin_ranks import PHASES
from benchmarks.plugin_report import LOSING, markdown, summary
from benchmarks.rank import start_ranks
from irc.backends.cuda.runtime import device_count

# Seconds that a phase may take, and how long a rank lives before it is killed or stopped.
SECONDS = {"check": 90.0, "overhead": 75.0}
OTHERWISE, BEFORE = 50.0, 1.5
AFTER = 15.0  # seconds that the other ranks have once one has failed
SIGNALS = {
    "kill in a graph": signal.SIGKILL,
    "kill on a stream": signal.SIGKILL,
    "kill under a watchdog": signal.SIGKILL,
    "stop in a graph": signal.SIGSTOP,
}


class Phase:
    """The processes of one phase, and their reports by rank."""

    def __init__(self, name: str, ranks: int, seed: int, folder: Path) -> None:
        self.name, self.victim = name, ranks - 1
        processes = 1 if name == "threads" else ranks
        self._files = [folder / f"rank{rank}.jsonl" for rank in range(processes)]
        self.reports: list[list[dict[str, Any]]] = [[] for _ in self._files]
        self.struck: float | None = None
        os.environ["IRC_BENCHMARK_RANKS"] = str(ranks)
        self._launcher = start_ranks(
            processes,
            "benchmarks.plugin_ranks",
            name,
            str(folder),
            str(seed),
            start_new_session=True,
        )

    def run(self, seconds: float) -> dict[str, Any]:
        """Read reports until every rank is done, lost or out of time."""
        begin, strike, failed = time.monotonic(), 0.0, 0.0
        others = [rank for rank in range(len(self._files)) if rank != self.victim]
        losing = self.name.startswith(LOSING)
        while time.monotonic() - begin < seconds:
            ended = self._launcher.poll() is not None
            self.reports = [_read(path) for path in self._files]
            if any(self._has(rank, "failed") for rank in range(len(self._files))):
                failed = failed or time.monotonic()
                seconds = min(seconds, failed - begin + AFTER)
            if ended or (losing and all(self._has(rank, "lost") for rank in others)):
                break
            if self.name in SIGNALS and self.struck is None:
                if not strike and all(self._has(r, "ready") for r in [*others, self.victim]):
                    strike = time.monotonic() + BEFORE
                if strike and time.monotonic() > strike:
                    self._strike()
            time.sleep(0.05)
        expected = others if losing else range(len(self._files))
        key = "lost" if losing else "done"
        late = [r for r in expected if not self._has(r, key) and not self._has(r, "failed")]
        took = time.monotonic() - begin
        self._end()
        return {"phase": self.name, "seconds": took, "late": late, "struck": self.struck}

    def _strike(self) -> None:
        process = next(r["process"] for r in self.reports[self.victim] if "ready" in r)
        self.struck = time.monotonic()
        os.kill(process, SIGNALS[self.name])

    def _end(self) -> None:
        """End all processes: those of a failed run within seconds by themselves."""
        with suppress(subprocess.TimeoutExpired):
            self._launcher.wait(AFTER)
        self._launcher.kill()
        self._launcher.wait()
        for reports in self.reports:
            for process in (each["process"] for each in reports if "process" in each):
                with suppress(OSError):
                    os.kill(process, signal.SIGKILL)

    def _has(self, rank: int, key: str) -> bool:
        return any(key in each for each in self.reports[rank])


def _read(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a rank's reports."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def main(arguments: Sequence[str]) -> int:
    """Run the phases; the status is 0 where all went right."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=0, help="GPUs; default: all of this host")
    parser.add_argument("--out", type=Path, default=Path("."), help="the folder of the results")
    parser.add_argument("--minutes", type=float, default=6.0, help="when to start no new phase")
    parser.add_argument("--phase", action="append", choices=list(PHASES), help="only this one")
    options = parser.parse_args(arguments)
    ranks = options.ranks or device_count()
    if ranks < 2:
        print("this needs two GPUs or more", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    begin, seed = time.monotonic(), secrets.randbelow(1 << 30)
    results: dict[str, Any] = {"ranks": ranks, "seed": seed, "phases": []}
    for name in options.phase or PHASES:
        left = 60 * options.minutes - (time.monotonic() - begin)
        if left < 15:
            results["phases"].append({"phase": name, "skipped": True})
            continue
        with TemporaryDirectory() as folder:
            phase = Phase(name, ranks, seed, Path(folder))
            facts = phase.run(min(left, SECONDS.get(name, OTHERWISE)))
        results["phases"].append({**facts, "reports": phase.reports})
        print(f"{name}: {summary(results['phases'][-1])} ({facts['seconds']:.1f} s)", flush=True)
        save(options.out, results)
    save(options.out, results)
    return any("WRONG" in summary(each) for each in results["phases"])


def save(folder: Path, results: dict[str, Any]) -> None:
    """Write both files."""
    text = json.dumps(results, indent=1)
    (folder / "plugin_collectives.json").write_text(text, encoding="utf-8")
    (folder / "plugin_collectives.md").write_text(markdown(results), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
