"""The GPU of one rank, with the library that runs its engines, and its NCCL groups."""

from __future__ import annotations

from irc.backends.cuda.calls import Library as Nccl
from irc.backends.cuda.driver import Driver
from irc.backends.cuda.execute.gpu import RankGpu, open_driver
from irc.backends.cuda.group import TIMEOUT
from irc.backends.tensorrt.builder.library import Library, find
from irc.backends.tensorrt.plugins import communicators
from irc.backends.tensorrt.target import Flavour

_INSTEAD = "engines need one. The same artifact compiled with --backend onnx runs on CPU"


class EngineGpu(RankGpu):
    """One GPU, TensorRT or TensorRT-RTX, and NCCL."""

    def __init__(
        self, driver: Driver, library: Library, timeout: float = TIMEOUT, nccl: Nccl | None = None
    ) -> None:
        super().__init__(driver, timeout, nccl)
        self.library = library

    def close(self) -> None:
        """Forget the groups, which their ranks close together."""
        super().close()
        communicators.clear()


def open_gpu(flavour: Flavour, local_rank: int, timeout: float = TIMEOUT) -> EngineGpu:
    """The GPU with the number of a local rank; 0 where the process sees a single GPU."""
    library = find(flavour)
    return EngineGpu(open_driver(local_rank, _INSTEAD), library, timeout)
