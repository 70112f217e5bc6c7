"""Quantized weights over ranks: scales follow their blocks, and no block is split."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import irc
import irc.passes
from irc.backends.reference import evaluate
from irc.errors import Error
from irc.ir.core import Module
from irc.ir.verify import verify
from irc.pipeline import run_pipeline
from tests.fresh import fresh

assert irc.passes
PASSES = "fuse-gated-mlp, localize, fuse-collectives"


def mlp(kind: str, ffn: int, block: int) -> Module:
    """A quantized feed-forward of 24 features: scales per row, in 4 blocks, and per block."""
    number = {"i4": 4.0, "u4": 4.0, "i8": 40.0, "f8e4m3": 1.0}[kind]
    zero = (
        f'weight @down.zero : u4[24, {ffn // block}] = random("z", 1, 4.0)' if kind == "u4" else ""
    )
    given = ", zero=@down.zero" if zero else ""
    return irc.parse(f"""module @m dims(B=1:3:8) {{
      weight @gate_proj.weight : {kind}[{ffn}, 24] = random("g", 1, {number})
      weight @gate_proj.scale : f32[{ffn}, 1] = random("gs", 1, 0.05)
      weight @up_proj.weight : {kind}[{ffn}, 24] = random("u", 1, {number})
      weight @up_proj.scale : f32[{ffn}, 4] = random("us", 1, 0.05)
      weight @down_proj.weight : {kind}[24, {ffn}] = random("d", 1, {number})
      weight @down_proj.scale : f32[24, {ffn // block}] = random("ds", 1, 0.05)
      {zero}
      func @forward(%x: f32[B, 24]) -> (y: f32[B, 24]) {{
        %gate = dequantize @gate_proj.weight, @gate_proj.scale : f32[{ffn}, 24]
        %up = dequantize @up_proj.weight, @up_proj.scale : f32[{ffn}, 24]
        %down = dequantize @down_proj.weight, @down_proj.scale{given} : f32[24, {ffn}]
        %g = linear %x, %gate : f32[B, {ffn}]
        %u = linear %x, %up : f32[B, {ffn}]
        %s = silu %g : f32[B, {ffn}]
        %m = mul %s, %u : f32[B, {ffn}]
        %y = linear %m, %down : f32[B, 24]
        return %y
      }}
    }}""")


@pytest.mark.parametrize("kind", ["i4", "u4", "i8", "f8e4m3"])
@pytest.mark.parametrize(
    ("group_size", "ffn", "block"), [(2, 24, 6), (3, 30, 5), (4, 16, 2), (3, 16, 2)]
)
def test_sharded_is_unsharded(
    kind: str, group_size: int, ffn: int, block: int, tmp_path: Path
) -> None:
    rng = fresh(group_size + ffn)
    x = {"x": rng.standard_normal((3, 24)).astype(np.float32)}
    wanted = evaluate(mlp(kind, ffn, block), x)["y"]
    module = mlp(kind, ffn, block)
    for step in (f'shard{{mesh="tp={group_size}"}}', *PASSES.split(", ")):
        run_pipeline(module, step)
        found = evaluate(module, x)["y"]
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())
    scales = module.weights["down_proj.scale"].type.shape
    assert scales == (24, -(-(ffn // block) // group_size))
    artifact = irc.compile(mlp(kind, ffn, block), tmp_path / "out", mesh=f"tp={group_size}")
    found = artifact.run(x)["y"]
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize(("group_size", "ffn", "block"), [(3, 64, 8), (4, 16, 8), (3, 192, 24)])
def test_a_block_is_never_split(group_size: int, ffn: int, block: int) -> None:
    """Not even where parts of x and of scale have sizes that divide, as 64 and 3."""
    x = {"x": fresh(ffn).standard_normal((3, 24)).astype(np.float32)}
    wanted = evaluate(mlp("i4", ffn, block), x)["y"]
    module = mlp("i4", ffn, block)
    run_pipeline(module, f'shard{{mesh="tp={group_size}"}}')
    assert module.weights["down_proj.scale"].type.axes == ((), ())
    run_pipeline(module, PASSES)
    found = evaluate(module, x)["y"]
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


def test_a_shard_boundary_within_a_block_is_an_error() -> None:
    text = """module @m mesh(tp=4) {
      func @forward(%x: i8[3, 16@tp], %s: f32[3, 2@tp]) -> (y: f32[3, 16@tp]) {
        %y = dequantize %x, %s : f32[3, 16@tp]
        return %y } }"""
    with pytest.raises(Error, match="16 over tp makes shards of 4, which cut a block of 8"):
        verify(irc.parse(text))
