"""Calls of CUDA's libraries: errors, and which GPUs there are."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import ctypes
from importlib import import_module
from typing import Any

from irc.errors import Error, installs

_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*, cuda.h
# beginnings of functions, the longest first, and their modules of cuda.bindings
_LIBRARIES = {"nvrtc": "nvrtc", "cuda": "runtime", "cu": "driver"}


def unavailable(library: str, error: Exception) -> Error:
    """The Error about a library of the extra `cuda` that is missing, or does not load."""
    reason = str(error).partition("\n")[0]
    return Error(f"{library} is not available ({reason}): {installs('cuda')}")


def driver_version() -> int | None:
    """The newest CUDA that the NVIDIA driver serves, 13010 for 13.1; None without a driver."""
    return _number("cuDriverGetVersion")


def device_count() -> int:
    """The number of GPUs that the NVIDIA driver offers; 0 without a driver."""
    return _number("cuDeviceGetCount") or 0


def capability(index: int = 0) -> int | None:
    """The compute capability of a GPU, 90 for sm_90; None without that GPU."""
    major, minor = (_number("cuDeviceGetAttribute", a, index) for a in (_MAJOR, _MINOR))
    return None if major is None or minor is None else 10 * major + minor


def _number(function: str, *arguments: int) -> int | None:
    """What a function of the driver returns, without any package; None where it fails."""
    number = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    driver.cuInit(0)
    failed = getattr(driver, function)(ctypes.byref(number), *arguments)
    return None if failed else number.value


def call(function: str, *arguments: Any) -> Any:
    """The result of a function of the CUDA runtime, of the driver or of NVRTC; an Error with the
    library's message."""
    status, *results = getattr(_library(function)[1], function)(*arguments)
    if int(status):
        raise failure(function, status)
    return results[0] if len(results) == 1 else tuple(results)


def failure(function: str, status: Any) -> Error:
    """The Error about a call that returned this status."""
    start, library = _library(function)
    text = getattr(library, f"{start}GetErrorString")(status)[1]
    return Error(f"{function} failed: {text.decode() if isinstance(text, bytes) else text}")


def _library(function: str) -> tuple[str, Any]:
    """The beginning of the names of a library's functions, and its module."""
    start = next(start for start in _LIBRARIES if function.startswith(start))
    return start, import_module(f"cuda.bindings.{_LIBRARIES[start]}")


def block_limits() -> tuple[int, int]:
    """Multiprocessors of the current GPU, and the shared memory that one block may have."""
    facts = call("cudaGetDeviceProperties", call("cudaGetDevice"))
    return int(facts.multiProcessorCount), int(facts.sharedMemPerBlockOptin)


def use_device(index: int) -> str:
    """Make a GPU the current one of this thread; returns its name."""
    call("cudaSetDevice", index)
    name = call("cudaGetDeviceProperties", index).name
    return name.decode() if isinstance(name, bytes) else str(name)
