"""Why a fusion did not happen."""

from __future__ import annotations

import re

import pytest

import irc
import irc.passes
from irc.backends.reference import evaluate
from irc.pipeline import run_pipeline
from irc.pipeline.instruments import CheckNumerics, VerifyEach
from irc.pipeline.instruments.limit import WhyNot

assert irc.passes
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
}


@pytest.mark.parametrize("case", FAILURES)
def test_why_not(case: str) -> None:
    body, reason = FAILURES[case]
    name = case.partition(":")[0]
    module = irc.parse(f"""module @m dims(B=1:2:4) {{
      weight @w : f32[8, 8] = random("w", 1, 0.5)
      weight @v : f32[8, 8] = random("v", 1, 0.5)
      weight @n : f32[8] = random("n", 1, 0.5)
      weight @q : i8[8, 8] = random("q", 1, 30.0)
      weight @qs : f32[2, 1] = random("qs", 1, 0.1)
      weight @r : i8[8, 8] = random("r", 1, 30.0)
      weight @rs : f32[8, 1] = random("rs", 1, 0.1)
      weight @s : f32[1, 1] = random("s", 1, 0.1)
      weight @t : f32[1, 1] = random("t", 1, 0.1)
      func @forward(%x: f32[B, 8], %c: i8[B, 8]) -> (f32[B, 8]) {{ {body} }} }}""")
    why = WhyNot(name)
    run_pipeline(module, name, [why, VerifyEach(), CheckNumerics(evaluate)])
    assert any(re.search(reason, str(failure)) for failure in why.failures), str(why)
