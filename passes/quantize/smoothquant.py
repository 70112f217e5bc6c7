"""SmoothQuant: factors that move the outliers of inputs into the weights.

Xiao et al., 2022: inputs are divided, weights multiplied by |x| ** alpha / |w| ** (1 - alpha), of
the largest magnitudes per input.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .algorithms import RESCALE, Array, Context, largest_weights, rescale
from .assignment import Assignment

ALPHA = 0.5


def smooth(largest: Array, weights: Array, alpha: float = ALPHA) -> Array:
    """Factors [K] from the largest magnitudes per input: of the inputs, and of the weights.

    1 where either is 0.
    """
    both = (largest > 0) & (weights > 0)
    x, w = np.where(both, largest, 1), np.where(both, weights, 1)
    return (x**alpha / w ** (1 - alpha)).astype(np.float32)


def _rescale(group: Sequence[Assignment], context: Context) -> Array | None:
    statistics = context.calibrated(group[0].scheme.name)

    def find() -> Array:
        columns = [largest_weights(context.reader, assignment.site) for assignment in group]
        return smooth(statistics.largest(group[0].site.name), np.max(columns, axis=0))

    return rescale(group, context, ALPHA, find)


RESCALE["smoothquant"] = _rescale
