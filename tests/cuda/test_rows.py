"""Kernels of rows, selections and experts, on the host, against the reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from irc.backends.cuda.codegen import experts, norms, rows, select
from irc.backends.cuda.plan import KERNELS, Launch, Template
from irc.backends.cuda.plan.prepare import load_tables
from irc.backends.reference import evaluate
from irc.ir.core import Op
from irc.ir.dims import symbol
from irc.ir.dtypes import numpy_dtype
from irc.ops import Maximum
from irc.text import parse_module
from tests.cuda.cases import cases, drawn, launches, wide_launches
from tests.cuda.emulate import prepare, run_templates
from tests.cuda.run_plan import HostProgram
from tests.ops.compare import assert_close
from tests.ops.example import Arg, Example, module_of, operation
from tests.ops.examples import EXAMPLES

load_tables()  # operands are computed by the elements of other files
HERE = {module.__name__ for module in (experts, norms, rows, select)}
OPERATIONS = sorted(cls.opname for cls, maker in KERNELS.items() if maker.__module__ in HERE)


def launches_of_computed(op: Op) -> list[Template]:
    """The launches of an operation that is changed so that its kernels compute its operands."""
    function, args = op.parent, op.operands
    assert function is not None
    same = {value: function.insert(Maximum(value, value), op).results[0] for value in args}
    op.operands = tuple(same[value] for value in args)
    return launches(op, *args)


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
    """With a symbol as length, and with a number, which keeps short rows in shared memory, or in
    registers where all threads have as many numbers.

    Indices are of 64 bits where the length is a symbol.
    """
    lengths = [1, 2, 33, 264, 128 * int(rng.integers(1, 9)), int(rng.integers(200, 1200))]
    fixed = [replace(example, sizes={"N": length}).bound() for length in lengths]
    found = [*cases([example], wide_launches, ("f32",)), *cases(fixed, launches, ("f32",))]
    prepare([each.kernel for case in found for each in case.templates], threaded=True)
    for case in found[1:]:
        case.check(rng, {}, threaded=True)
    for length in lengths:
        found[0].check(rng, {"N": length}, threaded=True)


@pytest.mark.parametrize(
    ("example", "together"),
    [
        (Example("rms_norm", (Arg((3, 264)), Arg((264,)))), True),
        (Example("add_layer_norm", (Arg((3, 264)), Arg((3, 264)))), True),
        (Example("softmax", (Arg((3, 264)),)), True),
        (Example("rms_norm", (Arg((3, 33)), Arg((33,)))), False),
        (Example("softmax", (Arg((264, 264)),), {"dim": 0}), False),
    ],
    ids=str,
)
def test_neighbours_are_read_and_written_together(example: Example, together: bool) -> None:
    (template,) = launches(operation(module_of(example, "bf16")))
    for pointer in ("(const Pack<bf16, 8>*)p0", "(Pack<bf16, 8>*)out0"):
        assert (pointer in template.kernel.source) is together


@pytest.mark.parametrize(("size", "threads"), [(512, 64), (8192, 512)])
def test_constant_weights_are_read_before_the_kernel_in_front_has_ended(
    size: int, threads: int, rng: np.random.Generator
) -> None:
    """A thread has one pack of a row, or two."""
    kind = f"bf16[3, {size}]"
    module = parse_module(f"""module @m {{
      weight @w : bf16[{size}] = random("w", 1, 0.5)
      func @forward(%x: {kind}) -> ({kind}, {kind}) {{
        %y = rms_norm %x, @w {{eps=0.01}} : {kind}
        %s, %z = add_rms_norm %y, %x, @w {{eps=0.01}} : {kind}, {kind}
        return %s, %z }} }}""")
    program = HostProgram(module)
    inputs = {"x": rng.normal(0, 3, (3, size)).astype(numpy_dtype("bf16"))}
    first, second = program.planners[0].plan({}).steps
    assert isinstance(first, Launch) and isinstance(second, Launch) and second.programmatic
    assert first.block == second.block == threads
    assert len(first.early) == len(second.early) == 1
    results = program.run(inputs)
    for name, want in evaluate(module, inputs).items():
        assert_close(results[name], want, name)


def test_neighbours_that_are_computed_apart_are_taken_one_by_one(rng: np.random.Generator) -> None:
    """A row of a transposed value."""
    text = """module @m { func @forward(%x: f32[264, 3]) -> (f32[3, 264]) {
      %t = transpose %x {order=[1, 0]} : f32[3, 264]
      %y = softmax %t : f32[3, 264]
      return %y } }"""
    module = parse_module(text)
    producer = module.main.returned[0].producer
    assert producer is not None
    (template,) = launches(producer, *module.main.args)
    assert "const Pack" not in template.kernel.source
    x = rng.uniform(-1, 1, (264, 3)).astype(np.float32)
    (value,) = module.main.args
    got = run_templates([template], {value: x}, {}, True)[module.main.returned[0]]
    assert_close(got, next(iter(evaluate(module, {"x": x}).values())), text)
