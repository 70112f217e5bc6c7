"""Products of quantized and of odd weights on TensorRT-RTX: the kernels that the builder makes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest

import irc
import irc.passes
from irc.backends.reference import evaluate
from irc.backends.tensorrt.builder.report import Layer
from irc.backends.tensorrt.lowering.table import lowerings
from irc.backends.tensorrt.options import EngineOptions
from irc.backends.tensorrt.target import Target
from irc.driver import Artifact
from irc.frontends.onnx import import_onnx
from irc.ir.dtypes import numpy_dtype
from irc.passes.quantize import QuantizeModule
from irc.pipeline import run_pipeline
from tests.calibration.statistics_folder import write_folder
from tests.fresh import fresh
from tests.sharded import test_fusions
from tests.tensorrt import emission
from tests.tiny_checkpoint import write_checkpoint

assert irc.passes
RNG = fresh(72)
N, K, F = 384, 256, 384
Row: TypeAlias = tuple[str, Callable[[Path], irc.Module], str, str]
WIDTH, HIDDEN, RESULTS = 33, 51, 19


def linear(scheme: str, folder: Path | None = None, op: str = "linear") -> irc.Module:
    """A quantized product [B, S, 256] by [384, 256], calibrated with a folder to write; of a
    `matmul` by [256, 384], as ONNX files have it."""
    rows = (N, K) if op == "linear" else (K, N)
    module = irc.parse(f"""module @m dims(B=1:2:4, S=1:8:32) {{
      weight @w.weight : bf16[{rows[0]}, {rows[1]}] = random("w", 0, 0.1)
      func @forward(%x: bf16[B, S, {K}]) -> (y: bf16[B, S, {N}]) {{
        %y = {op} %x, @w.weight : bf16[B, S, {N}]
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


def compiled(module: irc.Module, folder: Path, target: str = "sm_89", **more: Any) -> Artifact:
    engine = {"self_test": False, "caching": False, "target": f"tensorrt-rtx/{target}"}
    engine |= more.pop("engine", {})
    return irc.compile(module, folder, backend="tensorrt-rtx", engine=engine, **more)


def products(layers: Sequence[Layer]) -> list[tuple[str, str]]:
    """(the kind of a product, the dtype of its activations)."""
    kernels = [layer for layer in layers if layer.kind == "gemm" or "Fc" in layer.name]
    return [(layer.kind, layer.inputs[0].dtype) for layer in kernels]


CODES: list[Row] = [
    ("fp8", lambda folder: linear("fp8"), "sm_89", "f8e4m3"),  # scales per token, applied outside
    ("fp8_rowwise", lambda folder: linear("fp8_rowwise"), "sm_89", "f8e4m3"),
    ("nvfp4", lambda folder: linear("nvfp4", folder), "sm_120", "f4e2m1"),
    ("one scale of i8", lambda folder: static("i8", "i8", 1), "sm_89", "i8"),
    ("rows of i8", lambda folder: static("i8", "i8", N), "sm_89", "i8"),
    ("one scale of f8e4m3", lambda folder: static("f8e4m3", "f8e4m3", 1), "sm_89", "f8e4m3"),
    ("rows of f8e4m3", lambda folder: static("f8e4m3", "f8e4m3", N), "sm_89", "f8e4m3"),
]
WITHIN: list[Row] = [
    ("w8a16", lambda folder: linear("w8a16"), "sm_80+sm_89", ""),
    ("w4a16", lambda folder: linear("w4a16"), "sm_80", ""),
    ("w8a16_fp8", lambda folder: linear("w8a16_fp8"), "sm_89", ""),
    ("mxfp8", lambda folder: linear("mxfp8"), "sm_120", ""),  # there is no product of its codes
    ("codes of two dtypes", lambda folder: static("f8e4m3", "i4", N), "sm_89", ""),  # are widened
]
APART: list[Row] = [
    ("fp8_block", lambda folder: linear("fp8_block"), "sm_89", "apart"),
    ("w4a16_nvfp4", lambda folder: linear("w4a16_nvfp4"), "sm_120", "apart"),
    ("w4a16_mxfp4", lambda folder: linear("w4a16_mxfp4"), "sm_120", "apart"),
    ("w4a8_mxfp4_mxfp8", lambda folder: linear("w4a8_mxfp4_mxfp8"), "sm_120", "apart"),
]


@pytest.mark.needs_rtx
@pytest.mark.parametrize(
    ("make", "target", "kind"),
    [pytest.param(*row, id=name) for name, *row in CODES + WITHIN + APART],
)
def test_kernels_are_those_of_the_guide(
    make: Callable[[Path], irc.Module], target: str, kind: str, tmp_path: Path
) -> None:
    """The product multiplies codes of a dtype, or dequantizes the weight within itself (""), or a
    kernel before it writes the whole weight at every step ("apart")."""
    layers = emission.layers(compiled(make(tmp_path / "statistics"), tmp_path / "out", target))
    is_of_codes = kind not in ("", "apart")
    name = "runtime_fusion" if not kind else "gemm"
    assert products(layers) == [(name, kind if is_of_codes else "bf16")]
    whole = [out for layer in layers for out in layer.outputs if out.dims in ((N, K), (K, N))]
    assert len(whole) == (kind == "apart")


@pytest.mark.needs_rtx
@pytest.mark.parametrize("scheme", ["mxfp8", "nvfp4", "w4a16_nvfp4", "w4a16_mxfp4"])
def test_blocks_of_weights_of_matmul(scheme: str, tmp_path: Path) -> None:
    """TensorRT has the scales of NVFP4 in bf16."""
    x = RNG.standard_normal((2, 3, K)).astype(numpy_dtype("bf16"))
    module = linear(scheme, tmp_path / "statistics", "matmul")
    assert emission.layers(compiled(module, tmp_path / "out", "sm_120"))
    wanted = irc.evaluate(module, {"x": x})["y"].astype(np.float32)
    nodes = scheme.startswith("w4a16")  # the others have nodes of TensorRT, which irc does not read
    for use_text in (True, False) if nodes else (True,):
        read = import_onnx(tmp_path / "out" / "rank0.onnx", use_text=use_text)
        (y,) = irc.evaluate(read, {"x": x}).values()
        limit = 0 if use_text or scheme == "w4a16_mxfp4" else 1e-2 * np.abs(wanted).max()
        np.testing.assert_allclose(y.astype(np.float32), wanted, rtol=0, atol=limit)


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
    assert any(op.reason.startswith(reason) for op in missing)


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
    assert not missing if reason is None else missing[0].reason.startswith(reason)


# -- products of one input, and of values from other ranks


def block() -> irc.Module:
    """Attention and a gated feed-forward whose weights have 4 bits, in groups of 128."""
    shapes = dict.fromkeys("qkvo", (K, K)) | {"g": (F, K), "u": (F, K), "d": (K, F)}
    weights, products = "", ""
    for name, (rows, columns) in shapes.items():
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


@pytest.mark.needs_rtx
def test_products_of_one_input_are_one_kernel(tmp_path: Path) -> None:
    joined = emission.layers(compiled(block(), tmp_path / "joined"))
    pipeline = "inline, static-capacity, fuse-gated-mlp, dce"
    apart = emission.layers(compiled(block(), tmp_path / "apart", pipeline=pipeline))
    assert len(products(joined)) == 4 < len(products(apart))
    assert not any(layer.kind in ("signal", "wait") for layer in joined)
    assert len(joined) < len(apart)


@pytest.mark.needs_rtx
@pytest.mark.parametrize("inputs", ["tensor", "token"])
def test_codes_from_other_ranks_are_multiplied(inputs: str, tmp_path: Path) -> None:
    module = test_fusions.block(inputs)
    artifact = compiled(module, tmp_path / "out", mesh="tp=2", sequence=True)
    assert ("gemm", "i8") in products(emission.layers(artifact))


# -- weights of odd sizes, which TensorRT would copy at every step: padded once, still the same


def odd(kind: str, per_row: bool = True) -> irc.Module:
    """Two products of weights in eight bits, of odd sizes."""
    rows = (HIDDEN, RESULTS) if per_row else (1, 1)
    return irc.parse(f"""module @m dims(B=1:2:8) {{
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


def table() -> irc.Module:
    """A weight of odd sizes that is looked up and multiplied."""
    return irc.parse(f"""module @m dims(B=1:2:8) {{
      weight @w : f16[{HIDDEN}, {WIDTH}] = random("w", 1, 0.3)
      func @forward(%x: i32[B]) -> (f16[B, {HIDDEN}]) {{
        %e = embedding %x, @w : f16[B, {WIDTH}]
        %y = linear %e, @w : f16[B, {HIDDEN}]
        return %y }} }}""")


@pytest.mark.parametrize("weights", ["inside", "outside"])
@pytest.mark.parametrize("kind", ["i8", "i8 per row", "f8e4m3", "f8e4m3 per row", "table"])
def test_padded_weights_compute_the_same(kind: str, weights: str, tmp_path: Path) -> None:
    """The graph, and the text in it."""
    module = table() if kind == "table" else odd(kind.split()[0], kind.endswith("row"))
    x = RNG.standard_normal((3, WIDTH)).astype(np.float16)
    x = RNG.integers(0, HIDDEN, 3).astype(np.int32) if kind == "table" else x
    artifact = compiled(module, tmp_path, engine={"build": False, "weights": weights})
    (wanted,) = evaluate(module, {"x": x}).values()
    path = tmp_path / artifact.manifest["program"]["ranks"][0]["model"]
    for use_text in (True, False):
        (y,) = evaluate(import_onnx(path, use_text=use_text), {"x": x}, tmp_path).values()
        scale = max(1.0, float(np.abs(wanted.astype(np.float64)).max()))
        np.testing.assert_allclose(y, wanted, 2e-2, 2e-2 * scale)


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
    copies = [
        layer.name
        for layer in emission.layers(artifact)
        for tensor in layer.inputs
        if tensor.name.endswith(named)
        and any(np.prod(out.dims) >= np.prod(tensor.dims) for out in layer.outputs)
    ]
    assert not copies
    bindings = json.loads((artifact.folder / "rank2.bindings.json").read_text())
    assert bindings["model.layers.0.mlp.gate_proj.weight"]["shape"] == [168, 96]  # 167 of 500 / 3
    assert bindings["lm_head.weight"]["shape"] == [336, 96]


@pytest.mark.needs_rtx
@pytest.mark.parametrize("kind", ["i8", "f8e4m3"])
def test_products_of_eight_bits_are_one_kernel(kind: str, tmp_path: Path) -> None:
    artifact = compiled(odd(kind), tmp_path / "out", engine={"weights": "inside"})
    sizes = [np.prod(out.dims) for layer in emission.layers(artifact) for out in layer.outputs]
    assert all(size < 0 or size < HIDDEN * RESULTS for size in sizes)  # no whole weight is written
