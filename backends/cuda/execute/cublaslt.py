"""cuBLASLt through ctypes: matrix products on device memory, enqueued on a stream.

cuBLASLt reads matrices in column-major order, so it is asked for yᵀ = wᵀ xᵀ: its first operand is
the weight, its second one x, and its rows are the columns of y.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import ctypes as c
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from irc.backends.cuda.driver import Driver
from irc.backends.cuda.execute.launch import Enqueue
from irc.backends.cuda.plan.core import LibraryCall
from irc.backends.cuda.plan.product import Operand, Product
from irc.backends.cuda.runtime import unavailable
from irc.backends.cuda.tuning import FILE, WRITES
from irc.errors import Error

WORKSPACE = 32 << 20  # bytes, what NVIDIA recommends for compute capability 9.0
ALIGNMENT = 256  # bytes; of a pointer, more is not better
_OFFERED = 8  # algorithms to choose from

# Numbers of library_types.h, cublas_api.h and cublasLt.h
_DTYPES = {"f32": 0, "f16": 2, "bf16": 14, "f8e4m3": 28, "f8e5m2": 29}  # cudaDataType
_COMPUTE_32F, _SCALE_32F = c.c_int(68), c.c_int(0)  # cublasComputeType_t, cudaDataType
_EPILOGUE = {"": 1, "relu": 2}  # cublasLtEpilogue_t
_EPILOGUE_BIAS = 4
_SCALE_MODES = {"tensor": 0, "rows": 3}  # SCALAR_32F, OUTER_VEC_32F
# attributes of a description; the last are addresses
_TRANSA, _EPILOGUE_KIND, _BIAS_TYPE, _WEIGHT_SCALE_MODE, _X_SCALE_MODE = 3, 7, 26, 31, 32
_ADDRESSES = {"bias": 8, "weight_scale": 17, "x_scale": 18}
_BATCH_COUNT, _BATCH_STRIDE = 5, 6  # attributes of a layout
_MOST_WORKSPACE = 1  # attributes of a preference, with _ALIGNMENTS
_ALIGNMENTS = {"weight": 5, "x": 6, "residual": 7, "y": 8}


class _Algorithm(c.Structure):
    _fields_ = (("data", c.c_uint64 * 8),)


class _Result(c.Structure):
    _fields_ = (
        ("algorithm", _Algorithm),
        ("workspace", c.c_size_t),
        ("state", c.c_int),
        ("waves", c.c_float),
        ("reserved", c.c_int * 4),
    )


Addresses = Sequence[int]  # of the operands of a product, in order


class CublasLt:
    """Products on one GPU and one stream: they share the workspace.

    The GPU is the current one of the thread. `algorithms` are the chosen ones in hexadecimal, by
    `key_of`; where `locked`, every product needs one. `library` replaces libcublasLt in tests.
    """

    def __init__(
        self,
        driver: Driver,
        algorithms: Mapping[str, str] | None = None,
        locked: bool = False,
        library: Any = None,
    ) -> None:
        self._library = find_library() if library is None else library
        self.algorithms, self._locked = dict(algorithms or {}), locked
        self.handle = c.c_void_p()
        self.call("Create", c.byref(self.handle))
        self._driver, self.workspace = driver, driver.allocate(WORKSPACE)
        self._described: WeakValueDictionary[object, _Described] = WeakValueDictionary()

    def close(self) -> None:
        """Release the workspace; graphs with products must not run any more."""
        self._driver.free(self.workspace)
        self.call("Destroy", self.handle)

    def choose(self, algorithms: Mapping[str, str]) -> None:
        """Use other algorithms too, for calls that are bound from now on."""
        self.algorithms |= algorithms
        self._described.clear()

    def bind(self, call: LibraryCall, addresses: Addresses) -> Enqueue:
        """enqueue(stream) of a call whose arguments lie at `addresses`: by the chosen algorithm,
        else the first that cuBLASLt offers, which is asked once for equal products."""
        product = Product.of(call.settings)
        if product.is_empty:
            return lambda stream: None
        key = product, tuple(map(_alignment, addresses))
        described = self._described.get(key)
        if described is None:
            described = self._described[key] = _Described(self, *key)
            described.algorithm = self._algorithm(described)
        names = [operand.name for operand in product.operands()]
        return partial(described.enqueue, dict(zip(names, addresses, strict=True)))

    def offered(self, call: LibraryCall) -> tuple[str, list[str]]:
        """The key of a call, and algorithms for it, the likely fastest first."""
        product = Product.of(call.settings)
        if product.is_empty:
            return key_of(product), []
        alignments = [ALIGNMENT for _ in product.operands()]
        offered = _Described(self, product, alignments).offered()
        return key_of(product), [algorithm.hex() for algorithm in offered]

    def call(self, function: str, *arguments: Any, what: str = "a product") -> None:
        """Call a function of the library; an Error with its message."""
        status = getattr(self._library, f"cublasLt{function}")(*arguments)
        if status:
            raise Error(f"cublasLt{function} of {what} failed: {self._message(status)}")

    def try_call(self, function: str, *arguments: Any) -> bool:
        """Call a function of the library; whether it succeeds."""
        return getattr(self._library, f"cublasLt{function}")(self.handle, *arguments) == 0

    def _message(self, status: int) -> str:
        text = self._library.cublasLtGetStatusString(status)
        return f"{(text or b'no message').decode()} ({status})"

    def _algorithm(self, described: _Described) -> bytes:
        """The chosen algorithm of a product, else the first that can run."""
        key = key_of(described.product)
        chosen = bytes.fromhex(self.algorithms.get(key, ""))
        if chosen and described.accepts(chosen):
            return chosen
        offered = described.offered()
        if self._locked and not chosen and len(offered) > 1:
            raise Error(f"{FILE} has no algorithm for the product {key}; {WRITES} chooses it")
        return offered[0]


class _Described:
    """What cuBLASLt is told about a product of operands that lie at multiples of `alignments`."""

    algorithm: bytes

    def __init__(self, library: CublasLt, product: Product, alignments: Sequence[int]) -> None:
        self._lt, self.product = library, product
        operands = {operand.name: operand for operand in product.operands()}
        self._alignments = dict(zip(operands, alignments, strict=True))
        epilogue = _EPILOGUE[product.activation]
        if product.bias:
            epilogue = (epilogue if product.activation else 0) | _EPILOGUE_BIAS
        told: dict[int, Any] = {_TRANSA: c.c_int32(product.transposed)}
        told[_EPILOGUE_KIND] = c.c_uint32(epilogue)
        if product.bias:
            told[_BIAS_TYPE] = c.c_int32(_DTYPES[product.result])
        if product.scales:
            modes = (_X_SCALE_MODE, _WEIGHT_SCALE_MODE)
            told |= dict.fromkeys(modes, c.c_int32(_SCALE_MODES[product.scales]))
        # Without addresses of scales per row, cuBLASLt offers no algorithm.
        self._told = {name: number for name, number in _ADDRESSES.items() if name in operands}
        told |= {number: c.c_uint64(ALIGNMENT) for number in self._told.values()}
        self._description = self._made("MatmulDesc", told, _COMPUTE_32F, _SCALE_32F)
        layouts = [self._layout(operands[name]) for name in ("weight", "x", "y")]
        self._weight, self._x, self._y = layouts
        self._asked = (self._description, *layouts, self._y)  # y is where a residual lies, too

    def enqueue(self, addresses: Mapping[str, int], stream: int) -> None:
        """Enqueue the product of operands at `addresses`."""
        for name, attribute in self._told.items():
            self._set("MatmulDesc", self._description, attribute, c.c_uint64(addresses[name]))
        alpha, beta = c.c_float(self.product.alpha), c.c_float(float(self.product.residual))
        weight, x, y = (_pointer(addresses[name]) for name in ("weight", "x", "y"))
        self._lt.call(
            "Matmul", self._lt.handle, self._description, c.byref(alpha), weight, self._weight, x,
            self._x, c.byref(beta), _pointer(addresses.get("residual", addresses["y"])), self._y,
            y, self._y, c.byref(_Algorithm.from_buffer_copy(self.algorithm)),
            _pointer(self._lt.workspace), c.c_size_t(WORKSPACE), _pointer(stream),
            what=str(self.product),
        )  # fmt: skip

    def offered(self) -> list[bytes]:
        """Algorithms that can run, the likely fastest first; an Error if there is none."""
        told: dict[int, Any] = {_MOST_WORKSPACE: c.c_uint64(WORKSPACE)}
        for name, attribute in _ALIGNMENTS.items():
            told[attribute] = c.c_uint32(self._alignments.get(name, self._alignments["y"]))
        preference = self._made("MatmulPreference", told)
        results, count = (_Result * _OFFERED)(), c.c_int()
        arguments = *self._asked, preference, _OFFERED, results, c.byref(count)
        self._lt.try_call("MatmulAlgoGetHeuristic", *arguments)
        offered = [bytes(result.algorithm) for result in results[: count.value] if not result.state]
        if not offered:
            raise Error(f"cuBLASLt has no algorithm on this GPU for the {self.product}")
        return offered

    def accepts(self, algorithm: bytes) -> bool:
        """Whether an algorithm can run, within the workspace; they are chosen for operands at
        multiples of 256."""
        result, chosen = _Result(), _Algorithm.from_buffer_copy(algorithm)
        arguments = *self._asked, c.byref(chosen), c.byref(result)
        can = {*self._alignments.values()} == {ALIGNMENT}
        can = can and self._lt.try_call("MatmulAlgoCheck", *arguments)
        return can and result.workspace <= WORKSPACE

    def _layout(self, operand: Operand) -> c.c_void_p:
        """The layout of a row-major operand: its columns are the rows of a column-major one."""
        batch, rows, columns = operand.shape
        told: dict[int, Any] = {}
        if self.product.batch > 1:
            stride = rows * columns if batch > 1 else 0
            told = {_BATCH_COUNT: c.c_int32(self.product.batch), _BATCH_STRIDE: c.c_int64(stride)}
        sizes = c.c_uint64(columns), c.c_uint64(rows), c.c_int64(columns)
        return self._made("MatrixLayout", told, c.c_int(_DTYPES[operand.dtype]), *sizes)

    def _made(self, kind: str, told: Mapping[int, Any], *arguments: Any) -> c.c_void_p:
        """A new object of the library with attributes, destroyed with this one."""
        handle = c.c_void_p()
        self._lt.call(f"{kind}Create", c.byref(handle), *arguments, what=str(self.product))
        weakref.finalize(self, self._lt.call, f"{kind}Destroy", handle).atexit = False
        for attribute, value in told.items():
            self._set(kind, handle, attribute, value)
        return handle

    def _set(self, kind: str, handle: c.c_void_p, attribute: int, value: Any) -> None:
        arguments = handle, attribute, c.byref(value), c.c_size_t(c.sizeof(value))
        self._lt.call(f"{kind}SetAttribute", *arguments, what=str(self.product))


def find_library() -> Any:
    """libcublasLt, of the wheel nvidia-cublas or of a CUDA toolkit; an Error without it."""
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        library = c.CDLL(load_nvidia_dynamic_lib("cublasLt").abs_path)
    except Exception as error:  # pathfinder's errors have no common base
        raise unavailable("cuBLASLt", error) from error
    library.cublasLtGetStatusString.restype = c.c_char_p
    library.cublasLtGetVersion.restype = c.c_size_t
    return library


def library_version() -> str:
    """The version of cuBLASLt; an Error without it."""
    return str(find_library().cublasLtGetVersion())


def key_of(product: Product) -> str:
    """The name of a product among algorithms: what they depend on, at typical sizes."""
    settings = typical(product).settings()
    return ", ".join(f"{name} {x}" for name, x in settings.items() if name != "alpha")


def typical(product: Product) -> Product:
    """The product whose algorithm serves this one, too.

    Numbers of tokens are rounded up, so that not every length of a prompt needs one: the rows, and
    every size of products in batches, which have no weights.
    """
    if product.batch == 1:
        return replace(product, rows=_rounded(product.rows))
    sizes = (product.batch, product.rows, product.columns, product.inner)
    batch, rows, columns, inner = map(_rounded, sizes)
    return replace(product, batch=batch, rows=rows, columns=columns, inner=inner)


def _rounded(size: int) -> int:
    """The next size of 1, 2, 3, 4, 6, 8, 12, 16, 24, ..."""
    power = 1 << max(0, size - 1).bit_length()
    return power * 3 // 4 if size <= power * 3 // 4 else power


def _pointer(address: int) -> c.c_void_p:
    return c.c_void_p(address)


def _alignment(address: int) -> int:
    """The largest power of two that divides an address, at most 256."""
    return min(ALIGNMENT, address & -address) if address else ALIGNMENT
