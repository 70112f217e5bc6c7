"""Convolutions, pooling and resizing of images [B, C, ...] and of [C, H, W] without a batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ....errors import Error
from ....ir.dims import Dim
from ....source import here
from ..arithmetic import node, tensor
from ..dimensions import Sizes, per_dimension
from ..tensor import Operand, Tensor
from .shapes import squeeze, unsqueeze


def _batched(kind: str, x: Tensor, count: int, *operands: Any, **attributes: Any) -> Tensor:
    """An operator of ONNX on images with `count` dimensions of positions, also without a batch."""
    alone = x.rank() == count + 1
    images = node(kind, unsqueeze(x, 0) if alone else x, *operands, **attributes)
    return squeeze(images, 0) if alone else images


def conv2d(
    input: Operand,
    weight: Operand,
    bias: Operand = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    pre_padding: Sizes | None = None,
    post_padding: Sizes | None = None,
) -> Tensor:
    """x [B, C, H, W] with weight [O, C/groups, height, width]; zeros around x."""
    x, kernel = tensor(input), tensor(weight)
    count = kernel.rank() - 2
    before = per_dimension(padding if pre_padding is None else pre_padding, count)
    after = per_dimension(padding if post_padding is None else post_padding, count)
    strides, gaps = (per_dimension(each, count, 1) for each in (stride, dilation))
    moves: Any = {"strides": strides, "dilations": gaps, "pads": before + after, "group": groups}
    return _batched("Conv", x, count, kernel, bias, **moves)


conv3d = conv2d  # x [B, C, D, H, W] with weight [O, C/groups, depth, height, width]


def conv1d(
    input: Operand,
    weight: Operand,
    bias: Operand = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Tensor:
    """x [B, C, L] with weight [O, C/groups, size, 1], or without the last dimension."""
    kernel = tensor(weight)
    kernel = squeeze(kernel, 3) if kernel.rank() == 4 else kernel
    return conv2d(input, kernel, bias, stride, padding, dilation, groups)


def conv_transpose2d(
    input: Operand,
    weight: Operand,
    bias: Operand = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    groups: int = 1,
) -> Tensor:
    """x [B, C, H, W] with weight [C, O/groups, height, width], as the gradient of conv2d."""
    pads = per_dimension(padding, 2) * 2
    moves: Any = {"strides": per_dimension(stride, 2, 1), "pads": pads, "group": groups}
    return _batched("ConvTranspose", tensor(input), 2, tensor(weight), bias, **moves)


def avg_pool2d(input: Operand, kernel_size: Sizes, stride: Sizes | None = None) -> Tensor:
    """The means of windows of x [..., H, W]."""
    size = per_dimension(kernel_size, 2, 1)
    steps = size if stride is None else per_dimension(stride, 2, 1)
    return _batched("AveragePool", tensor(input), 2, kernel_shape=size, strides=steps)


def interpolate(
    input: Operand,
    size: Sizes | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool = False,
) -> Tensor:
    """x [B, C, ...] resized by the ratio of the sizes.

    As in TensorRT-LLM "nearest-exact" is "nearest", and `align_corners` is of "linear" and
    "trilinear" alone.
    """
    x = tensor(input)
    count, sizes = x.rank() - 2, x.type.shape[2:]
    linear = {3: "linear", 4: "bilinear", 5: "trilinear"}.get(x.rank())
    modes = ("nearest", "nearest-exact", linear, "bicubic")
    if mode not in modes:
        raise Error(f"interpolate: expected one of {modes}, found {mode!r} {x.type}", loc=here())
    if (size is None) == (scale_factor is None) or any(isinstance(n, Dim) for n in sizes):
        raise Error(
            "interpolate: expected either size or scale_factor, and known sizes of positions, "
            f"found {x.type}",
            loc=here(),
        )
    if scale_factor is not None:
        factors = zip(sizes, per_dimension(scale_factor, count), strict=True)
        size = [math.floor(int(str(n)) * factor) for n, factor in factors]
    wanted = per_dimension(size, count, 1)
    how = {"coordinate_transformation_mode": "half_pixel", "mode": "linear"}
    if mode.startswith("nearest"):
        how = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    elif mode == "bicubic":
        how["mode"] = "cubic"
    elif align_corners and mode != "bilinear":
        how["coordinate_transformation_mode"] = "align_corners"
    return node("Resize", x, None, None, wanted, axes=list(range(2, x.rank())), **how)
