"""Every operation on every dtype that its inference takes, and on empty batches."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from irc.backends.reference import evaluate
from irc.text import parse_module
from tests.ops.compare import run
from tests.ops.example import Example, dtypes_taken, inputs_of, module_of
from tests.ops.examples import EXAMPLES

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
    found = evaluate(parse_module(f"{text} return %y }} }}"), {"x": x})["result0"]
    assert found.astype(np.int64).tolist() == wanted
