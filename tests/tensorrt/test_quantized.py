"""Quantized linears of every scheme on TensorRT-RTX: the kernels that the builder makes of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import irc
import irc.passes
from irc.backends.tensorrt.builder.report import Layer, Report
from irc.backends.tensorrt.lowering.table import lowerings
from irc.backends.tensorrt.options import EngineOptions
from irc.backends.tensorrt.target import Target
from irc.frontends.onnx import import_onnx
from irc.ir.dtypes import numpy_dtype
from irc.passes.quantize import QuantizeModule
from irc.pipeline import run_pipeline
from tests.calibration.statistics_folder import write_folder
from tests.fresh import fresh

assert irc.passes
N, K = 384, 256


def linear(scheme: str, folder: Path | None = None) -> irc.Module:
    """A quantized product [B, S, 256] by [384, 256], calibrated with a folder to write."""
    module = irc.parse(f"""module @m dims(B=1:2:4, S=1:8:32) {{
      weight @w.weight : bf16[{N}, {K}] = random("w", 0, 0.1)
      func @forward(%x: bf16[B, S, {K}]) -> (y: bf16[B, S, {N}]) {{
        %y = linear %x, @w.weight : bf16[B, S, {N}]
        return %y }} }}""")
    if folder is not None:
        write_folder(folder, {"w": np.ones((1, K), np.float32)})
    run_pipeline(module, [QuantizeModule(scheme=scheme, calibration=str(folder or ""))])
    return module


def static(codes: str, weight: str, rows: int) -> irc.Module:
    """The same, with one scale for all activations and `rows` scales of the weight."""
    return irc.parse(f"""module @m dims(B=1:2:4, S=1:8:32) {{
      weight @w : {weight}[{N}, {K}] = random("w", 0, 3.0)
      weight @s : bf16[{rows}, {K // 128 if weight == "i4" else 1}] = random("s", 0, 0.1)
      func @forward(%x: bf16[B, S, {K}]) -> (y: bf16[B, S, {N}]) {{
        %sx = full {{value=0.05, shape=[1, 1, 1], dtype="f32"}} : f32[1, 1, 1]
        %q = quantize %x, %sx {{dtype="{codes}"}} : {codes}[B, S, {K}]
        %d = dequantize %q, %sx {{dtype="bf16"}} : bf16[B, S, {K}]
        %w = dequantize @w, @s {{dtype="bf16"}} : bf16[{N}, {K}]
        %y = linear %d, %w : bf16[B, S, {N}]
        return %y }} }}""")


def kernels(module: irc.Module, target: str, folder: Path) -> list[Layer]:
    """The kernels of the engine that compute something."""
    options = {"self_test": False, "caching": False, "target": f"tensorrt-rtx/{target}"}
    artifact = irc.compile(module, folder, backend="tensorrt-rtx", engine=options)
    (stage,) = artifact.manifest["program"]["stages"]
    layers = Report.from_json(json.loads((folder / stage["report"]).read_text())).layers
    return [layer for layer in layers if layer.kind not in ("shape_call", "signal", "wait")]


def products(layers: list[Layer]) -> list[tuple[str, str]]:
    """(the kind of a product, the dtype of its activations)."""
    found = [each for each in layers if each.kind == "gemm" or "Fc" in each.name]
    return [(each.kind, each.inputs[0].dtype) for each in found]


def whole_weights(layers: list[Layer]) -> list[str]:
    """The kernels that write a complete weight at every step."""
    sizes = ((N, K), (K, N))
    return [each.name for each in layers for out in each.outputs if out.dims in sizes]


CODES = {  # the product has a kernel of its own for codes
    "fp8": ("sm_89", "f8e4m3"),
    "fp8_rowwise": ("sm_89", "f8e4m3"),
    "nvfp4": ("sm_120", "f4e2m1"),
}


@pytest.mark.needs_rtx
@pytest.mark.parametrize("scheme", CODES)
def test_codes_are_multiplied(scheme: str, tmp_path: Path) -> None:
    """Scales per token too, which are applied outside; the scheme fp8 has them here."""
    target, dtype = CODES[scheme]
    calibration = tmp_path / "calibration" if scheme == "nvfp4" else None
    layers = kernels(linear(scheme, calibration), target, tmp_path / "out")
    assert products(layers) == [("gemm", dtype)] and not whole_weights(layers)


@pytest.mark.needs_rtx
@pytest.mark.parametrize(("kind", "rows"), [("i8", 1), ("i8", N), ("f8e4m3", 1), ("f8e4m3", N)])
def test_codes_of_static_scales_are_multiplied(kind: str, rows: int, tmp_path: Path) -> None:
    found = kernels(static(kind, kind, rows), "sm_89", tmp_path)
    assert products(found) == [("gemm", kind)] and not whole_weights(found)


WITHIN = {"w8a16": "sm_80+sm_89", "w4a16": "sm_80", "w8a16_fp8": "sm_89", "mxfp8": "sm_120"}


@pytest.mark.needs_rtx
@pytest.mark.parametrize("scheme", WITHIN)
def test_weights_are_dequantized_within_the_product(scheme: str, tmp_path: Path) -> None:
    """Also in mxfp8, for which the builder has no product of codes."""
    found = kernels(linear(scheme), WITHIN[scheme], tmp_path)
    assert products(found) == [("runtime_fusion", "bf16")] and not whole_weights(found)


@pytest.mark.needs_rtx
def test_codes_of_two_dtypes_are_widened(tmp_path: Path) -> None:
    found = kernels(static("f8e4m3", "i4", N), "sm_89", tmp_path)
    assert products(found) == [("runtime_fusion", "bf16")] and not whole_weights(found)


@pytest.mark.needs_rtx
@pytest.mark.parametrize("scheme", ["mxfp8", "nvfp4", "w4a16_nvfp4", "w4a16_mxfp4"])
def test_blocks_of_weights_of_matmul(scheme: str, tmp_path: Path) -> None:
    """Of [K, N], as ONNX files have them; TensorRT has the scales of NVFP4 in bf16."""
    text = f"""module @m dims(B=1:2:4, S=1:8:32) {{
      weight @w.weight : bf16[{K}, {N}] = random("w", 0, 0.1)
      func @forward(%x: bf16[B, S, {K}]) -> (y: bf16[B, S, {N}]) {{
        %y = matmul %x, @w.weight : bf16[B, S, {N}]
        return %y }} }}"""
    x = fresh(2).standard_normal((2, 3, K)).astype(numpy_dtype("bf16"))
    folder = tmp_path / "calibration"
    write_folder(folder, {"w": x.astype(np.float32)})
    module = irc.parse(text)
    run_pipeline(module, [QuantizeModule(scheme=scheme, calibration=str(folder))])
    assert kernels(module, "sm_120", tmp_path / "out")
    wanted = irc.evaluate(module, {"x": x})["y"].astype(np.float32)
    nodes = scheme.startswith("w4a16")  # the others have nodes of TensorRT, which irc does not read
    for use_text in (True, False) if nodes else (True,):
        read = import_onnx(tmp_path / "out" / "rank0.onnx", use_text=use_text)
        (y,) = irc.evaluate(read, {"x": x}).values()
        limit = 0 if use_text or scheme == "w4a16_mxfp4" else 1e-2 * np.abs(wanted).max()
        np.testing.assert_allclose(y.astype(np.float32), wanted, rtol=0, atol=limit)


APART = {  # what the table says is dequantized by a kernel of its own
    "fp8_block": "sm_89",
    "w4a16_nvfp4": "sm_120",
    "w4a16_mxfp4": "sm_120",
    "w4a8_mxfp4_mxfp8": "sm_120",
}


@pytest.mark.needs_rtx
@pytest.mark.parametrize("scheme", APART)
def test_weights_that_are_dequantized_apart(scheme: str, tmp_path: Path) -> None:
    found = kernels(linear(scheme), APART[scheme], tmp_path)
    assert products(found) == [("gemm", "bf16")] and len(whole_weights(found)) == 1


@pytest.mark.parametrize(
    ("scheme", "target", "reason"),
    [
        ("fp8", "sm_80+sm_89", "is in f8e4m3, which needs sm_89; give --target tensorrt-rtx-1.7/"),
        ("w4a16_nvfp4", "sm_89", "is in f4e2m1, which needs sm_120; give --target tensorrt-rtx-"),
        ("mxfp8", "sm_89", "is in f8e8m0, which needs sm_120; give --target"),
        ("w4a16", "sm_75", "is in bf16, which needs sm_80"),
        ("w4a16_asym", "sm_89", "is in u4, which TensorRT does not have"),
        ("mxfp4", "sm_120", "has other scales than NVFP4 and MXFP8"),
    ],
)
def test_schemes_that_a_target_lacks(scheme: str, target: str, reason: str) -> None:
    missing = lowerings(Target.parse(f"tensorrt-rtx/{target}")).unsupported(linear(scheme))
    assert any(each.reason.startswith(reason) for each in missing)


@pytest.mark.parametrize("quantized", [False, True])
def test_quantized_weights_are_constants_by_default(quantized: bool) -> None:
    """Products of codes need constant scales."""
    weight = "@w" if not quantized else "%d"
    line = "%d = dequantize @c, @s : bf16[4, 8]" if quantized else ""
    module = irc.parse(f"""module @m mesh(tp=2) {{
      weight @w : bf16[4, 8] = random("w", 0, 1.0)
      weight @c : i8[4, 8] = random("c", 0, 9.0)
      weight @s : bf16[4, 1] = random("s", 0, 1.0)
      func @forward(%x: bf16[2, 8]) -> (y: bf16[2, 4]) {{
        {line}
        %y = linear %x, {weight} : bf16[2, 4]
        return %y }} }}""")
    assert EngineOptions().outside(module) is not quantized
    assert EngineOptions(weights="outside").outside(module)


@pytest.mark.parametrize(
    ("kind", "reason"), [("i8", None), ("f8e4m3", "is in f8e4m3, which TensorRT takes from")]
)
def test_caches_of_codes(kind: str, reason: str | None) -> None:
    module = irc.parse(f"""module @m {{
      func @forward(%q: {kind}[B, S, 64], %k: {kind}[B, 2, 64, 32], %past: i32[B])
        -> (k: {kind}[B, 2, 64, 32] aliases %k) {{
        %k.1 = cache_update %k, %q, %past : {kind}[B, 2, 64, 32]
        return %k.1 }} }}""")
    missing = lowerings(Target.parse("tensorrt-rtx/sm_89")).unsupported(module)
    found = [each.reason for each in missing]
    assert not found if reason is None else found[0].startswith(reason)
