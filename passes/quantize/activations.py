"""Quantizes the inputs of products, each value once for all products that take it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from irc.quantization.activations import FakeQuantize
from irc.quantization.formats import FORMATS, Format

from .algorithms import Array, Context
from .assignment import Assignment


@dataclass(frozen=True)
class Activation:
    """How a value is quantized: its format, elements per scale (0 is a token), static or not."""

    format: Format
    block: int = 0
    static: bool = False


def activation_of(assigned: Assignment, context: Context) -> Activation | None:
    """How the inputs of a site are quantized, if they are."""
    scheme = assigned.scheme
    if not scheme.activation:
        return None
    format = FORMATS[scheme.activation_format]
    if format.tensor_scale:  # without it, small inputs would become 0
        context.calibrated(scheme.name)
    if scheme.activation == "block":
        return Activation(format, assigned.inputs_block)
    if scheme.activation == "token":
        return Activation(format)
    if context.statistics is None and format.name == "fp8":
        context.stats.explain(
            f"{scheme.name} without calibration: inputs have a scale per token, computed when the "
            "model runs; with --calibration they have one per tensor"
        )
        return Activation(format)
    context.calibrated(scheme.name)
    return Activation(format, static=True)


def quantize_input(
    group: Sequence[Assignment], activation: Activation, factors: Array | None, context: Context
) -> None:
    """Quantize the value that some sites in order multiply, which was divided by `factors`."""
    first = group[0].site.op
    x = first.operands[0]
    limit = _limit(group, activation, factors, context)
    new = _rounding(activation, limit).apply(x, first)
    for each in group:
        op = each.site.op
        op.set_operands((new, *op.operands[1:]))


def _limit(
    group: Sequence[Assignment], activation: Activation, factors: Array | None, context: Context
) -> float | None:
    """The largest magnitude to represent, by the calibration; None where nothing asks for it."""
    statistics = context.statistics
    if statistics is None or not (activation.static or activation.format.tensor_scale):
        return None
    name = group[0].site.key
    if factors is not None:
        return float((statistics.largest(name) / factors).max())
    observer = context.observer if activation.static else "min-max"  # blocks have their own scales
    return statistics.scale_range(name, observer, activation.format.codes)


def _rounding(activation: Activation, limit: float | None) -> FakeQuantize:
    """The rounding of values up to a limit."""
    format = activation.format
    if activation.static:
        return FakeQuantize(format.codes, _scale(limit, format.largest))
    whole = None
    if format.tensor_scale:
        whole = _scale(limit, format.largest * FORMATS["fp8"].largest)
    scales = format.scales or "f32"
    return FakeQuantize(format.codes, block=activation.block, scales=scales, tensor_scale=whole)


def _scale(limit: float | None, largest: float) -> float:
    """The scale that maps a limit to the largest code; 1 where the limit is 0 or not known."""
    return limit / largest if limit else 1.0
