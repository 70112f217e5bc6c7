"""Launches of kernels by the CUDA driver, with clusters and programmatic dependent launch."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from irc.backends.cuda.execute.compile import Compiler, Key, key_of
from irc.backends.cuda.plan import Kernel, Launch
from irc.backends.cuda.runtime import call, failure

Enqueue: TypeAlias = Callable[[int], None]  # (stream)

# The compute capability from which a kernel may start before the one in front, and blocks form
# clusters; below it, kernels do without either.
PROGRAMMATIC = 90
_PORTABLE = 8  # blocks per cluster that every GPU allows
_PLAIN = 48 << 10  # bytes of static and dynamic shared memory that a kernel gets without asking


class Kernels:
    """The kernels of the current GPU, in cubins that NVRTC compiles."""

    def __init__(self, capability: int, compiler: Compiler) -> None:
        self._capability, self._compiler = capability, compiler
        self._images: dict[Key, bytes] = {}  # to be loaded
        self._functions: dict[Key, Any] = {}
        self._modules: list[Any] = []  # they must outlive their functions
        self._shared: dict[Key, int] = {}

    def compile(self, kernels: Iterable[Kernel]) -> None:
        """Compile kernels that are not loaded yet, for `load`; another thread may call it."""
        done = {*self._functions, *self._images}
        missing = [kernel for kernel in kernels if key_of(kernel) not in done]
        self._images |= self._compiler.images(missing)

    def load(self, kernels: Iterable[Kernel]) -> None:
        """Compile and load kernels that are not loaded yet."""
        self.compile(kernels)
        while self._images:
            key, image = self._images.popitem()
            module = call("cuModuleLoadData", image)
            self._modules.append(module)
            self._functions[key] = call("cuModuleGetFunction", module, key[0].encode())

    def bind(
        self, launch: Launch, kernel: Kernel, values: Sequence[int | float], early: bool
    ) -> Enqueue:
        """A function that enqueues a launch of a loaded kernel.

        `values` are the arguments, with addresses for pointers. `early`: it may start before the
        kernel in front of it has ended.
        """
        from cuda.bindings import driver

        function = self._allowed(launch, kernel)
        held = [
            _scalar(given, value) for given, value in zip(launch.arguments, values, strict=True)
        ]
        pointers = (ctypes.c_void_p * len(held))(*map(ctypes.addressof, held))
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = launch.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = launch.block, 1, 1
        config.sharedMemBytes = launch.shared
        config.attrs = self._attributes(driver, launch, early)
        config.numAttrs = len(config.attrs)
        enqueue, success = driver.cuLaunchKernelEx, driver.CUresult.CUDA_SUCCESS
        address = ctypes.addressof(pointers)

        def run(stream: int, held: object = held, pointers: object = pointers) -> None:
            config.hStream = stream
            (status,) = enqueue(config, function, address, 0)
            if status != success:
                raise failure("cuLaunchKernelEx", status)

        return run

    def close(self) -> None:
        """Unload all kernels; none runs any more."""
        self._functions.clear()
        self._shared.clear()
        while self._modules:
            call("cuModuleUnload", self._modules.pop())

    def _attributes(self, driver: Any, launch: Launch, early: bool) -> list[Any]:
        kinds, attributes = driver.CUlaunchAttributeID, list[Any]()
        if early and self._capability >= PROGRAMMATIC:
            attributes.append(driver.CUlaunchAttribute())
            attributes[-1].id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attributes[-1].value.programmaticStreamSerializationAllowed = 1
        if launch.cluster > 1 and self._capability >= PROGRAMMATIC:
            attributes.append(driver.CUlaunchAttribute())
            attributes[-1].id = kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            size = attributes[-1].value.clusterDim
            size.x, size.y, size.z = launch.cluster, 1, 1
        return attributes

    def _allowed(self, launch: Launch, kernel: Kernel) -> Any:
        """The function of a kernel, which may use the shared memory and clusters of a launch."""
        from cuda.bindings import driver

        key = key_of(kernel)
        function, limits = self._functions[key], driver.CUfunction_attribute
        static = call("cuFuncGetAttribute", limits.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function)
        if launch.shared > max(_PLAIN - static, self._shared.get(key, 0)):
            most = limits.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            call("cuFuncSetAttribute", function, most, launch.shared)
            self._shared[key] = launch.shared
        if launch.cluster > _PORTABLE:
            wide = limits.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            call("cuFuncSetAttribute", function, wide, 1)
        return function


def _scalar(given: object, value: int | float) -> Any:
    """An argument as the kernel takes it: `int`, `float`, or an address."""
    if isinstance(given, bool | int):
        return ctypes.c_int(int(value))
    return ctypes.c_float(value) if isinstance(given, float) else ctypes.c_void_p(int(value))
