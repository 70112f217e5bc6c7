"""Small modules for tests of the pass quantize."""

from __future__ import annotations

import irc
from irc.ir.core import Module
from irc.pipeline import Stats, run_pipeline


def linear(outputs: int = 256, inputs: int = 256, dtype: str = "f32") -> Module:
    return irc.parse(f"""module @m dims(B=1:2:8) {{
      weight @fc.weight : {dtype}[{outputs}, {inputs}] = random("w", 1, 0.1)
      func @forward(%x: {dtype}[B, 3, {inputs}]) -> (y: {dtype}[B, 3, {outputs}]) {{
        %y = linear %x, @fc.weight : {dtype}[B, 3, {outputs}]
        return %y }} }}""")


def quantized(module: Module, options: str) -> Stats:
    (step,) = run_pipeline(module, f"quantize{{{options}}}")
    return step.stats


GATED = """module @m dims(B=1:2:8) {
  weight @gate_proj.weight : f32[48, 32] = random("g", 1, 50.0)
  weight @up_proj.weight : f32[48, 32] = random("u", 1, 0.0001)
  weight @down_proj.weight : f32[32, 48] = random("d", 1, 0.1)
  func @forward(%x: f32[B, 3, 32]) -> (y: f32[B, 3, 32]) {
    %g = linear %x, @gate_proj.weight : f32[B, 3, 48]
    %u = linear %x, @up_proj.weight : f32[B, 3, 48]
    %s = silu %g : f32[B, 3, 48]
    %m = mul %s, %u : f32[B, 3, 48]
    %y = linear %m, @down_proj.weight : f32[B, 3, 32]
    return %y } }"""
