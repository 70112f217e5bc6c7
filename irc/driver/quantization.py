"""The options of a compilation about quantization, as the pass `quantize`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..argument_checks import check_kind, check_path
from ..errors import Error
from ..ir.core import Module, Weight
from ..ops import CacheUpdate, Dequantize
from ..pipeline import run_pipeline
from ..quantization.ranges import check_observer
from ..quantization.report import QuantizationReport
from ..quantization.sites import FLOATS
from ..quantization.statistics import is_calibrated
from ..text.parser import parse_module
from .options import selected

if TYPE_CHECKING:
    from ..artifact.manifest import Progress
    from ..backends.base import Backend
    from ..passes.quantize import QuantizeModule
    from ..pipeline import Pass
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
_CLEANERS = ("inline", "canonicalize", "cse")  # what the pass follows where nothing is sharded


@dataclass(frozen=True)
class Quantization:
    """How a module is quantized; without `quantize` and `kv_cache` not at all.

    `quantize`: the name of a scheme, auto, a JSON file of scopes and schemes, or a mapping of them.
    `group`: inputs that share a scale, 0 for the scheme's number. `include`, `exclude`: globs on
    scopes. `kv_cache`: int8 or fp8. `calibration`: a folder of `irc calibrate`, or data for it.
    `observer`: how its statistics give the ranges of static scales: min-max, percentile,
    percentile:99.9, entropy or mse; by default mse for INT8 and min-max for FP8.
    `budget`: of auto, such as "4.5 bits".
    """

    quantize: str | os.PathLike[str] | Mapping[str, Any] = ""
    group: int = 0
    include: Sequence[str] | None = None
    exclude: Sequence[str] | None = None
    kv_cache: str = ""
    calibration: str | os.PathLike[str] = ""
    observer: str = ""
    budget: str = ""

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Quantization:
        """The options of a compilation that are about quantization; an Error about a wrong one."""
        found = cls(**selected(options, *(field.name for field in fields(cls))))
        wanted = "the name of a scheme, the path of a JSON file, or a mapping of globs and schemes"
        check_kind("quantize", found.quantize, (str, os.PathLike, Mapping), wanted)
        for name in ("include", "exclude"):
            globs = getattr(found, name)
            check_kind(name, [] if globs is None else globs, (list, tuple), "a list of globs")
            for glob in globs or ():
                check_kind(f"an entry of {name}", glob, str, 'a glob, such as "*.lm_head"')
        check_kind("group", found.group, int, "a number of inputs, such as 128")
        check_kind("kv_cache", found.kv_cache, str, "int8 or fp8")
        check_kind("budget", found.budget, str, 'bits per weight or decibels, such as "4.5 bits"')
        check_path("calibration", found.calibration)
        check_kind("observer", found.observer, str, "min-max, percentile, entropy or mse")
        check_observer(found.observer)
        if not (found.quantize or found.kv_cache):
            found._check_unused()
        return found

    def _check_unused(self) -> None:
        """An Error about an option that has no effect without a scheme."""
        for field in fields(self):
            if getattr(self, field.name) != field.default:
                option = f"--{field.name.replace('_', '-')}"
                raise Error(f"{option} has no effect without --quantize SCHEME")

    def check_effect(self, module: Module, pipeline: str | None) -> None:
        """An Error where the options have no effect."""
        if not self.wanted:
            return
        option = "--quantize" if self.quantize else "--kv-cache"
        if pipeline is not None:
            why = "--pipeline names the passes"
            raise Error(f"{why}, so {option} has no effect; write quantize{{scheme=...}} there")
        if module.local or any(value.type.sharded for op in module.ops() for value in op.results):
            why = "the module is sharded already"
            raise Error(f"{why}, so {option} has no effect; compile its source anew")

    def check_done(self, module: Module, report: QuantizationReport) -> None:
        """An Error where no layer or no cache was quantized though a scheme was given."""
        caches = [op.cache.type.dtype for op in module.ops() if isinstance(op, CacheUpdate)]
        asked = self.wanted and cast("QuantizeModule", self.as_pass()).caches
        if asked and all(dtype in FLOATS for dtype in caches):
            option = "--kv-cache" if self.kv_cache else "kv_cache_quant_algo of the table"
            what = "has no KV caches" if not caches else "has caches that are no arguments"
            raise Error(f"{option} has no effect: the model {what}; leave it out")
        if not self.quantize or report.rows:
            return
        raise Error(
            "--quantize quantized no layer: all are excluded, or not included; --exclude '' "
            "excludes none"
        )

    def calibrated(
        self, source: Source, output: PathLike | None, progress: Progress
    ) -> Path | None:
        """The folder of a calibration, if there is one; data are run into OUTPUT.calibration."""
        from ..calibration import calibrate

        if not self.calibration or is_calibrated(Path(self.calibration)):
            return Path(self.calibration) if self.calibration else None
        if output is None:
            raise Error(
                "--calibration names data, and a dry run writes no statistics of it; give the "
                "folder of irc calibrate, or -o DIR without --dry-run"
            )
        folder = Path(f"{Path(output)}.calibration")
        gram = self._needs_gram()
        calibrate(source, self.calibration, folder, gram=gram, progress=progress)
        return folder

    def _needs_gram(self) -> bool:
        """Whether an algorithm needs gram matrices; an Error where an option is wrong."""
        from ..passes.quantize import AUTO
        from ..passes.quantize.table import read_table
        from ..quantization.schemes import scheme_called

        chosen = cast("QuantizeModule", self.as_pass())
        chosen.check()
        if chosen.scheme == AUTO:
            return True
        found = [row.scheme for row in read_table(chosen.table)] if chosen.table else []
        found += [scheme_called(chosen.scheme)] if chosen.scheme else []
        return any(scheme.algorithm in ("awq", "gptq") for scheme in found if scheme is not None)

    def explain_refusal(self, error: Error, backend: Backend, module: Module) -> None:
        """Add the schemes that a backend can run to its Error about operations that it cannot."""
        kinds = {each.op.opname for each in backend.unsupported(module)}
        if self.wanted and kinds & {"quantize", "dequantize", "dynamic_scale"}:
            dtypes = [weight.type.dtype for weight in module.weights.values()]
            dtype = next((each for each in dtypes if each in FLOATS), "f32")
            codes = [op.x for op in module.ops() if isinstance(op, Dequantize)]
            experts = any(isinstance(x, Weight) and x.type.ndim > 2 for x in codes)
            texts = [_LINEAR, _EXPERTS] if experts else [_LINEAR]
            runnable = [runnable_schemes(backend, text.replace("f32", dtype)) for text in texts]
            names = ", ".join(name for name in runnable[0] if name in runnable[-1]) or "none"
            error.add_note(f"schemes that {backend.name} can run: {names}")

    @property
    def wanted(self) -> bool:
        """Whether anything is quantized."""
        return bool(self.quantize or self.kv_cache)

    def cache_scales(self, source: Source) -> list[str] | None:
        """The scales of caches that a checkpoint has, as the pass takes them."""
        from ..frontends.huggingface.quantized import cache_scales

        kind = cast("QuantizeModule", self.as_pass()).caches
        if not kind or self.calibration or source.folder is None or source.artifact is not None:
            return None
        return [f"{name}={scale!r}" for name, scale in cache_scales(source.folder, kind).items()]

    def as_pass(self, plan: str = "", kv_scales: list[str] | None = None) -> Pass:
        """The pass; `plan` shards the weights afterwards."""
        from ..passes.quantize import QuantizeModule

        names = {"scheme": self.quantize}
        if isinstance(self.quantize, Mapping):
            names = {"table": json.dumps(dict(self.quantize))}
        elif os.fspath(self.quantize).endswith(".json"):
            names = {"table": os.fspath(self.quantize)}
        return QuantizeModule(
            **cast("dict[str, Any]", names),
            include=None if self.include is None else list(self.include),
            exclude=None if self.exclude is None else list(self.exclude),
            group=self.group,
            kv=self.kv_cache,
            kv_scales=kv_scales or None,
            calibration=str(Path(self.calibration)) if self.calibration else "",
            observer=self.observer,
            budget=self.budget,
            **({"plan": plan} if plan else {}),
        )


def with_quantization(chosen: tuple[Pass, ...], added: Pass) -> tuple[Pass, ...]:
    """The passes of a backend with `quantize` among them: before `shard`, behind the cleaners."""
    names = [each.name for each in chosen]
    at = names.index("shard") if "shard" in names else 0
    if not at and set(_CLEANERS) & set(names):
        at = 1 + max(names.index(name) for name in _CLEANERS if name in names)
    return (*chosen[:at], added, *chosen[at:])


def runnable_schemes(backend: Backend, product: str) -> list[str]:
    """The names of the schemes without calibration with which a backend runs a module's text."""
    from ..passes.quantize import QuantizeModule
    from ..quantization.schemes import SCHEMES

    found: list[str] = []
    for name in SCHEMES:
        module = parse_module(product)
        try:
            run_pipeline(module, [QuantizeModule(scheme=name)])
        except Error:  # its algorithm needs calibration
            continue
        if not backend.unsupported(module):
            found.append(name)
    return found
