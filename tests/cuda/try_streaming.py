"""Checks streaming products against numpy on a GPU, and prints their times beside the floor.

    python -m tests.cuda.try_streaming [--check | --time] [--tune]
        [--models 8B] [--schemes float,int4] [--rows 1,16]

The floor is the bytes of the weights over the rate at which a plain kernel reads memory. It needs
a GPU and cuda-bindings, and takes about three minutes. `--tune` times all candidates.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from statistics import median

import numpy as np

from irc.backends.cuda.codegen.kernels import number
from irc.backends.cuda.codegen.streaming.choices import Choice, candidates, target
from irc.backends.cuda.device import CudaDriver, CudaStream
from irc.backends.cuda.execute.compile import key_of
from irc.backends.cuda.execute.launch import CudaKernels, Enqueue, call_driver
from irc.backends.cuda.execute.load import CudaGpu, open_gpu
from irc.backends.cuda.plan import Argument, Kernel, Launch
from irc.backends.cuda.plan.template import Template
from irc.errors import Error
from irc.ir.dims import product as count_of
from irc.ir.dtypes import dtype, dtype_of, numpy_dtype, packed
from tests.cuda.streaming_cases import SCHEMES, Case

FORMS = ("", "norm", "bias residual", "norm gated bias")
# (N, K) and the form of the products of a layer, and of the head
MODELS = {
    "8B": {
        "qkv": (6144, 4096, "norm"),
        "o": (4096, 4096, "residual"),
        "gate, up": (14336, 4096, "norm gated"),
        "down": (4096, 14336, "residual"),
        "head": (128256, 4096, "norm"),
    },
    "1B": {
        "qkv": (3072, 2048, "norm"),
        "o": (2048, 2048, "residual"),
        "gate, up": (8192, 2048, "norm gated"),
        "down": (2048, 8192, "residual"),
        "head": (128256, 2048, "norm"),
    },
}
LAYERS = {"8B": 32, "1B": 16}
CACHE = 256 << 20  # bytes of weights between two uses of the same, more than the L2 cache holds
READ = Kernel(
    "read_all",
    """extern "C" __global__ void read_all(const uint4* x, int* y, int count) {
    u32 sum = 0;
    #pragma unroll 8
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
        const uint4 v = __ldcs(x + i);
        sum ^= v.x ^ v.y ^ v.z ^ v.w;
    }
    if (sum == 12345u) *y = 1;
}
""",
)


class Tried:
    """The first GPU."""

    def __init__(self) -> None:
        self.gpu: CudaGpu = open_gpu(0, 60.0)
        driver = self.gpu.driver
        assert isinstance(driver, CudaDriver)
        self.driver, self.stream = driver, CudaStream()
        self.memory = self.driver.allocate(4 << 30)
        noise = np.random.default_rng().integers(0, 2**16, 1 << 24, dtype=np.uint16)
        noise &= 0xBFFF  # of weights that are no large numbers
        self.stream.upload(self.memory, noise)
        for i in range(1, (4 << 30) // noise.nbytes):
            self.stream.copy(self.memory + i * noise.nbytes, self.memory, noise.nbytes)
        self.stream.wait("random memory")

    def launch(
        self, template: Template, places: Sequence[int], rows: int, early: bool = True
    ) -> Enqueue:
        """The function that enqueues a launch."""
        values = [*places, *(rows for _ in template.symbols)]
        given = [Argument("") for _ in places] + [rows for _ in template.symbols]
        step = Launch(
            template.kernel.name,
            template.grid({"B": rows}),
            template.block,
            tuple(given),
            template.shared({"B": rows}),
        )
        self.gpu.kernels.load([template.kernel])
        return self.gpu.kernels.bind(step, template.kernel, values, early)

    def check(self, case: Case, choice: Choice) -> float:
        """The largest error, in units of what rounding may make of it; in a captured graph."""
        template = case.product().template(choice)
        inputs = case.inputs(template.reads, np.random.default_rng())
        wanted = case.expected(inputs)
        got = np.empty(wanted.shape, numpy_dtype(case.dtype))
        arrays = [inputs[value] for value in template.reads]
        arrays = [packed(a) if dtype(dtype_of(a)).bits == 4 else a for a in arrays]
        places = [self.driver.allocate(array.nbytes) for array in (*arrays, got)]
        for place, array in zip(places, arrays, strict=False):
            self.stream.upload(place, np.ascontiguousarray(array).view(np.uint8))
        self.driver.zero(places[-1], got.nbytes, self.stream.handle)
        launches = [
            self.launch(template, places, case.rows, early) for early in (False, True, True)
        ]

        def thrice() -> None:
            for enqueue in launches:
                enqueue(self.stream.handle)

        graph = self.stream.capture(thrice)
        self.stream.launch(graph)
        self.stream.download(got, places[-1])
        self.stream.wait(template.kernel.name)
        self.stream.drop(graph)
        for place in places:
            self.driver.free(place)
        return case.error(got, wanted)

    def registers(self, template: Template) -> str:
        """Registers of a thread, and bytes that it spills."""
        from cuda.bindings import driver

        kernels = self.gpu.kernels
        assert isinstance(kernels, CudaKernels)
        function = kernels._functions[key_of(template.kernel)]  # pyright: ignore[reportPrivateUsage]
        kinds = driver.CUfunction_attribute
        registers, local = (
            call_driver("cuFuncGetAttribute", kind, function)
            for kind in (kinds.CU_FUNC_ATTRIBUTE_NUM_REGS, kinds.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)
        )
        return f"{registers} registers" + (f", {local} BYTES SPILLED" if local else "")

    def time(self, case: Case, choice: Choice) -> tuple[float, int]:
        """Microseconds of one product in a chain of them, and the bytes of its weights."""
        template = case.product().template(choice)
        sizes = [
            dtype(v.type.dtype).nbytes(number(count_of(v.type.shape), {"B": case.rows}))
            for v in (*template.reads, *template.writes)
        ]
        each = -(-sum(sizes) // 256) * 256 + 256 * len(sizes)
        count = max(2, min(64, (4 << 30) // each, -(-CACHE // each)))
        parts = [-(-size // 256) * 256 for size in sizes]

        def at(i: int, early: bool = True) -> Enqueue:
            start = self.memory + i * each
            places = [start + sum(parts[:part]) for part in range(len(parts))]
            return self.launch(template, places, case.rows, early)

        enqueues, rounds = [at(i) for i in range(count)], max(1, 40 // count)
        alone = at(count // 2, early=False)

        def chain() -> None:
            alone(self.stream.handle)
            for _ in range(rounds):
                for enqueue in enqueues:
                    enqueue(self.stream.handle)

        weights = sum(s for s, v in zip(sizes, template.reads, strict=False) if v.name != "x")
        return self.replayed(chain) / (rounds * count + 1), weights

    def replayed(self, work: Callable[[], None]) -> float:
        """The median time of a graph of `work`, in microseconds."""
        graph = self.stream.capture(work)
        for _ in range(3):
            self.stream.launch(graph)
        events = [self.stream.event()]
        for _ in range(15):
            self.stream.launch(graph)
            events.append(self.stream.event())
        self.stream.wait("products")
        self.stream.drop(graph)
        return 1e3 * median(before.ms_until(after) for before, after in pairwise(events))

    def rate(self) -> float:
        """Bytes per second that a plain kernel reads."""
        count = (2 << 30) // 16
        best = 0.0
        for per_unit in (2, 4, 8):
            grid = (per_unit * target().multiprocessors, 1, 1)
            step = Launch(READ.name, grid, 512, (Argument(""), Argument(""), count))
            self.gpu.kernels.load([READ])
            values = [self.memory, self.memory + (3 << 30), count]
            enqueue = self.gpu.kernels.bind(step, READ, values, False)
            us = self.replayed(lambda enqueue=enqueue: enqueue(self.stream.handle))
            best = max(best, 16 * count / us * 1e6)
        return best


def choices(case: Case, tune: bool) -> Iterator[tuple[str, Choice]]:
    """The chosen kernel, and others where they are to be tuned."""
    product = case.product()
    gated = len(product.matrices) == 2
    found = candidates(case.n, case.k, gated, product.codes, case.rows, target())
    known = {each.name: each for each in found if isinstance(each, Choice)}
    yield from list(known.items())[: None if tune else 1]


def check(tried: Tried) -> None:
    """Every scheme, form and number of rows, with an odd number of rows of weights."""
    shapes = (("bf16", 4096), ("f16", 1536), ("bf16", 14336))
    work: list[tuple[Case, str, Choice]] = []
    for scheme in SCHEMES:
        for i, rows in enumerate((1, 2, 3, 5, 8, 13, 16)):
            for kind, k in shapes if rows in (1, 16) else [shapes[i % 3]]:
                case = Case(scheme, kind, FORMS[i % len(FORMS)], rows, 1003, k)
                work += [(case, *each) for each in choices(case, False)]
    tried.gpu.kernels.load([case.product().template(choice).kernel for case, _, choice in work])
    wrong = 0
    for case, name, choice in work:
        error = tried.check(case, choice)
        if not error <= 1:
            wrong += 1
            print(f"WRONG {error:9.3g} {name} {case}", flush=True)
    print(f"{len(work)} products checked, {wrong} wrong", flush=True)


def time(tried: Tried, given: argparse.Namespace) -> None:
    """The products of models, by scheme and rows."""
    rate = tried.rate()
    print(f"a plain kernel reads {rate / 1e12:.2f} TB/s")
    for model in given.models.split(","):
        for scheme in given.schemes.split(","):
            for rows in map(int, given.rows.split(",")):
                step(tried, model, scheme, rows, rate, given.tune)


def step(tried: Tried, model: str, scheme: str, rows: int, rate: float, tune: bool) -> None:
    """The products of one step of a model."""
    cases = {
        name: Case(scheme, "bf16", form, rows, n, k) for name, (n, k, form) in MODELS[model].items()
    }
    work = [(name, case, *each) for name, case in cases.items() for each in choices(case, tune)]
    tried.gpu.kernels.load([case.product().template(choice).kernel for _, case, _, choice in work])
    words = f"{model} {scheme:6s} rows {rows:2d}"
    total, least, seen = 0.0, 0.0, set[str]()
    for name, case, kernel, choice in work:
        us, nbytes = tried.time(case, choice)
        floor = 1e6 * nbytes / rate
        if name not in seen:  # the chosen kernel
            seen.add(name)
            times = 1 if name == "head" else LAYERS[model]
            total, least = total + us * times, least + floor * times
        print(
            f"{words} {name:9s} {kernel:11s} {us:7.2f} us, floor {floor:7.2f} ({floor / us:4.0%}), "
            f"{tried.registers(case.product().template(choice))}",
            flush=True,
        )
    print(f"{words} products of a step {total / 1e3:.3f} ms, floor {least / 1e3:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--models", default="8B,1B")
    parser.add_argument("--schemes", default="float,fp8,int8,int4,uint4")
    parser.add_argument("--rows", default="1,4,16")
    given = parser.parse_args()
    tried = Tried()
    print(tried.driver.gpu, target())
    both = not (given.check or given.time)
    try:
        if given.check or both:
            check(tried)
        if given.time or both:
            time(tried, given)
    except Error as failure:
        print(f"FAIL  {failure.message}", flush=True)


if __name__ == "__main__":
    main()
