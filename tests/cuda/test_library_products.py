"""Which products become calls of cuBLASLt, and that the calls compute what the operations do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import irc
from irc import ops
from irc.backends.cuda.codegen import library_products
from irc.backends.cuda.codegen.library_products import library_product
from irc.backends.cuda.codegen.streaming.choices import Target
from irc.backends.cuda.plan import template as templates
from irc.backends.cuda.plan.core import LibraryCall
from irc.backends.cuda.plan.product import Product
from irc.backends.cuda.plan.template import CallTemplate, Fused
from irc.ir.core import Module, Op, Value, Weight
from irc.ir.dtypes import numpy_dtype
from irc.text import parse_module
from tests.cuda.library_calls import product_of
from tests.cuda.run_plan import HostProgram
from tests.fresh import fresh
from tests.ops.example import bound_dims

SIZES = {"B": 3, "S": 7}
# name: (arguments, statements, whose last name is the result, names of the operations in the call)
CASES = {
    "linear": ("%x: {0}[B, S, 8], %w: {0}[5, 8]", "%y = linear %x, %w : {0}[B, S, 5]", "y"),
    "vector": ("%x: {0}[8], %w: {0}[5, 8]", "%y = linear %x, %w : {0}[5]", "y"),
    "bias": (
        "%x: {0}[B, 8], %w: {0}[5, 8], %b: {0}[5]",
        "%y = linear %x, %w, bias=%b : {0}[B, 5]",
        "y",
    ),
    "added bias": (
        "%x: {0}[B, 8], %w: {0}[8, 5], %b: {0}[5]",
        "%p = matmul %x, %w : {0}[B, 5]\n%y = add %b, %p : {0}[B, 5]",
        "p y",
    ),
    "residual": (
        "%x: {0}[B, S, 8], %w: {0}[5, 8], %b: {0}[5], %r: {0}[B, S, 5]",
        "%p = linear %x, %w, bias=%b : {0}[B, S, 5]\n%y = add %r, %p : {0}[B, S, 5]",
        "p y",
    ),
    "relu": (
        "%x: {0}[B, 8], %w: {0}[5, 8], %b: {0}[5]",
        "%p = linear %x, %w, bias=%b : {0}[B, 5]\n%y = relu %p : {0}[B, 5]",
        "p y",
    ),
    "relu of a residual": (
        "%x: {0}[B, 8], %w: {0}[5, 8], %r: {0}[B, 5]",
        "%p = linear %x, %w : {0}[B, 5]\n%q = add %p, %r : {0}[B, 5]\n%y = relu %q : {0}[B, 5]",
        "p q y",
    ),
    "two uses": (
        "%x: {0}[B, 5], %w: {0}[5, 5]",
        "%p = linear %x, %w : {0}[B, 5]\n%y = add %p, %p : {0}[B, 5]",
        "p",
    ),
    "wide addend": (
        "%x: {0}[1, 8], %w: {0}[5, 8], %r: {0}[B, 5]",
        "%p = linear %x, %w : {0}[1, 5]\n%y = add %p, %r : {0}[B, 5]",
        "p",
    ),
    "batch": ("%x: {0}[B, S, 8], %w: {0}[B, 8, 5]", "%y = matmul %x, %w : {0}[B, S, 5]", "y"),
    "one weight": (
        "%x: {0}[B, 2, S, 8], %w: {0}[1, 1, 8, 5]",
        "%y = matmul %x, %w : {0}[B, 2, S, 5]",
        "y",
    ),
    "one x": ("%x: {0}[S, 8], %w: {0}[B, 2, 8, 5]", "%y = matmul %x, %w : {0}[B, 2, S, 5]", "y"),
    "ones in front": (
        "%x: {0}[1, B, S, 8], %w: {0}[B, 8, 5]",
        "%y = matmul %x, %w : {0}[1, B, S, 5]",
        "y",
    ),
    "transposed": (
        "%x: {0}[B, S, 8], %w: {0}[B, 5, 8]",
        "%t = transpose %w {{order = [0, 2, 1]}} : {0}[B, 8, 5]\n%y = matmul %x, %t : {0}[B, S, 5]",
        "y",
    ),
    "other order": (
        "%x: {0}[B, S, 8], %w: {0}[8, B, 5]",
        "%t = transpose %w {{order = [1, 0, 2]}} : {0}[B, 8, 5]\n%y = matmul %x, %t : {0}[B, S, 5]",
        "y",
    ),
}
TOLERANCE = {"f32": 1e-5, "f16": 4e-3, "bf16": 4e-2}


def module_of(arguments: str, statements: str, result: str) -> Module:
    """A module that returns the last value."""
    body = "\n".join(f"    {line}" for line in [*statements.splitlines(), f"return %{result}"])
    kind = statements.splitlines()[-1].rpartition(" : ")[2]
    return parse_module(f"module @m {{\n  func @f({arguments}) -> ({kind}) {{\n{body}\n  }}\n}}")


def product_in(module: Module) -> Op:
    return next(op for op in module.main if isinstance(op, ops.Linear | ops.Matmul))


def template_of(op: Op) -> CallTemplate:
    found = library_product(op, SIZES)
    assert isinstance(found, Fused), found
    (template,) = found.templates
    assert isinstance(template, CallTemplate)
    assert tuple(found.covers) == template.operations
    return template


def drawn(value: Value, rng: np.random.Generator) -> np.ndarray:
    shape = [size if isinstance(size, int) else SIZES[str(size)] for size in value.type.shape]
    return rng.uniform(-1, 1, shape).astype(numpy_dtype(value.type.dtype))


def check(template: CallTemplate, values: Mapping[Value, Any], expected: Any, dtype: str) -> None:
    """The call computes `expected`."""
    product = Product.of(template.settings(SIZES))
    found = product_of(product, [values[value] for value in template.reads])
    np.testing.assert_allclose(
        found.reshape(expected.shape).astype(np.float64),
        expected.astype(np.float64),
        rtol=TOLERANCE[dtype],
        atol=4 * TOLERANCE[dtype],
    )


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_call_computes_the_operations(name: str, dtype: str) -> None:
    arguments, statements, operations = CASES[name]
    module = module_of(arguments.format(dtype), statements.format(dtype), "y")
    rng = fresh()
    values = {value: drawn(value, rng) for value in module.main.args}
    template = template_of(product_in(module))
    assert " ".join(op.results[0].name or "" for op in template.operations) == operations
    last = template.writes[0]
    if name == "other order":
        (t,) = (op for op in module.main if isinstance(op, ops.Transpose))
        values[t.result] = values[t.x].transpose(t.order)
    returned = module_of(
        arguments.format(dtype), _until(statements.format(dtype), last), last.name or ""
    )
    inputs = {
        value.name or "": array for value, array in values.items() if value.owner is module.main
    }
    (expected,) = irc.evaluate(returned, inputs, sizes=SIZES).values()
    check(template, values, expected, dtype)


def _until(statements: str, value: Value) -> str:
    lines = statements.splitlines()
    names = [line.split()[0] for line in lines]
    return "\n".join(lines[: names.index(f"%{value.name}") + 1])


CODES = """
    %xq = dequantize %x, %xs {{dtype = "bf16"}} : bf16[B, S, {k}]
    %wq = dequantize @w, @ws {{dtype = "bf16"}} : bf16[{n}, {k}]
    %y = linear %xq, %wq : bf16[B, S, {n}]
    return %y
  }}
}}"""
HEAD = """module @m {{
  weight @w : f8e4m3[{n}, {k}] = random("w", 1, 2.0)
  weight @ws : {scale}[{blocks}] = random("s", 1, 1.0)
  func @f(%x: f8e4m3[B, S, {k}], %xs: f32[{x}]) -> (bf16[B, S, {n}]) {{"""


def codes(**words: Any) -> tuple[Module, Op]:
    """A product of codes."""
    filled = {"n": 32, "k": 48, "scale": "f32", "blocks": "32, 1", "x": "B, S, 1"} | words
    module = parse_module((HEAD + CODES).format(**filled))
    return module, product_in(module)


@pytest.mark.parametrize("scale", ["f32", "bf16"])
@pytest.mark.parametrize(
    ("x", "blocks", "scales"),
    [("B, S, 1", "32, 1", "rows"), ("B, S, 1", "1, 1", "rows"), ("1, 1, 1", "1, 1", "tensor")],
)
def test_codes_are_multiplied_with_their_scales(
    x: str, blocks: str, scales: str, scale: str
) -> None:
    module, op = codes(x=x, blocks=blocks, scale=scale)
    template = template_of(op)
    assert template.settings(SIZES).get("scales", "") == scales
    assert [value.type.dtype for value in template.reads] == ["f8e4m3", "f8e4m3", "f32", "f32"]
    rng = fresh()
    values = {value: drawn(value, rng) for value in module.main.args}
    named = {weight.name: weight for weight in module.weights.values()}
    drawn_weights = {name: drawn(weight, rng) for name, weight in named.items()}
    for value in template.reads:
        if isinstance(value, Weight):
            source = drawn_weights[value.name.split(".")[0]]
            values[value] = source
            if value.name.startswith("ws"):
                values[value] = np.broadcast_to(source, bound_dims(value.type.shape, SIZES))
    inputs = {value.name or "": values[value] for value in module.main.args}
    (expected,) = irc.evaluate(module, inputs, weights=drawn_weights).values()
    check(template, values, expected, "bf16")


@pytest.mark.parametrize(("kind", "factor"), [("f32", 0.25), ("bf16", 0.10009765625)])
def test_a_constant_scale_is_a_factor(kind: str, factor: float) -> None:
    """A factor is rounded as the scale."""
    text = (HEAD + CODES).format(n=32, k=48, scale="f32", blocks="1, 1", x="1")
    given = f'{{value = {factor:.2}, shape = [1, 1, 1], dtype = "{kind}"}} : {kind}[1, 1, 1]'
    text = text.replace("%xs: f32[1]", "%unused: f32[1]")
    text = text.replace("%xq =", f"%xs = full {given}\n    %xq =")
    template = template_of(product_in(parse_module(text)))
    assert template.settings(SIZES)["alpha"] == factor
    assert [value.name for value in template.reads] == ["x", "w", "ws"]


@pytest.mark.parametrize(
    "words",
    [
        {"n": 24, "blocks": "24, 1"},
        {"k": 40},
        {"blocks": "32, 3"},
        {"x": "1, 1, 1"},
        {"x": "B, 1, 1"},
    ],
)
def test_other_codes_are_dequantized_before(words: dict[str, Any]) -> None:
    _, op = codes(**words)
    assert template_of(op).reads == op.operands


@pytest.mark.parametrize(
    ("capability", "multiplied"), [(80, set[str]()), (89, {"tensor"}), (100, {"tensor"})]
)
def test_gpus_without_products_of_codes_dequantize_them(
    capability: int, multiplied: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library_products, "target", lambda: Target(capability))
    for scales, words in (("rows", {}), ("tensor", {"x": "1, 1, 1", "blocks": "1, 1"})):
        _, op = codes(**words)
        found = template_of(op)
        assert (found.reads != op.operands) == (scales in multiplied)


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
    ],
)
def test_why_not(arguments: str, statement: str, reason: str) -> None:
    found = library_product(product_in(module_of(arguments, statement, "y")), SIZES)
    assert isinstance(found, str)
    assert reason in found


def test_the_later_of_two_products_takes_in_their_sum() -> None:
    statements = (
        "%p = linear %x, %w : f32[B, 5]\n"
        "%q = linear %x, %v : f32[B, 5]\n"
        "%y = add %{0}, %{1} : f32[B, 5]"
    )
    for order in ("pq", "qp"):
        module = module_of(
            "%x: f32[B, 8], %w: f32[5, 8], %v: f32[5, 8]", statements.format(*order), "y"
        )
        first, second = (op for op in module.main if isinstance(op, ops.Linear))
        assert len(template_of(first).operations) == 1
        assert len(template_of(second).operations) == 2
        assert template_of(second).reads[-1] is first.result


WHOLE = """module @m {
  weight @w : bf16[40, 24] = random("w", 1, 0.3)
  weight @v : f8e4m3[64, 48] = random("v", 1, 1.0)
  weight @vs : bf16[64, 1] = random("vs", 1, 0.3)
  func @f(%x: bf16[B, 24], %r: bf16[B, 40], %z: bf16[B, 48]) -> (bf16[B, 40], bf16[B, 64]) {
    %n = silu %x : bf16[B, 24]
    %p = linear %n, @w : bf16[B, 40]
    %q = add %p, %r : bf16[B, 40]
    %s = relu %q : bf16[B, 40]
    %t = mul %s, %r : bf16[B, 40]
    %zs = dynamic_scale %z : f32[B, 1]
    %zc = quantize %z, %zs {dtype = "f8e4m3"} : f8e4m3[B, 48]
    %zq = dequantize %zc, %zs {dtype = "bf16"} : bf16[B, 48]
    %vq = dequantize @v, @vs : bf16[64, 48]
    %y = linear %zq, %vq : bf16[B, 64]
    return %t, %y
  }
}"""


@pytest.mark.parametrize("rows", [0, 1, 37])
def test_a_plan_with_calls(rows: int) -> None:
    module = parse_module(WHOLE)
    rng = fresh()
    inputs = {
        str(arg.name): rng.uniform(-1, 1, (rows, arg.type.shape[1])).astype(numpy_dtype("bf16"))
        for arg in module.main.args
    }
    program = HostProgram(module, fused=True)
    steps = program.planners[0].plan({"B": 37}).steps
    assert sum(isinstance(step, LibraryCall) for step in steps) == 2
    found, expected = program.run(inputs), irc.evaluate(module, inputs)
    for name, array in expected.items():
        np.testing.assert_allclose(
            found[name].astype(np.float32), array.astype(np.float32), rtol=0.05, atol=0.2
        )


def test_fusions_are_tried_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "FUSIONS", {ops.Linear: []})
    rules: list[Any] = [lambda op, sizes, n=n: n for n in range(4)]
    for number, rule in enumerate(rules):
        templates.fusion(ops.Linear, order=[0, 1, 0, -1][number])(rule)
    assert templates.FUSIONS[ops.Linear] == [rules[3], rules[0], rules[2], rules[1]]


NORMED = """module @m {{
  weight @w : bf16[32, 24] = random("w", 1, 0.3)
  func @f(%x: bf16[B, 24], %r: bf16[B, 32], %g: f32[32]) -> (bf16[B, 32], bf16[B, 32]) {{
    %p = linear %x, @w : bf16[B, 32]
    %n, %t = add_rms_norm {0}, %g {{eps=1e-05, offset=0.5}} : bf16[B, 32], bf16[B, 32]
    return %n, %t
  }}
}}"""


@pytest.mark.parametrize("order", ["%p, %r", "%r, %p"])
def test_a_sum_that_is_normalized(order: str) -> None:
    module = parse_module(NORMED.format(order))
    rng = fresh()
    inputs = {str(arg.name): drawn(arg, rng) for arg in module.main.args}
    program = HostProgram(module, fused=True)
    first, _ = program.planners[0].plan(SIZES).steps
    assert isinstance(first, LibraryCall)
    assert first.settings["residual"]
    found, expected = program.run(inputs), irc.evaluate(module, inputs)
    for name, array in expected.items():
        np.testing.assert_allclose(
            found[name].astype(np.float32), array.astype(np.float32), rtol=0.05, atol=0.05
        )
