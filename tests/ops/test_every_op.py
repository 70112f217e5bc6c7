"""For every operation: type inference, text, expansion, dtypes and errors, on its examples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from irc.backends.lowering import expansion
from irc.backends.reference import evaluate
from irc.backends.reference.execute import widened
from irc.errors import Error
from irc.ir.core import Function, Module, Op, Value
from irc.ir.declare import REGISTRY, op_class
from irc.ir.dims import bind
from irc.ir.dtypes import numpy_dtype
from irc.ir.mesh import Mesh
from irc.ir.verify import verify
from irc.ops import Return
from irc.ops.collective import Collective
from irc.text import parse_module, print_module
from tests.ops.compare import assert_close, run
from tests.ops.example import Bad, Example, build, dtypes_taken, inputs_of, module_of, operation
from tests.ops.examples import EXAMPLES

NEVER_WRONG = {"return"}  # takes any values; the verifier checks its position
WITHOUT_MEANING = {"return", "call"}  # the executor walks these itself
CASES = [
    pytest.param(example, dtype, id=f"{example}-{dtype}")
    for examples in EXAMPLES.values()
    for example in examples
    for dtype in example.dtypes
]
BAD = [
    pytest.param(op, bad, id=f"{op}-{bad.message}")
    for op, examples in EXAMPLES.items()
    for example in examples
    for bad in example.bad
]


def test_every_operation_has_examples_and_errors() -> None:
    assert sorted(REGISTRY) == sorted(EXAMPLES)
    refused = {op for op, examples in EXAMPLES.items() if any(e.bad for e in examples)}
    assert sorted(REGISTRY.keys() - refused) == sorted(NEVER_WRONG)


def test_every_operation_has_a_docstring() -> None:
    silent = [name for name, cls in REGISTRY.items() if not (cls.__doc__ or "").strip()]
    assert not silent


def test_every_operation_on_tensors_has_a_sharding_rule() -> None:
    """Without a rule, the sharding of the operands would be lost in the result types."""
    for name, examples in EXAMPLES.items():
        for example in examples:
            op = operation(module_of(example, example.dtypes[0]))
            # those that name the axis type their results
            exempt = name in WITHOUT_MEANING or bool(op.attributes.get("axis"))
            exempt |= not op.operands
            assert exempt == (op.sharding_rule() is None), name


@pytest.mark.parametrize(("example", "dtype"), CASES)
def test_inference_agrees_with_numpy(
    example: Example, dtype: str, rng: np.random.Generator
) -> None:
    op = operation(module_of(example, dtype))
    if op.opname in WITHOUT_MEANING:
        return
    inputs = list(inputs_of(example, dtype, rng).values())
    bound = operation(module_of(example.bound(), dtype))
    arrays = meaning(bound, inputs, example)
    assert len(arrays) == len(op.results)
    for array, result in zip(arrays, op.results, strict=True):
        shape = tuple(bind(size, example.sizes) for size in result.type.shape)
        assert np.shape(array) == shape
        declared = numpy_dtype(result.type.dtype)
        narrow = widened(np.zeros((), declared)).dtype
        assert np.asarray(array).dtype in (declared, narrow)


def meaning(op: Op, inputs: list[np.ndarray], example: Example) -> list[np.ndarray]:
    """The results of an operation straight from its declaration."""
    wide = [widened(array) for array in inputs]
    if isinstance(op, Collective):
        array: Any = wide[0] if wide else None
        if op.operands and not op.stated_group_size:
            return [op.whole(array)]
        return op.combine([array] * (op.stated_group_size or 2))[:1]
    if op.composite and type(op).evaluate is Op.evaluate:
        given = dict(zip(arg_names(op), inputs, strict=True))
        return list(evaluate(expanded(op, example), given).values())
    fixed = len(wide) - len(op.present)
    named = dict(zip(op.present, wide[fixed:], strict=True))
    arrays = op.evaluate(*wide[:fixed], *[named.get(name) for name in op.optional_names])
    return list(arrays) if isinstance(arrays, tuple) else [arrays]


def arg_names(op: Op) -> list[str]:
    return [f"x{i}" for i in range(len(op.operands))]


def expanded(op: Op, example: Example) -> Module:
    """A module that computes the expansion of a composite operation, on the example's mesh."""
    parts = expansion(op)
    module = Module("expanded", Mesh.parse(example.mesh), local=example.local)
    args = zip(arg_names(op), (v.type for v in op.operands), strict=True)
    function = module.add_function(Function("forward", list(args)))
    for stand_in, arg in zip(parts.operands, function.args, strict=True):
        stand_in.replace_by(arg)
    for part in parts.ops:
        function.append(part)
    results = [_read(value, parts.operands, function) for value in parts.results]
    function.append(Return(results))
    return module


