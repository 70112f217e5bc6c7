"""The report of `quantize`: its rows, and the errors of weights, against outputs of the model."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irc
import irc.passes
from irc.backends.reference import evaluate
from irc.pipeline import run_pipeline
from irc.quantization import report
from irc.quantization.report import QuantizationReport
from tests.calibration.statistics_folder import write_folder
from tests.fresh import fresh

assert irc.passes
TEXT = """module @m {
  weight @a.weight : f32[160, 256] = random("a", 3, 0.1)
  weight @b.weight : f32[48, 256] = random("b", 3, 0.1)
  func @forward(%x: f32[256, 256]) -> (a: f32[256, 160], b: f32[256, 48]) {
    %a = linear %x, @a.weight : f32[256, 160]
    %b = linear %x, @b.weight : f32[256, 48]
    return %a, %b
  }
}"""


def measured(options: str) -> tuple[irc.Module, QuantizationReport]:
    module, found = irc.parse(TEXT), QuantizationReport(errors=True)
    run_pipeline(module, f"quantize{{{options}}}", [found])
    return module, found


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
    plain, rounded = evaluate(irc.parse(TEXT), {"x": x}), evaluate(module, {"x": x})
    unit = {"x": np.eye(256, dtype=np.float32)}
    wanted, outputs = evaluate(irc.parse(TEXT), unit), evaluate(module, unit)
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
    _, found = measured(f'scheme="{scheme}"')
    assert {(row.weight, row.input) for row in found.rows} == {(weight, entering)}


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
    module, shown = irc.parse(text), QuantizationReport(errors=True)
    options = f"calibration={json.dumps(str(tmp_path))}, scheme=w4a16_awq, group=32"
    run_pipeline(module, f"quantize{{{options}}}", [shown])
    for row in shown.rows:
        assert row.sqnr is not None and row.outputs is not None
        assert 14 < row.sqnr < 25 and 14 < row.outputs < 35
        assert row.largest is not None and row.largest < 0.1


def test_products_that_stay_are_not_listed() -> None:
    _, found = measured('scheme="w8a16", exclude=["a"]')
    assert [row.site for row in found.rows] == ["b"]


def test_an_artifact_has_the_table(tmp_path: Path) -> None:
    irc.compile(irc.parse(TEXT), tmp_path / "out", quantize="w4a16", weight_errors=True)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Quantization" in page and "i4 in groups of 128" in page and " dB" in page
    irc.compile(irc.parse(TEXT), tmp_path / "plain")
    assert "Quantization" not in (tmp_path / "plain" / "report.html").read_text()


def test_a_compilation_that_quantizes_nothing_is_refused(tmp_path: Path) -> None:
    once, _ = measured('scheme="w8a16"')
    with pytest.raises(irc.Error, match="quantized already; leave it out, or compile"):
        irc.compile(once, tmp_path / "out", quantize="w8a16")
    with pytest.raises(irc.Error, match="quantized already; leave it out, or compile"):
        irc.run_passes(irc.parse(TEXT), "quantize{scheme=w8a16}, quantize{scheme=w8a16}")
    with pytest.raises(irc.Error, match="--kv-cache has no effect: the model has no KV caches"):
        irc.compile(irc.parse(TEXT), tmp_path / "out", kv_cache="fp8")
    with pytest.raises(irc.Error, match="quantized no layer: all are excluded"):
        irc.compile(irc.parse(TEXT), tmp_path / "out", quantize="w8a16", exclude=["a", "b"])
