"""Kernels of quantized products that share an input or get it from other ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import irc
from irc.backends.tensorrt.builder.report import Layer, Report
from tests.sharded import test_fusions

K, F = 256, 384
SHAPES = {"q": (K, K), "k": (K, K), "v": (K, K), "o": (K, K), "g": (F, K), "u": (F, K), "d": (K, F)}


def block() -> irc.Module:
    """Attention and a gated feed-forward whose weights have 4 bits, in groups of 128."""
    weights, products = "", ""
    for name, (rows, columns) in SHAPES.items():
        weights += f"""
          weight @{name} : i4[{rows}, {columns}] = random("{name}", 1, 3.0)
          weight @{name}.s : bf16[{rows}, {columns // 128}] = random("{name}.s", 1, 0.02)"""
        products += f" %{name} = dequantize @{name}, @{name}.s : bf16[{rows}, {columns}]"
    x, wide = f"bf16[B, S, {K}]", f"bf16[B, S, {F}]"
    return irc.parse(f"""module @m dims(B=1:1:4, S=1:8:32) {{ {weights}
      func @forward(%x: {x}) -> (y: {x}) {{ {products}
        %xq = linear %x, %q : {x}
        %xk = linear %x, %k : {x}
        %xv = linear %x, %v : {x}
        %a = attention %xq, %xk, %xv {{head_dim=64, causal}} : {x}
        %r = linear %a, %o : {x}
        %xg = linear %r, %g : {wide}
        %xu = linear %r, %u : {wide}
        %s = silu %xg : {wide}
        %m = mul %s, %xu : {wide}
        %y = linear %m, %d : {x}
        return %y }} }}""")


def layers(folder: Path, module: irc.Module, **options: Any) -> tuple[Layer, ...]:
    artifact = irc.compile(module, folder, backend="tensorrt-rtx", **options)
    (stage,) = artifact.manifest["program"]["stages"]
    return Report.from_json(json.loads((folder / stage["report"]).read_text())).layers


@pytest.mark.needs_rtx
def test_products_of_one_input_are_one_kernel(tmp_path: Path) -> None:
    found = layers(tmp_path / "joined", block())
    pipeline = "inline, static-capacity, fuse-gated-mlp, dce"
    apart = layers(tmp_path / "apart", block(), pipeline=pipeline)
    products = [[layer for layer in each if "Fc" in layer.name] for each in (found, apart)]
    assert len(products[0]) == 4 < len(products[1])
    assert not any(layer.kind in ("signal", "wait") for layer in found)
    assert len(found) < len(apart)


@pytest.mark.needs_rtx
@pytest.mark.parametrize("inputs", ["tensor", "token"])
def test_codes_from_other_ranks_are_multiplied(inputs: str, tmp_path: Path) -> None:
    module = test_fusions.block("i8", 0, "silu", inputs)
    found = layers(tmp_path, module, mesh="tp=2", sequence=True)
    assert "i8" in [layer.inputs[0].dtype for layer in found if layer.kind == "gemm"]
