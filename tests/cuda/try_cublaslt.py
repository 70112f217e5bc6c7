"""Checks cuBLASLt's products against numpy on a GPU, and prints their speed.

    python -m tests.cuda.try_cublaslt [--rows 2048]

It needs a GPU, cuda-bindings and nvidia-cublas, and takes about a minute.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np

from irc.backends.cuda.device import CudaDriver, CudaStream
from irc.backends.cuda.execute.algorithms import Algorithms
from irc.backends.cuda.execute.cublaslt import CublasLt, machine_name
from irc.backends.cuda.execute.fastest import Fastest
from irc.backends.cuda.plan.product import Product
from irc.errors import Error
from irc.ir.dtypes import numpy_dtype
from tests.cuda.library_calls import product_of

TOLERANCE = {"f32": 1e-4, "f16": 2e-3, "bf16": 2e-2}
# Llama 8B: (columns, inner) of the weights of a layer, and of the head
SHAPES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate": (14336, 4096),
    "gate and up": (28672, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
}


def plain(dtype: str, rows: int = 33, columns: int = 48, inner: int = 64) -> Product:
    return Product(dtype, dtype, 1, rows, columns, inner)


def codes(result: str, scales: str, rows: int = 33, columns: int = 48, inner: int = 64) -> Product:
    found = Product("f8e4m3", result, 1, rows, columns, inner, scales=scales)
    return replace(found, x_scale=True, weight_scale=True)


def cases() -> list[Product]:
    """Products that are checked, odd sizes and every epilogue among them."""
    found: list[Product] = []
    for dtype in ("f32", "f16", "bf16"):
        for rows, columns, inner in ((33, 48, 64), (17, 5, 3), (1, 7, 9), (300, 129, 257)):
            product = plain(dtype, rows=rows, columns=columns, inner=inner)
            found += [product, replace(product, bias=True, residual=True, transposed=False)]
        base = plain(dtype)
        found += [
            replace(base, bias=True),
            replace(base, residual=True),
            replace(base, activation="relu"),
            replace(base, bias=True, residual=True, activation="relu"),
            replace(base, batch=5, transposed=False),
            replace(base, batch=5, x_shared=True, bias=True),
            replace(base, alpha=0.25),
        ]
    for result in ("bf16", "f16", "f32"):
        for scales in ("tensor", "rows"):
            found += [codes(result, scales), codes(result, scales, rows=17)]
            if result != "f32":
                found.append(replace(codes(result, scales), bias=True, residual=True))
    found.append(replace(codes("bf16", "tensor"), x_scale=False, alpha=0.5))
    return found


class Tried:
    """cuBLASLt on the first GPU."""

    def __init__(self) -> None:
        self.driver = CudaDriver(0)
        self.stream = CudaStream()
        self.lt = CublasLt(self.driver, Algorithms(None, machine_name(self.driver)))

    def check(self, product: Product) -> float:
        """The largest error of a captured call, in tolerances."""
        rng = np.random.default_rng()
        arrays = [
            rng.uniform(-1, 1, each.shape).astype(numpy_dtype(each.dtype))
            for each in product.operands()
        ]
        places = [self.driver.allocate(array.nbytes) for array in arrays]
        for place, array in zip(places, arrays, strict=True):
            self.stream.upload(place, array.view(np.uint8))
        expected = product_of(product, arrays).astype(np.float64)
        enqueue = self.lt.bind_product(product, places)
        enqueue(self.stream.handle)
        self.driver.zero(places[-1], arrays[-1].nbytes, self.stream.handle)
        graph = self.stream.capture(lambda: enqueue(self.stream.handle))
        self.stream.launch(graph)
        self.stream.download(arrays[-1], places[-1])
        self.stream.wait("a product")
        for place in places:
            self.driver.free(place)
        # tensor cores add products of codes with fewer bits than f32 has
        tolerance = max(TOLERANCE[product.result], 5e-3 * (product.dtype == "f8e4m3"))
        away = np.abs(arrays[-1].astype(np.float64) - expected)
        return float(np.max(away / (tolerance * (1 + np.abs(expected)))))

    def speed(self, name: str, product: Product) -> str:
        """The first and the fastest algorithm."""
        fastest = Fastest(self.lt, self.driver, self.stream)
        times = fastest.times(product, self.lt.offered(product))
        if not times:
            return f"{name}: too little memory"
        best = min(times)
        return (
            f"{name:12s} {product.dtype:7s} {product.scales:7s} {len(times)} offered, "
            f"first {times[0]:8.1f} us, best {best:8.1f} us = {product.flops / best / 1e6:5.0f} "
            f"TFLOP/s, {product.nbytes / best / 1e6:5.2f} TB/s"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2048)
    rows = parser.parse_args().rows
    tried = Tried()
    print(machine_name(tried.driver))
    for product in cases():
        try:
            error = tried.check(product)
            mark = "ok   " if error <= 1 else "WRONG"
            print(f"{mark} {error:7.3f} {product} {dict(product.settings())}", flush=True)
        except Error as failure:
            print(f"FAIL  {failure.message}", flush=True)
    for name, (columns, inner) in SHAPES.items():
        sizes = {"rows": rows, "columns": columns, "inner": inner}
        timed = [plain("bf16", **sizes), codes("bf16", "rows", **sizes)]
        if name in ("o", "down"):
            timed[0] = replace(timed[0], residual=True)
        if name == "o":
            timed += [plain(dtype, **sizes) for dtype in ("f16", "f32")]
            timed.append(codes("bf16", "tensor", **sizes))
        for product in timed:
            try:
                print(tried.speed(name, product), flush=True)
            except Error as failure:
                print(f"FAIL  {name}: {failure.message}", flush=True)


if __name__ == "__main__":
    main()
