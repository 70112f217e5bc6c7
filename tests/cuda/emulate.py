"""Runs kernels on the host: compiled by g++, one block after the other.

A block has one thread, which is fast to run, or all those of its launch, which take turns. Kernels
with a constant THREADS always run with all threads; with a constant CLUSTER, the blocks of the x
dimension run together.

Arrays of values are numpy arrays; memory is what a GPU would hold (elements of four bits in pairs),
between canaries, so that a write beyond it is seen.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest

from irc.backends.cuda.codegen.kernels import number
from irc.backends.cuda.codegen.prelude import PRELUDE
from irc.backends.cuda.plan import Kernel, Template
from irc.ir.core import Value
from irc.ir.dtypes import dtype, dtype_of, packed, unpacked
from irc.ir.types import TensorType

Array: TypeAlias = np.ndarray[Any, Any]
HOST, WARPS, COPIES = (
    Path(__file__).with_name(name).read_text(encoding="utf-8")
    for name in ("host.h", "warps.h", "copies.h")
)
COMPILER = shutil.which("g++")
CANARY = 64  # bytes on both sides of every memory
FILL = 0xA5  # of canaries, and of memory that nothing has written
Key: TypeAlias = tuple[str, str, tuple[tuple[str, str], ...], bool]
_FUNCTIONS: dict[Key, Any] = {}
_FOLDER = tempfile.TemporaryDirectory(prefix="irc-emulated-")


def _key(kernel: Kernel, threaded: bool) -> Key:
    return kernel.name, kernel.source, tuple(sorted(kernel.macros.items())), threaded


def prepare(kernels: Iterable[Kernel], threaded: bool = False) -> None:
    """Compile kernels, all at once, unless they are compiled; skip the test without a compiler."""
    if COMPILER is None:
        pytest.skip("no g++ on this machine")
    new = {key: k for k in kernels if (key := _key(k, threaded)) not in _FUNCTIONS}
    if not new:
        return
    first = len(_FUNCTIONS)
    flags = ["-std=c++17", "-fPIC", "-fwrapv", "-ffp-contract=off", "-w", "-fno-gnu-unique"]
    flags += ["-DTHREADED", "-O1"] if threaded else ["-O0"]  # which compile longer than they run
    parts = [f'#include "{_header(threaded, *flags)}"']
    for i, kernel in enumerate(new.values(), first):
        parts.append(_renamed(kernel, f"run_{i}"))
    source = Path(_FOLDER.name, f"kernels{first}.cpp")
    library = source.with_suffix(".so")
    source.write_text("\n".join(parts), encoding="utf-8")
    _compile(source, library, "-shared", *flags)
    loaded = ctypes.CDLL(str(library))
    for i, key in enumerate(new, first):
        _FUNCTIONS[key] = getattr(loaded, f"run_{i}")


@cache
def _header(threaded: bool, *flags: str) -> str:
    """The name of the header of all kernels, compiled in advance, which halves the time of few."""
    path = Path(_FOLDER.name, f"host{threaded:d}.h")
    path.write_text("\n".join([HOST, PRELUDE, WARPS, COPIES]), encoding="utf-8")
    _compile(path, Path(f"{path}.gch"), "-x", "c++-header", *flags)
    return path.name


def _compile(source: Path, target: Path, *flags: str) -> None:
    assert COMPILER is not None
    command = [COMPILER, *flags, str(source), "-o", str(target)]
    made = subprocess.run(command, capture_output=True, text=True)
    assert made.returncode == 0, f"{source} does not compile: {made.stderr[:4000]}"


def _renamed(kernel: Kernel, name: str) -> str:
    """A kernel in a scope of its own, and the function `name` that runs its grid."""
    defined = [f"#undef {k}\n#define {k} {v}" for k, v in kernel.macros.items()]
    ended = [f"#undef {k}" for k in kernel.macros] + ["#undef ix\n#define ix int"]
    scope = f"scope_{name}"
    whole = "constexpr int THREADS" in kernel.source  # its threads always work together
    together = str("CLUSTER = " in kernel.source).lower()
    rest = f"{scope}::THREADS, a, s, {together}" if whole else "t, a, s"
    return "\n".join(
        [
            *defined,
            f"#define {kernel.name} kernel_{name}",
            f"namespace {scope} {{\n{kernel.source}\n}}",
            f'extern "C" void {name}(const unsigned* g, unsigned t, void** a, unsigned char* s) {{',
            f"  run_grid({scope}::kernel_{name}, g, {rest}); }}",
            f"#undef {kernel.name}",
            *ended,
        ]
    )


class Memory:
    """Bytes of device memory between canaries."""

    def __init__(self, nbytes: int) -> None:
        self.whole = np.full(nbytes + 2 * CANARY, FILL, np.uint8)
        self.bytes = self.whole[CANARY : CANARY + nbytes]

    @property
    def address(self) -> int:
        """Where the bytes start."""
        return self.whole.ctypes.data + CANARY

    def check(self, what: str) -> None:
        """Raise where a kernel has written beyond the bytes."""
        for side in (self.whole[:CANARY], self.whole[-CANARY:]):
            assert (side == FILL).all(), f"{what}: written beyond the memory"


def memory_of(array: Array) -> Memory:
    """Memory with the elements of an array."""
    kind = dtype(dtype_of(array))
    flat = packed(array) if kind.bits == 4 else np.ascontiguousarray(array).reshape(-1)
    held = Memory(flat.nbytes)
    held.bytes[:] = flat.view(np.uint8)
    return held


def empty_memory(type: TensorType, sizes: Mapping[str, int]) -> Memory:
    """Memory for a value that nothing has written."""
    count = int(np.prod([number(d, sizes) for d in type.shape], dtype=np.int64))
    return Memory(dtype(type.dtype).nbytes(count))


def array_of(held: Memory, type: TensorType, sizes: Mapping[str, int]) -> Array:
    """The elements in a memory."""
    shape = tuple(number(d, sizes) for d in type.shape)
    kind = dtype(type.dtype)
    if kind.bits == 4:
        count = int(np.prod(shape, dtype=np.int64))
        return unpacked(held.bytes, type.dtype)[:count].reshape(shape)
    return held.bytes.copy().view(kind.numpy).reshape(shape)


def run_kernel(
    kernel: Kernel,
    grid: tuple[int, int, int],
    arguments: Sequence[Memory | int | float],
    shared: int = 0,
    threads: int = 1,
) -> None:
    """One launch. Integers are `int`, floats `float`."""
    threaded = threads > 1
    prepare([kernel], threaded)
    held: list[Any] = []
    for argument in arguments:
        if isinstance(argument, Memory):
            held.append(ctypes.c_void_p(argument.address))
        else:
            held.append(
                ctypes.c_int(argument) if isinstance(argument, int) else ctypes.c_float(argument)
            )
    pointers = (ctypes.c_void_p * len(held))(*[ctypes.addressof(each) for each in held])
    scratch = Memory(shared)
    run = _FUNCTIONS[_key(kernel, threaded)]
    run((ctypes.c_uint * 3)(*grid), threads, pointers, ctypes.c_void_p(scratch.address))
    scratch.check(f"{kernel.name}: dynamic shared memory")
    for i, argument in enumerate(arguments):
        if isinstance(argument, Memory):
            argument.check(f"{kernel.name}: argument {i}")


def run_templates(
    templates: Sequence[Template],
    arrays: Mapping[Value, Array],
    sizes: Mapping[str, int] | None = None,
    threaded: bool = False,
) -> dict[Value, Array]:
    """The values that launches write, from those in `arrays`; all in the memory of a GPU between.

    A value that a launch reads is in `arrays`, or a launch in front of it has written it.
    """
    sizes = sizes or {}
    prepare((each.kernel for each in templates), threaded)
    memory = {value: memory_of(array) for value, array in arrays.items()}
    written: list[Value] = []
    for each in templates:
        for value in each.writes:
            if value in each.in_place:
                memory[value] = memory[each.in_place[value]]
            elif value not in memory:
                memory[value] = empty_memory(value.type, sizes)
        scratch = [empty_memory(type, sizes) for type in each.scratch]
        for type in each.zeros:
            scratch.append(empty_memory(type, sizes))
            scratch[-1].bytes[:] = 0
        values = [memory[value] for value in (*each.reads, *each.writes)]
        numbers = [sizes[name] for name in each.symbols]
        arguments = [*values, *scratch, *numbers]
        threads = each.block if threaded else 1
        run_kernel(each.kernel, each.grid(sizes), arguments, each.shared(sizes), threads)
        for held in scratch[len(each.scratch) :]:
            assert not held.bytes.any(), f"{each.kernel.name}: its zeros are not left zero"
        written += each.writes
    return {value: array_of(memory[value], value.type, sizes) for value in written}
