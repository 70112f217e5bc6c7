"""Convolutions, pooling and resizing of images [B, C, ...] and of [C, H, W] without a batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ....errors import Error
from ....ir.dims import Dim, product
from ....source import here
from ... import functional as F
from ...tensor import Tensor as Inner
from ..arithmetic import data
from ..module import constant_tensor
from ..tensor import Operand, Tensor, wrap
from .shapes import pad

Sizes = int | Sequence[int]


def several(sizes: Sizes, count: int, least: int = 0) -> tuple[int, ...]:
    """A number per dimension, each at least `least`."""
    found = (sizes,) * count if isinstance(sizes, (int, float)) else tuple(sizes)
    if len(found) != count or min(found) < least:
        expected = f"expected {count} numbers of at least {least}, or one for all"
        raise Error(f"{expected}, found {sizes}", loc=here())
    return found


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
    x, kernel = data(input), data(weight)
    count = len(kernel.shape) - 2
    alone = len(x.shape) == count + 1
    found = F.conv(
        F.unsqueeze(x, (0,)) if alone else x,
        kernel,
        bias=None if bias is None else data(bias),
        before=several(padding if pre_padding is None else pre_padding, count),
        after=several(padding if post_padding is None else post_padding, count),
        strides=several(stride, count, 1),
        dilations=several(dilation, count, 1),
        groups=groups,
    )
    return wrap(F.squeeze(found, (0,)) if alone else found)


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
    kernel = data(weight)
    kernel = F.squeeze(kernel, (3,)) if len(kernel.shape) == 4 else kernel
    return conv2d(input, kernel, bias, stride, padding, dilation, groups)


def conv_transpose2d(
    input: Operand,
    weight: Operand,
    bias: Operand = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Tensor:
    """x [B, C, H, W] with weight [C, O/groups, height, width], as the gradient of conv2d.

    `output_padding` and `dilation` are those of PyTorch; TensorRT-LLM ignores them.
    """
    steps, gaps = several(stride, 2, 1), several(dilation, 2, 1)
    sides, more = several(padding, 2), several(output_padding, 2)
    if any(n >= max(pair) for n, *pair in zip(more, steps, gaps, strict=True)):
        raise Error(
            f"conv_transpose2d: output_padding is {more}; expected less than the stride {steps} "
            f"or the dilation {gaps}",
            loc=here(),
        )
    x, kernel = data(input), data(weight)
    channels, out, *sizes = (int(n) for n in kernel.shape)
    ends: list[int] = []
    for i in (1, 0):  # pad takes the last dimension first
        x = _spread(x, len(x.shape) - 2 + i, steps[i])
        before = gaps[i] * (sizes[i] - 1) - sides[i]
        ends += [before, before + more[i]]
    # groups of [C/groups, O/groups] become one weight [O, C/groups]
    kernel = F.reshape(kernel, (groups, channels // groups, out, *sizes)).permute(0, 2, 1, 3, 4)
    kernel = F.flip(F.reshape(kernel, (groups * out, channels // groups, *sizes)), (2, 3))
    return conv2d(pad(wrap(x), ends), kernel, bias, dilation=gaps, groups=groups)


def _spread(x: Inner, dim: int, step: int) -> Inner:
    """x with step - 1 zeros between two elements along `dim`."""
    if step == 1:
        return x
    zeros, shape = [0] * (len(x.shape) + 1), x.shape
    behind = [step - 1 if i == dim + 1 else 0 for i in range(len(zeros))]
    wide = F.pad(F.unsqueeze(x, (dim + 1,)), zeros, behind)
    wide = F.reshape(wide, (*shape[:dim], shape[dim] * step, *shape[dim + 1 :]))
    return F.slice(wide, dim, 0, (shape[dim] - 1) * step + 1)


def avg_pool2d(
    input: Operand,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Sizes = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Tensor:
    """The means of windows of x [..., H, W], as in PyTorch; TensorRT-LLM ignores the padding."""
    if ceil_mode:
        raise Error("avg_pool2d: ceil_mode is not supported; pad the input first", loc=here())
    x, size, sides = data(input), several(kernel_size, 2, 1), several(padding, 2)
    if any(2 * side > n for side, n in zip(sides, size, strict=True)):
        raise Error(f"avg_pool2d: padding {sides} is more than half of {size}", loc=here())
    *outer, height, width = x.shape
    steps = size if stride is None else stride
    ones = F.full(1.0, shape=(1, 1, *size), dtype=x.dtype)

    def summed(images: Inner) -> Inner:
        return conv2d(images, ones, stride=steps, padding=sides).inner

    total = summed(F.reshape(x, (product(tuple(outer)), 1, height, width)))
    if count_include_pad:
        total = total / float(math.prod(size))
    else:
        total = total / summed(F.full(1.0, shape=(1, 1, height, width), dtype=x.dtype))
    return wrap(F.reshape(total, (*outer, *total.shape[-2:])))


_MODES = {3: "linear", 4: "bilinear", 5: "trilinear"}


def interpolate(
    input: Operand,
    size: Sizes | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool = False,
    recompute_scale_factor: bool = False,
    antialias: bool = False,
) -> Tensor:
    """x [B, C, ...] resized, as in PyTorch with recompute_scale_factor: by the ratio of the sizes.

    TensorRT-LLM takes "nearest-exact" as "nearest", and ignores align_corners of "bilinear".
    """
    x = data(input)
    count, sizes = len(x.shape) - 2, x.shape[2:]
    modes = ("nearest", "nearest-exact", _MODES.get(len(x.shape)))
    if antialias:
        raise Error("interpolate: antialias is not supported; leave it out", loc=here())
    if mode not in modes:
        raise Error(f"interpolate: expected one of {modes}, found {mode!r} {x.type}", loc=here())
    if (size is None) == (scale_factor is None) or any(isinstance(n, Dim) for n in sizes):
        raise Error(
            "interpolate: expected either size or scale_factor, and known sizes of positions, "
            f"found {x.type}",
            loc=here(),
        )
    if scale_factor is None:
        wanted = several(size or 0, count, 1)
    else:
        factors: Any = scale_factor
        factors = zip(sizes, several(factors, count), strict=True)
        wanted = several([int(int(n) * factor) for n, factor in factors], count, 1)
    for i, (old, new) in enumerate(zip(sizes, wanted, strict=True)):
        x = _resized(x, 2 + i, int(old), new, mode, align_corners)
    return wrap(x)


def _resized(x: Inner, dim: int, old: int, new: int, mode: str, align_corners: bool) -> Inner:
    """One dimension resized; the ends are repeated."""
    places = np.arange(new)
    if mode.startswith("nearest"):
        shift = 0.5 if mode == "nearest-exact" else 0.0
        nearest = np.floor((places + shift) * (old / new)).clip(0, old - 1).astype(np.int32)
        return F.gather(x, constant_tensor(nearest).inner, dim=dim)
    if align_corners:
        source = places * ((old - 1) / max(1, new - 1))
    else:
        source = ((places + 0.5) * (old / new) - 0.5).clip(0, old - 1)
    # [new, old]: the part of every element in an interpolated one
    parts = np.maximum(0, 1 - np.abs(source[:, None] - np.arange(old)))
    weights = constant_tensor(parts, x.dtype).inner
    last = len(x.shape) - 1
    return F.linear(x.transpose(dim, last), weights).transpose(dim, last)
