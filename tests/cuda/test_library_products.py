"""Which products become calls of cuBLASLt, and that the calls compute what the operations do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import irc
import irc.passes
from irc.backends.cuda.execute.load import CudaProgram, program_of
from irc.backends.cuda.plan.build import Planner
from irc.backends.cuda.plan.core import Launch, LibraryCall
from irc.backends.cuda.plan.regime import Target
from irc.ir.core import Module
from irc.ir.dtypes import dtype_of, numpy_dtype
from irc.pipeline import run_pipeline
from irc.text import parse_module
from tests.cuda.run_plan import HostProgram
from tests.fresh import fresh
from tests.ops.example import bound_dims

assert irc.passes  # importing it registers the passes
SIZES = {"B": 3, "S": 23}  # so many rows that no other kernel reads codes
# name: (arguments, statements that make %y, which one call computes). No other kernel takes rows
# of 12 numbers.
CASES = {
    "linear": ("%x: {0}[B, S, 12], %w: {0}[5, 12]", "%y = linear %x, %w : {0}[B, S, 5]"),
    "vector": ("%x: {0}[12], %w: {0}[5, 12]", "%y = linear %x, %w : {0}[5]"),
    "bias": (
        "%x: {0}[B, 12], %w: {0}[5, 12], %b: {0}[5]",
        "%y = linear %x, %w, bias=%b : {0}[B, 5]",
    ),
    "added bias": (
        "%x: {0}[B, 12], %w: {0}[5, 12], %b: {0}[5]",
        "%p = linear %x, %w : {0}[B, 5]\n%y = add %b, %p : {0}[B, 5]",
    ),
    "residual": (
        "%x: {0}[B, S, 12], %w: {0}[5, 12], %b: {0}[5], %r: {0}[B, S, 5]",
        "%p = linear %x, %w, bias=%b : {0}[B, S, 5]\n%y = add %r, %p : {0}[B, S, 5]",
    ),
    "relu": (
        "%x: {0}[B, 12], %w: {0}[5, 12], %b: {0}[5]",
        "%p = linear %x, %w, bias=%b : {0}[B, 5]\n%y = relu %p : {0}[B, 5]",
    ),
    "batch": ("%x: {0}[B, S, 12], %w: {0}[B, 12, 5]", "%y = matmul %x, %w : {0}[B, S, 5]"),
    "one weight": (
        "%x: {0}[B, 2, S, 12], %w: {0}[1, 1, 12, 5]",
        "%y = matmul %x, %w : {0}[B, 2, S, 5]",
    ),
    "one x": ("%x: {0}[S, 12], %w: {0}[B, 2, 12, 5]", "%y = matmul %x, %w : {0}[B, 2, S, 5]"),
    "ones in front": (
        "%x: {0}[1, B, S, 12], %w: {0}[B, 12, 5]",
        "%y = matmul %x, %w : {0}[1, B, S, 5]",
    ),
    "transposed": (
        "%x: {0}[B, S, 12], %w: {0}[B, 5, 12]",
        "%t = transpose %w {{order = [0, 2, 1]}} : {0}[B, 12, 5]\n"
        "%y = matmul %x, %t : {0}[B, S, 5]",
    ),
    "other order": (
        "%x: {0}[B, S, 12], %w: {0}[12, B, 5]",
        "%t = transpose %w {{order = [1, 0, 2]}} : {0}[B, 12, 5]\n"
        "%y = matmul %x, %t : {0}[B, S, 5]",
    ),
}
TOLERANCE = {"f32": 1e-5, "f16": 4e-3, "bf16": 4e-2}


def module_of(arguments: str, statements: str, weights: str = "") -> Module:
    """A module that returns %y."""
    kind = statements.splitlines()[-1].rpartition(" : ")[2]
    body = f"func @f({arguments}) -> ({kind}) {{\n{statements}\nreturn %y }}"
    return parse_module(f"module @m {{ {weights}\n{body} }}")


def check(program: HostProgram | CudaProgram, module: Module) -> None:
    """A program gives the results of the reference, for random inputs."""
    inputs = inputs_of(module)
    results, wanted = program.run(inputs), irc.evaluate(module, inputs)
    for name, want in wanted.items():
        close = TOLERANCE[dtype_of(want)]
        got, want = results[name].astype(np.float64), want.astype(np.float64)
        np.testing.assert_allclose(got, want, rtol=close, atol=4 * close)


def inputs_of(module: Module) -> dict[str, np.ndarray]:
    """Random numbers from -1 to 1."""
    shapes = {arg: bound_dims(arg.type.shape, SIZES) for arg in module.main.args}
    drawn = {arg: fresh().uniform(-1, 1, shape) for arg, shape in shapes.items()}
    return {str(a.name): array.astype(numpy_dtype(a.type.dtype)) for a, array in drawn.items()}


def call_of(module: Module, target: Target | None = None) -> LibraryCall:
    """The only call of a plan, which gives the results of the reference."""
    plain = parse_module(str(module))
    run_pipeline(module, "fuse-linear-epilogue")
    program = HostProgram(module, fused=True, target=target)
    (call,) = (s for s in program.planners[0].plan(SIZES).steps if isinstance(s, LibraryCall))
    check(program, plain)
    return call


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", CASES)
def test_call_computes_the_operations(name: str, dtype: str) -> None:
    module = module_of(*(text.format(dtype) for text in CASES[name]))
    call_of(module)
    launches = [step for step in Planner(module).plan(SIZES).steps if isinstance(step, Launch)]
    assert len(launches) == (name == "other order")  # which is transposed before


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", [*CASES, "rows", "tensor"])
def test_on_a_gpu(name: str, dtype: str, tmp_path: Path) -> None:
    """Launched, captured, and from a graph."""
    if name in CASES:
        plain, module = (module_of(*(t.format(dtype) for t in CASES[name])) for _ in range(2))
    else:
        plain, module = (codes("1, 1, 1", "1, 1") if name == "tensor" else codes() for _ in "12")
    run_pipeline(module, "fuse-linear-epilogue")
    program = program_of(module, tmp_path)
    for _ in range(3):
        check(program, plain)
    program.close()


def codes(
    x: str = "B, S, 1",
    blocks: str = "32, 1",
    scale: str = "f32",
    n: int = 32,
    k: int = 48,
    given: str = "",
) -> Module:
    """A product of codes, whose scales have these shapes; `given`: what gives the scale of x."""
    weights = f"""weight @w : f8e4m3[{n}, {k}] = random("w", 1, 2.0)
        weight @ws : {scale}[{blocks}] = random("s", 1, 1.0, [{blocks}])"""
    statements = f"""{given}
        %xq = dequantize %x, %xs {{dtype = "bf16"}} : bf16[B, S, {k}]
        %wq = dequantize @w, @ws {{dtype = "bf16"}} : bf16[{n}, {k}]
        %y = linear %xq, %wq : bf16[B, S, {n}]"""
    xs = "" if given else f", %xs: f32[{x}]"
    return module_of(f"%x: f8e4m3[B, S, {k}]{xs}", statements, weights)


@pytest.mark.parametrize("scale", ["f32", "bf16"])
@pytest.mark.parametrize(
    ("x", "blocks", "scales"),
    [("B, S, 1", "32, 1", "rows"), ("B, S, 1", "1, 1", "rows"), ("1, 1, 1", "1, 1", "tensor")],
)
def test_codes_are_multiplied_with_their_scales(
    x: str, blocks: str, scales: str, scale: str
) -> None:
    call = call_of(codes(x, blocks, scale))
    assert (call.settings["dtype"], call.settings["scales"]) == ("f8e4m3", scales)


@pytest.mark.parametrize(("kind", "factor"), [("f32", 0.25), ("bf16", 0.10009765625)])
def test_a_constant_scale_is_a_factor(kind: str, factor: float) -> None:
    """A factor is rounded as the scale."""
    given = f'%xs = full {{value={factor:.2}, shape=[1, 1, 1], dtype="{kind}"}} : {kind}[1, 1, 1]'
    call = call_of(codes(blocks="1, 1", given=given))
    assert call.settings["alpha"] == factor and "x_scale" not in call.settings


@pytest.mark.parametrize(
    ("module", "capability"),
    [
        (codes(n=24, blocks="24, 1"), 90),
        (codes(k=40), 90),
        (codes(blocks="32, 3"), 90),
        (codes("1, 1, 1"), 90),
        (codes("B, 1, 1"), 90),
        (codes("1, 1, 1", "1, 1"), 80),
        (codes(), 89),
        (codes(), 100),
    ],
)
def test_other_codes_are_dequantized_before(module: Module, capability: int) -> None:
    """Of sizes or scales that cuBLASLt does not know, or not on this GPU."""
    assert call_of(module, Target(capability)).settings["dtype"] == "bf16"


@pytest.mark.parametrize("capability", [89, 100])
def test_codes_with_one_scale_are_multiplied_elsewhere(capability: int) -> None:
    call = call_of(codes("1, 1, 1", "1, 1"), Target(capability))
    assert call.settings["scales"] == "tensor"


@pytest.mark.parametrize(
    ("arguments", "statement", "reason"),
    [
        ("%x: i8[B, 8], %w: i8[8, 5]", "%y = matmul %x, %w : i8[B, 5]", "f32, f16, bf16, not i8"),
        ("%x: f32[B, 0], %w: f32[5, 0]", "%y = linear %x, %w : f32[B, 5]", "0 elements"),
        (
            "%x: f32[B, 1, S, 8], %w: f32[2, 8, 5]",
            "%y = matmul %x, %w : f32[B, 2, S, 5]",
            "does not broadcast",
        ),
        (
            "%x: f32[B, 8], %w: f32[5, 8], %g: f32[8]",
            "%n = rms_norm %x, %g : f32[B, 8]\n%y = linear %n, %w : f32[B, 5]",
            "neither a norm in front",
        ),
        (
            "%x: f32[B, 8], %w: f32[5, 8]",
            "%p = linear %x, %w : f32[B, 5]\n%y = silu %p : f32[B, 5]",
            "no silu",
        ),
        (
            "%x: f32[B, 8], %w: f32[5, 8], %r: f32[B, 5]",
            "%p = linear %x, %w : f32[B, 5]\n%q = relu %p : f32[B, 5]\n%y = add %q, %r : f32[B, 5]",
            "relu behind the sum",
        ),
    ],
)
def test_why_not(arguments: str, statement: str, reason: str) -> None:
    module = module_of(arguments, statement)
    run_pipeline(module, "fuse-linear-epilogue")
    assert any(reason in why for _, why in Planner(module).regime(SIZES).launches.declined)


@pytest.mark.parametrize("rows", [1, 16, 17, 64, 65])
def test_codes_of_more_than_16_rows_are_multiplied(rows: int) -> None:
    """Of fewer, their numbers are, by a kernel for few rows."""
    *_, step = Planner(codes(n=64, k=256, blocks="64, 1")).plan({"B": rows, "S": 1}).steps
    assert isinstance(step, LibraryCall if rows > 16 else Launch)
    if isinstance(step, LibraryCall):
        assert step.settings["dtype"] == "f8e4m3"


NORMED = """module @m {{
  weight @w : bf16[32, 20] = random("w", 1, 0.3)
  func @f(%x: bf16[B, 20], %r: bf16[B, 32], %g: f32[32]) -> (bf16[B, 32], bf16[B, 32]) {{
    %h = silu %x : bf16[B, 20]
    %p = linear %h, @w : bf16[B, 32]
    %n, %t = add_rms_norm {0}, %g {{eps=1e-05, offset=0.5}} : bf16[B, 32], bf16[B, 32]
    return %n, %t
  }}
}}"""


@pytest.mark.parametrize("order", ["%p, %r", "%r, %p"])
def test_a_sum_that_is_normalized(order: str) -> None:
    assert call_of(parse_module(NORMED.format(order))).settings["residual"]
