"""Kernels of rows, selections and experts, on the host, against the reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from irc.backends.cuda.codegen import moe, norms, rows, select
from irc.backends.cuda.plan import KERNELS, Template
from irc.backends.cuda.plan.prepare import load_tables
from irc.ir.core import Op, Value
from irc.ir.dims import symbol
from irc.ops import Maximum
from tests.cuda.cases import cases, drawn, odd_sizes
from tests.cuda.emulate import prepare
from tests.ops.example import Arg, Example
from tests.ops.examples import EXAMPLES

load_tables()  # operands are computed by the elements of other files
HERE = {module.__name__ for module in (moe, norms, rows, select)}
OPERATIONS = sorted(cls.opname for cls, maker in KERNELS.items() if maker.__module__ in HERE)


def launches(op: Op, *more: Value) -> list[Template]:
    """The launches of an operation; its operands are in memory, or instead `more` values."""
    made = KERNELS[type(op)](op, [*(more or op.operands), *op.results])
    return [each for each in made if isinstance(each, Template)]


def wide_launches(op: Op) -> list[Template]:
    """The launches of an operation on values of so many elements that indices have 64 bits."""
    wide = {"ix": "long long"}
    return [replace(each, kernel=replace(each.kernel, macros=wide)) for each in launches(op)]


def launches_of_computed(op: Op) -> list[Template]:
    """The launches of an operation that is changed so that its kernels compute its operands."""
    function, args = op.parent, op.operands
    assert function is not None
    same = {value: function.insert(Maximum(value, value), op).results[0] for value in args}
    op.operands = tuple(same[value] for value in args)
    return launches(op, *args)


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_example_is_as_in_the_reference(name: str, rng: np.random.Generator) -> None:
    """In two of the dtypes that it takes."""
    found = drawn(cases([e for e in EXAMPLES[name] if not e.local], launches), rng, 2)
    prepare(each.kernel for case in found for each in case.templates)
    for case in found:
        for sizes in odd_sizes(case.example, rng):
            case.check(rng, sizes)


SIZE = symbol("N")
LONG = [
    *(Example(f"reduce_{name}", (Arg((2, SIZE)),), {"dims": (1,)}) for name in ("sum", "mean")),
    Example("reduce_max", (Arg((SIZE, 3, SIZE)),), {"dims": (0, 2)}),
    Example("reduce_min", (Arg((SIZE, 3, 2)),), {"dims": (0, 2), "keep": True}),
    Example("reduce_sum", (Arg((SIZE, 3, 1)),), {"dims": (-3, 1)}),
    Example("reduce_sum", (Arg((40, SIZE)),), {"dims": (0,)}),
    Example("cumsum", (Arg((20, SIZE)),), {"dim": 0, "exclusive": True}),
    Example("softmax", (Arg((20, SIZE)),), {"dim": 0}),
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


@pytest.mark.parametrize("name", OPERATIONS)
def test_operands_that_are_computed_inside(name: str, rng: np.random.Generator) -> None:
    examples = [e for e in EXAMPLES[name] if not e.local]
    found = drawn(cases(examples, launches_of_computed, ("f16", "i32")), rng, 1)
    prepare(each.kernel for case in found for each in case.templates)
    for case in found:
        assert not any(v.producer is not None for t in case.templates for v in t.reads)
        case.check(rng, case.example.sizes)


@pytest.mark.parametrize("example", LONG, ids=str)
def test_rows_of_any_length(example: Example, rng: np.random.Generator) -> None:
    """With a symbol as length, and with a number, which keeps short rows in shared memory.

    Indices are of 64 bits where the length is a symbol.
    """
    lengths = [1, 2, 33, int(rng.integers(200, 1200))]
    fixed = [replace(example, sizes={"N": length}).bound() for length in lengths]
    found = [*cases([example], wide_launches, ("f32",)), *cases(fixed, launches, ("f32",))]
    prepare([each.kernel for case in found for each in case.templates], threaded=True)
    for case in found[1:]:
        case.check(rng, {}, threaded=True)
    for length in lengths:
        found[0].check(rng, {"N": length}, threaded=True)
