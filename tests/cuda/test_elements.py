"""Kernels of operations that are computed element by element: what they read, and together."""

from __future__ import annotations

import numpy as np
import pytest

from irc.backends.cuda.codegen.kernels import elementwise
from irc.backends.cuda.plan import Launch
from irc.backends.cuda.plan.prepare import load_tables
from irc.backends.reference import evaluate
from irc.ir.dtypes import numpy_dtype
from irc.text import parse_module
from tests.cuda.emulate import Array
from tests.cuda.run_plan import HostProgram

load_tables()


@pytest.mark.parametrize(
    ("text", "together"),
    [
        ("embedding %ids, %x : f32[5, 24]", True),
        ("mul %y, %bias : f32[5, 24]", True),
        ("transpose %z {order=[1, 0]} : f32[5, 24]", False),
        ("concat %y, %y {dim=1} : f32[5, 48]", False),
        ("dequantize %codes, %scales : f32[5, 24]", True),
        ("dequantize %codes, %small : f32[5, 24]", False),
    ],
)
def test_neighbours_are_read_together(text: str, together: bool) -> None:
    """In 16 bytes, unless elements that are neighbours in the result are none in an operand."""
    result = text.rpartition(": ")[2]
    arguments = "%ids: i32[5], %x: f32[9, 24], %y: f32[5, 24], %z: f32[24, 5], %bias: f32[24]"
    arguments += ", %codes: i4[5, 24], %scales: f32[1, 3], %small: f32[5, 12]"
    module = parse_module(
        f"module @m {{ func @forward({arguments}) -> ({result}) {{ %r = {text} return %r }} }}"
    )
    found = elementwise(module.main.returned, module.main.args)
    packs = ("const Pack<f32, 4>*", "const Pack<i4, 2>*")
    assert any(pack in found.kernel.source for pack in packs) is together


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_operands_of_a_stack_have_blocks_of_their_own(dim: int, rng: np.random.Generator) -> None:
    """Looked up together, sixteen bytes at a time, whatever the dimension."""
    tables = ", ".join(f"%t{i}: bf16[{size}, 24]" for i, size in enumerate((9, 1, 40)))
    lines = [
        f"%i{i} = slice %ids {{dim=1, start={i}, stop={i + 1}}} : i32[T, 1]\n"
        f"%e{i} = embedding %i{i}, %t{i} : bf16[T, 1, 24]"
        for i in range(3)
    ]
    shape = ["T", "1", "24"]
    shape[dim] = {0: "3*T", 1: "3", 2: "72", -1: "72"}[dim]
    result = f"bf16[{', '.join(shape)}]"
    lines.append(f"%y = concat %e0, %e1, %e2 {{dim={dim}}} : {result}\nreturn %y")
    body = "\n".join(lines)
    function = f"func @forward(%ids: i32[T, 3], {tables}) -> (y: {result}) {{ {body} }}"
    module = parse_module(f"module @m dims(T=0:4:99) {{ {function} }}")
    program = HostProgram(module)
    for tokens in (int(rng.integers(1, 99)), 0):
        inputs: dict[str, Array] = {"ids": rng.integers(-1, 10, (tokens, 3)).astype(np.int32)}
        for i, size in enumerate((9, 1, 40)):
            inputs[f"t{i}"] = rng.standard_normal((size, 24)).astype(numpy_dtype("bf16"))
        wanted = evaluate(module, inputs)["y"]
        np.testing.assert_array_equal(program.run(inputs)["y"], wanted)
    (step,) = program.planners[0].plan({"T": 64}).steps
    assert isinstance(step, Launch)
    assert step.grid == (3, 1, 1)  # one for each table, in 64 * 24 / 8 packs


def test_weights_alone_are_read_as_constants() -> None:
    """A kernel may start before those in front of it have written its other operands."""
    module = parse_module(
        """module @m {
          weight @w : f32[24] = random("w", 1, 0.5)
          func @forward(%x: f32[5, 24]) -> (f32[5, 24]) { %y = mul %x, @w : f32[5, 24] return %y }
        }"""
    )
    launch = elementwise(module.main.returned, module.main.args)
    signature = launch.kernel.source.partition(")")[0]
    assert "const f32* p0, const f32* __restrict__ p1, f32* __restrict__ out0" in signature
