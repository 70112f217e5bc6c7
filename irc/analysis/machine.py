"""The speed of this machine's CPU: how fast it reads memory and multiplies matrices."""

from __future__ import annotations

import timeit
from dataclasses import replace
from functools import cache

import numpy as np

from .topology import Device

_LEAST, _MOST = 1 << 20, 1 << 28  # bytes that are read
_SIZE = 768  # of the matrices
_REPEATED = 20


def measure_cpu(nbytes: float, ranks: int = 1) -> Device:
    """The best of reads of as many bytes as a run touches, and of products of f32, as the share of
    each of `ranks` that run at once; in less than a second."""
    x = np.ones(min(max(int(nbytes), _LEAST), _MOST) // 4, np.float32)
    read = x.nbytes / min(timeit.repeat(lambda: x @ x, number=1, repeat=_REPEATED)) / 1e9
    return Device("this CPU", 0, read / ranks, {"f32": _tflops() / ranks}, 0.0)


def at_least(device: Device, gb_s: float, tflops: float) -> Device:
    """A device that is at least as fast as this."""
    peaks = {name: max(peak, tflops) for name, peak in device.peak_tflops.items()}
    return replace(device, hbm_gb_s=max(device.hbm_gb_s, gb_s), peak_tflops=peaks)


@cache
def _tflops() -> float:
    a = np.ones((_SIZE, _SIZE), np.float32)
    return 2 * _SIZE**3 / min(timeit.repeat(lambda: a @ a, number=1, repeat=_REPEATED)) / 1e12
