"""Checks attention of one query per sequence on a GPU, and prints its times.

    python -m tests.cuda.try_attention [--heads 32 --key-heads 8 --size 128]

It needs a GPU and cuda-bindings, and takes about a minute. A time is that of one launch among
those of a step, each with caches of its own, in a graph.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from statistics import median
from typing import Any

import numpy as np

from irc.backends.cuda.codegen.decode_attention import Shape, find_site, template
from irc.backends.cuda.codegen.decode_choices import cluster_of, shape_of
from irc.backends.cuda.codegen.kernels import number
from irc.backends.cuda.device import CudaDriver, CudaStream
from irc.backends.cuda.execute.compile import Compiler
from irc.backends.cuda.execute.launch import CudaKernels
from irc.backends.cuda.plan import Argument, Launch, Template
from irc.ir.core import Value
from irc.ir.dtypes import dtype
from irc.ir.types import TensorType
from tests.cuda.decode_cases import Array, Case, arrays_of, attention_of, check_results
from tests.cuda.test_decode_attention import CASES, launch

LAYERS = 16
ROOM = 8 << 30  # bytes of caches
READ = 4.39e12  # bytes per second, of an H200
STEPS = [(1, 512), (1, 8192), (1, 32768), (16, 512), (16, 8192), (64, 512)]


class Tried:
    """The first GPU."""

    def __init__(self) -> None:
        self.driver, self.stream = CudaDriver(0), CudaStream()
        capability = self.driver.gpu.capability
        self.kernels = CudaKernels(capability, Compiler(capability))
        self.held: list[int] = []

    def upload(self, data: Array) -> int:
        address = self.driver.allocate(max(data.nbytes, 1))
        self.held.append(address)
        self.stream.upload(address, np.ascontiguousarray(data).reshape(-1).view(np.uint8))
        self.stream.wait()
        return address

    def zeros(self, nbytes: int) -> int:
        """The address of memory of zeros."""
        address = self.driver.allocate(max(nbytes, 1))
        self.held.append(address)
        self.driver.zero(address, nbytes, self.stream.handle)
        return address

    def download(self, address: int, like: Array) -> Array:
        host = np.empty(like.nbytes, np.uint8)
        self.stream.download(host, address)
        self.stream.wait()
        return host.view(like.dtype).reshape(like.shape)

    def free(self) -> None:
        self.stream.wait()
        for address in self.held:
            self.driver.free(address)
        self.held.clear()

    def bound(
        self, made: Template, memory: dict[Value, int], case: Case, early: bool = False
    ) -> Any:
        """enqueue(stream) of a launch whose values lie at these addresses."""
        own = [self.zeros(nbytes_of(t, case)) for t in (*made.scratch, *made.zeros)]
        values = [memory[v] for v in (*made.reads, *made.writes)] + own
        numbers = [case.sizes[name] for name in made.symbols]
        grid, shared = made.grid(case.sizes), made.shared(case.sizes)
        arguments = (*[Argument("buffer")] * len(values), *numbers)
        launched = Launch("kernel", grid, made.block, arguments, shared, made.cluster)
        self.kernels.load([made.kernel])
        return self.kernels.bind(launched, made.kernel, [*values, *numbers], early)


def nbytes_of(type: TensorType, case: Case) -> int:
    """Bytes of a value of a case."""
    count = prod(number(size, case.sizes) for size in type.shape)
    return dtype(type.dtype).nbytes(count)


def check(tried: Tried, case: Case) -> None:
    """Raise unless the kernel agrees with the reference; twice, as it has to leave zeros."""
    module = case.module()
    made = launch(case, module)
    inputs = arrays_of(case, module, np.random.default_rng())
    memory = {value: tried.upload(array) for value, array in inputs.items()}
    results: dict[Value, Array] = {}
    for value in made.writes:
        old = made.in_place.get(value)
        results[value] = inputs[old] if old else np.zeros(case.result_shape, case.numpy)
        memory[value] = memory[old] if old else tried.upload(results[value])
    run = tried.bound(made, memory, case)
    for _ in range(2):
        run(tried.stream.handle)
        got = {v: tried.download(memory[v], results[v]) for v in made.writes}
        check_results(case, module, inputs, got)
    tried.free()


def time(tried: Tried, case: Case, shape: Shape) -> float:
    """Microseconds per launch, in a graph of launches with caches of their own, all zeros."""
    module = case.module()
    made = template(find_site(attention_of(module)), case.sizes, shape)
    small = arrays_of(replace(case, capacity=1), module, np.random.default_rng())
    caches = [value for value in small if value.name in ("k0", "v0")]
    shared = {v: tried.upload(a) for v, a in small.items() if v not in caches}
    size = sum(nbytes_of(value.type, case) for value in caches)
    count = min(LAYERS, max(2, ROOM // size))
    runs: list[Any] = []
    for i in range(count):
        memory = shared | {v: tried.zeros(nbytes_of(v.type, case)) for v in caches}
        for value in made.writes:
            old = made.in_place.get(value)
            memory[value] = memory[old] if old else tried.zeros(nbytes_of(value.type, case))
        runs.append(tried.bound(made, memory, case, early=i > 0))
    tried.stream.wait()
    graph = tried.stream.capture(lambda: enqueue(tried.stream.handle, runs))
    found: list[float] = []
    for _ in range(30):
        start = tried.stream.event()
        tried.stream.launch(graph)
        end = tried.stream.event()
        tried.stream.wait()
        found.append(start.ms_until(end) * 1000 / count)
    tried.stream.drop(graph)
    tried.free()
    return median(found)


def enqueue(stream: int, runs: Sequence[Any]) -> None:
    """Enqueue launches, one after the other."""
    for run in runs:
        run(stream)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--key-heads", type=int, default=8)
    parser.add_argument("--size", type=int, default=128)
    given = parser.parse_args(arguments)
    tried = Tried()
    for name, case in CASES.items():
        check(tried, case)
        print(f"{name}: agrees")
    for batch, past in STEPS:
        shape = (given.heads, given.key_heads, given.size)
        case = Case(*shape, batch, past + 64, (past,))
        chosen = shape_of(find_site(attention_of(case.module())), case.sizes)
        floor = batch * (past + 1) * given.key_heads * given.size * 4 / READ * 1e6
        tries: list[int] = sorted({1, 2, 4, 8, chosen.splits, *([16, 32] if batch < 16 else [])})
        shapes = {n: replace(chosen, splits=n, cluster=cluster_of(n, past)) for n in tries}
        times = ", ".join(f"{n}: {time(tried, case, each):.1f}" for n, each in shapes.items())
        chosen = f"chosen {chosen.splits}; floor {floor:.1f}"
        print(f"batch {batch}, {past} keys, us by splits: {times} ({chosen})")


if __name__ == "__main__":
    main()
