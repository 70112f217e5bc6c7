"""What a compilation does about quantization beside the pass: it calibrates, and explains."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import Error
from ..ir.core import Module, Weight
from ..ops import Dequantize
from ..ops.fused_attention import cache_writes
from ..pipeline import Pipeline, run_pipeline
from ..quantization.report import QuantizationReport
from ..quantization.sites import FLOATS
from ..quantization.statistics import is_calibrated
from ..text.parser import parse_module

if TYPE_CHECKING:
    from ..artifact.manifest import Progress
    from ..backends.base import Backend
    from ..passes.quantize import QuantizeModule
    from .sources import PathLike, Source

_LINEAR = """module @m dims(B=1:1:2) {
  weight @w.weight : f32[256, 256] = random("w", 0, 0.1)
  func @forward(%x: f32[B, 2, 256]) -> (y: f32[B, 2, 256]) {
    %y = linear %x, @w.weight : f32[B, 2, 256]
    return %y } }"""
_EXPERTS = """module @m dims(B=1:1:2) {
  weight @w.weight : f32[4, 256, 256] = random("w", 0, 0.1)
  func @forward(%x: f32[4, B, 256]) -> (y: f32[4, B, 256]) {
    %w = transpose @w.weight {order=[0, 2, 1]} : f32[4, 256, 256]
    %y = matmul %x, %w : f32[4, B, 256]
    return %y } }"""


def calibrated(
    pipeline: Pipeline, source: Source, output: PathLike | None, progress: Progress
) -> Pipeline:
    """The pipeline with statistics in place of data, which are run into OUTPUT.calibration."""
    from .calibration import calibrate

    chosen = _quantize_of(pipeline)
    if chosen is None or not chosen.calibration or is_calibrated(Path(chosen.calibration)):
        return pipeline
    gram = _needs_gram(chosen)
    if output is None:
        raise Error(
            "--calibration names data, and a dry run writes no statistics of it; give the "
            "folder of irc calibrate, or -o DIR without --dry-run"
        )
    folder = Path(f"{Path(output)}.calibration")
    calibrate(source, chosen.calibration, folder, gram=gram, progress=progress)
    filled = replace(chosen, calibration=str(folder))
    return Pipeline(tuple(filled if step is chosen else step for step in pipeline))


def _needs_gram(chosen: QuantizeModule) -> bool:
    """Whether an algorithm needs gram matrices; an Error where an option is wrong."""
    from ..passes.quantize import AUTO
    from ..passes.quantize.assignment import read_table
    from ..quantization.schemes import scheme_called

    chosen.check()
    if chosen.scheme == AUTO:
        return True
    schemes = [row.scheme for row in read_table(chosen.table)] if chosen.table else []
    schemes += [scheme_called(chosen.scheme)] if chosen.scheme else []
    return any(scheme.algorithm in ("awq", "gptq") for scheme in schemes if scheme is not None)


def check_done(pipeline: Pipeline, module: Module, report: QuantizationReport) -> None:
    """An Error where the options name a scheme and no layer or no cache was quantized."""
    chosen = _quantize_of(pipeline)
    if chosen is None:
        return
    writes = [write for op in module.ops() for write in cache_writes(op)]
    caches = [write.cache.type.dtype for write in writes]
    if chosen.caches and all(dtype in FLOATS for dtype in caches):
        option = "--kv-cache" if chosen.kv else "kv_cache_quant_algo of the table"
        what = "has no KV caches" if not caches else "has caches that are not arguments"
        raise Error(f"{option} has no effect: the model {what}; leave it out")
    if (chosen.scheme or chosen.table) and not report.rows:
        raise Error(
            "--quantize quantized no layer: all are excluded, or not included; --exclude '' "
            "excludes none"
        )


def _quantize_of(pipeline: Pipeline) -> QuantizeModule | None:
    from ..passes.quantize import QuantizeModule

    return next((step for step in pipeline if isinstance(step, QuantizeModule)), None)


def explain_refusal(error: Error, backend: Backend, module: Module, pipeline: Pipeline) -> None:
    """Add the schemes that a backend can run to its Error about operations that it cannot."""
    kinds = {refused.op.opname for refused in backend.unsupported(module)}
    if _quantize_of(pipeline) is None or not kinds & {"quantize", "dequantize", "dynamic_scale"}:
        return
    dtypes = [weight.type.dtype for weight in module.weights.values()]
    dtype = next((dtype for dtype in dtypes if dtype in FLOATS), "f32")
    codes = [op.x for op in module.ops() if isinstance(op, Dequantize)]
    experts = any(isinstance(x, Weight) and x.type.ndim > 2 for x in codes)
    texts = [_LINEAR, _EXPERTS] if experts else [_LINEAR]
    runnable = [runnable_schemes(backend, text.replace("f32", dtype)) for text in texts]
    names = ", ".join(name for name in runnable[0] if name in runnable[-1]) or "none"
    error.add_note(f"schemes that {backend.name} can run: {names}")


def runnable_schemes(backend: Backend, product: str) -> list[str]:
    """The names of the schemes without calibration with which a backend runs a module's text."""
    from ..passes.quantize import QuantizeModule
    from ..quantization.schemes import SCHEMES

    names: list[str] = []
    for name in SCHEMES:
        module = parse_module(product)
        try:
            run_pipeline(module, [QuantizeModule(scheme=name)])
        except Error:  # its algorithm needs calibration
            continue
        if not backend.unsupported(module):
            names.append(name)
    return names
