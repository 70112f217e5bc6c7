"""The pass quantize: what schemes compute, in layers and caches, and the report of its errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irc
import irc.passes
from irc.backends.reference import evaluate
from irc.errors import Error
from irc.ir.core import Module
from irc.ir.dtypes import numpy_dtype
from irc.ops import Full, Linear, Quantize
from irc.pipeline import Stats, run_pipeline
from irc.quantization import report
from irc.quantization.formats import FORMATS, decode, encode
from irc.quantization.report import QuantizationReport
from irc.quantization.schemes import SCHEMES, Scheme
from irc.weights.checkpoint import Reader
from tests.calibration.statistics_folder import write_folder
from tests.fresh import fresh
from tests.layout import ROOT
from tests.sharded.models import logits, prompt_of, tiny_llama

assert irc.passes
ROUND = [each for each in SCHEMES.values() if each.algorithm == "round" or each.optional]


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


# what schemes compute


def rounded_input(x: np.ndarray, scheme: Scheme) -> np.ndarray:
    """x as the activations of a scheme without calibration represent it, in plain numpy."""
    if not scheme.activation:
        return x
    format = FORMATS[scheme.activation_format]
    block = scheme.weight[1][1] if scheme.activation == "block" else x.shape[-1]
    cut = x.reshape(*x.shape[:-1], -1, block)
    most = np.abs(cut).max(axis=-1, keepdims=True)
    if format.scales == "f8e8m0":
        scale = 2.0 ** (np.floor(np.log2(most)) - np.floor(np.log2(format.largest)))
    else:
        scale = most / np.float32(format.largest)
    scale = scale.astype(np.float32)
    codes = np.clip(cut / scale, -format.largest, format.largest)
    codes = np.rint(codes) if format.codes == "i8" else codes.astype(numpy_dtype(format.codes))
    return (codes.astype(np.float32) * scale).reshape(x.shape)


@pytest.mark.parametrize("size", [1, 1e-4])
@pytest.mark.parametrize("scheme", ROUND, ids=lambda scheme: scheme.name)
def test_a_scheme_is_its_formats(scheme: Scheme, size: float) -> None:
    module = linear()
    weights = Reader(module).read(module.weights["fc.weight"])
    x = (size * fresh(3).standard_normal((2, 3, 256))).astype(np.float32)
    quantized(module, f"scheme={scheme.name}")
    method = "mse" if "4" in FORMATS[scheme.weight[0]].codes[:2] else "absmax"
    kept = decode(encode(weights, scheme.weight[0], scheme.weight[1], "f32", method))
    wanted = rounded_input(x, scheme) @ kept.T
    result = evaluate(module, {"x": x})["y"]
    np.testing.assert_allclose(result, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("scheme", ROUND, ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_scales_and_results_have_the_dtype_of_the_model(scheme: Scheme, dtype: str) -> None:
    module = linear(dtype=dtype)
    quantized(module, f"scheme={scheme.name}")
    format = FORMATS[scheme.weight[0]]
    assert module.weights["fc.weight"].type.dtype == format.codes
    assert module.weights["fc.scale"].type.dtype == (format.scales or dtype)
    (product,) = [op for op in module.ops() if isinstance(op, Linear)]
    assert {value.type.dtype for value in (*product.operands, product.result)} == {dtype}
    text = str(module)
    assert str(irc.parse(text)) == text
    with pytest.raises(Error, match="quantized already"):
        quantized(module, f"scheme={scheme.name}")


@pytest.mark.parametrize("example", ["two_tower", "recommender"])
@pytest.mark.parametrize("scheme", ["w8a16", "fp8"])
def test_layers_that_have_numbers_for_names(example: str, scheme: str, tmp_path: Path) -> None:
    weights = {"recommender": {"checkpoint": ROOT / "examples/recommender"}}
    options: Any = weights.get(example, {"random_weights": 0}) | {"quantize": scheme}
    options["backend"] = "reference"
    artifact = irc.compile(ROOT / "examples" / f"{example}.py", tmp_path / "a", **options)
    assert any(op.opname == "dequantize" for op in artifact.module.ops())
    assert str(irc.parse(str(artifact.module))) == str(artifact.module)


def test_an_input_is_rounded_once_for_all_products() -> None:
    module = tiny_llama(num_hidden_layers=2)
    stats = quantized(module, "scheme=fp8_rowwise")
    rounded = [op for op in module.ops() if isinstance(op, Quantize)]
    assert len(rounded) == stats["inputs"] == 2 * 4  # before q, k, v; o; gate, up; down
    assert stats["products"] == 2 * 7 + 1  # and the head, whose inputs stay as they are


@pytest.mark.parametrize("scheme", ["fp8", "fp8_rowwise", "fp8_block", "w8a16", "w4a16_nvfp4"])
@pytest.mark.parametrize("passes", ["fuse-gated-mlp", 'shard{mesh="tp=3"}, fuse-gated-mlp'])
def test_both_branches_of_a_gated_mlp_keep_their_scales(scheme: str, passes: str) -> None:
    """The branches differ by 500,000: with the scale of the other, one is zero or saturates."""
    x = {"x": fresh(4).standard_normal((2, 3, 32)).astype(np.float32)}
    wanted = evaluate(irc.parse(GATED), x)["y"]
    module = irc.parse(GATED)
    quantized(module, f"scheme={scheme}")
    run_pipeline(module, f"{passes}, cse, fold, dce")
    assert any(op.opname == "gated_mlp" for op in module.ops())
    result = evaluate(module, x)["y"]
    error = np.linalg.norm(result - wanted) / np.linalg.norm(wanted)
    assert error < 0.6  # 0.3 in four bits


@pytest.mark.parametrize("take", ["split", "slice"])
@pytest.mark.parametrize("scheme", ["w8a8_sq", "w8a8_sq_per_token", "fp8"])
def test_both_halves_of_a_merged_linear_keep_their_scales(
    scheme: str, take: str, tmp_path: Path
) -> None:
    """The halves differ by 500,000; TensorRT-LLM merges gate and up in one weight."""
    halves = "%g, %u = split %m {dim=-1, sizes=[48, 48]} : f32[B, 3, 48], f32[B, 3, 48]"
    if take == "slice":
        halves = (
            "%g = slice %m {dim=-1, start=0, stop=48} : f32[B, 3, 48]\n"
            "%u = slice %m {dim=-1, start=48, stop=96} : f32[B, 3, 48]"
        )
    weights = fresh(5).standard_normal((96, 32)) * np.repeat([[50], [1e-4]], 48, axis=0)
    (tmp_path / "w.bin").write_bytes(weights.astype(np.float32).tobytes())
    module = irc.parse(f"""module @m dims(B=1:2:8) {{
      file @w = {json.dumps(str(tmp_path / "w.bin"))}
      weight @gate_up.weight : f32[96, 32] = bytes(@w, 0, f32[96, 32])
      func @forward(%x: f32[B, 3, 32]) -> (g: f32[B, 3, 48], u: f32[B, 3, 48]) {{
        %m = linear %x, @gate_up.weight : f32[B, 3, 96]
        {halves}
        return %g, %u }} }}""")
    x = fresh(4).standard_normal((2, 3, 32)).astype(np.float32)
    write_folder(tmp_path, {"gate_up": x})
    wanted = evaluate(module, {"x": x})
    quantized(module, f"scheme={scheme}, calibration={json.dumps(str(tmp_path))}")
    for name, rounded in evaluate(module, {"x": x}).items():
        error = np.linalg.norm(rounded - wanted[name]) / np.linalg.norm(wanted[name])
        assert error < (0.06 if scheme == "fp8" else 0.03)


# caches


def test_caches_hold_codes() -> None:
    module = tiny_llama(head_dim=4)
    ids = prompt_of(module, fresh(5))
    wanted = logits(module, ids)
    assert quantized(module, "kv=fp8")["caches"] == 6
    assert {str(arg.type.dtype) for arg in module.main.args[4:]} == {"f8e4m3"}
    error = np.linalg.norm(logits(module, ids) - wanted) / np.linalg.norm(wanted)
    assert 0 < error < 0.15


def test_scales_of_caches_that_are_given() -> None:
    module = tiny_llama(head_dim=4, num_hidden_layers=1)
    stats = quantized(module, 'kv=fp8, kv_scales=["v0=0.25", "k7=2"]')
    scales: list[Any] = [op.value for op in module.ops() if isinstance(op, Full)]
    assert sorted(set(scales)) == [0.25, 1.0]
    assert "no cache is called k7, so its scale is left out" in stats.notes


def test_a_calibrated_cache_uses_all_codes(tmp_path: Path) -> None:
    module = tiny_llama(head_dim=4, num_hidden_layers=1)
    names = [str(arg.name) for arg in module.main.args[4:]]
    values = {name: np.full((5, 12), 6.35 * (i + 1), np.float32) for i, name in enumerate(names)}
    write_folder(tmp_path, values)
    quantized(module, f"kv=int8, calibration={json.dumps(str(tmp_path))}")
    scales: set[Any] = {op.value for op in module.ops() if isinstance(op, Full)}
    assert sorted(scales) == pytest.approx([0.05, 0.1], rel=0.01)


# static scales


@pytest.mark.parametrize(("scheme", "largest"), [("fp8", 448), ("w4a8_mxfp4_fp8", 448)])
def test_calibration_gives_static_scales(scheme: str, largest: int, tmp_path: Path) -> None:
    module = linear()
    x = fresh(6).standard_normal((2, 3, 256)).astype(np.float32)
    write_folder(tmp_path, {"fc": x})
    more = 'observer="min-max"'
    quantized(module, f"scheme={scheme}, {more}, calibration={json.dumps(str(tmp_path))}")
    scale: Any = next(op.value for op in module.ops() if isinstance(op, Full))
    assert scale == pytest.approx(np.abs(x).max() / largest, rel=0.01)
    assert all(op.opname != "dynamic_scale" for op in module.ops())


def test_nvfp4_has_two_levels_of_scales_and_smooth_inputs(tmp_path: Path) -> None:
    module = linear()
    weights = np.abs(Reader(module).read(module.weights["fc.weight"])).max(0)
    x = 0.001 * fresh(7).standard_normal((2, 3, 256)).astype(np.float32)
    write_folder(tmp_path, {"fc": x})
    wanted = evaluate(module, {"x": x})["y"]
    quantized(module, f"scheme=nvfp4, calibration={json.dumps(str(tmp_path))}")
    scale: Any = next(op.value for op in module.ops() if isinstance(op, Full))
    smooth = np.sqrt(np.abs(x).max((0, 1)) * weights)  # of inputs over factors, and of weights
    assert scale == pytest.approx(smooth.max() / 448 / 6, rel=0.01)
    with pytest.raises(Error, match="nvfp4 needs statistics of the inputs of layers; give --calib"):
        quantized(linear(), "scheme=nvfp4")
    result = evaluate(module, {"x": x})["y"]
    assert np.linalg.norm(result - wanted) < 0.25 * np.linalg.norm(wanted)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("scheme", ["w8a16", "w4a16", "fp8_block", "w4a16_nvfp4"])
def test_weights_that_are_not_finite(wrong: float, scheme: str, tmp_path: Path) -> None:
    weights = np.ones((256, 256), np.float32)
    weights[200, 7] = wrong
    (tmp_path / "w.bin").write_bytes(weights.tobytes())
    text = str(linear()).replace('random("w", 1, 0.1)', "bytes(@w, 0, f32[256, 256])")
    path = json.dumps(str(tmp_path / "w.bin"))
    module = irc.parse(text.replace("weight @fc", f"file @w = {path}\n  weight @fc"))
    with pytest.raises(Error, match="the values have NaN or infinities"):
        irc.compile(module, tmp_path / "out", quantize=scheme, backend="onnx")
    assert not (tmp_path / "out").exists()


# the report


TWO = """module @m {
  weight @a.weight : f32[160, 256] = random("a", 3, 0.1)
  weight @b.weight : f32[48, 256] = random("b", 3, 0.1)
  func @forward(%x: f32[256, 256]) -> (a: f32[256, 160], b: f32[256, 48]) {
    %a = linear %x, @a.weight : f32[256, 160]
    %b = linear %x, @b.weight : f32[256, 48]
    return %a, %b
  }
}"""


def measured(options: str, text: str = TWO) -> tuple[Module, QuantizationReport]:
    module, shown = irc.parse(text), QuantizationReport(errors=True)
    run_pipeline(module, f"quantize{{{options}}}", [shown])
    return module, shown


@pytest.mark.parametrize(
    ("scheme", "words", "after"),
    [
        ("w8a16", "i8 per channel", 256 + 4),
        ("w4a16", "i4 in groups of 128", 128 + 8),
        ("w4a16_asym", "u4 in groups of 128, zero points", 128 + 8 + 1),
        ("w8a16_fp8", "f8e4m3 per channel", 256 + 4),
        ("w4a16_mxfp4", "f4e2m1 in groups of 32", 128 + 8),
        ("w4a16_awq", "i4 in groups of 128", 128 + 8),
        ("w4a16_gptq", "i4 in groups of 128", 128 + 8),
    ],
)
@pytest.mark.parametrize("block", [1 << 22, 1000])
def test_errors_are_those_of_the_outputs_for_unit_inputs(
    scheme: str, words: str, after: float, block: int, monkeypatch: Any, tmp_path: Path
) -> None:
    """And for others, whose factors of AWQ are undone by what comes before."""
    monkeypatch.setattr(report, "_BLOCK", block)
    x = fresh(1).standard_normal((256, 256)) * np.geomspace(0.1, 10, 256)
    x = x.astype(np.float32)
    write_folder(tmp_path, {"a": x, "b": x})
    module, shown = measured(f'scheme="{scheme}", calibration={json.dumps(str(tmp_path))}')
    plain, rounded = evaluate(irc.parse(TWO), {"x": x}), evaluate(module, {"x": x})
    unit = {"x": np.eye(256, dtype=np.float32)}
    wanted, outputs = evaluate(irc.parse(TWO), unit), evaluate(module, unit)
    assert [row.site for row in shown.rows] == ["a", "b"]
    for row in shown.rows:
        error = outputs[row.site] - wanted[row.site]
        sqnr = 10 * np.log10((wanted[row.site] ** 2).sum() / (error**2).sum())
        assert row.sqnr == pytest.approx(sqnr, abs=0.01)
        assert row.largest == pytest.approx(np.abs(error).max(), rel=1e-4)
        error = rounded[row.site] - plain[row.site]
        ratio = 10 * np.log10((plain[row.site] ** 2).sum() / (error**2).sum())
        assert row.outputs == pytest.approx(ratio, abs=0.05)
        assert row.weight == words and row.input == ""
        rows = 160 if row.site == "a" else 48
        assert (row.before, row.after) == (rows * 256 * 4, rows * after)


@pytest.mark.parametrize(
    ("scheme", "weight", "entering"),
    [
        ("fp8_rowwise", "f8e4m3 per channel", "f8e4m3 per token"),
        ("fp8", "f8e4m3 per tensor", "f8e4m3 per token"),
        ("mxfp8", "f8e4m3 in groups of 32", "f8e4m3 in groups of 32"),
    ],
)
def test_inputs_are_listed(scheme: str, weight: str, entering: str) -> None:
    _, shown = measured(f'scheme="{scheme}"')
    assert {(row.weight, row.input) for row in shown.rows} == {(weight, entering)}


@pytest.mark.parametrize("turned", [False, True])
def test_factors_of_inputs_and_of_outputs_are_no_errors(turned: bool, tmp_path: Path) -> None:
    """The inverse of those of @v is in the rows, or columns, of @w."""
    shape, op = ("64, 256", "matmul") if turned else ("256, 64", "linear")
    text = f"""module @m {{
      weight @w : f32[{shape}] = random("w", 3, 0.1)
      weight @v : f32[64, 256] = random("v", 3, 0.1)
      func @forward(%x: f32[256, 64]) -> (y: f32[256, 64]) {{
        %h = {op} %x, @w : f32[256, 256]
        %y = linear %h, @v : f32[256, 64]
        return %y }} }}"""
    x = fresh(2).standard_normal((256, 64)) * np.geomspace(0.1, 10, 64)
    h = fresh(3).standard_normal((256, 256)) * np.geomspace(0.1, 10, 256)
    write_folder(tmp_path, {"w": x.astype(np.float32), "v": h.astype(np.float32)})
    options = f"calibration={json.dumps(str(tmp_path))}, scheme=w4a16_awq, group=32"
    _, shown = measured(options, text)
    for row in shown.rows:
        assert row.sqnr is not None and row.outputs is not None
        assert 14 < row.sqnr < 25 and 14 < row.outputs < 35
        assert row.largest is not None and row.largest < 0.1


def test_products_that_stay_are_not_listed() -> None:
    _, shown = measured('scheme="w8a16", exclude=["a"]')
    assert [row.site for row in shown.rows] == ["b"]


def test_an_artifact_has_the_table(tmp_path: Path) -> None:
    irc.compile(irc.parse(TWO), tmp_path / "out", quantize="w4a16", weight_errors=True)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Quantization" in page and "i4 in groups of 128" in page and " dB" in page
    irc.compile(irc.parse(TWO), tmp_path / "plain")
    assert "Quantization" not in (tmp_path / "plain" / "report.html").read_text()


def test_a_compilation_that_quantizes_nothing_is_refused(tmp_path: Path) -> None:
    once, _ = measured('scheme="w8a16"')
    with pytest.raises(Error, match="quantized already; leave it out, or compile"):
        irc.compile(once, tmp_path / "out", quantize="w8a16")
    with pytest.raises(Error, match="quantized already; leave it out, or compile"):
        irc.run_passes(irc.parse(TWO), "quantize{scheme=w8a16}, quantize{scheme=w8a16}")
    with pytest.raises(Error, match="--kv-cache has no effect: the model has no KV caches"):
        irc.compile(irc.parse(TWO), tmp_path / "out", kv_cache="fp8")
    with pytest.raises(Error, match="quantized no layer: all are excluded"):
        irc.compile(irc.parse(TWO), tmp_path / "out", quantize="w8a16", exclude=["a", "b"])
