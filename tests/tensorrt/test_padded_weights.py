"""Weights of odd sizes, which TensorRT would copy at every step: padded once, still the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irc
from irc.backends.reference import evaluate
from irc.backends.tensorrt.builder.report import Layer, Report
from irc.driver import Artifact
from irc.frontends.onnx import import_onnx
from irc.ir.core import Module
from irc.text import parse_module
from tests.fresh import fresh
from tests.tiny_checkpoint import write_checkpoint

RNG = fresh(72)
WIDTH, HIDDEN, RESULTS = 33, 51, 19


def quantized(kind: str, per_row: bool) -> Module:
    """Two products of weights in eight bits, of odd sizes."""
    rows = (HIDDEN, RESULTS) if per_row else (1, 1)
    return parse_module(f"""module @m {{
      weight @w : {kind}[{HIDDEN}, {WIDTH}] = random("w", 1, 2.0)
      weight @v : {kind}[{RESULTS}, {HIDDEN}] = random("v", 1, 2.0)
      weight @s : f16[{rows[0]}, 1] = random("s", 1, 0.2)
      weight @t : f16[{rows[1]}, 1] = random("t", 1, 0.2)
      weight @b : f16[{RESULTS}] = random("b", 1, 0.2)
      func @forward(%x: f16[B, {WIDTH}]) -> (f16[B, {RESULTS}]) {{
        %d = dequantize @w, @s : f16[{HIDDEN}, {WIDTH}]
        %y = linear %x, %d : f16[B, {HIDDEN}]
        %a = relu %y : f16[B, {HIDDEN}]
        %e = dequantize @v, @t : f16[{RESULTS}, {HIDDEN}]
        %z = linear %a, %e, bias=@b : f16[B, {RESULTS}]
        return %z }} }}""")


def plain() -> Module:
    """Two products of a weight of odd sizes, one of them with its table looked up."""
    return parse_module(f"""module @m {{
      weight @w : f16[{HIDDEN}, {WIDTH}] = random("w", 1, 0.3)
      func @forward(%ids: i32[B]) -> (f16[B, {HIDDEN}]) {{
        %x = embedding %ids, @w : f16[B, {WIDTH}]
        %y = linear %x, @w : f16[B, {HIDDEN}]
        return %y }} }}""")


def compiled(module: Module, folder: Path, **engine: Any) -> Artifact:
    options: dict[str, Any] = {"self_test": False, "caching": False, "target": "tensorrt-rtx/sm_89"}
    return irc.compile(
        module, folder, backend="tensorrt-rtx", dims={"B": (1, 2, 8)}, engine=options | engine
    )


def check_same(module: Module, artifact: Artifact, inputs: dict[str, np.ndarray]) -> None:
    """The graph, and the text in it, compute what the module does."""
    (wanted,) = evaluate(module, inputs).values()
    path = artifact.folder / artifact.manifest["program"]["ranks"][0]["model"]
    for use_text in (True, False):
        read = import_onnx(path, use_text=use_text)
        (found,) = evaluate(read, inputs, artifact.folder).values()
        scale = max(1.0, float(np.abs(wanted.astype(np.float64)).max()))
        np.testing.assert_allclose(found, wanted, 2e-2, 2e-2 * scale)


@pytest.mark.parametrize("weights", ["inside", "outside"])
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("kind", ["i8", "f8e4m3"])
def test_weights_of_eight_bits(kind: str, per_row: bool, weights: str, tmp_path: Path) -> None:
    module = quantized(kind, per_row)
    artifact = compiled(module, tmp_path / "out", build=False, weights=weights)
    check_same(module, artifact, {"x": RNG.standard_normal((3, WIDTH)).astype(np.float16)})


@pytest.mark.parametrize("weights", ["inside", "outside"])
def test_a_table_that_is_multiplied(weights: str, tmp_path: Path) -> None:
    artifact = compiled(plain(), tmp_path / "out", build=False, weights=weights)
    check_same(plain(), artifact, {"ids": RNG.integers(0, HIDDEN, 3).astype(np.int32)})


def copies(artifact: Artifact, weights: tuple[str, ...]) -> list[Layer]:
    """The kernels that read one of these weights and write as many numbers as it has or more."""
    report = artifact.manifest["program"]["stages"][0]["report"]
    layers = Report.from_json(json.loads((artifact.folder / report).read_text())).layers
    return [
        layer
        for layer in layers
        for tensor in layer.inputs
        if tensor.name.endswith(weights)
        and any(np.prod(each.dims) >= np.prod(tensor.dims) for each in layer.outputs)
    ]


@pytest.mark.needs_rtx
def test_no_weight_is_copied_where_parts_are_uneven(tmp_path: Path) -> None:
    shape = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
    source = write_checkpoint(
        tmp_path / "checkpoint", **shape, head_dim=16, intermediate_size=500, vocab_size=1003
    )
    artifact = irc.compile(
        source, tmp_path / "built", backend="tensorrt-rtx", dtype="bf16", mesh="tp=3",
        dims={"B": (1, 2, 4), "S": (1, 16, 32), "T": (1, 1, 4), "C": (64, 64, 64)},
        engine={"self_test": False, "caching": False},
    )  # fmt: skip
    named = ("gate_proj.weight", "up_proj.weight", "down_proj.weight", "lm_head.weight")
    assert not [layer.name for layer in copies(artifact, named)]
    bindings = json.loads((artifact.folder / "rank2.bindings.json").read_text())
    assert bindings["model.layers.0.mlp.gate_proj.weight"]["shape"] == [168, 96]  # 167 of 500 / 3
    assert bindings["lm_head.weight"]["shape"] == [336, 96]


@pytest.mark.needs_rtx
@pytest.mark.parametrize("kind", ["i8", "f8e4m3"])
def test_products_of_eight_bits_are_one_kernel(kind: str, tmp_path: Path) -> None:
    artifact = compiled(quantized(kind, per_row=True), tmp_path / "out", weights="inside")
    report = artifact.manifest["program"]["stages"][0]["report"]
    layers = Report.from_json(json.loads((artifact.folder / report).read_text())).layers
    sizes = [np.prod(tensor.dims) for layer in layers for tensor in layer.outputs]
    assert all(size < 0 or size < HIDDEN * RESULTS for size in sizes)  # no whole weight is written
