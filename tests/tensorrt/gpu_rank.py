"""One rank of an artifact on a real GPU, whose engine numpy computes: a process of its own.

    python -m tests.tensorrt.gpu_rank FOLDER RANK

NCCL does not bear several GPUs in one process where memory is allocated while another one waits.
What the rank generates goes into FOLDER/tokens{RANK}.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from irc.backends.cuda.runtime import use_device
from irc.backends.processes.meeting import Address, meet
from irc.backends.tensorrt.runtime import gpu, load
from irc.backends.tensorrt.runtime.gpu import GpuDriver, GpuGroup, GpuStream
from irc.dtypes import numpy_dtype
from tests.tensorrt.runtime_engine import MARK, Context, Engine, Library
from tests.tensorrt.runtime_gpu import Array

FACTS = "facts.json"


class Memory:
    """A GPU's memory for an engine of numpy, which waits for every copy."""

    def __init__(self, stream: GpuStream) -> None:
        self._stream = stream

    def read(self, address: int, shape: Sequence[int], dtype: str) -> Array:
        array = np.empty(tuple(shape), numpy_dtype(dtype))
        self._stream.download(array, address)
        self._stream.wait()
        return array

    def write(self, address: int, array: Array, dtype: str) -> None:
        host = np.ascontiguousarray(array.astype(numpy_dtype(dtype), copy=False))
        self._stream.upload(address, host)
        self._stream.wait()


class Meeting:
    """A group in which numpy arrays are gathered over NCCL."""

    def __init__(self, driver: HalfDriver, group: GpuGroup) -> None:
        self._driver, self._group = driver, group
        self.rank, self.ranks = group.rank, group.ranks

    def meet(self, item: Array) -> list[Array]:
        array = np.ascontiguousarray(item)
        driver, stream = self._driver, self._driver.own
        source = driver.allocate(max(1, array.nbytes))
        target = driver.allocate(max(1, array.nbytes * self.ranks))
        every = np.empty((self.ranks, *array.shape), array.dtype)
        stream.upload(source, array)
        self._group.bind("all_gather", "u8", array.nbytes)(source, target, stream.handle)
        stream.download(every, target)
        stream.wait()
        for address in (source, target):
            driver.free(address)
        return list(every)


class HalfDriver(GpuDriver):
    """A real GPU, whose engines numpy computes."""

    def __init__(self, library: Library, number: int) -> None:
        super().__init__("tensorrt-rtx", number, 10.0)
        self._artifact, self.number = library, number
        self.gpu = gpu.Gpu(self.gpu.name, 89, self.gpu.identity, self.gpu.memory)
        self.own = self.stream()
        self.memory = Memory(self.own)
        self.registered: dict[str, Meeting] = {}
        self.contexts: list[Context] = []
        self.can_capture, self.can_bind, self.skew = False, True, 0.0

    def engine(self, path: Path) -> Any:
        own = json.loads(path.read_bytes().partition(MARK)[2])
        names = {entry["engine"]: entry["stage"] for entry in self._artifact.facts["ranks"]}
        engine: Any = HalfEngine(self, self._artifact, names[path.name], own)  # type: ignore[arg-type]
        return engine

    def register(self, key: str, rank: int, group: Any) -> None:
        self.registered[key] = Meeting(self, group)


class HalfEngine(Engine):
    """Its context runs at once, where the GPU has come to it."""

    def context(self, profile: int, stream: Any) -> Any:
        return HalfContext(self, profile)


class HalfContext(Context):
    """See HalfEngine."""

    def enqueue(self, stream: Any) -> None:
        def now(work: Callable[[], None]) -> None:
            stream.wait()
            work()

        super().enqueue(SimpleNamespace(calls=[], enqueue=now))  # type: ignore[arg-type]


def main() -> None:
    """Generate on one rank."""
    from tests.tensorrt.test_runtime import continued

    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    facts: dict[str, Any] = json.loads((folder / FACTS).read_text())
    ranks = len(facts["ranks"])
    gpu.find = lambda flavour: SimpleNamespace(version="1.7.1.116")  # type: ignore[assignment]
    use_device(rank)
    host = meet(Address.of(), rank, ranks) if ranks > 1 else None
    library = Library(folder, facts)
    program: Any = load(
        folder,
        facts,
        communicator=host,
        device=rank,
        driver=lambda number: HalfDriver(library, number),
    )
    tokens = continued(program, facts).tokens
    (folder / f"tokens{rank}.json").write_text(json.dumps(tokens))
    program.close()
    library.close()
    if host is not None:
        host.close()


if __name__ == "__main__":
    main()
