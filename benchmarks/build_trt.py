"""Checkpoint folder to TensorRT-RTX engine, without a GPU: seconds and peak memory.

    python -m benchmarks.build_trt [--work FOLDER] [--cases 1b-inside 8b-outside] [--batch 4]

Memory is that of `irc compile` and of the builder's process together, looked at 50 times a second:
`resident` counts what the system may drop (mapped checkpoints) too, `anonymous` does not.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.checkpoints import make
from benchmarks.process import python
from irc.report import markdown_table

CASES = {
    "1b-inside": ("1b", "inside"),
    "1b-outside": ("1b", "outside"),
    "8b-outside": ("8b", "outside"),
}
EVERY = 0.02  # seconds between samples
HEADER = (
    "shape",
    "weights",
    "engines",
    "seconds",
    "of them building",
    "resident GB",
    "anonymous GB",
    "anonymous / weights",
)


@dataclass(frozen=True)
class Measured:
    """One compilation; peak memory of all its processes together, in bytes."""

    seconds: float
    building: float
    resident: int
    anonymous: int
    engines: int


def compile_engine(source: Path, out: Path, weights: str, *flags: str) -> Measured:
    """One `irc compile` into an empty folder, without the engine cache."""
    shutil.rmtree(out, ignore_errors=True)
    command = python("irc", "compile", source, "-o", out, "--backend", "tensorrt-rtx")
    command += ["--weights", weights, "--no-cache", *flags]
    with tempfile.TemporaryFile() as output:
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        resident, anonymous, building = _watch(process)
        seconds = time.perf_counter() - began
        output.seek(0)
        text = output.read().decode(errors="replace")
    if process.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{text[-3000:]}")
    engines = sum(path.stat().st_size for path in out.glob("*.engine"))
    return Measured(seconds, building, resident, anonymous, engines)


def _watch(process: subprocess.Popen[bytes]) -> tuple[int, int, float]:
    """Peak memory of a process and its children, and how long it ran, in seconds."""
    resident = anonymous = 0
    building, before = 0.0, time.perf_counter()
    while process.poll() is None:
        family = _family(process.pid)
        sizes = [_memory(pid) for pid in family]
        resident = max(resident, sum(size for size, _ in sizes))
        anonymous = max(anonymous, sum(size for _, size in sizes))
        time.sleep(EVERY)
        now = time.perf_counter()
        building += (now - before) * (len(family) > 1)
        before = now
    return resident, anonymous, building


def _family(pid: int) -> list[int]:
    try:
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return [pid]
    return [pid, *(each for child in found for each in _family(int(child)))]


def _memory(pid: int) -> tuple[int, int]:
    """(resident, anonymous) bytes of a process; zeros after it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0, 0
    sizes = dict(line.split(":", 1) for line in lines if line.startswith("Rss") or "VmRSS" in line)
    return tuple(int(sizes.get(key, "0").split()[0]) << 10 for key in ("VmRSS", "RssAnon"))  # type: ignore[return-value]


def row(case: str, size: int, measured: Measured) -> list[str]:
    """One row of the table."""
    shape, weights = CASES[case]
    return [
        f"{shape} bf16, {size / 1e9:.2f} GB",
        weights,
        f"{measured.engines / 1e6:.1f} MB",
        f"{measured.seconds:.1f}",
        f"{measured.building:.1f}",
        f"{measured.resident / 1e9:.2f}",
        f"{measured.anonymous / 1e9:.2f}",
        f"{measured.anonymous / size:.2f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("build/benchmarks"))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["1b-inside", "8b-outside"])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--target", default="tensorrt-rtx-1.7/sm_80+sm_86+sm_89+sm_120")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead")
    options = parser.parse_args()
    work = options.work.resolve()
    dims = f"B=1:1:{options.batch},S=1:512:2048,T=1:1:2048"
    flags = ["--dtype", "bf16", "--dims", dims, "--target", options.target]
    rows: list[list[str]] = []
    for case in options.cases:
        shape, weights = CASES[case]
        checkpoint = make(shape, work / f"{shape}-bf16", "bf16")
        size = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
        measured = compile_engine(checkpoint, work / "engine", weights, *flags)
        rows.append(row(case, size, measured))
    if options.json:
        print(json.dumps([dict(zip(HEADER, each, strict=True)) for each in rows], indent=2))
        return
    print(f"{os.cpu_count()} cores, {options.target}")
    print(markdown_table(rows, HEADER))


if __name__ == "__main__":
    main()
