"""Operations that are computed element by element, on the host, against the reference."""

from __future__ import annotations

import numpy as np
import pytest

from irc.backends.cuda.codegen.body import ELEMENTS
from irc.backends.cuda.codegen.kernels import elementwise
from irc.backends.cuda.plan import Template
from irc.backends.cuda.plan.prepare import load_tables
from irc.ir.core import Op
from irc.text import parse_module
from tests.cuda.cases import cases, drawn, odd_sizes
from tests.cuda.emulate import prepare
from tests.ops.examples import EXAMPLES

load_tables()
OPERATIONS = sorted({cls.opname for cls in ELEMENTS} - {"rank"})


def launches(op: Op) -> list[Template]:
    return [elementwise([value], op.operands) for value in op.results]


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_example_is_as_in_the_reference(name: str, rng: np.random.Generator) -> None:
    """In two of the dtypes that it takes."""
    found = drawn(cases([e for e in EXAMPLES[name] if not e.local], launches), rng, 2)
    assert found
    prepare(each.kernel for case in found for each in case.templates)
    for case in found:
        for sizes in odd_sizes(case.example, rng):
            case.check(rng, sizes)


@pytest.mark.parametrize(
    ("text", "together"),
    [
        ("embedding %ids, %x : f32[5, 24]", True),
        ("mul %y, %bias : f32[5, 24]", True),
        ("transpose %z {order=[1, 0]} : f32[5, 24]", False),
        ("concat %y, %y {dim=1} : f32[5, 48]", False),
    ],
)
def test_neighbours_are_read_together(text: str, together: bool) -> None:
    """In 16 bytes, unless elements that are neighbours in the result are none in an operand."""
    result = text.rpartition(": ")[2]
    arguments = "%ids: i32[5], %x: f32[9, 24], %y: f32[5, 24], %z: f32[24, 5], %bias: f32[24]"
    module = parse_module(
        f"module @m {{ func @forward({arguments}) -> ({result}) {{ %r = {text} return %r }} }}"
    )
    found = elementwise(module.main.returned, module.main.args)
    assert ("const Pack<f32, 4>*" in found.kernel.source) is together
