"""Sums over ranks that write to each other's memory: kernels on the host, a rank per thread."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from typing import Any

import numpy as np
import pytest

from irc.backends.cuda.codegen.all_reduce import LARGEST, buffer_size
from irc.backends.cuda.plan import Kernel, Launch
from irc.backends.cuda.plan.build import Planner
from irc.backends.cuda.plan.core import PEERS
from irc.ir.core import Module
from irc.ir.dtypes import numpy_dtype
from irc.text import parse_module
from tests.cuda.emulate import Memory, memory_of, prepare, run_kernel
from tests.fresh import fresh

Array = np.ndarray[Any, Any]
WIDTH = 7


def module_of(ranks: int, kind: str, text: str, results: str = "y") -> Module:
    type = f"{kind}[B, {WIDTH}]"
    given = ", ".join(f"{name}: {type}" for name in results.split())
    body = text.replace("all_reduce %x", f'all_reduce %x {{axis="tp", group_size={ranks}}}')
    lines = "\n".join(f"{line.strip()} : {type}" for line in body.splitlines())
    return parse_module(f"""module @m local mesh(tp={ranks}) dims(B=1:2:999999) {{
      func @forward(%x: {type}, %r: {type}) -> ({given}) {{
        {lines}
        return {", ".join(f"%{name}" for name in results.split())} }} }}""")


ALONE = "%y = all_reduce %x"
ADDED = "%a = all_reduce %x\n%y = add %r, %a"


class Ranks:
    """The memory of a group of ranks, each with the kernels of its own."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.memory = [
            np.full(buffer_size(count) // 4, 0xFFFFFFFF, np.uint32) for _ in range(count)
        ]
        self.stop = np.zeros(1, np.uint32)
        self.tables: list[Memory] = []
        for rank in range(count):
            words = np.zeros(PEERS // 8, np.int64)
            words[:2] = self.stop.ctypes.data, rank
            words[2 : 2 + count] = [each.ctypes.data for each in self.memory]
            self.tables.append(memory_of(words))

    def one(self, rank: int, launch: Launch, kernel: Kernel, arrays: list[Array]) -> Array:
        own = Kernel(kernel.name, kernel.source, {**kernel.macros, "RANK": str(rank)})
        prepare([own])
        result = Memory(arrays[0].nbytes)
        numbers = [each for each in launch.arguments if isinstance(each, int)]
        given = [memory_of(each) for each in arrays]
        run_kernel(own, launch.grid, [*given, result, self.tables[rank], *numbers])
        return result.bytes.copy().view(arrays[0].dtype).reshape(arrays[0].shape)

    def all(self, text: str, kind: str, arrays: list[list[Array]]) -> list[Array]:
        """The result of every rank."""
        planner = Planner(module_of(self.count, kind, text))
        plan = planner.plan({"B": arrays[0][0].shape[0]})
        (launch,) = plan.steps
        assert isinstance(launch, Launch)
        kernel = plan.kernels[launch.kernel]
        for rank in range(self.count):  # g++ once, not in every thread
            prepare([Kernel(kernel.name, kernel.source, {**kernel.macros, "RANK": str(rank)})])
        with ThreadPoolExecutor(self.count) as pool:
            work = [
                pool.submit(self.one, rank, launch, kernel, arrays[rank])
                for rank in range(self.count)
            ]
            return [each.result() for each in work]


@pytest.mark.parametrize(
    ("ranks", "kind", "text"),
    [(2, "bf16", ADDED), (2, "f16", ALONE), (3, "f32", ADDED), (8, "bf16", ALONE)],
)
def test_sums(ranks: int, kind: str, text: str) -> None:
    """Calls of different sizes one after the other, with NaN and infinity among the numbers."""
    rng, group, dtype = fresh(), Ranks(ranks), numpy_dtype(kind)
    largest = LARGEST // dtype.itemsize // WIDTH
    for rows in (1, *(int(n) for n in rng.integers(1, 3000, 4)), largest, 2):
        arrays = [
            [rng.standard_normal((rows, WIDTH)).astype(dtype) for _ in range(text.count("%") // 2)]
            for _ in range(ranks)
        ]
        for each in arrays:
            each[1:] = arrays[0][1:]  # one residual
        arrays[-1][0][0, :2] = np.inf, np.nan
        arrays[0][0].view(f"u{dtype.itemsize}")[-1, -3:] = 2 ** (8 * dtype.itemsize) - 1  # NaN
        with np.errstate(invalid="ignore"):
            wanted = reduce(np.add, (each[0].astype("f4") for each in arrays)).astype(dtype)
            if len(arrays[0]) > 1:
                wanted = (wanted.astype("f4") + arrays[0][1].astype("f4")).astype(dtype)
        found = group.all(text, kind, arrays)
        for each in found:
            np.testing.assert_array_equal(each.astype("f4"), wanted.astype("f4"))
    for each in group.memory:
        assert (each == 0xFFFFFFFF).all()


def test_a_kernel_ends_once_the_run_has_failed() -> None:
    group, x = Ranks(2), np.ones((5, WIDTH), np.float32)
    plan = Planner(module_of(2, "f32", ALONE)).plan({"B": 5})
    (launch,) = plan.steps
    assert isinstance(launch, Launch)
    kernel = plan.kernels[launch.kernel]
    prepare([Kernel(kernel.name, kernel.source, {**kernel.macros, "RANK": "0"})])
    with ThreadPoolExecutor(1) as pool:
        alone = pool.submit(group.one, 0, launch, kernel, [x])
        time.sleep(0.2)
        assert not alone.done()
        group.stop[0] = 1
        alone.result(30)
