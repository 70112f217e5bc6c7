"""GPTQ: codes of weights that compensate the rounding of earlier inputs in the later ones.

Frantar et al., 2022. Scales are those of rounding to nearest. The inputs (columns of the weights)
are rounded one after the other, those with the largest values first. What a column loses is added
to the columns not rounded yet, so that the error of the outputs is the least one by the gram matrix
of the inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from irc.errors import Error
from irc.ir.dtypes import dtype, numpy_dtype, packed
from irc.quantization.rounding import as_f32, rounded, rounded_codes
from irc.weights import BytesRef, Ref

from .algorithms import ENCODE, Array, Context, as_rows, row_blocks, spread, stored
from .assignment import Assignment
from .rewriting import rounded_parts

DAMPING = (0.01, 0.1, 1.0)  # of the diagonal's mean, added to it; the next one if it is too small
BLOCK = 128  # columns whose losses are added to the later ones together
WIDE = 8192  # inputs from which on the factors of a gram matrix are computed in f32


@dataclass(frozen=True)
class Compensation:
    """The order of the inputs, and in it the upper triangular U, with UᵀU the inverse of the gram.

    The gram matrix is damped.
    """

    order: Array
    upper: Array


def compensation(gram: Array, site: str) -> Compensation:
    """How the losses of rounded inputs are spread, by the gram matrix of the inputs."""
    order = np.argsort(-np.diag(gram), kind="stable")
    matrix = gram[np.ix_(order, order)].astype(np.float64 if len(gram) < WIDE else np.float32)
    mean = float(np.trace(matrix)) / len(matrix) or 1.0
    before = 0.0
    for damping in DAMPING:
        matrix[np.diag_indices_from(matrix)] += (damping - before) * mean
        before = damping
        try:
            lower = np.linalg.cholesky(matrix[::-1, ::-1])
        except np.linalg.LinAlgError:
            continue
        return Compensation(order, _inverse(lower[::-1, ::-1]).astype(np.float32))
    raise Error(
        f"the gram matrix of {site} is not positive definite, even with its mean added to the "
        "diagonal; calibrate again"
    )


def _inverse(upper: Array) -> Array:
    """The inverse of an upper triangular matrix, by halves."""
    size = len(upper)
    if size <= BLOCK:
        return np.linalg.inv(upper)
    half = size // 2
    inverse = np.zeros_like(upper)
    inverse[:half, :half] = _inverse(upper[:half, :half])
    inverse[half:, half:] = _inverse(upper[half:, half:])
    inverse[:half, half:] = -inverse[:half, :half] @ upper[:half, half:] @ inverse[half:, half:]
    return inverse


def gptq(
    weights: Array, by: Compensation, codes: str, steps: Array, zeros: Array | None = None
) -> Array:
    """Codes, of the dtype `codes`, of weights [N, K] with a scale, and zero point, each."""
    upper = by.upper
    # a row of these is an input: a column of the weights
    left, scales = (
        np.ascontiguousarray(array.T[by.order], np.float32) for array in (weights, steps)
    )
    starts = None if zeros is None else as_f32(zeros.T[by.order])
    for begin in range(0, len(left), BLOCK):
        end = min(begin + BLOCK, len(left))
        losses = np.empty((end - begin, left.shape[1]), np.float32)
        for at in range(begin, end):
            start = None if starts is None else starts[at]
            near = rounded(left[at] / scales[at], codes, start) * scales[at]
            loss = losses[at - begin] = (left[at] - near) / upper[at, at]
            left[at + 1 : end] -= np.multiply.outer(upper[at, at + 1 : end], loss)
            left[at] = near
        left[end:] -= upper[begin:end, end:].T @ losses
    result = np.empty(left.shape, np.uint8)
    result[by.order] = rounded_codes(left / scales, codes, starts)
    return result.T.view(numpy_dtype(codes))


def _encode(assigned: Assignment, context: Context) -> Mapping[str, Ref]:
    """References to the parts of a site's weight in a file, which is written unless it exists."""
    file = stored([assigned], context, DAMPING, lambda: _compute(assigned, context))
    tensors = context.reader.file(file).tensors
    return {
        part: BytesRef(file, tensors[part].offset, kind, shape)
        for part, (kind, shape) in assigned.parts.items()
    }


def _compute(assigned: Assignment, context: Context) -> dict[str, Array]:
    """The parts of a site's weight by name; those of four bits are packed."""
    site, reader = assigned.site, context.reader
    by = compensation(context.calibrated(assigned.scheme.name).gram(*site.keys), site.name)
    refs = rounded_parts(assigned)
    parts = {part: reader.read(ref) for part, ref in refs.items() if part != "codes"}
    steps = as_f32(parts["scales"])
    if "tensor_scale" in parts:
        steps = steps * parts["tensor_scale"]
    parts["codes"] = np.empty(site.shape, numpy_dtype(assigned.format.codes))
    for ranges, weights in row_blocks(reader, site):
        scales = as_rows(spread(steps, site.shape, ranges), site)
        zeros = None
        if "zeros" in parts:
            zeros = as_rows(spread(parts["zeros"], site.shape, ranges), site)
        codes = gptq(weights, by, assigned.format.codes, scales, zeros)
        as_rows(parts["codes"][tuple(slice(*span) for span in ranges)], site)[...] = codes
    small = {part for part, (kind, _) in assigned.parts.items() if dtype(kind).bits < 8}
    return {part: packed(values) if part in small else values for part, values in parts.items()}


ENCODE["gptq"] = _encode
