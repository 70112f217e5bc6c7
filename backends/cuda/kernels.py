"""CUDA kernels of plugins, compiled at run time for the current GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeAlias

from irc.backends.cuda.execute.compile import Compiler, default_folder
from irc.backends.cuda.plan import Kernel
from irc.backends.cuda.runtime import call, capability

Scalar: TypeAlias = "ctypes.c_int | ctypes.c_longlong | ctypes.c_float | ctypes.c_double"


def kernel(name: str, source: str, macros: Mapping[str, str]) -> Any:
    """The kernel `name` (extern "C") of a source after the prelude, for the current GPU.

    It is compiled once per source, macros and GPU. An Error has the compiler's message.
    """
    return _loaded(name, source, tuple(sorted(macros.items())), int(call("cudaGetDevice")))


@cache
def _loaded(name: str, source: str, macros: tuple[tuple[str, str], ...], device: int) -> Any:
    compiler = Compiler(capability(device) or 0, default_folder())
    module = call("cuModuleLoadData", compiler.image(Kernel(name, source, dict(macros))))
    return call("cuModuleGetFunction", module, name.encode())


def launcher(kernel: Any, grid: int, block: int) -> Callable[..., None]:
    """launch(stream, *arguments), with ctypes scalars, or integers for addresses."""

    def launch(stream: int, *arguments: Scalar | int) -> None:
        held = [ctypes.c_void_p(a) if isinstance(a, int) else a for a in arguments]
        pointers = (ctypes.c_void_p * len(held))(*map(ctypes.addressof, held))
        sizes = (grid, 1, 1, block, 1, 1, 0)
        call("cuLaunchKernel", kernel, *sizes, stream, ctypes.addressof(pointers), 0)

    return launch
