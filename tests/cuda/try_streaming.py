"""Checks streaming products of real widths against numpy: python -m tests.cuda.try_streaming

It needs a GPU and cuda-bindings, and takes about 20 seconds. `irc bench kernels` times the
same kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from irc.backends.cuda.codegen.streaming.choices import Choice, candidates, target
from irc.backends.cuda.device import CudaDriver, CudaStream
from irc.backends.cuda.execute.launch import Enqueue
from irc.backends.cuda.execute.load import CudaGpu, open_gpu
from irc.backends.cuda.plan import Argument, Launch
from irc.backends.cuda.plan.template import Template
from irc.errors import Error
from irc.ir.dtypes import dtype, dtype_of, numpy_dtype, packed
from tests.cuda.streaming_cases import SCHEMES, Case

FORMS = ("", "norm", "bias residual", "norm gated bias")


class Tried:
    """The first GPU."""

    def __init__(self) -> None:
        self.gpu: CudaGpu = open_gpu(0, 60.0)
        driver = self.gpu.driver
        assert isinstance(driver, CudaDriver)
        self.driver, self.stream = driver, CudaStream()

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


def chosen(case: Case) -> Choice:
    """The kernel that the rules choose."""
    product = case.product()
    gated = len(product.matrices) == 2
    found = candidates(case.n, case.k, gated, product.codes, case.rows, target())
    return next(each for each in found if isinstance(each, Choice))


def check(tried: Tried) -> None:
    """Every scheme, form and number of rows, with an odd number of rows of weights."""
    shapes = (("bf16", 4096), ("f16", 1536), ("bf16", 14336))
    work: list[tuple[Case, Choice]] = []
    for scheme in SCHEMES:
        for i, rows in enumerate((1, 2, 3, 5, 8, 13, 16)):
            for kind, k in shapes if rows in (1, 16) else [shapes[i % 3]]:
                case = Case(scheme, kind, FORMS[i % len(FORMS)], rows, 1003, k)
                work.append((case, chosen(case)))
    tried.gpu.kernels.load([case.product().template(choice).kernel for case, choice in work])
    wrong = 0
    for case, choice in work:
        error = tried.check(case, choice)
        if not error <= 1:
            wrong += 1
            print(f"WRONG {error:9.3g} {choice.name} {case}", flush=True)
    print(f"{len(work)} products checked, {wrong} wrong", flush=True)


def main() -> None:
    tried = Tried()
    print(tried.driver.gpu, target())
    try:
        check(tried)
    except Error as failure:
        print(f"FAIL  {failure.message}", flush=True)


if __name__ == "__main__":
    main()
