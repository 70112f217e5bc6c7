"""CUDA kernels of irc, compiled at run time for the current GPU (NVRTC, cuda.core)."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock
from typing import Any

from irc.errors import Error

# Element types of kernels: storage, and conversion to and from float. They need no headers of the
# CUDA toolkit, which a machine that only runs kernels may lack.
PRELUDE = r"""
typedef unsigned short u16;
typedef unsigned int u32;

struct alignas(2) bf16 {
    u16 bits;
    __device__ operator float() const { return __uint_as_float((u32)bits << 16); }
    __device__ static bf16 of(float x) {
        u32 b = __float_as_uint(x);
        bool nan = (b & 0x7fffffffu) > 0x7f800000u;
        b = nan ? (b | 0x00400000u) : b + 0x7fffu + ((b >> 16) & 1u);
        return bf16{(u16)(b >> 16)};
    }
};
struct alignas(2) f16 {
    u16 bits;
    __device__ operator float() const {
        float x;
        asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
        return x;
    }
    __device__ static f16 of(float x) {
        f16 y;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
        return y;
    }
};
struct alignas(4) f32 {
    float value;
    __device__ operator float() const { return value; }
    __device__ static f32 of(float x) { return f32{x}; }
};
template <typename T, int N> struct alignas(sizeof(T) * N) Pack { T item[N]; };
"""

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
