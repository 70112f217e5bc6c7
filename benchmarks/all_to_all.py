"""All2AllDenseEmbedding against a plain dictionary: a million 64-bit keys, on GPUs.

    python -m benchmarks.all_to_all [--gpus 2] [--keys 1000000]

A process per GPU: ONNX Runtime computes on the CPU, and every collective of the rank programs goes
from GPU to GPU through NCCL. A third of the lookups are of ten hot keys, a tenth of keys without a
row.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import irc
from benchmarks.key_tables import Array, asked, bound, drawn, layer_for, looked_up, spread
from benchmarks.process import run_ranks
from irc.backends.cuda.driver import Driver
from irc.backends.cuda.group import Group, nccl_version, open_group
from irc.backends.ranks.communicator import CollectiveCall, Communicator
from irc.frontends.layers import Table
from irc.ir.core import Module
from irc.ir.dtypes import dtype_of
from irc.report import markdown_table

WIDTH, HOT = 8, 10
MEETING = 60.0  # seconds: the first processes on a machine start slowly
SCHEMES = {  # rows of the table: options of rewrite-embeddings
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


def on_gpus(count: int, gpus: int) -> tuple[str, list[Sequence[Any]]]:
    """(the GPUs, rows of the table), by processes that exchange through NCCL."""
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
        run_ranks(gpus, "benchmarks.all_to_all", folder)
        found = json.loads((base / "found.json").read_text())
    return found["about"], [(name, *row) for name, row in zip(SCHEMES, found["rows"], strict=True)]


class NcclCommunicator:
    """A communicator whose collectives go from GPU to GPU; all else is done by another one.

    `calls`, `bytes` and `seconds` (of NCCL alone, without copies to and from the GPU) add up.
    """

    def __init__(self, host: Communicator, driver: Driver, **options: Any) -> None:
        self._host, self._driver, self._options = host, driver, options
        self._stream, self._groups = driver.stream(), dict[tuple[int, ...], Group]()
        self.rank, self.ranks = host.rank, host.ranks
        self.reset()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)

    def reset(self) -> None:
        """Count from zero."""
        self.calls, self.bytes, self.seconds = 0, 0, 0.0

    def collective(self, call: CollectiveCall, operand: np.ndarray, result: np.ndarray) -> None:
        """One collective: to the GPU, through NCCL, and back."""
        group, stream, driver = self._group(call.group), self._stream, self._driver
        source, target = (driver.allocate(max(1, x.nbytes)) for x in (operand, result))
        bound = (dtype_of(operand), operand.size, call.reduce_op, call.root)
        launch = group.bind(call.operation, *bound)
        stream.upload(source, np.ascontiguousarray(operand))
        stream.wait("the upload")
        begin = time.perf_counter()
        launch(source, target, stream.handle)
        stream.wait(call.operation)
        self.seconds += time.perf_counter() - begin
        stream.download(result, target)
        stream.wait("the download")
        for address in (source, target):
            driver.free(address)
        self.calls, self.bytes = self.calls + 1, self.bytes + operand.nbytes + result.nbytes

    def close(self) -> None:
        """Close the groups; the other communicator stays open."""
        for group in self._groups.values():
            group.close()

    def _group(self, ranks: tuple[int, ...]) -> Group:
        if ranks not in self._groups:
            options = {"meeting": MEETING, "label": "benchmark"} | self._options
            self._groups[ranks] = open_group(self._host, ranks, self._driver, **options)
        return self._groups[ranks]


def run(host: Communicator, arguments: Sequence[str]) -> None:
    """Run the program of every scheme; rank 0 writes found.json."""
    from irc.backends.cuda.device import CudaDriver

    folder = Path(*arguments)
    driver = CudaDriver(host.local_rank)
    about = f"{host.ranks} x {driver.gpu.name}, NCCL {nccl_version()}"
    rows = compare(NcclCommunicator(host, driver), folder)
    if not host.rank:
        (folder / "found.json").write_text(json.dumps({"about": about, "rows": rows}))


def compare(communicator: NcclCommunicator, folder: Path) -> list[list[Any]]:
    """Per scheme whether its rows are those of the dictionary, and what its collectives took."""
    asked = np.load(folder / "asked.npz")
    found: list[list[Any]] = []
    for number in range(len(SCHEMES)):
        artifact = irc.load(folder / f"{number}", communicator=communicator)
        artifact.run({"keys": asked["keys"]})  # NCCL connects GPUs at the first call
        communicator.reset()
        rows = artifact.run({"keys": asked["keys"]})["result0"]
        size, spent = communicator.bytes / 1e6, communicator.seconds * 1e3
        same = same_bits(rows, asked["wanted"])
        found.append([same, communicator.calls, f"{size:.1f}", f"{spent:.2f}"])
    communicator.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--keys", type=int, default=10**6)
    parser.add_argument("--gpus", type=int, default=2)
    options = parser.parse_args()
    about, rows = on_gpus(options.keys, options.gpus)
    print(f"{about}; {options.keys} keys.\n")
    head = ("scheme", "rows", "collectives over NCCL", "MB sent and received", "ms in NCCL")
    print(markdown_table([[str(cell) for cell in row] for row in rows], head))
    if any(row[1] != "equal" for row in rows):
        raise SystemExit("the rows are not those of the dictionary")


if __name__ == "__main__":
    main()
