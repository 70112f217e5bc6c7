"""Quantized layers of a TensorRT-LLM checkpoint: codes and scales of the ranks, joined.

The tensors are those that ModelOpt and the converters write before a GPU is chosen. Codes that are
interleaved for the GEMM plugins of one GPU are an Error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING, Literal

from ....errors import Error
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
_SCALES, _FACTORS = "weights_scaling_factor", "prequant_scaling_factor"
_WHOLE, _LEVEL = "weights_scaling_factor_2", "activation_scaling_factor"
_BLOCK = 128  # inputs that share a scale where the ranks have different ones


@dataclass(frozen=True)
class Format:
    """How an algorithm stores a matrix: the dtype of its codes, its scales, and its inputs.

    `grid` says what shares a scale: the tensor, a row, or a group of inputs in a row. `inputs` is
    the dtype to which inputs are quantized, with a static scale or, if `dynamic`, one per token.
    """

    codes: str
    grid: Literal["tensor", "row", "group"]
    inputs: str = ""
    dynamic: bool = False
    scales: str = _SCALES


# As ModelOpt stores them.
FORMATS: Mapping[str, Format] = {
    "FP8": Format("f8e4m3", "tensor", "f8e4m3"),
    "FP8_PER_CHANNEL_PER_TOKEN": Format("f8e4m3", "row", "f8e4m3", True, "per_channel_scale"),
    "W8A8_SQ_PER_CHANNEL": Format("i8", "row", "i8"),
    "W8A16": Format("i8", "row"),
    "W4A16_AWQ": Format("i4", "group"),
    "W4A8_AWQ": Format("i4", "group", "f8e4m3"),
    "NVFP4": Format("f4e2m1", "group", "f4e2m1"),
}
_INTERLEAVED = ("W4A16", "W4A16_GPTQ", "W8A16_GPTQ")  # always, like W8A16 of the converters


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
    name, first = place.key, ranks[0]
    present = [end for end in (_SCALES, "per_channel_scale", _LEVEL) if f"{name}.{end}" in first]
    if not present or f"{name}.weight" not in first:
        return None
    local = [*shape]
    if place.dim is not None:
        local[place.dim] = -(-shape[place.dim] // len(ranks))
    local[0] = sum(place.sections) or local[0]
    stored = first.info(f"{name}.weight")
    if stored.dtype in FLOATS and stored.shape == tuple(local):
        for tensors in ranks:  # of a layer that the algorithm leaves as it was
            tensors.used.update(f"{name}.{end}" for end in present)
        return None
    reader = _Reader(
        name, _format(f"{name}.{present[0]}", quantized), quantized, local[0], local[1]
    )
    return _joined(place, reader, ranks, shape)


def _format(key: str, quantized: QuantConfig) -> Format:
    algorithm = str(quantized.quant_algo)
    if algorithm in _INTERLEAVED:
        return FORMATS["W8A16"]  # whose scales have other keys
    if algorithm not in FORMATS:
        raise Error(
            f"{key} is a scale, but config.json has quant_algo={algorithm}; irc reads "
            f"{', '.join(FORMATS)}. Compile the original checkpoint with --quantize"
        )
    return FORMATS[algorithm]


@dataclass(frozen=True)
class _Reader:
    """Reads what a rank holds of a matrix [n, k]."""

    name: str
    format: Format
    quantized: QuantConfig
    n: int
    k: int

    def codes(self, tensors: Tensors) -> Part:
        """The codes [n, k]; an Error where they are interleaved."""
        key, n, k = f"{self.name}.weight", self.n, self.k
        stored = tensors.info(key)
        packed = self.format.codes == "i4" and stored.shape != (n // 2, k)
        algorithm = self.quantized.quant_algo
        if (
            packed
            or algorithm in _INTERLEAVED
            or f"{self.name}.{self.format.scales}" not in tensors
        ):
            raise Error(
                f"{key} is {TensorType(stored.dtype, stored.shape)}: codes of {algorithm} in the "
                "order that the GEMM plugin of one kind of GPU reads, which the checkpoint does "
                "not name. Convert the original checkpoint without quantization, or compile it as "
                f"it is, and give irc --quantize {self.quantized.scheme()}"
            )
        if self.format.codes != "i4":
            return tensors.view(key, self.format.codes, (n, k))
        # a byte has the codes of two rows, the even one in its low half
        pairs = tensors.view(key, "i4", (n // 2, 2 * k)).ref.then(Cyclic(1, 2))
        halves = (pairs.then(Slice((None, (0, k)))), pairs.then(Slice((None, (k, 2 * k)))))
        return Part(ConcatRef(halves, 0).then(Cyclic(0, n // 2)), "i4", (n, k))

    def scales(self, tensors: Tensors) -> Part:
        """The scales [1, 1], [n, 1] or [n, groups]."""
        key, group = f"{self.name}.{self.format.scales}", self.quantized.group_size
        tensors.check_scales(key)
        if self.format.grid != "group":
            return _numbers(tensors, key, (1 if self.format.grid == "tensor" else self.n, 1))
        group = 16 if self.format.codes == "f4e2m1" else group if group > 0 else self.k
        scales = _numbers(tensors, key, (self.n, -(-self.k // group)))
        return spread(scales, (self.n, self.k), (1, group))

    def whole(self, tensors: Tensors) -> Part | None:
        """The scale of the scales of NVFP4; that of W4A8_AWQ only says how to store them."""
        key = f"{self.name}.{_WHOLE}"
        if key in tensors and self.format.codes != "f4e2m1":
            tensors.used.add(key)
        return _numbers(tensors, key, (1, 1)) if self.format.codes == "f4e2m1" else None

    def inputs(self, ranks: Sequence[Tensors]) -> FakeQuantize | None:
        """How inputs are quantized: by the largest of the static scales of all ranks."""
        dtype = self.format.inputs
        if not dtype or self.format.dynamic:
            return FakeQuantize(dtype) if dtype else None
        level = max(tensors.number(f"{self.name}.{_LEVEL}") for tensors in ranks)
        if dtype == "f4e2m1":
            return FakeQuantize(dtype, block=16, scales="f8e4m3", tensor_scale=level)
        return FakeQuantize(dtype, level)

    def are_equal(self, ranks: Sequence[Tensors], end: str) -> bool:
        """Whether all ranks have the same numbers under a key."""
        first, *others = (tensors.read(f"{self.name}.{end}").tobytes() for tensors in ranks)
        return all(each == first for each in others)


def _numbers(tensors: Tensors, key: str, shape: Sizes) -> Part:
    """Numbers of a rank in a shape of the same size."""
    return tensors.view(key, tensors.info(key).dtype, shape)


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


def _joined(place: Place, reader: _Reader, ranks: Sequence[Tensors], shape: Sizes) -> Joined:
    """What ranks hold as one layer."""
    codes = place.joined([reader.codes(tensors) for tensors in ranks], shape)
    if codes.shape != shape:
        raise Error(f"{place.key}.weight joins to {codes.type}; the model takes {[*shape]}")
    wholes = [reader.whole(tensors) for tensors in ranks]
    if wholes[0] is not None and not reader.are_equal(ranks, _WHOLE):
        raise Error(
            f"{place.key}: the ranks have different {_WHOLE}; convert the checkpoint with "
            "tp_size=1, which every mesh of irc can use"
        )
    scales = _scales(place, reader, ranks, shape)
    layer = Layer(codes, scales, tensor_scale=wholes[0], activation=reader.inputs(ranks))
    key = f"{place.key}.{_FACTORS}"
    if key not in ranks[0]:
        return Joined(layer)
    used = ranks if place.dim == 1 else ranks[:1]
    parts = [_numbers(tensors, key, (shape[1] // len(used),)) for tensors in used]
    ref = ConcatRef(tuple(part.ref for part in parts), 0) if len(parts) > 1 else parts[0].ref
    numbers = b"".join(tensors.read(key).tobytes() for tensors in used)
    return Joined(layer, Part(ref, parts[0].dtype, (shape[1],)), numbers)


def _scales(place: Place, reader: _Reader, ranks: Sequence[Tensors], shape: Sizes) -> Part:
    """The scales of all ranks: one where all have the same, else each for its own part."""
    parts = [reader.scales(tensors) for tensors in ranks]
    grid, count = reader.format.grid, len(ranks)
    shared = grid == "tensor" or (grid == "row" and place.dim == 1)
    if shared and reader.are_equal(ranks, reader.format.scales):
        return place.joined(parts[:1], shape)
    joined = place.joined(parts, shape)
    if not shared:
        return joined
    if place.dim == 0:  # the same for all rows of a rank
        repeats, sizes = (-(-shape[0] // count), 1), (shape[0], 1)
    else:  # the same for all inputs of a rank: in blocks that other meshes divide
        width = shape[1] // count
        blocks = gcd(width, _BLOCK)
        repeats, sizes = (1, width // blocks), (joined.shape[0], shape[1] // blocks)
    return Part(RepeatedRef(joined.ref, repeats, sizes), joined.dtype, sizes)
