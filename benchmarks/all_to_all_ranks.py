"""What one rank does in benchmarks/all_to_all.py: rank programs whose collectives are NCCL's."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import irc
from benchmarks.all_to_all import SCHEMES, same_bits
from irc.backends.cuda.driver import Driver
from irc.backends.cuda.group import Group, nccl_version, open_group
from irc.backends.ranks.communicator import CollectiveCall, Communicator
from irc.ir.dtypes import dtype_of

MEETING = 60.0  # seconds: the first processes on a machine start slowly


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
