"""Fusions of quantized branches against numpy, and why a fusion did not happen."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest

import irc
import irc.passes
from irc.backends.reference import evaluate
from irc.pipeline import run_pipeline
from irc.pipeline.instruments import CheckNumerics, VerifyEach
from irc.pipeline.instruments.limit import WhyNot
from tests.fresh import fresh

assert irc.passes
K, F = 16, 24
CODES = {"f8e4m3": ml_dtypes.float8_e4m3fn, "i8": np.int8, "i4": ml_dtypes.int4}


def gated(codes: str, rows: int) -> irc.Module:
    """A gated feed-forward on an input in 8 bits, with `rows` scales per weight."""
    y, w, s = f"f32[B, {F}]", f"[{F}, {K}]", f"f32[{rows}, 1]"
    return irc.parse(f"""module @m dims(B=1:3:8) {{
      func @forward(%x: f32[B, {K}], %x_s: f32[1, 1], %gate: {codes}{w}, %gate_s: {s},
                    %up: {codes}{w}, %up_s: {s}) -> (y: {y}) {{
        %c = quantize %x, %x_s {{dtype="f8e4m3"}} : f8e4m3[B, {K}]
        %xq = dequantize %c, %x_s : f32[B, {K}]
        %gate_w = dequantize %gate, %gate_s : f32{w}
        %up_w = dequantize %up, %up_s : f32{w}
        %g = linear %xq, %gate_w : {y}
        %u = linear %xq, %up_w : {y}
        %a = silu %g : {y}
        %y = mul %u, %a : {y}
        return %y }} }}""")


def rounded(values: np.ndarray, codes: str) -> np.ndarray:
    """Random codes, from numbers of deviation 1."""
    most = {"f8e4m3": 100, "i8": 40, "i4": 3}[codes]
    if codes == "f8e4m3":
        return (values * most).astype(CODES[codes])
    low, high = (-8, 7) if codes == "i4" else (-128, 127)
    return np.clip(np.rint(values * most), low, high).astype(CODES[codes])


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("rows", [1, F])
def test_gate_and_up_keep_both_scales(codes: str, rows: int) -> None:
    """The branches' scales are far apart, so that either of them for both gives other results."""
    rng = fresh(rows)
    x = rng.standard_normal((3, K)).astype(np.float32)
    gate, up = (rounded(rng.standard_normal((F, K)), codes) for _ in range(2))
    gate_s = rng.uniform(0.01, 0.02, (rows, 1)).astype(np.float32)
    up_s = rng.uniform(0.2, 0.4, (rows, 1)).astype(np.float32)
    x_s = np.full((1, 1), 0.02, np.float32)
    inputs = {"x": x, "x_s": x_s, "gate": gate, "gate_s": gate_s, "up": up, "up_s": up_s}
    module = gated(codes, rows)
    run_pipeline(module, "fuse-gated-mlp, dce", [VerifyEach(), CheckNumerics(evaluate)])
    assert [op.opname for op in module.ops()].count("gated_mlp") == 1

    def numpy_result(gate_s: np.ndarray, up_s: np.ndarray) -> np.ndarray:
        xq = (x / x_s).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * x_s
        g, u = (xq @ (w.astype(np.float64) * s).T for w, s in ((gate, gate_s), (up, up_s)))
        return g / (1 + np.exp(-g)) * u

    found, wanted = evaluate(module, inputs)["y"], numpy_result(gate_s, up_s)
    largest = np.abs(wanted).max()
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5 * largest)
    for one in (gate_s, up_s):
        assert np.abs(found - numpy_result(one, one)).max() > 0.1 * largest


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
