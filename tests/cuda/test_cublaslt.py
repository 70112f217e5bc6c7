"""How products are described to cuBLASLt, and the choice and keeping of algorithms."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from irc.backends.cuda.execute.algorithms import Algorithms
from irc.backends.cuda.execute.cublaslt import CublasLt, key_of, typical
from irc.backends.cuda.execute.fastest import Fastest
from irc.backends.cuda.plan.core import LibraryCall
from irc.backends.cuda.plan.product import Product
from irc.errors import Error
from irc.ir.dtypes import numpy_dtype
from tests.cuda.fake_cublaslt import FakeCublasLt
from tests.cuda.library_calls import product_of
from tests.fresh import fresh

PLAIN = Product("f32", "f32", 1, 5, 7, 3)
PRODUCTS = {
    "linear": PLAIN,
    "matmul": replace(PLAIN, transposed=False),
    "bias": replace(PLAIN, bias=True, activation="relu"),
    "relu": replace(PLAIN, activation="relu", transposed=False),
    "residual": replace(PLAIN, dtype="bf16", result="bf16", residual=True, bias=True),
    "batch": replace(PLAIN, dtype="f16", result="f16", batch=4, transposed=False),
    "one x": replace(PLAIN, batch=4, x_shared=True, residual=True, bias=True),
    "codes": Product(
        "f8e4m3", "bf16", 1, 5, 16, 32, scales="rows", x_scale=True, weight_scale=True
    ),
    "codes of a tensor": Product(
        "f8e4m3", "f16", 1, 5, 16, 32, scales="tensor", weight_scale=True, alpha=0.5
    ),
}


class FakeDriver:
    """Memory as numbers."""

    gpu = "a GPU, sm_90"

    def __init__(self, free: int = 1 << 40) -> None:
        self.allocated: set[int] = set()
        self.free_bytes = free

    def free_memory(self) -> int:
        return self.free_bytes

    def allocate(self, size: int) -> int:
        self.allocated.add(256 * (len(self.allocated) + 1))
        return max(self.allocated)

    def free(self, address: int) -> None:
        self.allocated.remove(address)


def made(library: FakeCublasLt, algorithms: Algorithms | None = None) -> CublasLt:
    driver: Any = FakeDriver()
    return CublasLt(driver, algorithms, library)


def call_of(product: Product) -> LibraryCall:
    return LibraryCall("cublaslt", "product", (), product.settings())


def arrays_of(product: Product, misplaced: int = 0) -> list[np.ndarray]:
    """Operands at addresses that are `misplaced` bytes behind multiples of 256."""
    rng = fresh()
    found: list[np.ndarray] = []
    for each in product.operands():
        memory = np.empty(each.nbytes + 512, np.uint8)
        start = -memory.ctypes.data % 256 + misplaced
        array = memory[start : start + each.nbytes].view(numpy_dtype(each.dtype))
        array[:] = rng.uniform(-1, 1, array.size)
        found.append(array.reshape(each.shape))
    return found


def places(arrays: list[np.ndarray]) -> list[int]:
    return [array.ctypes.data for array in arrays]


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_is_described(name: str) -> None:
    product = PRODUCTS[name]
    arrays = arrays_of(product)
    expected = product_of(product, arrays).astype(np.float64)
    library = FakeCublasLt()
    lt = made(library)
    lt.bind(call_of(product), places(arrays))(0)
    tolerance = {"f32": 1e-5, "f16": 2e-3, "bf16": 2e-2}[product.result]
    found = arrays[-1].astype(np.float64)
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)
    lt.close()
    gc.collect()
    assert not library.objects


@pytest.mark.parametrize("name", PRODUCTS)
def test_algorithms_are_offered_before_addresses_are_known(name: str) -> None:
    assert made(FakeCublasLt()).offered(PRODUCTS[name])


def test_settings_are_read_back() -> None:
    for product in PRODUCTS.values():
        assert Product.of(product.settings()) == product


def test_an_empty_product_does_nothing() -> None:
    library = FakeCublasLt(offered=0)
    made(library).bind(call_of(replace(PLAIN, rows=0)), [256, 512, 768])(0)
    assert not library.used


def test_the_chosen_algorithm_is_kept(tmp_path: Path) -> None:
    kept, library = tmp_path / "folder" / "algorithms.json", FakeCublasLt()
    lt = made(library, Algorithms(kept, "one"))
    seen: list[Product] = []

    def choose(product: Product, offered: Any) -> bytes:
        seen.append(product)
        return offered[2]

    other = replace(PLAIN, bias=True)
    lt.prepare([call_of(PLAIN), call_of(PLAIN), call_of(other)], choose)
    assert seen == [typical(PLAIN), typical(other)]
    again = made(library, Algorithms(kept, "one"))
    again.prepare([call_of(PLAIN), call_of(other)], choose)
    assert len(seen) == 2
    arrays = arrays_of(PLAIN)
    again.bind(call_of(PLAIN), places(arrays))(0)
    made(library, Algorithms(kept, "another")).prepare([call_of(PLAIN)], choose)
    assert len(seen) == 3
    assert library.used == [2]
    assert Algorithms(kept, "one")[key_of(other)] is not None


def test_products_of_about_as_many_rows_share_an_algorithm() -> None:
    rows = {key_of(replace(PLAIN, rows=n)): n for n in (1, 17, 24, 25, 32, 1537, 2048)}
    assert list(rows.values()) == [1, 24, 32, 2048]
    columns = {key_of(replace(PLAIN, columns=n)) for n in (17, 24)}
    assert len(columns) == 2
    batches = [replace(PLAIN, batch=5, columns=n, inner=n + 1) for n in (17, 23)]
    assert key_of(batches[0]) == key_of(batches[1])


def test_an_algorithm_that_cannot_run_is_not_used() -> None:
    library, algorithms = FakeCublasLt(offered=1), Algorithms()
    algorithms[key_of(PLAIN)] = bytes([9, *[0] * 63])
    arrays = arrays_of(PLAIN)
    made(library, algorithms).bind(call_of(PLAIN), places(arrays))(0)
    assert library.used == [0]


def test_kept_algorithms_are_for_aligned_operands() -> None:
    library, algorithms = FakeCublasLt(), Algorithms()
    algorithms[key_of(PLAIN)] = bytes([2, *[0] * 63])
    lt = made(library, algorithms)
    for misplaced in (0, 16):
        lt.bind(call_of(PLAIN), places(arrays_of(PLAIN, misplaced)))(0)
    assert library.used == [1, 0]
    assert library.alignments == {16}


@pytest.mark.parametrize("text", ["", "[]", '{"one": {"p": "zz"}}', '{"one": {"p": "00"}}'])
def test_a_damaged_file_is_replaced(tmp_path: Path, text: str) -> None:
    path = tmp_path / "algorithms.json"
    path.write_text(text)
    algorithms = Algorithms(path, "one")
    assert algorithms["p"] is None
    algorithms["p"] = bytes(64)
    algorithms.save()
    assert Algorithms(path, "one")["p"] == bytes(64)


def test_processes_add_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "algorithms.json"
    first, second = Algorithms(path, "one"), Algorithms(path, "one")
    first["p"], second["q"] = bytes(64), bytes(64)
    first.save()
    second.save()
    found = Algorithms(path, "one")
    assert found["p"] == found["q"] == bytes(64)


def test_ranks_agree_on_the_lowest_ranks_algorithms() -> None:
    tables = [Algorithms(), Algorithms()]
    tables[0]["p"], tables[1]["p"], tables[1]["q"] = bytes(64), bytes([1] * 64), bytes([2] * 64)
    sent: dict[int, bytes] = {}

    class Rank:
        def __init__(self, rank: int) -> None:
            self.rank, self.ranks = rank, 2

        def broadcast(self, data: bytes, root: int, group: Any) -> bytes:
            if root == self.rank:
                sent[root] = data
            return sent.get(root, b"{}")

    for rank in (1, 0, 1):
        host: Any = Rank(rank)
        tables[rank].agree(host)
    assert tables[0]["p"] == tables[1]["p"] == bytes(64)
    assert tables[0]["q"] == tables[1]["q"] == bytes([2] * 64)


def test_no_algorithm_names_the_product() -> None:
    message = r"no algorithm on this GPU for the f32 product \[5, 3\] x \[3, 7\] in f32"
    with pytest.raises(Error, match=message):
        made(FakeCublasLt(offered=0)).bind(call_of(PLAIN), [256, 512, 768])


def test_a_failure_names_the_product() -> None:
    library = FakeCublasLt(offered=1)
    library.failing = {0}
    arrays = arrays_of(PLAIN)
    enqueue = made(library).bind(call_of(PLAIN), places(arrays))
    with pytest.raises(Error, match=r"f32 product \[5, 3\] x \[3, 7\].*not supported"):
        enqueue(0)


class Clock:
    """A stream whose graphs take the time of their products; see `Fastest`."""

    handle = 0

    def __init__(self, library: FakeCublasLt, times: list[float]) -> None:
        self.library, self.times, self.now, self.filled = library, times, 0.0, 0

    def upload(self, address: int, host: np.ndarray) -> None:
        self.filled += host.nbytes

    def copy(self, target: int, source: int, size: int) -> None:
        assert source + size <= target
        self.filled += size

    def wait(self, what: str) -> None: ...

    def capture(self, work: Any) -> list[int]:
        before = len(self.library.used)
        work()
        return self.library.used[before:]

    def launch(self, graph: list[int]) -> None:
        self.now += sum(self.times[algorithm] for algorithm in graph)

    def event(self) -> Any:
        return Moment(self.now)

    def drop(self, graph: list[int]) -> None: ...


class Moment:
    def __init__(self, at: float) -> None:
        self.at = at

    def ms_until(self, later: Moment) -> float:
        return later.at - self.at


@pytest.mark.parametrize(
    ("times", "failing", "best"),
    [
        ([3.0, 2.0, 1.0], set[int](), 2),
        ([3.0, 2.0, 1.0], {2}, 1),
        ([1.0, 0.999, 1.1], set[int](), 0),
        ([3.0, 2.0, 1.0], {0, 1, 2}, 0),
    ],
)
def test_the_fastest_algorithm(times: list[float], failing: set[int], best: int) -> None:
    library = FakeCublasLt(computes=False)
    library.failing = failing
    driver: Any = FakeDriver()
    stream: Any = Clock(library, times)
    lt = CublasLt(driver, None, library)
    held = set(driver.allocated)
    product = Product("bf16", "bf16", 1, 64, 4096, 4096)
    offered = lt.offered(product)
    assert Fastest(lt, driver, stream)(product, offered) == offered[best]
    assert driver.allocated == held
    assert stream.filled >= product.nbytes


def test_without_memory_nothing_is_timed() -> None:
    library, driver = FakeCublasLt(), FakeDriver(free=1 << 20)
    given: Any = driver
    lt = CublasLt(given, None, library)
    stream: Any = None
    assert Fastest(lt, given, stream)(PLAIN, lt.offered(PLAIN)) is None
