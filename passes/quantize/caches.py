"""KV caches of narrow numbers: new keys and values are quantized, and dequantized to be read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf, nan
from typing import Any

import numpy as np

from irc.errors import Error, did_you_mean
from irc.ops import CacheUpdate, Dequantize, Quantize
from irc.quantization.activations import constant
from irc.quantization.formats import FORMATS
from irc.quantization.sites import CacheSite, find_caches
from irc.rewrite import permit

from ..shared.edit import insert_before, retype
from .algorithms import Context

KINDS = ("int8", "fp8")


def check_kind(kind: str) -> None:
    """An Error unless caches can be stored so."""
    if kind not in KINDS:
        known = " or ".join(KINDS)
        raise Error(f"no format of caches called {kind!r}{did_you_mean(kind, KINDS)}; give {known}")


def parse_scales(texts: Iterable[str]) -> dict[str, float]:
    """By the argument of a cache, its scale, from texts such as "k0=0.02"."""
    scales: dict[str, float] = {}
    for text in texts:
        name, _, number = text.partition("=")
        try:
            scales[name] = float(number)
        except ValueError:
            scales[name] = nan
        if not 0 < np.float32(scales[name]) < inf:
            raise Error(f'{text!r} is no scale of a cache; give one above 0, such as "k0=0.02"')
    return scales


def quantize_caches(kind: str, scales: Mapping[str, float], context: Context) -> int:
    """Store all caches as int8 or fp8, with a scale per cache; returns how many there were.

    `scales` hold without calibration. An FP8 cache that has none has the scale 1: its numbers keep
    their exponents.
    """
    caches = find_caches(context.module)
    for name in scales.keys() - {site.name for site in caches}:
        context.stats.explain(f"no cache is called {name}, so its scale is left out")
    sites = [site for site in caches if permit("quantize", site.op)]
    for site in sites:
        _quantize(site, kind, _scale(site, kind, scales, context))
    return len(sites)


def _scale(site: CacheSite, kind: str, scales: Mapping[str, float], context: Context) -> float:
    if context.statistics is None and site.name in scales:
        return scales[site.name]
    if kind == "fp8" and context.statistics is None:
        return 1.0
    statistics = context.calibrated(f"a cache in {kind}")
    statistics.check_width(site.name, site.new.type.shape[-1])
    format = FORMATS[kind]
    limit = statistics.scale_range(site.name, context.observer, format.codes)
    return limit / format.largest if limit else 1.0


def _quantize(site: CacheSite, kind: str, scale: float) -> None:
    op = site.op
    codes: Any = FORMATS[kind].codes
    cache = op.cache
    float_type = cache.type.dtype
    written = constant(scale, op.new.type.ndim, op)
    new = insert_before(Quantize(op.new, written, dtype=codes), op)
    cache.type = cache.type.replace(dtype=codes)
    op.set_operands((cache, new.result, *op.operands[2:]))
    retype(op)
    _read(op, scale, float_type)


def _read(op: CacheUpdate, scale: float, float_type: str) -> None:
    """Dequantize a cache for everything that reads it; results of the function keep the codes."""
    users = [user for user in op.result.users if user.opname != "return"]
    if not users:
        return
    behind = op.next
    assert behind is not None
    scales = constant(scale, op.result.type.ndim, behind)
    kind: Any = float_type
    read = insert_before(Dequantize(op.result, scales, dtype=kind), behind).result
    for user in users:
        user.set_operands(tuple(read if v is op.result else v for v in user.operands))
