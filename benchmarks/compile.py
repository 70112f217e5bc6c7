"""Checkpoint folder to artifact folder: seconds and peak memory, compared with peers.

    python -m benchmarks.compile [--work FOLDER] [--repeat 3] [--skip-peers] [--shapes 1b 8b]

Every tool is a process of its own, import and start-up included. Peers run once at 1B in f32.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from statistics import median

from benchmarks.checkpoints import make
from benchmarks.process import Run, measure, python

GENAI = "onnxruntime-genai builder"
EXPORT = "torch.onnx.export(dynamo=True)"
PARTS = "tp=4"
MOST_MB = 500  # limit for a compilation to several ranks, for any shape


def irc_run(checkpoint: Path, out: Path, *flags: str) -> Run:
    """One `irc compile` into an empty folder."""
    shutil.rmtree(out, ignore_errors=True)
    return measure(python("irc", "compile", checkpoint, "-o", out, *flags))


def irc_rows(checkpoint: Path, work: Path, label: str, repeat: int) -> list[tuple[str, Run]]:
    """The median of several runs by reference; one run bundled and one sharded, which write."""
    runs = [irc_run(checkpoint, work / "irc") for _ in range(repeat)]
    middle = median(r.seconds for r in runs)
    by_reference = min(runs, key=lambda r: abs(r.seconds - middle))
    bundled = irc_run(checkpoint, work / "irc-bundle", "--bundle")
    shutil.rmtree(work / "irc-bundle")
    parts = irc_run(checkpoint, work / "irc-parts", "--mesh", PARTS)
    shutil.rmtree(work / "irc-parts")
    return [
        (f"irc {label}", by_reference),
        (f"irc {label} --bundle", bundled),
        (f"irc {label} --mesh {PARTS}", parts),
    ]


def genai(
    checkpoint: Path,
    out: Path,
    precision: str = "fp32",
    *flags: str,
    interpreter: str = sys.executable,
) -> Run:
    """The onnxruntime-genai model builder for CPU."""
    shutil.rmtree(out, ignore_errors=True)
    words = ["-m", checkpoint, "-o", out, "-p", precision, "-e", "cpu"]
    words += ["-c", out.parent / "genai-cache", *flags]
    return measure(python("onnxruntime_genai.models.builder", *words, interpreter=interpreter))


def export(checkpoint: Path, work: Path) -> Run:
    """torch.onnx.export with caches as inputs and outputs."""
    out = work / "torch"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    run = measure(python("benchmarks.peers.torch_export", checkpoint, out / "model.onnx"))
    shutil.rmtree(out)
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("build/benchmarks"))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--skip-peers", action="store_true")
    parser.add_argument("--shapes", nargs="+", choices=("tiny", "1b", "8b"), default=["1b", "8b"])
    options = parser.parse_args()
    work = options.work.resolve()
    rows: list[tuple[str, Run]] = []
    for shape in options.shapes:
        dtype = "bf16" if shape == "8b" else "f32"
        checkpoint = make(shape, work / f"{shape}-{dtype}", dtype)
        rows += irc_rows(checkpoint, work, f"{shape} {dtype}", options.repeat)
        if shape == "8b" or options.skip_peers:
            continue
        rows.append((f"{GENAI} {shape} f32", genai(checkpoint, work / "genai")))
        rows.append((f"{EXPORT} {shape} f32", export(checkpoint, work)))
    print(f"{'':44s}{'seconds':>9s}{'peak MB':>9s}")
    for name, run in rows:
        print(f"{name:44s}{run.seconds:9.2f}{run.peak_mb:9.0f}")
    for name, run in rows:
        if name.endswith(PARTS) and run.peak_mb > MOST_MB:
            raise SystemExit(f"{name} takes more than {MOST_MB} MB")
    if not options.skip_peers:
        irc = next(run for name, run in rows if name.startswith("irc"))
        peer = min(
            (run for name, run in rows if not name.startswith("irc")), key=lambda r: r.seconds
        )
        print(f"irc is {peer.seconds / irc.seconds:.0f}x faster than the faster peer")


if __name__ == "__main__":
    main()
