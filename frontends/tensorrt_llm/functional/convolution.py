"""Convolutions, pooling and resizing of images [B, C, ...] and of [C, H, W] without a batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..arithmetic import node, tensor
from ..errors import ScriptError
from ..tensor import Operand, Tensor
from .basic import Dims, squeeze, unsqueeze


def per_dimension(sizes: Any, count: int, least: int = 0) -> tuple[int, ...]:
    """A number per dimension, each at least `least`."""
    numbers: tuple[Any, ...] = (sizes,) * count if isinstance(sizes, (int, float)) else tuple(sizes)
    if len(numbers) != count or min(numbers) < least:
        expected = f"expected {count} numbers of at least {least}, or one for all"
        raise ScriptError(f"{expected}, found {sizes}")
    return numbers


def _batched(kind: str, x: Tensor, count: int, *operands: Any, **attributes: Any) -> Tensor:
    """An operator of ONNX on images with `count` dimensions of positions, also without a batch."""
    alone = x.rank() == count + 1
    images = node(kind, unsqueeze(x, 0) if alone else x, *operands, **attributes)
    return squeeze(images, 0) if alone else images


def conv2d(input: Operand, weight: Operand, bias: Operand = None, **fields: Any) -> Tensor:
    """x [B, C, H, W] with weight [O, C/groups, height, width]; zeros around x."""
    x, kernel = tensor(input), tensor(weight)
    count, padding = kernel.rank() - 2, fields.get("padding", 0)
    ends = (fields.get(name) for name in ("pre_padding", "post_padding"))
    pads = [per_dimension(padding if end is None else end, count) for end in ends]
    moves: Any = {
        f"{name}s": per_dimension(fields.get(name, 1), count, 1) for name in ("stride", "dilation")
    }
    group = fields.get("groups", 1)
    return _batched("Conv", x, count, kernel, bias, pads=pads[0] + pads[1], group=group, **moves)


def conv1d(input: Operand, weight: Operand, bias: Operand = None, **fields: Any) -> Tensor:
    """x [B, C, L] with weight [O, C/groups, size, 1], or without the last dimension."""
    kernel = tensor(weight)
    return conv2d(input, squeeze(kernel, 3) if kernel.rank() == 4 else kernel, bias, **fields)


def conv_transpose2d(
    input: Operand, weight: Operand, bias: Operand = None, **fields: Any
) -> Tensor:
    """x [B, C, H, W] with weight [C, O/groups, height, width], as the gradient of conv2d."""
    strides = per_dimension(fields.get("stride", 1), 2, 1)
    moves: Any = {"strides": strides, "pads": per_dimension(fields.get("padding", 0), 2) * 2}
    kernel, group = tensor(weight), fields.get("groups", 1)
    return _batched("ConvTranspose", tensor(input), 2, kernel, bias, group=group, **moves)


def avg_pool2d(input: Operand, kernel_size: Dims, stride: Dims | None = None) -> Tensor:
    """The means of windows of x [..., H, W]."""
    size = per_dimension(kernel_size, 2, 1)
    steps = size if stride is None else per_dimension(stride, 2, 1)
    return _batched("AveragePool", tensor(input), 2, kernel_shape=size, strides=steps)


def interpolate(
    input: Operand,
    size: Dims | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool = False,
) -> Tensor:
    """x [B, C, ...] resized by the ratio of the sizes.

    As in TensorRT-LLM "nearest-exact" is "nearest", and `align_corners` is of "linear" and
    "trilinear" alone.
    """
    x, at_corners = tensor(input), align_corners and mode in ("linear", "trilinear")
    centers = {"coordinate_transformation_mode": "align_corners" if at_corners else "half_pixel"}
    floor = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    linear = {4: "bilinear", 5: "trilinear"}.get(x.rank(), "linear")
    ways = {"nearest": floor, "nearest-exact": floor, linear: centers | {"mode": "linear"}}
    ways["bicubic"] = centers | {"mode": "cubic"}
    if mode not in ways:
        raise ScriptError(f"interpolate: expected one of {[*ways]}, found {mode!r} {x.type}")
    sizes = [n for n in x.type.shape[2:] if isinstance(n, int)]
    if (size is None) == (scale_factor is None) or not 0 < len(sizes) == x.rank() - 2:
        raise ScriptError(
            "interpolate: expected either size or scale_factor, and known sizes of positions, "
            f"found {x.type}"
        )
    if scale_factor is not None:
        factors = zip(sizes, per_dimension(scale_factor, len(sizes)), strict=True)
        size = [math.floor(n * factor) for n, factor in factors]
    wanted = per_dimension(size, len(sizes), 1)
    return node("Resize", x, None, None, wanted, axes=list(range(2, x.rank())), **ways[mode])
