"""cuBLASLt in numpy, as its documentation defines it: column-major matrices in host memory.

Addresses are those of numpy arrays. Attributes of a wrong size are refused, as the library does.
"""

from __future__ import annotations

import ctypes as c
from collections.abc import Callable
from typing import Any

import numpy as np

from irc.ir.dtypes import numpy_dtype

OK, INVALID, UNSUPPORTED = 0, 7, 15
DTYPES = {0: "f32", 2: "f16", 14: "bf16", 28: "f8e4m3"}
# attribute -> bytes of its value
SIZES = {
    "MatmulDesc": {3: 4, 4: 4, 7: 4, 8: 8, 17: 8, 18: 8, 26: 4, 31: 4, 32: 4},
    "MatrixLayout": {5: 4, 6: 8},
    "MatmulPreference": {1: 8, 5: 4, 6: 4, 7: 4, 8: 4},
}
_BY_ROWS = ((17, 31), (18, 32))  # attributes of a description: the scales, and their mode


class FakeCublasLt:
    """`offered`: how many algorithms there are; `failing`: those that cannot run.

    `used` are the algorithms of the products so far, by number; `alignments` are those of the
    operands in the last of `questions` for algorithms. `objects` are the descriptions that exist.
    """

    def __init__(self, offered: int = 3) -> None:
        self.offered, self.failing = offered, set[int]()
        self.used: list[int] = []
        self.questions = 0
        self.alignments: set[int] = set()
        self.objects: dict[int, dict[Any, Any]] = {}
        self._next = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        name = name.removeprefix("cublasLt")
        for ending, method in (
            ("Create", self._create),
            ("Destroy", self._destroy),
            ("SetAttribute", self._set),
        ):
            if name.endswith(ending):
                kind = name.removesuffix(ending)
                return lambda *arguments: method(kind, *arguments)
        raise AttributeError(name)

    def cublasLtGetStatusString(self, status: int) -> bytes:
        return {INVALID: b"an invalid value", UNSUPPORTED: b"not supported"}[status]

    def cublasLtGetVersion(self) -> int:
        return 130100

    def _create(self, kind: str, handle: Any, *arguments: Any) -> int:
        self._next += 1
        handle._obj.value = self._next
        self.objects[self._next] = {"kind": kind, "made with": [_plain(a) for a in arguments]}
        return OK

    def _destroy(self, kind: str, handle: Any) -> int:
        assert self.objects.pop(handle.value)["kind"] == kind
        return OK

    def _set(self, kind: str, handle: Any, attribute: int, value: Any, size: Any) -> int:
        if SIZES[kind].get(attribute) != size.value:
            return INVALID
        assert c.sizeof(value._obj) == size.value
        self.objects[handle.value][attribute] = value._obj.value
        return OK

    def cublasLtMatmulAlgoGetHeuristic(self, handle: Any, *arguments: Any) -> int:
        desc, *_, preference, most, results, count = arguments
        told = self.objects[desc.value]
        if any(told.get(mode) == 3 and pointer not in told for pointer, mode in _BY_ROWS):
            return UNSUPPORTED
        asked = self.objects[preference.value]
        self.questions += 1
        assert asked[1] > 0
        self.alignments = {asked[attribute] for attribute in (5, 6, 7, 8)}
        count._obj.value = min(most, self.offered)
        for i in range(count._obj.value):
            results[i].algorithm.data[0] = i + 1
        return OK if self.offered else UNSUPPORTED

    def cublasLtMatmulAlgoCheck(self, handle: Any, *arguments: Any) -> int:
        *_, algorithm, result = arguments
        result._obj.workspace = 0
        return OK if 1 <= algorithm._obj.data[0] <= self.offered else INVALID

    def cublasLtMatmul(self, handle: Any, desc: Any, *arguments: Any) -> int:
        alpha, a, a_layout, b, b_layout, beta, add, _, out, out_layout, algorithm = arguments[:11]
        number = algorithm._obj.data[0] - 1
        if number in self.failing:
            return UNSUPPORTED
        self.used.append(number)
        told = self.objects[desc.value]
        left, right = self._matrices(a, a_layout), self._matrices(b, b_layout)
        if told.get(3):
            left = np.swapaxes(left, 1, 2)
        y = alpha._obj.value * np.matmul(left, right)
        y = y * self._scales(told, 17, 31, left.shape[1], (1, -1, 1))
        y = y * self._scales(told, 18, 32, right.shape[2], (1, 1, -1))
        if beta._obj.value:
            y = y + beta._obj.value * self._matrices(add, out_layout)
        dtype = DTYPES[self.objects[out_layout.value]["made with"][0]]
        if told[7] & 4:
            assert told[26] == self.objects[out_layout.value]["made with"][0]
            y = y + _read(told[8], y.shape[1], dtype).reshape(1, -1, 1)
        if told[7] & 2:
            y = np.maximum(y, 0)
        stored = np.ascontiguousarray(np.swapaxes(y, 1, 2)).astype(numpy_dtype(dtype))
        c.memmove(out.value, stored.ctypes.data, stored.nbytes)
        return OK

    def _matrices(self, pointer: Any, layout: Any) -> Any:
        """[batch, rows, columns] in f32."""
        told = self.objects[layout.value]
        number, rows, columns, leading = told["made with"]
        assert leading == rows
        batch, stride = told.get(5, 1), told.get(6, 0)
        size, item = rows * columns, numpy_dtype(DTYPES[number]).itemsize
        found = [
            _read(pointer.value + i * stride * item, size, DTYPES[number]).reshape(columns, rows).T
            for i in range(batch)
        ]
        return np.stack(found)

    def _scales(self, told: Any, pointer: int, mode: int, size: int, shape: Any) -> Any:
        if pointer not in told:
            return np.float32(1)
        by_rows = told[mode] == 3
        return _read(told[pointer], size if by_rows else 1, "f32").reshape(shape)


def _plain(argument: Any) -> int:
    return argument if isinstance(argument, int) else argument.value


def _read(address: int, count: int, dtype: str) -> Any:
    kind = numpy_dtype(dtype)
    return np.frombuffer(c.string_at(address, count * kind.itemsize), kind).astype(np.float32)
