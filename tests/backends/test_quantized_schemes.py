"""Quantized modules on ONNX Runtime against the reference: every scheme, and caches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import irc
import irc.passes
from irc.backends.reference import evaluate
from irc.errors import Error
from irc.ir.dtypes import numpy_dtype
from irc.passes.quantize import QuantizeModule
from irc.pipeline import run_pipeline
from irc.quantization.schemes import SCHEMES
from tests.fresh import fresh
from tests.rows import ROWS, row_error

assert irc.passes
K = 256


def layer() -> irc.Module:
    """A residual layer of two products."""
    return irc.parse(f"""module @m dims(B=1:2:{ROWS}) {{
      weight @up.weight : f32[384, {K}] = random("u", 0, 0.1)
      weight @down.weight : f32[{K}, 384] = random("d", 0, 0.1)
      func @forward(%x: f32[B, 3, {K}]) -> (y: f32[B, 3, {K}]) {{
        %h = linear %x, @up.weight : f32[B, 3, 384]
        %s = silu %h : f32[B, 3, 384]
        %y = linear %s, @down.weight : f32[B, 3, {K}]
        return %y }} }}""")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme(scheme: str, tmp_path: Path) -> None:
    module = layer()
    try:
        run_pipeline(module, [QuantizeModule(scheme=scheme)])
    except Error as error:
        assert "calibration" in str(error)
        return
    x = {"x": fresh(8).standard_normal((ROWS, 3, K)).astype(np.float32)}
    wanted = evaluate(module, x)["y"]
    found = irc.compile(module, tmp_path).run(x)["y"]
    rounded = bool(SCHEMES[scheme].activation)
    limit = 1e-5
    if "fp8" not in SCHEMES[scheme].weight[0]:  # MatMulNBits has 16 bits of its inputs
        limit = 1e-2 if rounded else 1e-3  # that is far enough for other codes in most rows
    assert row_error(found, wanted, rounded) < limit


@pytest.mark.parametrize("kind", ["i8", "f8e4m3"])
def test_caches_of_codes(kind: str, tmp_path: Path) -> None:
    """Two steps of attention over keys of 8 bits."""
    new, cache = "f32[B, S, 32]", f"{kind}[B, 2, C, 16]"
    module = irc.parse(f"""module @m dims(B=1:2:4, S=1:3:8, C=8:16:64) {{
      func @forward(%x: {new}, %k: {cache}, %past: i32[B]) -> (y: {new}, k: {cache} aliases %k) {{
        %one = full {{value=0.05, shape=[1, 1, 1], dtype="f32"}} : f32[1, 1, 1]
        %all = full {{value=0.05, shape=[1, 1, 1, 1], dtype="f32"}} : f32[1, 1, 1, 1]
        %q = quantize %x, %one {{dtype="{kind}"}} : {kind}[B, S, 32]
        %k.1 = cache_update %k, %q, %past : {cache}
        %d = dequantize %k.1, %all {{dtype="f32"}} : f32[B, 2, C, 16]
        %y = attention %x, %d, %d, past=%past {{head_dim=16, causal}} : {new}
        return %y, %k.1 }} }}""")
    random, program = fresh(9), irc.compile(module, tmp_path).program
    stream = program.open({"B": 2, "C": 16})
    states = {"k": np.zeros((2, 2, 16, 16), numpy_dtype(kind))}
    for past, count in ((0, 3), (3, 1)):
        x = random.standard_normal((2, count, 32)).astype(np.float32)
        inputs = {"x": x, "past": np.full(2, past, np.int32)}
        wanted = evaluate(module, inputs | states)
        states = {"k": wanted["k"]}
        found = stream.step(inputs)["y"]
        np.testing.assert_allclose(found, wanted["y"], rtol=1e-3, atol=1e-3)
