"""CUDA kernels of irc, compiled at run time for the current GPU (NVRTC, cuda.core)."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock
from typing import Any

from irc.errors import Error

from .codegen.prelude import PRELUDE

_COMPILING = Lock()
_KERNELS: dict[tuple[str, str, tuple[tuple[str, str], ...], int], Any] = {}


def kernel(name: str, source: str, macros: Mapping[str, str]) -> Any:
    """The kernel `name` (extern "C") of a source after the prelude, for the current GPU.

    It is compiled once per source, macros and GPU. An Error has the compiler's message.
    """
    import cuda.core as core

    device = core.Device()
    device.set_current()
    capability = device.compute_capability
    key = (name, source, tuple(sorted(macros.items())), device.device_id)
    with _COMPILING:
        if key not in _KERNELS:
            arch = f"sm_{capability.major}{capability.minor}"
            _KERNELS[key] = compiled(name, source, macros, arch).get_kernel(name)
    return _KERNELS[key]


def compiled(name: str, source: str, macros: Mapping[str, str], arch: str) -> Any:
    """The object code for an architecture; no GPU is needed."""
    import cuda.core as core

    defined = list(macros.items()) or None
    options = core.ProgramOptions(std="c++17", arch=arch, define_macro=defined)
    try:
        return core.Program(PRELUDE + source, "c++", options).compile("cubin")
    except Exception as error:  # NVRTC's own errors have no common base
        raise Error(f"the CUDA kernel {name} does not compile for {arch}: {error}") from error


def launcher(kernel: Any, grid: int, block: int) -> Any:
    """launch(stream, *arguments), with ctypes scalars, or integers for addresses."""
    import cuda.core as core

    config = core.LaunchConfig(grid=grid, block=block)
    streams: dict[int, Any] = {}

    def launch(stream: int, *arguments: Any) -> None:
        on = streams.get(stream)
        if on is None:
            on = streams[stream] = core.Stream.from_handle(stream)
        core.launch(on, config, kernel, *arguments)

    return launch
