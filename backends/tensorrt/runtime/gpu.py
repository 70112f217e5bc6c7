"""The GPU of one rank, with the library that runs its engines, and its NCCL groups."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from irc.backends.cuda.calls import Library as Nccl
from irc.backends.cuda.driver import Driver
from irc.backends.cuda.group import TIMEOUT, Group, open_group
from irc.backends.cuda.runtime import device_count
from irc.backends.cuda.watch import watched
from irc.backends.ranks.communicator import Communicator
from irc.backends.tensorrt.builder.library import Library, find
from irc.backends.tensorrt.plugins import communicators
from irc.backends.tensorrt.target import Flavour
from irc.errors import Error


class EngineGpu:
    """One GPU, TensorRT or TensorRT-RTX, and NCCL.

    `timeout`: seconds that work with collectives may take. `nccl` replaces the NCCL library.
    """

    def __init__(
        self, driver: Driver, library: Library, timeout: float = TIMEOUT, nccl: Nccl | None = None
    ) -> None:
        self.driver, self.library = driver, library
        self._timeout, self._nccl = timeout, nccl

    def group(self, host: Communicator, ranks: Sequence[int], label: str) -> Group:
        """The group of these ranks; all of them call this at once. `label` names it in errors."""
        options = {"label": label, "timeout": self._timeout, "meeting": self._timeout + 1}
        return open_group(host, ranks, self.driver, library=self._nccl, **options)

    def during(self, what: str, seconds: float | None = None) -> AbstractContextManager[None]:
        """Inside, a lost rank ends calls of the library that block; see watched."""
        groups = self.driver.groups
        return watched(groups, what, seconds) if groups else nullcontext()

    def close(self) -> None:
        """Forget the groups, which their ranks close together."""
        self.driver.groups.clear()
        communicators.clear()


def open_gpu(flavour: Flavour, local_rank: int, timeout: float = TIMEOUT) -> EngineGpu:
    """The GPU with the number of a local rank; 0 where the process sees a single GPU."""
    from irc.backends.cuda.device import CudaDriver

    library = find(flavour)
    count = device_count()
    if not count:
        raise Error(
            "the NVIDIA driver finds no GPU here, and engines need one. The same artifact compiled "
            "with --backend onnx runs on CPU"
        )
    index = 0 if count == 1 else local_rank  # Slurm may show every process only its own
    if index >= count:
        raise Error(
            f"local rank {local_rank} needs GPU {index}, and this host has {count}; start at most "
            f"{count} ranks per host"
        )
    return EngineGpu(CudaDriver(index), library, timeout)
