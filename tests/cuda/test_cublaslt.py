"""How products are described to cuBLASLt, and which algorithms compute them."""

from __future__ import annotations

import gc
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest

from irc.backends.cuda.execute.cublaslt import CublasLt, key_of
from irc.backends.cuda.plan.core import LibraryCall
from irc.backends.cuda.plan.product import Product
from irc.errors import Error
from irc.ir.dtypes import numpy_dtype
from tests.cuda.fake_cublaslt import FakeCublasLt
from tests.cuda.library_calls import product_of
from tests.fresh import fresh
from tests.tensorrt.fake_gpu import FakeDriver

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


def made(library: FakeCublasLt, algorithms: Any = None, locked: bool = False) -> CublasLt:
    return CublasLt(FakeDriver(0), algorithms, locked, library)


def call_of(product: Product) -> LibraryCall:
    return LibraryCall("cublaslt", "product", (), product.settings())


def arrays_of(product: Product, misplaced: int = 0) -> list[np.ndarray]:
    """Operands at addresses that are `misplaced` bytes behind multiples of 256."""
    rng = fresh()
    found: list[np.ndarray] = []
    for each in product.operands():
        nbytes = prod(each.shape) * numpy_dtype(each.dtype).itemsize
        memory = np.empty(nbytes + 512, np.uint8)
        start = -memory.ctypes.data % 256 + misplaced
        array = memory[start : start + nbytes].view(numpy_dtype(each.dtype))
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
    assert made(FakeCublasLt()).offered(call_of(PRODUCTS[name]))[1]


def test_settings_are_read_back() -> None:
    for product in PRODUCTS.values():
        assert Product.of(product.settings()) == product


def test_an_empty_product_does_nothing() -> None:
    library = FakeCublasLt(offered=0)
    made(library).bind(call_of(replace(PLAIN, rows=0)), [256, 512, 768])(0)
    assert not library.used


def test_the_chosen_algorithm_is_used() -> None:
    library = FakeCublasLt()
    key, offered = made(library).offered(call_of(PLAIN))
    assert len(offered) == 3
    lt = made(library, {key: offered[2]}, locked=True)
    bound = lt.bind(call_of(PLAIN), places(arrays_of(PLAIN)))
    bound(0)
    lt.bind(call_of(replace(PLAIN, rows=6)), places(arrays_of(replace(PLAIN, rows=6))))(0)
    lt.choose({key: offered[1]})
    lt.bind(call_of(PLAIN), places(arrays_of(PLAIN)))(0)
    bound(0)
    assert library.used == [2, 2, 1, 2]
    with pytest.raises(Error, match=r"no algorithm for the product .*bias.* irc bench kernels"):
        lt.bind(call_of(replace(PLAIN, bias=True)), [256, 512, 768, 1024])
    library.offered = 1  # where there is only one, none is chosen
    lt.bind(call_of(replace(PLAIN, bias=True)), [256, 512, 768, 1024])


def test_products_of_about_as_many_rows_share_an_algorithm() -> None:
    rows = {key_of(replace(PLAIN, rows=n)): n for n in (1, 17, 24, 25, 32, 1537, 2048)}
    assert list(rows.values()) == [1, 24, 32, 2048]
    columns = {key_of(replace(PLAIN, columns=n)) for n in (17, 24)}
    assert len(columns) == 2
    batches = [replace(PLAIN, batch=5, columns=n, inner=n + 1) for n in (17, 23)]
    assert key_of(batches[0]) == key_of(batches[1])


def test_an_algorithm_that_cannot_run_is_not_used() -> None:
    library = FakeCublasLt(offered=1)
    lt = made(library, {key_of(PLAIN): bytes([9, *[0] * 63]).hex()})
    lt.bind(call_of(PLAIN), places(arrays_of(PLAIN)))(0)
    assert library.used == [0]


def test_chosen_algorithms_are_for_aligned_operands() -> None:
    library = FakeCublasLt()
    lt = made(library, {key_of(PLAIN): bytes([2, *[0] * 63]).hex()})
    for misplaced in (0, 16):
        lt.bind(call_of(PLAIN), places(arrays_of(PLAIN, misplaced)))(0)
    assert library.used == [1, 0]
    assert library.alignments == {16}


def test_equal_products_are_described_once() -> None:
    """Also where they have biases at other addresses, which are told before each."""
    library, product = FakeCublasLt(), PRODUCTS["bias"]
    lt = made(library)
    given = [arrays_of(product) for _ in range(3)]
    bound = [lt.bind(call_of(product), places(arrays)) for arrays in given]
    assert library.questions == 1
    while bound:
        bound.pop()(0)
    for arrays in given:
        expected = product_of(product, arrays).astype(np.float64)
        np.testing.assert_allclose(arrays[-1].astype(np.float64), expected, rtol=0.02, atol=0.02)
    gc.collect()
    assert not library.objects.keys() - {1}


@pytest.mark.parametrize(
    ("offered", "failing", "reason"), [(0, set[int](), "no algorithm"), (1, {0}, "not supported")]
)
def test_errors_name_the_product(offered: int, failing: set[int], reason: str) -> None:
    library = FakeCublasLt(offered)
    library.failing = failing
    with pytest.raises(Error, match=r"f32 product \[5, 3\] x \[3, 7\]") as raised:
        made(library).bind(call_of(PLAIN), places(arrays_of(PLAIN)))(0)
    assert reason in raised.value.message
