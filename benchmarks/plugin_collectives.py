"""IrcCollective on GPUs: right, as fast as bare NCCL, and never hanging on a lost rank.

    python -m benchmarks.plugin_collectives [--ranks 4] [--out FOLDER] [--minutes 6] [--phase P]...

A process per GPU plays TensorRT (benchmarks/plays_tensorrt.py): no TensorRT is needed. Every phase
has processes of its own and a deadline. FOLDER gets plugin_collectives.json, written after every
phase, and plugin_collectives.md.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

from benchmarks.plugin_gpu import BARE, Job
from benchmarks.plugin_ranks import PHASES, work
from benchmarks.plugin_report import markdown, verdict
from irc.backends.cuda.group import unique_id
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


def families(ranks: int) -> dict[str, list[tuple[int, ...]]]:
    """Label -> groups of ranks, apart from each other."""
    everybody = tuple(range(ranks))
    found = {"tp": [everybody]}
    if ranks >= 4 and ranks % 2 == 0:
        half = ranks // 2
        found["near"] = [everybody[:half], everybody[half:]]
        found["far"] = [everybody[0::2], everybody[1::2]]
    return found


def named(phase: str, ranks: int) -> dict[str, tuple[tuple[int, ...], bytes]]:
    """The groups of a phase, each with a new name."""
    everybody = tuple(range(ranks))
    wanted = families(ranks) if phase in ("check", "threads") else {"tp": [everybody]}
    wanted |= {BARE: [everybody]} if phase == "overhead" else {}
    return {
        f"{label}/{number}": (members, unique_id())
        for label, groups in wanted.items()
        for number, members in enumerate(groups)
    }


class Phase:
    """The processes of one phase, and what they say."""

    def __init__(self, name: str, ranks: int, seed: int) -> None:
        self.name, self.said = name, [[] for _ in range(1 if name == "threads" else ranks)]
        self.victim = ranks - 1
        self.struck: float | None = None
        context, groups = get_context("spawn"), named(name, ranks)
        self.ends: list[Any] = []
        self.workers: list[Any] = []
        for rank in range(len(self.said)):
            ours, theirs = context.Pipe()
            job = Job(name, rank, ranks, groups, seed, self.victim)
            worker = context.Process(target=work, args=(job, theirs), daemon=True)
            worker.start()
            theirs.close()
            self.ends.append(ours)
            self.workers.append(worker)

    def run(self, seconds: float) -> dict[str, Any]:
        """Listen until every rank is done, gone or out of time."""
        begin, strike, failed = time.monotonic(), None, 0.0
        open_ends = dict(enumerate(self.ends))
        while open_ends and time.monotonic() - begin < seconds:
            for end in connection.wait(list(open_ends.values()), timeout=0.2):
                rank = self.ends.index(end)
                try:
                    self.said[rank].append(self.ends[rank].recv())
                except (EOFError, OSError):
                    del open_ends[rank]
            if any("failed" in each for said in self.said for each in said):
                failed = failed or time.monotonic()
                seconds = min(seconds, failed - begin + AFTER)
            if self.name in SIGNALS and strike is None and self._all("ready"):
                strike = time.monotonic() + BEFORE
            if strike is not None and self.struck is None and time.monotonic() > strike:
                self.struck = time.monotonic()
                os.kill(self.workers[self.victim].pid, SIGNALS[self.name])
            if self.name in SIGNALS and self._all("lost", but=self.victim):
                break
        late = [rank for rank in open_ends if not self._has(rank, "done")]
        for worker in self.workers:
            worker.kill()
            worker.join(5)
        if self.name in SIGNALS:
            late = [rank for rank in late if rank != self.victim and not self._has(rank, "lost")]
        took = time.monotonic() - begin
        return {"phase": self.name, "seconds": took, "late": late, "struck": self.struck}

    def _has(self, rank: int, key: str) -> bool:
        return any(key in each or "failed" in each for each in self.said[rank])

    def _all(self, key: str, but: int = -1) -> bool:
        return all(self._has(rank, key) for rank in range(len(self.said)) if rank != but)


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
        phase = Phase(name, ranks, seed)
        facts = {**phase.run(min(left, SECONDS.get(name, OTHERWISE))), "said": phase.said}
        results["phases"].append(facts)
        print(f"{name}: {verdict(facts)} ({facts['seconds']:.1f} s)", flush=True)
        save(options.out, results)
    save(options.out, results)
    return any("WRONG" in verdict(each) for each in results["phases"])


def save(folder: Path, results: dict[str, Any]) -> None:
    """Write both files."""
    text = json.dumps(results, indent=1)
    (folder / "plugin_collectives.json").write_text(text, encoding="utf-8")
    (folder / "plugin_collectives.md").write_text(markdown(results), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
