"""Examples of operations as launches, whose results are compared with the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from irc.backends.cuda.plan import KERNELS, Template
from irc.backends.reference import evaluate
from irc.ir.core import Module, Op, Value
from irc.ir.dtypes import DTYPES, dtype_of
from tests.cuda.emulate import run_templates
from tests.cuda.regimes import regime_of
from tests.ops.compare import CLOSE, assert_close
from tests.ops.example import Example, dtypes_taken, inputs_of, module_of, operation

Array: TypeAlias = np.ndarray[Any, Any]
# One step of floats of few bits, relative to a number: functions that are off by one unit of f32
# may be rounded to another code.
STEPS = {"f8e4m3": 2.0**-3, "f8e5m2": 2.0**-2, "f4e2m1": 0.5, "f8e8m0": 0.5}


@dataclass(frozen=True)
class Case:
    """One example in one dtype, with its launches."""

    example: Example
    dtype: str
    module: Module
    templates: Sequence[Template]

    def check(
        self, rng: np.random.Generator, sizes: dict[str, int], threaded: bool = False
    ) -> None:
        """Compare the results for random inputs at these sizes with the reference."""
        example = replace(self.example, sizes=sizes)
        inputs = inputs_of(example, self.dtype, rng)
        wanted = list(evaluate(self.module, inputs, sizes=sizes).values())
        values: dict[Value, Array] = {a: inputs[str(a.name)] for a in self.module.main.args}
        found = run_templates(self.templates, values, sizes, threaded)
        for value, want in zip(self.module.main.returned, wanted, strict=True):
            compare(found[value], want, example, self.dtype)


def launches(op: Op, *more: Value) -> list[Template]:
    """The launches of an operation; its operands are in memory, or instead `more` values."""
    stored = [*(more or op.operands), *op.results]
    made = KERNELS[type(op)](op, regime_of({"N": 9}, stored=stored))
    return [each for each in made if isinstance(each, Template)]


def wide_launches(op: Op) -> list[Template]:
    """The launches of an operation on values of so many elements that indices have 64 bits."""
    wide = {"ix": "long long"}
    return [replace(each, kernel=replace(each.kernel, macros=wide)) for each in launches(op)]


def compare(got: Array, want: Array, example: Example, dtype: str) -> None:
    """An AssertionError where a result is not as in the reference."""
    has_angles = example.op in ("rope", "rope_and_cache", "fused_attention")
    turned = has_angles and dtype == "f64"  # by angles in f32
    summed = example.op in ("reduce_sum", "cumsum")  # in another order, to any size
    product = example.op in ("matmul", "linear", "conv", "attention")
    factor = CLOSE["f32"] / CLOSE["f64"] if turned else 8.0 if summed else 4.0 if product else 2.0
    what, step = f"{example} in {dtype} at {example.sizes}", STEPS.get(dtype_of(want))
    if step is None:
        assert_close(got, want, what, factor)
        return
    assert got.shape == want.shape, what
    a, b = got.astype(np.float64), want.astype(np.float64)
    with np.errstate(invalid="ignore"):  # infinities
        apart = np.abs(a - b)
    # sums of many narrow numbers may round to either neighbour, in whichever order they are made
    least = step if product else float(np.finfo(np.float32).tiny)
    near = apart <= step * np.maximum(np.abs(a), np.abs(b)) + least
    same = (a == b) | (np.isnan(a) & np.isnan(b)) | near
    assert same.all(), f"{what}: {a[~same]} against {b[~same]}"


def cases(
    examples: Sequence[Example],
    launches: Callable[[Op], Sequence[Template]],
    dtypes: Sequence[str] = tuple(DTYPES),
) -> list[Case]:
    """The examples in every dtype that they take.

    Numbers of f8e8m0 have no zero, which attention needs, and no sign: half of those that are drawn
    are NaN, which no integer stands for.
    """
    found: list[Case] = []
    for example in examples:
        taken = {*dtypes}.intersection(dtypes_taken(example))
        if "attention" in example.op or example.attributes.get("dtype") == "i32":
            taken.discard("f8e8m0")
        for dtype in sorted(taken):
            module = module_of(example, dtype)
            found.append(Case(example, dtype, module, launches(operation(module))))
    return found


def drawn(found: Sequence[Case], rng: np.random.Generator, count: int) -> list[Case]:
    """The cases of each example in at most `count` dtypes, drawn afresh."""
    groups: dict[int, list[Case]] = {}
    for case in found:
        groups.setdefault(id(case.example), []).append(case)
    return [
        group[i]
        for group in groups.values()
        for i in rng.choice(len(group), min(count, len(group)), replace=False)
    ]


def odd_sizes(example: Example, rng: np.random.Generator) -> list[dict[str, int]]:
    """The sizes of the example, odd ones, and an empty batch."""
    found = [example.sizes]
    if example.sizes:
        found.append({name: int(rng.integers(1, 7)) * 2 + 1 for name in example.sizes})
    if "B" in example.sizes:
        found.append(example.sizes | {"B": 0})
    return found
