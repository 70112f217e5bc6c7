"""Calls of the CUDA runtime and driver libraries: errors, and which GPUs there are."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import ctypes
from contextlib import suppress
from typing import Any

from irc.errors import Error, installs

_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*, cuda.h


def unavailable(library: str, error: Exception) -> Error:
    """The Error about a library of the extra `cuda` that is missing, or does not load."""
    reason = str(error).partition("\n")[0]
    return Error(f"{library} is not available ({reason}): {installs('cuda')}")


def driver_version() -> int | None:
    """The newest CUDA that the NVIDIA driver serves, 13010 for 13.1; None without a driver."""
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return None
    return version.value


def device_count() -> int:
    """The number of GPUs that the NVIDIA driver offers; 0 without a driver."""
    with suppress(OSError):
        driver = ctypes.CDLL("libcuda.so.1")
        count = ctypes.c_int(0)
        if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0:
            return count.value
    return 0


def capability(index: int = 0) -> int | None:
    """The compute capability of a GPU, 90 for sm_90; None without that GPU."""
    if device_count() <= index:
        return None
    driver, device = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0)
    if driver.cuDeviceGet(ctypes.byref(device), index) != 0:
        return None
    found: list[int] = []
    for attribute in (_MAJOR, _MINOR):
        value = ctypes.c_int(0)
        if driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device) != 0:
            return None
        found.append(value.value)
    return 10 * found[0] + found[1]


def call(function: str, *arguments: Any) -> Any:
    """The result of a function of the CUDA runtime; an Error with CUDA's message."""
    from cuda.bindings import runtime

    status, *results = getattr(runtime, function)(*arguments)
    if int(status):
        _, text = runtime.cudaGetErrorString(status)
        words = text.decode() if isinstance(text, bytes) else str(text)
        raise Error(f"{function} failed: {words}")
    return results[0] if len(results) == 1 else tuple(results)


def block_limits() -> tuple[int, int]:
    """Multiprocessors of the current GPU, and the shared memory that one block may have."""
    facts = call("cudaGetDeviceProperties", call("cudaGetDevice"))
    return int(facts.multiProcessorCount), int(facts.sharedMemPerBlockOptin)


def use_device(index: int) -> str:
    """Make a GPU the current one of this thread; returns its name."""
    call("cudaSetDevice", index)
    name = call("cudaGetDeviceProperties", index).name
    return name.decode() if isinstance(name, bytes) else str(name)
