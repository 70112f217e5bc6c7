"""Runs kernels on the host: compiled by g++, one block after the other.

A block has one thread, which is fast to run, or all those of its launch, which take turns in a
random order. Kernels with a constant THREADS always run with all threads; with a constant CLUSTER,
the blocks of the x dimension run together.

Arrays of values are numpy arrays; memory is what a GPU would hold (elements of four bits in pairs).
A kernel works on a copy of it, which ends where no access is allowed. What a launch may not use
before it has waited for the kernel in front of it is not accessible before. Asynchronous copies end
when somebody waits for them. An access, order or wait that is wrong raises an AssertionError.
"""

from __future__ import annotations

import ctypes
import mmap
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest

from irc.backends.cuda.codegen.files import PRELUDE
from irc.backends.cuda.codegen.kernels import number
from irc.backends.cuda.plan import Kernel, Template
from irc.ir.core import Value
from irc.ir.dtypes import dtype, dtype_of, packed, unpacked
from irc.ir.types import TensorType
from tests.fresh import fresh

Array: TypeAlias = np.ndarray[Any, Any]
HOST, WARPS, COPIES = (
    Path(__file__).with_name(name).read_text(encoding="utf-8")
    for name in ("host.h", "warps.h", "copies.h")
)
COMPILER = shutil.which("g++")
PAGE = mmap.PAGESIZE
ALIGNED = 16  # bytes, to which operands start
FILL = 0xFF  # what memory holds that nothing has written, and around operands: NaN as a float
NONE, READ, WRITE = 0, mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE
Key: TypeAlias = tuple[str, str, tuple[tuple[str, str], ...], bool]
_FUNCTIONS: dict[Key, Any] = {}
_FOLDER = tempfile.TemporaryDirectory(prefix="irc-emulated-")
_SEEDS = fresh(16)

# What a test of faults changes in the sources of kernels, and what of it was there.
CHANGES: dict[str, str] = {}
CHANGED: set[str] = set()


def _source(kernel: Kernel) -> str:
    """The source with the changes."""
    source = kernel.source
    for old, new in CHANGES.items():
        if old in source:
            CHANGED.add(old)
            source = source.replace(old, new)
    return source


def _key(kernel: Kernel, threaded: bool) -> Key:
    return kernel.name, _source(kernel), tuple(sorted(kernel.macros.items())), threaded


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
    parts += [_renamed(kernel, f"run_{i}") for i, kernel in enumerate(new.values(), first)]
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
    if made.returncode:
        raise RuntimeError(f"{source} does not compile: {made.stderr[:4000]}")


def _renamed(kernel: Kernel, name: str) -> str:
    """A kernel in a scope of its own, and the function `name` that runs its grid."""
    defined = [f"#undef {k}\n#define {k} {v}" for k, v in kernel.macros.items()]
    ended = [f"#undef {k}" for k in kernel.macros] + ["#undef ix\n#define ix int"]
    scope = f"scope_{name}"
    source = _source(kernel)
    together = str("CLUSTER = " in source).lower()
    whole = "constexpr int THREADS" in source
    rest = f"{scope}::THREADS, {together}" if whole else "launch->threads"
    return "\n".join(
        [
            *defined,
            f"""#define {kernel.name} kernel_{name}
namespace {scope} {{
{source}
}}
extern "C" void {name}(Launch* launch) {{ run_grid({scope}::kernel_{name}, launch, {rest}); }}
#undef {kernel.name}""",
            *ended,
        ]
    )


@cache
def _guarded() -> Callable[[Any, Any], int | None]:
    """Runs a function with an argument; the address of the access that ended it, if one did."""
    library = Path(_FOLDER.name, "guard.so")
    _compile(Path(__file__).with_name("guard.cpp"), library, "-shared", "-fPIC")
    found = ctypes.CDLL(str(library))
    found.guard()
    found.guarded.restype = ctypes.c_void_p
    return found.guarded


