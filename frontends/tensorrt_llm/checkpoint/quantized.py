"""Quantized layers of a TensorRT-LLM checkpoint: codes and scales of the ranks, joined.

The tensors are those that ModelOpt and the converters write before a GPU is chosen. Codes that are
interleaved for the GEMM plugins of one GPU are an Error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from ....errors import Error, did_you_mean
from ....ir.core import Module, Op, Value, Weight
from ....ir.types import TensorType
from ....ops import Mul
from ....quantization.activations import FakeQuantize, result_before
from ....quantization.sites import find_sites
from ....weights import Cast, ConcatRef, Cyclic, RepeatedRef, Slice
from ...huggingface.quantized import Layer, Tensors, insert
from ...huggingface.quantized.parts import FLOATS, Part
from ...huggingface.quantized.scales import spread
from ..quantization import QuantConfig

if TYPE_CHECKING:
    from .weights import Place

Sizes = tuple[int, ...]
_FACTORS = "prequant_scaling_factor"
_BLOCK = 128  # inputs that share a scale where the ranks have different ones


@dataclass(frozen=True)
class Local:
    """What a rank holds of a quantized matrix [N, K]; `factors` [K] multiply its input."""

    codes: Part
    scales: Part
    activation: FakeQuantize | None = None
    tensor_scale: float | None = None
    whole: Part | None = None
    factors: Part | None = None


@dataclass(frozen=True)
class Joined:
    """A quantized layer of the model, and the factors [K] that multiply its input.

    `numbers` are the bytes of the factors: layers with the same ones share the product.
    """

    layer: Layer
    factors: Part | None = None
    numbers: bytes = b""


def read_layer(
    place: Place, ranks: Sequence[Tensors], shape: Sizes, quantized: QuantConfig
) -> Joined | None:
    """The quantized layer at a place; None where its weights are floats, or missing."""
    name, algorithm = place.key, str(quantized.quant_algo)
    marks = ("weights_scaling_factor", "per_channel_scale", "activation_scaling_factor")
    present = [f"{name}.{mark}" for mark in marks if f"{name}.{mark}" in ranks[0]]
    if not present or f"{name}.weight" not in ranks[0]:
        return None
    stored = ranks[0].info(f"{name}.weight")
    local = [*shape]
    if place.dim is not None:
        local[place.dim] = -(-shape[place.dim] // len(ranks))
    local[0] = sum(place.sections) or local[0]
    if stored.dtype in FLOATS and stored.shape == tuple(local):
        for tensors in ranks:  # of a layer that the algorithm leaves as it was
            tensors.used.update(present)
        return None
    read = _READERS.get(algorithm)
    if read is None:
        near = did_you_mean(algorithm, _READERS)
        raise Error(
            f"{present[0]} is a scale, but config.json has quant_algo={algorithm}{near}; "
            f"irc reads {', '.join(_READERS)}. Compile the original checkpoint with --quantize"
        )
    found = [read(tensors, name, (local[0], local[1]), quantized) for tensors in ranks]
    return _joined(place, found, ranks, shape)


def quantize(module: Module, layers: Mapping[str, Joined]) -> None:
    """Let the weights be dequantized where they are used, and inputs multiplied and quantized."""
    done: dict[tuple[object, ...], Value] = {}
    for site in find_sites(module):
        found = layers.get(site.weight.name)
        if found is None or found.factors is None:
            continue
        key = site.op.parent, site.x, found.numbers
        if key not in done:
            done[key] = _multiplied(module, site.x, site.op, f"{site.name}.factors", found.factors)
        site.op.set_operands((done[key], *site.op.operands[1:]))
    insert(module, {name: found.layer for name, found in layers.items()})


def _multiplied(module: Module, x: Value, op: Op, name: str, factors: Part) -> Value:
    """The input of an operation times factors [K]."""
    kind = x.type.dtype
    ref = factors.ref if factors.dtype == kind else factors.ref.then(Cast(kind))
    weight = module.add_weight(Weight(TensorType(kind, factors.shape), name, ref))
    return result_before(Mul(x, weight), op, x.name)


def _joined(place: Place, found: Sequence[Local], ranks: Sequence[Tensors], shape: Sizes) -> Joined:
    """What ranks hold as one layer; the largest of their scales quantizes the input."""
    first = found[0]
    codes = place.joined([each.codes for each in found], shape)
    if codes.shape != shape:
        raise Error(f"{place.key}.weight joins to {codes.type}; the model takes {[*shape]}")
    inputs = [each.activation for each in found if each.activation is not None]
    activation = max(inputs, key=lambda each: each.scale or each.tensor_scale or 0.0, default=None)
    if len({each.tensor_scale for each in found}) > 1:
        raise Error(
            f"{place.key}: the ranks have different weights_scaling_factor_2; convert the "
            "checkpoint with tp_size=1, which every mesh of irc can use"
        )
    scales = _scales(place, found, ranks, shape)
    layer = Layer(codes, scales, tensor_scale=first.whole, activation=activation)
    if first.factors is None:
        return Joined(layer)
    used = ranks if place.dim == 1 else ranks[:1]
    values = [tensors.read(f"{place.key}.{_FACTORS}").reshape(-1) for tensors in used]
    parts = [each.factors for each in found[: len(used)] if each.factors is not None]
    ref = ConcatRef(tuple(part.ref for part in parts), 0) if len(parts) > 1 else parts[0].ref
    factors = Part(ref, parts[0].dtype, (shape[1],))
    return Joined(layer, factors, np.concatenate(values).tobytes())


def _scales(place: Place, found: Sequence[Local], ranks: Sequence[Tensors], shape: Sizes) -> Part:
    """The scales of all ranks: one where all have the same, else each for its own part."""
    parts = [each.scales for each in found]
    per_block = parts[0].shape[1] > 1
    if not per_block and (place.dim == 1 or parts[0].shape[0] == 1) and _equal(place, parts, ranks):
        return place.joined(parts[:1], shape)
    if place.dim == 0 and parts[0].shape[0] == 1:  # of a tensor: the same for all rows of a rank
        count = shape[0] // len(parts)
        ref = ConcatRef(tuple(part.ref for part in parts), 0)
        return Part(RepeatedRef(ref, (count, 1), (shape[0], 1)), parts[0].dtype, (shape[0], 1))
    joined = place.joined(parts, shape)
    if place.dim == 1 and not per_block:  # of rows of a rank: in blocks that other meshes divide
        width = shape[1] // len(parts)
        count = width // gcd(width, _BLOCK)
        sizes = joined.shape[0], count * len(parts)
        joined = Part(RepeatedRef(joined.ref, (1, count), sizes), joined.dtype, sizes)
    return joined


def _equal(place: Place, parts: Sequence[Part], ranks: Sequence[Tensors]) -> bool:
    """Whether all ranks have the same scales."""
    if len(parts) == 1 or place.dim is None:
        return True
    keys = (f"{place.key}.weights_scaling_factor", f"{place.key}.per_channel_scale")
    key = next(key for key in keys if key in ranks[0])
    first = ranks[0].read(key).tobytes()
    return all(tensors.read(key).tobytes() == first for tensors in ranks[1:])


def _float8(tensors: Tensors, name: str, shape: Sizes, quantized: QuantConfig) -> Local:
    codes = tensors.view(f"{name}.weight", "f8e4m3", shape)
    level = tensors.number(f"{name}.activation_scaling_factor")
    return Local(codes, _of_tensor(tensors, name), FakeQuantize("f8e4m3", level))


def _float8_rows(tensors: Tensors, name: str, shape: Sizes, quantized: QuantConfig) -> Local:
    codes = tensors.view(f"{name}.weight", "f8e4m3", shape)
    return Local(
        codes, _of_rows(tensors, f"{name}.per_channel_scale", shape), FakeQuantize("f8e4m3")
    )


def _int8_rows(tensors: Tensors, name: str, shape: Sizes, quantized: QuantConfig) -> Local:
    """SmoothQuant as ModelOpt stores it: static scales of inputs, which factors multiply."""
    codes = tensors.view(f"{name}.weight", "i8", shape)
    level = tensors.number(f"{name}.activation_scaling_factor")
    scales = _of_rows(tensors, f"{name}.weights_scaling_factor", shape)
    return Local(codes, scales, FakeQuantize("i8", level), factors=_factors(tensors, name, shape))


def _int4_groups(tensors: Tensors, name: str, shape: Sizes, quantized: QuantConfig) -> Local:
    """AWQ as ModelOpt stores it: a byte has the codes of two rows, the even one in its low half."""
    n, k = shape
    stored = tensors.info(f"{name}.weight")
    if stored.dtype not in ("i8", "u8") or stored.shape != (n // 2, k):
        _interleaved(tensors, name, shape, quantized)
    pairs = tensors.view(f"{name}.weight", "i4", (n // 2, 2 * k)).ref.then(Cyclic(1, 2))
    halves = (pairs.then(Slice((None, (0, k)))), pairs.then(Slice((None, (k, 2 * k)))))
    codes = Part(ConcatRef(halves, 0).then(Cyclic(0, n // 2)), "i4", shape)
    scales = tensors.take(f"{name}.weights_scaling_factor", *FLOATS)
    tensors.check_scales(f"{name}.weights_scaling_factor")
    scales = spread(scales, shape, (1, quantized.group_size if quantized.group_size > 0 else k))
    activation = None
    if quantized.quant_algo == "W4A8_AWQ":
        activation = FakeQuantize("f8e4m3", tensors.number(f"{name}.activation_scaling_factor"))
        tensors.used.add(f"{name}.weights_scaling_factor_2")  # the range of scales in FP8
    return Local(codes, scales, activation, factors=_factors(tensors, name, shape))


def _float4(tensors: Tensors, name: str, shape: Sizes, quantized: QuantConfig) -> Local:
    n, k = shape
    codes = tensors.view(f"{name}.weight", "f4e2m1", shape)
    scales = tensors.view(f"{name}.weights_scaling_factor", "f8e4m3", (n, k // 16))
    whole = tensors.view(f"{name}.weights_scaling_factor_2", "f32", (1, 1))
    level = tensors.number(f"{name}.activation_scaling_factor")
    activation = FakeQuantize("f4e2m1", block=16, scales="f8e4m3", tensor_scale=level)
    number = tensors.number(f"{name}.weights_scaling_factor_2")
    return Local(codes, scales, activation, number, whole)


def _int8_weights(tensors: Tensors, name: str, shape: Sizes, quantized: QuantConfig) -> Local:
    """8-bit weights [N, K] as ModelOpt stores them, which names the scales otherwise."""
    scales = f"{name}.weights_scaling_factor"
    if scales not in tensors:
        _interleaved(tensors, name, shape, quantized)
    codes = tensors.view(f"{name}.weight", "i8", shape)
    return Local(codes, _of_rows(tensors, scales, shape))


def _interleaved(tensors: Tensors, name: str, shape: Sizes, quantized: QuantConfig) -> NoReturn:
    stored = tensors.info(f"{name}.weight")
    raise Error(
        f"{name}.weight is {TensorType(stored.dtype, stored.shape)}: codes of "
        f"{quantized.quant_algo} in the order that the GEMM plugin of one kind of GPU reads, which "
        "the checkpoint does not name. Convert the original checkpoint without quantization, or "
        f"compile it as it is, and give irc --quantize {quantized.scheme()}"
    )


def _of_tensor(tensors: Tensors, name: str) -> Part:
    tensors.check_scales(f"{name}.weights_scaling_factor")
    return tensors.view(f"{name}.weights_scaling_factor", "f32", (1, 1))


def _of_rows(tensors: Tensors, key: str, shape: Sizes) -> Part:
    tensors.check_scales(key)
    return tensors.view(key, tensors.info(key).dtype, (shape[0], 1))


def _factors(tensors: Tensors, name: str, shape: Sizes) -> Part | None:
    key = f"{name}.{_FACTORS}"
    if key not in tensors:
        return None
    if np.size(tensors.read(key)) != shape[1]:
        raise Error(f"{key} has {np.size(tensors.read(key))} elements; expected {shape[1]}")
    return tensors.view(key, tensors.info(key).dtype, (shape[1],))


Read = Callable[[Tensors, str, Sizes, QuantConfig], Local]
_READERS: Mapping[str, Read] = {
    "FP8": _float8,
    "FP8_PER_CHANNEL_PER_TOKEN": _float8_rows,
    "W8A8_SQ_PER_CHANNEL": _int8_rows,
    "W4A16_AWQ": _int4_groups,
    "W4A8_AWQ": _int4_groups,
    "NVFP4": _float4,
    "W8A16": _int8_weights,
    "W4A16": _interleaved,
    "W4A16_GPTQ": _interleaved,
    "W8A16_GPTQ": _interleaved,
}
