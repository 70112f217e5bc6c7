"""Kernels of rows and selections, run on the host, against the reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from irc.backends.cuda.codegen import moe, norms, rows, select
from irc.backends.cuda.plan import KERNELS, Template
from irc.backends.reference import evaluate
from irc.errors import Error
from irc.ir.dims import symbol
from irc.ir.dtypes import DTYPES, dtype_of
from tests.cuda.emulate import Array, prepare, run_templates
from tests.fresh import fresh
from tests.ops.compare import CLOSE
from tests.ops.example import Arg, Example, inputs_of, module_of, operation
from tests.ops.examples import EXAMPLES

MODULES = (moe, norms, rows, select)
HERE = {module.__name__ for module in MODULES}
OPERATIONS = sorted(cls.opname for cls, maker in KERNELS.items() if maker.__module__ in HERE)
RNG = fresh()
# How far neighbours are from each other, relative to their size: sums in another order may be
# rounded to the other one.
STEP = {"f8e4m3": 0.13, "f8e5m2": 0.26, "f4e2m1": 0.51, "f8e8m0": 1.01}


class Case:
    """The module of an example, and the launches of its operation, whose operands are in memory."""

    def __init__(self, example: Example, dtype: str = "f32") -> None:
        self.example, self.dtype, self.module = example, dtype, module_of(example, dtype)
        op = operation(self.module)
        made = KERNELS[type(op)](op, [*op.operands, *op.results])
        self.launches = [each for each in made if isinstance(each, Template)]

    def check(self, threaded: bool = False, **sizes: int) -> None:
        """Compare what the launches write with the reference, on random inputs of some sizes."""
        example = replace(self.example, sizes=self.example.sizes | sizes)
        inputs = inputs_of(example, self.dtype, RNG)
        args = self.module.functions["forward"].args
        arrays = {arg: inputs[str(arg.name)] for arg in args}
        got = run_templates(self.launches, arrays, example.sizes, threaded)
        wanted = evaluate(self.module, inputs).values()
        for value, want in zip(operation(self.module).results, wanted, strict=True):
            assert_near(got[value], want, f"{example} {self.dtype} {example.sizes}")


def compiled(cases: list[Case], threaded: bool = False) -> list[Case]:
    """The cases, all of whose kernels are compiled at once."""
    prepare([launch.kernel for case in cases for launch in case.launches], threaded)
    return cases


def is_taken(example: Example, dtype: str) -> bool:
    try:
        module_of(example, dtype)
    except Error:
        return False
    return True


def cases(op: str) -> list[Case]:
    """Every example of an operation in its dtypes, the first one in all that it takes."""
    examples = [each for each in EXAMPLES[op] if not each.local]
    found = [(each, dtype) for each in examples for dtype in each.dtypes]
    found += [(examples[0], dtype) for dtype in DTYPES if is_taken(examples[0], dtype)]
    return [Case(*each) for each in {(str(e), dtype): (e, dtype) for e, dtype in found}.values()]


def assert_near(got: Array, want: Array, what: str) -> None:
    """Raise unless two arrays have nearly the same numbers."""
    assert got.dtype == want.dtype, f"{what}: {got.dtype} against {want.dtype}"
    assert got.shape == want.shape, f"{what}: {got.shape} against {want.shape}"
    kind = dtype_of(want)
    a, b = got.astype(np.float64), want.astype(np.float64)
    if not DTYPES[kind].is_float:
        assert np.array_equal(got, want), f"{what}: {got} against {want}"
        return
    finite = np.isfinite(b)
    assert np.array_equal(a[~finite], b[~finite], equal_nan=True), f"{what}: infinities or NaN"
    a, b = a[finite], b[finite]
    limit = CLOSE.get(kind, 1e-5) * 4 * np.max(np.abs(b), initial=1.0)
    assert (np.abs(a - b) <= STEP.get(kind, 0) * np.abs(b) + limit).all(), f"{what}: {a} {b}"


@pytest.mark.parametrize("op", OPERATIONS)
def test_an_operation_in_every_dtype(op: str) -> None:
    for case in compiled(cases(op)):
        case.check()
        if "B" in case.example.sizes:
            case.check(B=0)


SIZE = symbol("N")
LENGTHS = (1, 2, 33, 256, 1000)
LONG = [
    *(Example(f"reduce_{name}", (Arg((2, SIZE)),), {"dims": (1,)}) for name in ("sum", "mean")),
    Example("reduce_max", (Arg((SIZE, 3, SIZE)),), {"dims": (0, 2)}),
    Example("reduce_min", (Arg((SIZE, 3, 2)),), {"dims": (0, 2), "keep": True}),
    Example("reduce_sum", (Arg((SIZE, 3, 1)),), {"dims": (-3, 1)}),
    Example("argmax", (Arg((3, SIZE)),), {}),
    Example("argmax", (Arg((SIZE, 3)),), {"dim": 0}),
    Example("softmax", (Arg((3, SIZE)),), {}),
    Example("log_softmax", (Arg((SIZE, 3)),), {"dim": 0}),
    Example("rms_norm", (Arg((3, SIZE)), Arg((SIZE,), "f32")), {}),
    Example("add_rms_norm", (Arg((3, SIZE)), Arg((3, SIZE)), Arg((SIZE,))), {}),
    Example("add_layer_norm", (Arg((3, SIZE)), Arg((3, SIZE))), {}),
    Example("group_norm", (Arg((2, 6, SIZE)), Arg((6,), name="weight")), {"groups": 3}),
    Example("topk", (Arg((3, SIZE + 9), "T", 0, 40),), {"k": 9}),
    Example("topk", (Arg((SIZE, 2), "T", 0, 40),), {"k": SIZE, "dim": 0}),
    Example("cumsum", (Arg((3, SIZE)),), {"exclusive": True}),
    Example("cumsum", (Arg((SIZE, 3)),), {"dim": 0}),
    Example("moe_slots", (Arg((SIZE, 2), "i32", -1, 7),), {"experts": 6, "capacity": 40}),
    Example("dynamic_scale", (Arg((SIZE, 96)),), {"dtype": "i8", "block": 32}),
]


@pytest.mark.parametrize("example", LONG, ids=str)
def test_rows_of_any_length(example: Example) -> None:
    """With a symbol as length, and with a number, which keeps short rows in shared memory."""
    any_length = Case(example)
    fixed = [Case(replace(example, sizes={"N": length}).bound()) for length in LENGTHS]
    compiled([any_length, *fixed], threaded=True)
    for length, case in zip(LENGTHS, fixed, strict=True):
        case.check(threaded=True)
        any_length.check(threaded=True, N=length)
