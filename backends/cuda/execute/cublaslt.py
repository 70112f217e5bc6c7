"""cuBLASLt through ctypes: matrix products on device memory, enqueued on a stream.

cuBLASLt reads matrices in column-major order, so it is asked for yᵀ = wᵀ xᵀ: its first operand is
the weight, its second one x, and its rows are the columns of y.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import ctypes as c
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from irc.backends.cuda.driver import Driver
from irc.backends.cuda.plan.core import LibraryCall
from irc.backends.cuda.plan.product import Product
from irc.backends.cuda.runtime import unavailable
from irc.errors import Error

from .algorithms import Algorithms

WORKSPACE = 32 << 20  # bytes, what NVIDIA recommends for compute capability 9.0
ALIGNMENT = 256  # bytes; of a pointer, more is not better
_OFFERED = 8  # algorithms to choose from

# Numbers of library_types.h, cublas_api.h and cublasLt.h
_DTYPES = {"f32": 0, "f16": 2, "bf16": 14, "f8e4m3": 28, "f8e5m2": 29}  # cudaDataType
_COMPUTE_32F, _SCALE_32F = 68, 0  # cublasComputeType_t, cudaDataType
_EPILOGUE = {"": 1, "relu": 2}  # cublasLtEpilogue_t
_EPILOGUE_BIAS = 4
_SCALE_MODES = {"tensor": 0, "rows": 3}  # SCALAR_32F, OUTER_VEC_32F
# attributes of a description
_TRANSA, _EPILOGUE_KIND, _BIAS, _BIAS_TYPE = 3, 7, 8, 26
_WEIGHT_SCALE, _X_SCALE, _WEIGHT_SCALE_MODE, _X_SCALE_MODE = 17, 18, 31, 32
_BATCH_COUNT, _BATCH_STRIDE = 5, 6  # attributes of a layout
_MOST_WORKSPACE = 1  # attributes of a preference
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
Enqueue = Callable[[int], None]  # (stream)
# The algorithm to keep, of those that are offered; None keeps none.
Choose = Callable[[Product, Sequence[bytes]], bytes | None]


class CublasLt:
    """Products on one GPU and one stream: they share the workspace.

    The GPU is the current one of the thread. `library` replaces libcublasLt in tests.
    """

    def __init__(
        self, driver: Driver, algorithms: Algorithms | None = None, library: Any = None
    ) -> None:
        self._library = find_library() if library is None else library
        self.algorithms = Algorithms() if algorithms is None else algorithms
        self._handle = c.c_void_p()
        self.call("Create", c.byref(self._handle))
        self._driver, self._workspace = driver, driver.allocate(WORKSPACE)

    def close(self) -> None:
        """Release the workspace; graphs with products must not run any more."""
        self._driver.free(self._workspace)
        self.call("Destroy", self._handle)

    def prepare(self, calls: Iterable[LibraryCall], choose: Choose) -> None:
        """Choose the algorithms of calls that have none yet, and save them.

        Call it while nothing is captured, for `choose` runs the algorithms.
        """
        products = (each for each in map(_product_of, calls) if not each.is_empty)
        for key, product in {key_of(each): typical(each) for each in products}.items():
            if self._known(_Description(self, product)):
                continue
            chosen = choose(product, self.offered(product))
            if chosen is not None:
                self.algorithms[key] = chosen
        self.algorithms.save()

    def bind(self, call: LibraryCall, addresses: Addresses) -> Enqueue:
        """enqueue(stream) of a call whose arguments lie at `addresses`."""
        return self.bind_product(_product_of(call), addresses)

    def bind_product(
        self, product: Product, addresses: Addresses, algorithm: bytes | None = None
    ) -> Enqueue:
        """enqueue(stream) of a product: by an algorithm, else the kept one, else the first that
        cuBLASLt offers."""
        if product.is_empty:
            return lambda stream: None
        names = [each.name for each in product.operands()]
        places = dict(zip(names, addresses, strict=True))
        made = _Description(self, product)
        made.point(places)
        if algorithm is None:
            algorithm = self._known(made) or made.offered()[0]
        chosen = _Algorithm.from_buffer_copy(algorithm)
        residual = places.get("residual", places["y"])
        alpha, beta = c.c_float(product.alpha), c.c_float(float(product.residual))

        def enqueue(stream: int) -> None:
            self.call(
                "Matmul", self._handle, made.description, c.byref(alpha),
                _pointer(places["weight"]), made.weight, _pointer(places["x"]), made.x,
                c.byref(beta), _pointer(residual), made.y, _pointer(places["y"]), made.y,
                c.byref(chosen), _pointer(self._workspace), c.c_size_t(WORKSPACE),
                _pointer(stream), what=str(product),
            )  # fmt: skip

        return enqueue

    def offered(self, product: Product) -> list[bytes]:
        """The algorithms for a product, the likely fastest first; an Error if there is none."""
        return _Description(self, product).offered()

    def call(self, function: str, *arguments: Any, what: str = "a product") -> None:
        """Call a function of the library; an Error with its message."""
        status = getattr(self._library, f"cublasLt{function}")(*arguments)
        if status:
            raise Error(f"cublasLt{function} of {what} failed: {self._message(status)}")

    def try_call(self, function: str, *arguments: Any) -> bool:
        """Call a function of the library; whether it succeeds."""
        return getattr(self._library, f"cublasLt{function}")(self._handle, *arguments) == 0

    def _message(self, status: int) -> str:
        text = self._library.cublasLtGetStatusString(status)
        return f"{(text or b'no message').decode()} ({status})"

    def _known(self, made: _Description) -> bytes | None:
        """The kept algorithm of a product, if it can run."""
        found = self.algorithms[key_of(made.product)] if made.is_aligned else None
        return found if found is not None and made.accepts(found) else None


class _Description:
    """What cuBLASLt is told about a product."""

    def __init__(self, library: CublasLt, product: Product) -> None:
        self._lt, self.product = library, product
        self._operands = {each.name: each for each in product.operands()}
        self.description = self._made("MatmulDesc", _COMPUTE_32F, _SCALE_32F)
        self._set(_TRANSA, c.c_int32(product.transposed))
        self._describe_result()
        # Without addresses of scales per row, cuBLASLt offers no algorithm.
        self.point(dict.fromkeys(self._operands, ALIGNMENT))
        self.weight = self._layout("weight")
        self.x, self.y = self._layout("x"), self._layout("y")

    def point(self, places: dict[str, int]) -> None:
        """Set the addresses that are part of the description."""
        self._places = places
        for name, attribute in (
            ("bias", _BIAS),
            ("x_scale", _X_SCALE),
            ("weight_scale", _WEIGHT_SCALE),
        ):
            if name in places:
                self._set(attribute, c.c_uint64(places[name]))

    @property
    def is_aligned(self) -> bool:
        """Whether the operands lie where algorithms were timed: at multiples of 256."""
        return all(_alignment(place) == ALIGNMENT for place in self._places.values())

    def offered(self) -> list[bytes]:
        """Algorithms that can run, the likely fastest first; an Error if there is none."""
        preference = self._made("MatmulPreference")
        self._prefer(preference, _MOST_WORKSPACE, c.c_uint64(WORKSPACE))
        for name, attribute in _ALIGNMENTS.items():
            place = self._places.get(name, self._places["y"])
            self._prefer(preference, attribute, c.c_uint32(_alignment(place)))
        results, count = (_Result * _OFFERED)(), c.c_int()
        self._lt.try_call(
            "MatmulAlgoGetHeuristic", self.description, self.weight, self.x, self.y, self.y,
            preference, _OFFERED, results, c.byref(count),
        )  # fmt: skip
        found = [bytes(each.algorithm) for each in results[: count.value] if each.state == 0]
        if not found:
            raise Error(f"cuBLASLt has no algorithm on this GPU for the {self.product}")
        return found

    def accepts(self, algorithm: bytes) -> bool:
        """Whether an algorithm can run, within the workspace."""
        result = _Result()
        chosen = _Algorithm.from_buffer_copy(algorithm)
        can = self._lt.try_call(
            "MatmulAlgoCheck", self.description, self.weight, self.x, self.y, self.y,
            c.byref(chosen), c.byref(result),
        )  # fmt: skip
        return can and result.workspace <= WORKSPACE

    def _describe_result(self) -> None:
        product = self.product
        epilogue = _EPILOGUE[product.activation]
        if product.bias:
            epilogue = (epilogue if product.activation else 0) | _EPILOGUE_BIAS
            self._set(_BIAS_TYPE, c.c_int32(_DTYPES[product.result]))
        self._set(_EPILOGUE_KIND, c.c_uint32(epilogue))
        if product.scales:
            mode = _SCALE_MODES[product.scales]
            self._set(_X_SCALE_MODE, c.c_int32(mode))
            self._set(_WEIGHT_SCALE_MODE, c.c_int32(mode))

    def _layout(self, name: str) -> c.c_void_p:
        """The layout of a row-major operand: its columns are the rows of a column-major one."""
        operand = self._operands[name]
        batch, rows, columns = operand.shape
        sizes = c.c_uint64(columns), c.c_uint64(rows), c.c_int64(columns)
        made = self._made("MatrixLayout", _DTYPES[operand.dtype], *sizes)
        if self.product.batch > 1:
            stride = rows * columns if batch > 1 else 0
            self._lay(made, _BATCH_COUNT, c.c_int32(self.product.batch))
            self._lay(made, _BATCH_STRIDE, c.c_int64(stride))
        return made

    def _made(self, kind: str, *arguments: Any) -> c.c_void_p:
        """A new object of the library, destroyed with this one."""
        made = c.c_void_p()
        self._lt.call(f"{kind}Create", c.byref(made), *arguments, what=str(self.product))
        weakref.finalize(self, self._lt.call, f"{kind}Destroy", made).atexit = False
        return made

    def _set(self, attribute: int, value: Any) -> None:
        self._attribute("MatmulDesc", self.description, attribute, value)

    def _lay(self, layout: c.c_void_p, attribute: int, value: Any) -> None:
        self._attribute("MatrixLayout", layout, attribute, value)

    def _prefer(self, preference: c.c_void_p, attribute: int, value: Any) -> None:
        self._attribute("MatmulPreference", preference, attribute, value)

    def _attribute(self, kind: str, object: c.c_void_p, attribute: int, value: Any) -> None:
        size = c.c_size_t(c.sizeof(value))
        call = f"{kind}SetAttribute"
        self._lt.call(call, object, attribute, c.byref(value), size, what=str(self.product))


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


def machine_name(driver: Driver, library: Any = None) -> str:
    """The GPU and the version of cuBLASLt, for which algorithms are valid."""
    version = (find_library() if library is None else library).cublasLtGetVersion()
    return f"{driver.gpu}, cuBLASLt {version}"


def key_of(product: Product) -> str:
    """The name of a product among algorithms: what they depend on, at typical sizes."""
    settings = typical(product).settings()
    return ", ".join(f"{name} {x}" for name, x in settings.items() if name != "alpha")


def typical(product: Product) -> Product:
    """The product whose fastest algorithm serves this one, too.

    Numbers of tokens are rounded up, so that not every length of a prompt is timed: the rows, and
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


def _product_of(call: LibraryCall) -> Product:
    return Product.of(call.settings)


def _pointer(address: int) -> c.c_void_p:
    return c.c_void_p(address)


def _alignment(address: int) -> int:
    """The largest power of two that divides an address, at most 256."""
    return min(ALIGNMENT, address & -address) if address else ALIGNMENT
