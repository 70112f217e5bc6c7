"""Details of single passes that the .irc cases do not show, and examples/custom_pass.py."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest

import irc
import irc.passes
from irc.backends.reference import evaluate
from irc.frontends import random_weights
from irc.ir.core import Module
from irc.ir.dtypes import DTYPES, lossless, widened
from irc.pipeline import load_file, run_pipeline
from irc.pipeline.instruments import CheckNumerics, VerifyEach, WhyNot
from irc.text import parse_module
from irc.text.printer import print_module
from tests.layout import ROOT
from tests.user_code import restored_registries

assert irc.passes
SMALL = [name for name, kind in DTYPES.items() if kind.bits <= 16]


@pytest.mark.parametrize("source", SMALL)
@pytest.mark.parametrize("target", list(DTYPES))
def test_lossless_agrees_with_numpy(source: str, target: str) -> None:
    values = every_value(source)
    with np.errstate(all="ignore"):  # numpy has no conversions between some narrow types
        there = widened(values).astype(DTYPES[target].numpy)
        back = widened(there).astype(DTYPES[source].numpy)
        wide = values.astype(np.float64), there.astype(np.float64)
    same = np.array_equal(*wide, equal_nan=True) and back.tobytes() == values.tobytes()
    same &= np.array_equal(np.signbit(wide[0]), np.signbit(wide[1]))
    if target == "bool":
        same = source == "bool"  # a bool is no number, though 0 and 1 survive
    assert lossless(source, target) == same


def every_value(name: str) -> np.ndarray:
    """Every value of a dtype of at most 16 bits, with one NaN."""
    kind = DTYPES[name]
    if name == "bool":
        return np.array([False, True])
    if kind.is_integer:
        low = 0 if kind.kind == "uint" else -(2 ** (kind.bits - 1))
        return np.arange(low, low + 2**kind.bits).astype(kind.numpy)
    bits = np.arange(2**kind.bits).astype(f"uint{kind.bits}")
    values = bits.view(kind.numpy)
    return np.append(values[~np.isnan(values.astype(np.float32))], kind.numpy.type("nan"))


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        *[("f32", "f64", True), ("f64", "f32", False), ("f32", "bf16", False)],
        *[("i32", "i64", True), ("i64", "i32", False), ("i32", "f32", False)],
        *[("i32", "f64", True), ("i64", "f64", False), ("f32", "i64", False)],
    ],
)
def test_lossless_of_wide_types(source: str, target: str, expected: bool) -> None:
    assert lossless(source, target) == expected


def through(text: str, passes: str) -> Module:
    module = parse_module(text)
    run_pipeline(module, passes, [VerifyEach()])
    return module


def test_inline_keeps_locations_and_takes_the_name_of_the_call() -> None:
    module = through(
        """module @m {
          func @g(%x: f32[4]) -> (f32[4]) {
            %a = neg %x : f32[4] loc("layer.py":3 "mlp")
            return %a
          }
          func @forward(%x: f32[4]) -> (f32[4]) {
            %out = call %x {callee=@g} : f32[4] loc("main.py":9)
            return %out
          } }""",
        "inline",
    )
    assert '%out = neg %x : f32[4] loc("layer.py":3 "mlp")' in print_module(module, locs=True)
    assert list(module.functions) == ["forward"]


def test_inline_in_an_entry_that_is_called_itself() -> None:
    text = """module @m {
      func @forward(%x: f32[4]) -> (f32[4]) { %a = neg %x : f32[4] return %a }
      func @twice(%x: f32[4]) -> (f32[4]) {
        %a = call %x {callee=@forward} : f32[4]
        %b = call %a {callee=@forward} : f32[4]
        return %b
      } }"""
    module = through(text, "inline")
    assert list(module.functions) == ["forward", "twice"]
    assert "call" not in str(module)
    x = np.arange(4, dtype=np.float32)
    assert np.array_equal(evaluate(module, {"x": x}, function="twice")["result0"], x)


def test_dce_removes_weights_of_inlined_functions() -> None:
    text = """module @m {
      weight @w : f32[4] = random("w", 1, 1.0)
      func @g(%x: f32[4]) -> (f32[4]) { %a = mul %x, @w : f32[4] return %a }
      func @forward(%x: f32[4]) -> (f32[4]) {
        %a = call %x {callee=@g} : f32[4]
        return %x
      } }"""
    assert through(text, "inline, dce").weights == {}


def test_new_operations_have_the_location_of_those_they_replace() -> None:
    text = """module @m {
      weight @w : f32[4, 4] = random("w", 1, 1.0)
      func @forward(%x: f32[B, 4]) -> (f32[B, 4]) {
        %y = gated_mlp %x, @w, @w : f32[B, 4] loc("m.py":5 "mlp")
        %z = full {value=2.0} : f32[]
        %n = neg %z : f32[] loc("m.py":6)
        %r = mul %y, %n : f32[B, 4] loc("m.py":7)
        return %r
      } }"""
    module = through(text, "expand, fold")
    lines = [op.loc and op.loc.line for op in module.main]
    assert lines == [5, 5, 5, 5, 5, 6, 7, None]


def test_bfloat16_is_folded_as_the_reference_computes_it() -> None:
    text = """module @m { func @forward(%x: bf16[2]) -> (bf16[2]) {
      %a = constant {values=[1.0, 3.0], shape=[2], dtype="bf16"} : bf16[2]
      %b = constant {values=[3.0, 7.0], shape=[2], dtype="bf16"} : bf16[2]
      %c = div %a, %b : bf16[2]
      %d = exp %c : bf16[2]
      %e = add %d, %x : bf16[2]
      return %e } }"""
    x = {"x": np.zeros(2, ml_dtypes.bfloat16)}
    before = evaluate(parse_module(text), x)["result0"]
    after = evaluate(through(text, "fold, dce"), x)["result0"]
    assert before.tobytes() == after.tobytes()


QKV = """module @m {
  weight @q : bf16[8, 4] = unbound("q")
  weight @k : bf16[4, 4] = unbound("k")
  weight @v : bf16[4, 4] = unbound("v")
  func @forward(%x: bf16[1, 3, 4]) -> (bf16[1, 3, 8]) {
    %q = linear %x, @q : bf16[1, 3, 8]
    %k = linear %x, @k : bf16[1, 3, 4]
    %v = linear %x, @v : bf16[1, 3, 4]
    %y = attention %q, %k, %v {head_dim=4} : bf16[1, 3, 8]
    return %y
  }
}
"""


def test_parameters_joined_before_they_have_values_get_the_same_random_numbers() -> None:
    x = {"x": np.linspace(-1, 1, 12).reshape(1, 3, 4).astype(ml_dtypes.bfloat16)}
    fused = through(QKV, "fuse-qkv")
    joined = 'concat(unbound("q", [8, 4]), unbound("k", [4, 4]), unbound("v", [4, 4]); 0)'
    assert joined in str(fused)
    after = evaluate(random_weights(parse_module(str(fused)), 3), x)["result0"]
    before = evaluate(random_weights(parse_module(QKV), 3), x)["result0"]
    assert before.tobytes() == after.tobytes()


@pytest.mark.parametrize("term", ["%y", "reduced"])
def test_a_sum_of_thousands_of_terms(term: str) -> None:
    """Deeper than the stack of Python."""
    lines, count = list[str](), 5000
    for i in range(count):
        if term == "reduced":
            lines.append(f'%r{i} = all_reduce %p {{axis="tp"}} : f32[4]')
        lines.append(f"%x{i + 1} = add %x{i}, {f'%r{i}' if term == 'reduced' else term} : f32[4]")
    body = "\n".join(lines)
    text = f"""module @m mesh(tp=2) {{
      func @forward(%x0: f32[4], %y: f32[4], %p: f32[4]{{sum tp}}) -> (f32[4]) {{
        {body}
        return %x{count}
      }} }}"""
    module = parse_module(text)
    run_pipeline(module, "fuse-collectives")
    kinds = [op.opname for op in module.main]
    assert kinds.count("all_reduce") == (term == "reduced")


# why a fusion did not happen

WHY = """module @m dims(B=1:2:4, S=1:8:64) {
  weight @q : f32[8, 8] = random("q", 1, 0.5)
  weight @k : f32[8, 8] = random("k", 1, 0.5)
  weight @v : f32[8, 8] = random("v", 1, 0.5)
  weight @b : f32[8] = random("b", 1, 0.5)
  func @forward(%x: f32[B, S, 8], %m: f32[B, S, 8]) -> (f32[B, S, 8]) {
    %q = linear %x, @q : f32[B, S, 8]
    %k = linear KEY : f32[B, S, 8]
    %v = linear %x, @v : f32[B, S, 8]
    %y = attention QKV {head_dim=4} : f32[B, S, 8] loc("a.py":4)
    return %y
  }
}"""


@pytest.mark.parametrize(
    ("qkv", "key", "reason"),
    [
        ("%q, %k, %v", "%m, @k", "the linears of q, k and v have different inputs"),
        (
            "%q, %k, %v",
            "%x, @k, bias=@b",
            "some of the linears of q, k and v have a bias and some have none",
        ),
        ("%q, %k, %v", "%x, @q", "@q has other uses"),
        ("%k, %k, %k", "%x, @k", "q, k and v of attention come from one linear already"),
        ("%m, %k, %v", "%x, @k", "q of attention comes from no operation, not from a linear"),
    ],
)
def test_why_not_fuse_qkv(qkv: str, key: str, reason: str) -> None:
    module = parse_module(WHY.replace("KEY", key).replace("QKV", qkv))
    before, why = str(module), WhyNot("fuse-qkv")
    run_pipeline(module, "fuse-qkv", [VerifyEach(), why])
    assert str(why) == f"a.py:4: {reason}"
    assert str(module) == before


FAILURES = {
    "fuse-gated-mlp: scales of the input": (
        """%a = dequantize %c, @s : f32[B, 8] %b = dequantize %c, @t : f32[B, 8]
           %g = linear %a, @w : f32[B, 8] %h = silu %g : f32[B, 8] %u = linear %b, @v : f32[B, 8]
           %y = mul %h, %u : f32[B, 8] return %y""",
        "gate and up quantize their input by different scales",
    ),
    "fuse-gated-mlp: other uses": (
        """%z = dequantize @q, @qs : f32[8, 8]
           %w = dequantize @q, @qs : f32[8, 8] %m = linear %x, %w : f32[B, 8]
           %g, %u = split %m {dim=1, sizes=[4, 4]} : f32[B, 4], f32[B, 4]
           %h = silu %g : f32[B, 4] %p = mul %h, %u : f32[B, 4]
           %y = concat %p, %p {dim=1} : f32[B, 8] return %y""",
        "@q has other uses",
    ),
    "fuse-gated-mlp: halves": (
        """%m = linear %x, @w : f32[B, 8]
           %g, %u = split %m {dim=1, sizes=[4, 4]} : f32[B, 4], f32[B, 4]
           %h = silu %g : f32[B, 4] %p = mul %h, %u : f32[B, 4]
           %y = concat %p, %h {dim=1} : f32[B, 8] return %y""",
        "gate or up has other uses",
    ),
    "fuse-gated-mlp: linears that broadcast": (
        """%g = linear %x, @w : f32[B, 8] %h = silu %g : f32[B, 8] %u = linear %x, @one : f32[B, 1]
           %y = mul %h, %u : f32[B, 8] return %y""",
        r"the rule takes two weights of one shape, not \[8, 8\] and \[1, 8\]",
    ),
    "fuse-norm: bias": (
        "%a = add %x, @n : f32[B, 8] %y = rms_norm %a, @n : f32[B, 8] return %y",
        r"the sum is of f32\[B, 8\] and f32\[8\]",
    ),
    "fuse-linears: one scale": (
        """%w1 = dequantize @q, @s : f32[8, 8] %w2 = dequantize @r, @t : f32[8, 8]
           %g = linear %x, %w1 : f32[B, 8] %u = linear %x, %w2 : f32[B, 8]
           %y = add %g, %u : f32[B, 8] return %y""",
        "@s scales all 8 rows; scales per row can be joined",
    ),
    "fuse-linears: other blocks": (
        """%w1 = dequantize @q, @qs : f32[8, 8] %w2 = dequantize @r, @rs : f32[8, 8]
           %g = linear %x, %w1 : f32[B, 8] %u = linear %x, %w2 : f32[B, 8]
           %y = add %g, %u : f32[B, 8] return %y""",
        "@qs, @rs hold for different numbers of rows",
    ),
    "fuse-experts: another function": (
        """EXPERTS %h = exp %g : f32[2, B, 8] %d = matmul %h, %t : f32[2, B, 8]
           %y = moe_combine %d, %chosen, %slots, %p : f32[B, 8] return %y""",
        "exp is no activation, and no product of one",
    ),
    "fuse-experts: other weights": (
        """EXPERTS %h = silu %g : f32[2, B, 8] %d = matmul %h, @e : f32[2, B, 8]
           %y = moe_combine %d, %chosen, %slots, %p : f32[B, 8] return %y""",
        "the weights %e are not \\[experts, outputs, inputs]",
    ),
    "fuse-experts: other pairs": (
        """EXPERTS %h = silu %g : f32[2, B, 8] %d = matmul %h, %t : f32[2, B, 8]
           %n = minimum %slots, %chosen : i32[B, 2]
           %y = moe_combine %d, %chosen, %n, %p : f32[B, 8] return %y""",
        "dispatched and combined are different pairs",
    ),
    "fuse-experts: other uses": (
        """EXPERTS %h = silu %g : f32[2, B, 8] %d = matmul %h, %t : f32[2, B, 8]
           %r = moe_combine %d, %chosen, %slots, %p : f32[B, 8]
           %z = moe_combine %h, %chosen, %slots, %p : f32[B, 8]
           %y = add %r, %z : f32[B, 8] return %y""",
        "the result of silu is used elsewhere, too",
    ),
    "fuse-experts: two buffers": (
        """EXPERTS %h = silu %g : f32[2, B, 8]
           %u = matmul %g, %t : f32[2, B, 8] %m = mul %h, %u : f32[2, B, 8]
           %d = matmul %m, %t : f32[2, B, 8]
           %y = moe_combine %d, %chosen, %slots, %p : f32[B, 8] return %y""",
        "what experts multiply is matmul, not moe_dispatch",
    ),
    "fuse-quantize: blocks": (
        """%k = dynamic_scale %x {block=4} : f32[B, 2]
           %q = quantize %x, %k {dtype="f8e4m3"} : f8e4m3[B, 8]
           %y = dequantize %q, %k : f32[B, 8] return %y""",
        "a row has several scales",
    ),
    "fuse-quantize: other codes": (
        """%k = dynamic_scale %x {dtype="i8"} : f32[B, 1]
           %q = quantize %x, %k {dtype="f8e4m3"} : f8e4m3[B, 8]
           %y = dequantize %q, %k : f32[B, 8] return %y""",
        "nothing is quantized to i8 by the scale",
    ),
}
EXPERTS = """%slots = moe_slots %chosen {experts=2} : i32[B, 2]
           %b = moe_dispatch %x, %chosen, %slots {experts=2} : f32[2, B, 8]
           %t = transpose @e {order=[0, 2, 1]} : f32[2, 8, 8]
           %g = matmul %b, %t : f32[2, B, 8]"""


@pytest.mark.parametrize("case", FAILURES)
def test_why_not(case: str) -> None:
    body, reason = FAILURES[case]
    name = case.partition(":")[0]
    args, body = "%c: i8[B, 8]", body.replace("EXPERTS", EXPERTS)
    if name == "fuse-experts":
        args = "%chosen: i32[B, 2], %p: f32[B, 2]"
    module = irc.parse(f"""module @m dims(B=1:2:4) {{
      weight @w : f32[8, 8] = random("w", 1, 0.5)
      weight @v : f32[8, 8] = random("v", 1, 0.5)
      weight @n : f32[8] = random("n", 1, 0.5)
      weight @one : f32[1, 8] = random("one", 1, 0.5)
      weight @e : f32[2, 8, 8] = random("e", 1, 0.5)
      weight @q : i8[8, 8] = random("q", 1, 30.0)
      weight @qs : f32[2, 1] = random("qs", 1, 0.1)
      weight @r : i8[8, 8] = random("r", 1, 30.0)
      weight @rs : f32[8, 1] = random("rs", 1, 0.1)
      weight @s : f32[1, 1] = random("s", 1, 0.1)
      weight @t : f32[1, 1] = random("t", 1, 0.1)
      func @forward(%x: f32[B, 8], {args}) -> (f32[B, 8]) {{ {body} }} }}""")
    before, why = str(module), WhyNot(name)
    run_pipeline(module, name, [why, VerifyEach(), CheckNumerics(evaluate)])
    assert str(module) == before
    assert any(re.search(reason, str(failure)) for failure in why.failures), str(why)


SQUARES = """module @m {
  func @forward(%x: f32[4]) -> (a: f32[4], b: f32[4]) {
    %two = full {value=2.0} : f32[]
    %r = relu %x : f32[4]
    %s = relu %x : f32[4]
    %a = mul %r, %s : f32[4]
    %t = relu %a : f32[4]
    %b = pow %t, %two : f32[4]
    return %a, %b
  }
}"""


def test_the_example_is_short_and_fuses() -> None:
    example = ROOT / "examples/custom_pass.py"
    assert len(example.read_text(encoding="utf-8").splitlines()) <= 20
    with restored_registries():
        assert load_file(example) == ["fuse-square"]
        module = parse_module(SQUARES)
        (step,) = run_pipeline(module, "fuse-square", [VerifyEach(), CheckNumerics(evaluate)])
    assert step.stats["squared_relu"] == 2
    assert [op.opname for op in module.main] == ["squared_relu", "squared_relu", "return"]
    x = np.array([-1, 0, 1, 2], np.float32)
    assert evaluate(module, {"x": x})["b"].tolist() == [0, 0, 1, 16]
