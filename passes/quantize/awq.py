"""AWQ: factors of the inputs of linears that make the rounding error of their outputs least.

Lin et al., 2023. The factors are a power of the mean magnitude of each input. The power is the one
of a grid whose rounded weights have the least error of the outputs, which the gram matrix of the
inputs gives exactly: tr(E G Eᵀ) for an error E of the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from irc.quantization.formats import Format, decode, encode

from .algorithms import RESCALE, Array, Context, rescale, sample
from .assignment import Assignment

GRID = 20  # powers 0, 1/20, ..., 19/20
ONE = np.float32(1)
SMALLEST = 1e-4  # of the largest mean; inputs below it get the factor of this mean


def output_error(error: Array, gram: Array | None) -> float:
    """The mean squared error of the outputs, summed over them, for an error [N, K] of weights.

    Without a gram matrix inputs are taken as independent.
    """
    return float(np.vdot(error if gram is None else error @ gram, error))


def search(weights: Sequence[Weights], mean: Array, gram: Array) -> tuple[Array, float]:
    """(factors [K], the error with them), for the weights of linears of one input."""
    best, least = np.ones_like(mean), np.inf
    for step in range(GRID):
        factors = powers(mean, step / GRID)
        error = total_error(weights, gram, factors)
        if error < least:
            best, least = factors, error
    return best, least


def total_error(weights: Sequence[Weights], gram: Array, factors: Array | np.float32) -> float:
    """The error of the outputs of linears of one input whose weights are multiplied by factors."""
    return sum(output_error(weight.error(factors), gram) for weight in weights)


def powers(mean: Array, exponent: float) -> Array:
    """mean ** exponent, so scaled that the largest and the smallest factor are reciprocal."""
    floor = SMALLEST * mean.max()
    if not floor:
        return np.ones_like(mean)
    factors = np.maximum(mean, floor) ** np.float32(exponent)
    return factors / np.sqrt(factors.max() * factors.min())


@dataclass(frozen=True)
class Weights:
    """Weights [N, K], with the format, block and dtype of scales that they are rounded with."""

    values: Array
    format: Format
    block: tuple[int, int]
    scale_dtype: str = "f32"
    method: str = "absmax"

    def error(self, factors: Array | np.float32 = ONE) -> Array:
        """What rounding changes if it rounds the weights times factors [K]."""
        scaled = self.values * factors
        encoded = encode(scaled, self.format, self.block, self.scale_dtype, self.method)
        return decode(encoded) / factors - self.values


def _rescale(group: Sequence[Assignment], context: Context) -> Array | None:
    name = group[0].site.name
    statistics = context.calibrated(group[0].scheme.name)

    def find() -> Array:
        # The search has scales by absmax, which is faster, so it may end at factors
        # that are worse than none with the scales that follow.
        weights, gram = [sampled(weight, context) for weight in group], statistics.gram(name)
        quick = [replace(weight, method="absmax") for weight in weights]
        factors = search(quick, statistics.mean(name), gram)[0]
        better = total_error(weights, gram, factors) < total_error(weights, gram, ONE)
        return factors if better else np.ones_like(factors)

    return rescale(group, context, GRID, find)


def sampled(assigned: Assignment, context: Context) -> Weights:
    """Some rows of a site's weight, as its scheme rounds them."""
    site, block = assigned.site, assigned.block
    sizes = block[site.outputs], block[site.inputs]
    values = sample(context.reader, site)
    return Weights(values, assigned.format, sizes, site.weight.type.dtype, assigned.method)


RESCALE["awq"] = _rescale