class Memory:
    """Bytes of device memory."""

    def __init__(self, nbytes: int) -> None:
        self.bytes = np.full(nbytes, FILL, np.uint8)

    @property
    def address(self) -> int:
        """Where the bytes start."""
        return self.bytes.ctypes.data


class _Operand(ctypes.Structure):
    """See Operand of host.h."""

    _fields_ = [(k, ctypes.c_size_t) for k in ("pages", "nbytes")] + [
        (k, ctypes.c_int) for k in ("before", "after", "counts")
    ]


class _Launch(ctypes.Structure):
    """See Launch of host.h."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("threads", ctypes.c_uint),
        ("arguments", ctypes.c_void_p),
        ("shared", ctypes.c_void_p),
        *((k, ctypes.c_size_t) for k in ("shared_bytes", "operand_count")),
        ("operands", ctypes.c_void_p),
        ("waits", ctypes.c_uint),
        ("seed", ctypes.c_uint64),
        ("failure", ctypes.c_char_p),
    ]


@dataclass
class Operand:
    """The bytes of an argument in pages of their own, of which the last byte is that of the page,
    but for at most 15 bytes.

    `before`, `after`: how it may be used before a launch has waited for the one in front of it.
    """

    name: str
    bytes: Array
    before: int
    after: int

    @property
    def padded(self) -> int:
        """Bytes with those behind them, so that the start is aligned."""
        return -(-self.bytes.size // ALIGNED) * ALIGNED

    @property
    def pages(self) -> int:
        """Bytes of its pages."""
        return -(-self.padded // PAGE) * PAGE


class _Pages(threading.local):
    """Memory of a thread, in which the operands of a launch lie between pages without access."""

    def __init__(self) -> None:
        self.nbytes = 0

    def start(self, operands: Sequence[Operand]) -> list[_Operand]:
        """Copy the operands into pages, which are all accessible."""
        total = sum(each.pages + PAGE for each in operands) + PAGE
        if total > self.nbytes:
            self.nbytes = 2 * total
            self.all = np.frombuffer(mmap.mmap(-1, self.nbytes), np.uint8)
            self.address = self.all.ctypes.data
        else:
            _protect(self.address, total, WRITE)
        self.total = total
        laid = list[_Operand]()
        for each, offset, held in self._held(operands):
            counts = each.name.startswith("zeros")
            at = self.address + offset
            laid.append(_Operand(at, each.pages, each.before, each.after, counts))
            self.all[offset : offset + each.pages] = FILL
            self.all[held] = each.bytes
        _protect(self.address, total, NONE)
        return laid

    def end(self, operands: Sequence[Operand]) -> None:
        """Copy the operands back."""
        _protect(self.address, self.total, WRITE)
        for each, offset, held in self._held(operands):
            around = (self.all[offset : held.start], self.all[held.stop : offset + each.pages])
            assert all((x == FILL).all() for x in around), f"{each.name}: written beside the memory"
            if each.after & mmap.PROT_WRITE:
                each.bytes[:] = self.all[held]

    def _held(self, operands: Sequence[Operand]) -> Iterator[tuple[Operand, int, slice]]:
        """Operands, the starts of their pages, and where in all pages their bytes are."""
        offset = PAGE
        for each in operands:
            start = offset + each.pages - each.padded
            yield each, offset, slice(start, start + each.bytes.size)
            offset += each.pages + PAGE


_PAGES = _Pages()
_LIBC = ctypes.CDLL(None)


def _protect(address: int, nbytes: int, how: int) -> None:
    assert _LIBC.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), how) == 0


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


@dataclass(frozen=True)
class Access:
    """How a launch uses its arguments; by default it waits for nothing and writes everything.

    `names` of the arguments; the numbers of those that it may read `early`, before it has waited
    for the launch in front of it (None: it does not start before that one has ended), and of those
    that it only reads.
    """

    names: Sequence[str] = ()
    early: Collection[int] | None = None
    read: Collection[int] = ()


def run_kernel(
    kernel: Kernel,
    grid: tuple[int, int, int],
    arguments: Sequence[Memory | int | float],
    shared: int = 0,
    threads: int = 1,
    access: Access = Access(),
) -> None:
    """One launch. Integers are `int`, floats `float`; memory without bytes is not guarded."""
    threaded = threads > 1
    prepare([kernel], threaded)
    operands = {(0, shared): Operand("shared memory", np.empty(shared, np.uint8), WRITE, WRITE)}
    keys = dict[int, tuple[int, int]]()
    for i, argument in enumerate(arguments):
        held = getattr(argument, "bytes", None)
        if not isinstance(argument, Memory) or held is None:
            continue
        keys[i] = key = (argument.address, held.size)
        name = access.names[i] if access.names else f"argument {i}"
        before = WRITE if access.early is None else READ if i in access.early else NONE
        new = operands.setdefault(key, Operand(name, held, before, READ))
        new.before = max(new.before, before)
        new.after = max(new.after, READ if i in access.read else WRITE)
    laid = _PAGES.start(list(operands.values()))
    address = {
        key: each.pages + each.nbytes - operand.padded
        for (key, operand), each in zip(operands.items(), laid, strict=True)
    }

    def held_value(i: int, argument: Memory | int | float) -> Any:
        if isinstance(argument, Memory):
            return ctypes.c_void_p(address[keys[i]] if i in keys else argument.address)
        return ctypes.c_int(argument) if isinstance(argument, int) else ctypes.c_float(argument)

    values = [held_value(i, argument) for i, argument in enumerate(arguments)]
    pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
    table, seed = (_Operand * len(laid))(*laid), int(_SEEDS.integers(1 << 63))
    launch = _Launch(
        (ctypes.c_uint * 3)(*grid),
        threads,
        ctypes.addressof(pointers),
        address[0, shared],
        shared,
        len(laid),
        ctypes.addressof(table),
        access.early is not None,
        seed,
    )
    wrong = _guarded()(_FUNCTIONS[_key(kernel, threaded)], ctypes.byref(launch))
    _PAGES.end(list(operands.values()))
    where = f"{kernel.name}, seed {seed}"
    assert wrong is None, f"{where}: access to {_named(wrong, operands.values(), laid)}"
    assert launch.failure is None, f"{where}: {launch.failure.decode()}"


def _named(address: int, operands: Iterable[Operand], laid: Iterable[_Operand]) -> str:
    """The operand whose pages, or the page behind, have an address."""
    for operand, at in zip(operands, laid, strict=True):
        if at.pages - PAGE <= address < at.pages + at.nbytes + PAGE:
            offset = address - (at.pages + at.nbytes - operand.padded)
            return f"byte {offset} of the {operand.bytes.size} of {operand.name}"
    return f"no operand: {address:#x}"


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
        scratch, zeros = ([empty_memory(t, sizes) for t in x] for x in (each.scratch, each.zeros))
        for held in zeros:
            held.bytes[:] = 0
        values = [memory[value] for value in (*each.reads, *each.writes)]
        arguments = [*values, *scratch, *zeros, *(sizes[name] for name in each.symbols)]
        threads = each.block if threaded else 1
        access = access_of(each)
        run_kernel(each.kernel, each.grid(sizes), arguments, each.shared(sizes), threads, access)
        for held in zeros:
            assert not held.bytes.any(), f"{each.kernel.name}: its zeros are not left zero"
        written += each.writes
    return {value: array_of(memory[value], value.type, sizes) for value in written}


def access_of(template: Template) -> Access:
    """How a launch uses its arguments."""
    names = [f"%{value.name or 'value'}" for value in (*template.reads, *template.writes)]
    names += ["scratch"] * len(template.scratch) + ["zeros"] * len(template.zeros)
    early = [i for i, value in enumerate(template.reads) if value in template.early]
    names += template.symbols
    return Access(names, early if template.waits else None, range(len(template.reads)))
