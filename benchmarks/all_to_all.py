"""All2AllDenseEmbedding against a plain dictionary: a million 64-bit keys, on CPU and over NCCL.

    python -m benchmarks.all_to_all [--keys 1000000] [--ranks 1,2,3,4,5,6,7,8] [--out FOLDER]
    python -m benchmarks.all_to_all --gpus 2 [--keys 1000000] [--out FOLDER]

The first evaluates the rank programs in numpy. The second starts a process per GPU: ONNX Runtime
computes on the CPU, and every collective of the rank programs goes from GPU to GPU through NCCL.
A third of the lookups are of ten hot keys, a tenth of keys without a row. FOLDER gets
all_to_all_cpu.md or all_to_all_gpu.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import irc
from benchmarks.key_tables import Array, asked, bound, drawn, layer_for, looked_up, spread
from benchmarks.rank import start_ranks
from irc.frontends.layers import Table
from irc.ir.core import Module

WIDTH, HOT, SECONDS = 8, 10, 400.0
SCHEMES = {  # rows of the second table: options of rewrite-embeddings
    "KD": "scheme=kd",
    "CD": "scheme=cd",
    "RSD": "scheme=rsd",
    "KD, capacity, hot rows": f"scheme=kd, capacity=%d, hot={HOT}",
}


def made(count: int, rng: np.random.Generator) -> tuple[Table, Array, Array]:
    """(a table of random keys, how often they occur, as many keys to look up)."""
    table = drawn(rng, count, WIDTH)
    counts = np.zeros(count, np.int64)
    counts[:HOT] = 1 + np.arange(HOT)
    return table, counts, asked(rng, table, count, HOT)


def module(table: Table, counts: Array, ranks: int, options: str, folder: Path) -> Module:
    """The layer for a table over data-parallel ranks, in the local view."""
    layer = layer_for(table, ranks, by_frequency=True)
    most = len(table.keys) // ranks * ranks
    found = bound(layer, layer.arrays(table, counts), folder, most=most)
    return spread(found, ranks, options)


def same_bits(found: Array, wanted: Array) -> str:
    """`equal`, or how many rows differ. Sums make +0.0 of -0.0."""
    zero = np.float32(0)
    differ = ((found + zero).view(np.uint32) != (wanted + zero).view(np.uint32)).any(-1)
    return "equal" if not differ.any() else f"WRONG: {differ.sum()} rows differ"


def on_cpu(count: int, ranks: Iterable[int]) -> list[Sequence[Any]]:
    """Rows of the first table."""
    table, counts, keys = made(count, np.random.default_rng(1))
    found: list[Sequence[Any]] = []
    for group_size in ranks:
        given = keys[: count // group_size * group_size]
        with TemporaryDirectory() as folder:
            program = module(table, counts, group_size, "scheme=kd", Path(folder))
            begin = time.perf_counter()
            rows = irc.evaluate(program, {"keys": given})["result0"]
        seconds = time.perf_counter() - begin
        found.append(
            (group_size, len(given), same_bits(rows, looked_up(table, given)), f"{seconds:.1f}")
        )
        print(*found[-1], flush=True)
    return found


def on_gpus(count: int, gpus: int) -> tuple[str, list[Sequence[Any]]]:
    """(the GPUs, rows of the second table), by processes that exchange through NCCL."""
    table, counts, keys = made(count, np.random.default_rng(1))
    keys = keys[: count // gpus * gpus]
    capacity = 4 * len(keys) // gpus**2 // 5  # too little but for the cold keys
    with TemporaryDirectory() as folder:
        base = Path(folder)
        for number, options in enumerate(SCHEMES.values()):
            options = options % capacity if "%d" in options else options
            program = module(table, counts, gpus, options, base)
            irc.compile(program, base / f"{number}")
        np.savez(base / "asked.npz", keys=keys, wanted=looked_up(table, keys))
        status = start_ranks(gpus, "benchmarks.all_to_all_ranks", folder).wait(SECONDS)
        if status or not (base / "found.json").is_file():
            raise SystemExit(f"the ranks ended with status {status}")
        found = json.loads((base / "found.json").read_text())
    return found["about"], [(name, *row) for name, row in zip(SCHEMES, found["rows"], strict=True)]


def table_text(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Compare, print and write; the status is 0 where all rows are equal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--keys", type=int, default=10**6)
    parser.add_argument("--ranks", default="1,2,3,4,5,6,7,8")
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--out", type=Path, help="the folder of the table")
    options = parser.parse_args(arguments)
    if options.gpus:
        about, rows = on_gpus(options.keys, options.gpus)
        head = ("scheme", "rows", "collectives over NCCL", "MB sent and received", "ms in NCCL")
        text, name = f"{about}; {options.keys} keys.\n\n" + table_text(head, rows), "gpu"
    else:
        rows = on_cpu(options.keys, map(int, options.ranks.split(",")))
        text, name = table_text(("ranks", "lookups", "rows", "seconds in numpy"), rows), "cpu"
    print(text)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / f"all_to_all_{name}.md").write_text(text)
    return int("WRONG" in text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
