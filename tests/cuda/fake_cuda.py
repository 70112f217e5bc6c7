"""GPUs on the host: memory and streams of fake_gpu.py, kernels that g++ compiles.

Ranks are threads, and one kernel runs at a time: kernels share the variables of a block.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from irc.backends.cuda.execute.cublaslt import CublasLt, key_of
from irc.backends.cuda.execute.launch import Enqueue, Kernels
from irc.backends.cuda.execute.load import CudaGpu, CudaProgram, program_of
from irc.backends.cuda.plan import Kernel, Launch, LibraryCall
from irc.backends.cuda.plan.product import Product
from irc.backends.cuda.plan.regime import Target
from irc.backends.ranks.communicator import Communicator
from irc.ir.core import Module
from tests.cuda.emulate import Memory, prepare, run_kernel
from tests.cuda.library_calls import product_of
from tests.tensorrt import fake_nccl
from tests.tensorrt.fake_gpu import SOON, STREAMS, FakeDriver
from tests.tensorrt.fake_nccl import FakeNccl

_ONE_KERNEL = threading.Lock()


class Pointer(Memory):
    """The memory of a fake GPU, or page-locked one, from an address on, which is not guarded."""

    def __init__(self, driver: FakeDriver, address: int) -> None:
        pins = [memory for pin in driver.pins if (memory := pin()) is not None]
        pinned = any(0 <= address - memory.ctypes.data < memory.size for memory in pins)
        self._place = address if pinned else driver.memory.view(address, 1).ctypes.data

    @property
    def address(self) -> int:
        return self._place


class EmulatedKernels(Kernels):
    """See Kernels. `launches` has what was enqueued, with whether it may start early."""

    def __init__(self, driver: FakeDriver) -> None:
        self._driver, self._loaded = driver, set[str]()
        self.launches: list[tuple[Launch, bool]] = []

    def compile(self, kernels: Iterable[Kernel]) -> None:
        with _ONE_KERNEL:
            prepare(list(kernels))

    def load(self, kernels: Iterable[Kernel]) -> None:
        wanted = list(kernels)
        self.compile(wanted)
        self._loaded |= {kernel.source for kernel in wanted}

    def bind(
        self, launch: Launch, kernel: Kernel, values: Sequence[int | float], early: bool
    ) -> Enqueue:
        assert kernel.source in self._loaded, "a kernel that is not loaded"

        def run() -> None:
            arguments = [
                value if isinstance(given, int | float) else Pointer(self._driver, int(value))
                for given, value in zip(launch.arguments, values, strict=True)
            ]
            with _ONE_KERNEL:
                gc.disable()  # a stream that is collected waits for kernels
                try:
                    run_kernel(kernel, launch.grid, arguments, launch.shared)
                finally:
                    gc.enable()

        def enqueue(stream: int) -> None:
            self.launches.append((launch, early))
            STREAMS[stream].enqueue(run, "kernel", kernel.name)

        return enqueue

    def close(self) -> None:
        self._loaded.clear()


class EmulatedProducts(CublasLt):
    """See CublasLt, in numpy, which offers two algorithms. `bound` are the calls that
    were bound, with their algorithms."""

    def __init__(self, driver: FakeDriver) -> None:
        self._memory, self.bound = driver.memory, list[tuple[LibraryCall, str]]()
        self.algorithms: dict[str, str] = {}

    def choose(self, algorithms: Mapping[str, str]) -> None:
        self.algorithms |= algorithms

    def offered(self, call: LibraryCall) -> tuple[str, list[str]]:
        return key_of(Product.of(call.settings)), ["01" * 64, "02" * 64]

    def bind(self, call: LibraryCall, addresses: Sequence[int]) -> Enqueue:
        key, (first, _) = self.offered(call)
        self.bound.append((call, self.algorithms.get(key, first)))
        product = Product.of(call.settings)
        operands = product.operands()

        def run() -> None:
            if product.is_empty:
                return
            arrays = [
                self._memory.array(address, each.shape, each.dtype)
                for address, each in zip(addresses, operands, strict=True)
            ]
            names = [each.name for each in operands]
            arrays[names.index("y")][...] = product_of(product, arrays)

        return lambda stream: STREAMS[stream].enqueue(run, "product")

    def close(self) -> None:
        """Nothing is held."""


class FakeCuda(CudaGpu):
    """The GPU of a rank, whose parts tests change."""

    driver: FakeDriver

    def __init__(self, nccl: FakeNccl, rank: int) -> None:
        super().__init__(FakeDriver(rank), SOON, nccl)
        self.kernels = self.emulated = EmulatedKernels(self.driver)
        self.target = Target()
        self.called = EmulatedProducts(self.driver)
        self.calls = self.driver.calls

    def products(self, algorithms: Mapping[str, str], locked: bool) -> CublasLt:
        self.called.choose(algorithms)
        return self.called

    def versions(self) -> dict[str, str]:
        return {"irc": "1", "NVRTC": "2", "cuBLASLt": "3"}


class World(fake_nccl.World[CudaProgram, FakeCuda]):
    """A module loaded on all its ranks. `prepare` changes a rank's GPU."""

    def __init__(
        self,
        module: Module,
        base: Path,
        prepare: Callable[[FakeCuda], None] = lambda gpu: None,
        **options: Any,
    ) -> None:
        def make(nccl: FakeNccl, rank: int) -> FakeCuda:
            gpu = FakeCuda(nccl, rank)
            prepare(gpu)
            return gpu

        def load(host: Communicator | None, gpu: Callable[[int], FakeCuda]) -> CudaProgram:
            # kernels for several operations use instructions that the host has not
            given = {"fused": False, **options, "communicator": host, "gpu": gpu}
            return program_of(module, base, **given)

        super().__init__(module.mesh.ranks, make, load)