def _read(value: Value, stand_ins: tuple[Value, ...], function: Function) -> Value:
    return function.args[stand_ins.index(value)] if value in stand_ins else value


@pytest.mark.parametrize(("example", "dtype"), CASES)
def test_text_round_trip(example: Example, dtype: str) -> None:
    module = module_of(example, dtype)
    verify(module)
    text = print_module(module)
    again = parse_module(text)
    verify(again)
    assert print_module(again) == text
    assert operation(again).type_key() == operation(module).type_key() or example.prepare


@pytest.mark.parametrize(("example", "dtype"), CASES)
def test_expansion_agrees_with_meaning(
    example: Example, dtype: str, rng: np.random.Generator
) -> None:
    if not op_class(example.op).composite:
        return
    op = operation(module_of(example.bound(), dtype))
    inputs = inputs_of(example, dtype, rng)
    module = expanded(op, example)
    verify(module)
    renamed = dict(zip(arg_names(op), inputs.values(), strict=True))
    results = list(evaluate(module, renamed).values())
    wanted = run(example.bound(), dtype, inputs)
    for got, want in zip(results, wanted, strict=True):
        assert_close(got, want, "the expansion", factor=4)  # it rounds after every step


@pytest.mark.parametrize(("op", "bad"), BAD)
def test_bad_input_is_refused_by_name(op: str, bad: Bad) -> None:
    values = [Value(arg.type("f32"), None, i) for i, arg in enumerate(bad.args)]
    with pytest.raises(Error) as caught:
        build(op, bad.args, values, bad.attributes)
    message = str(caught.value)
    assert op in message and bad.message in message, message


# dtypes and empty batches

GLOBAL = [
    pytest.param(example, id=str(example))
    for examples in EXAMPLES.values()
    for example in examples
    if not example.local and example.op != "call"  # the types of a callee are fixed
]


@pytest.mark.parametrize("example", GLOBAL)
def test_every_accepted_dtype_can_be_computed(example: Example, rng: np.random.Generator) -> None:
    bound = example.bound()
    taken = dtypes_taken(bound)
    assert taken
    for name in taken:
        evaluate(module_of(bound, name), inputs_of(bound, name, rng))


@pytest.mark.parametrize(
    "example",
    [p for p in GLOBAL if any("B" in e.sizes for e in p.values if isinstance(e, Example))],
)
def test_an_empty_batch(example: Example, rng: np.random.Generator) -> None:
    empty = replace(example, sizes=example.sizes | {"B": 0}).bound()
    dtype = example.dtypes[0]
    for array in run(empty, dtype, inputs_of(empty, dtype, rng)):
        assert array.size == 0 or 0 not in array.shape


SIGNED = np.arange(-8, 8).astype(ml_dtypes.int4)
UNSIGNED = np.arange(16).astype(ml_dtypes.uint4)


@pytest.mark.parametrize(
    ("op", "x", "result", "wanted"),
    [
        ('cast %x {dtype="u4"}', SIGNED, "u4[16]", [*range(8, 16), *range(8)]),
        ('cast %x {dtype="i4"}', UNSIGNED, "i4[16]", [*range(8), *range(-8, 0)]),
        ("reduce_max %x {dims=[0]}", SIGNED, "i4[]", 7),
        ("reduce_min %x {dims=[0]}", SIGNED, "i4[]", -8),
        ("reduce_sum %x {dims=[0]}", SIGNED, "i4[]", -8),  # modulo 16
        ("add %x, %x", SIGNED, "i4[16]", [0, 2, 4, 6, -8, -6, -4, -2] * 2),
        ("abs %x", SIGNED, "i4[16]", [-8, 7, 6, 5, 4, 3, 2, 1, *range(8)]),
    ],
)
def test_four_bits_wrap(op: str, x: np.ndarray, result: str, wanted: int | list[int]) -> None:
    kind = "i4" if x is SIGNED else "u4"
    text = f"module @m {{ func @forward(%x: {kind}[16]) -> ({result}) {{ %y = {op} : {result}"
    y = evaluate(parse_module(f"{text} return %y }} }}"), {"x": x})["result0"]
    assert y.astype(np.int64).tolist() == wanted
