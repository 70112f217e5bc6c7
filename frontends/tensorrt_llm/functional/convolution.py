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
from ..arithmetic import data, tensor
from ..module import constant_tensor
from ..tensor import Operand, Tensor, wrap

Sizes = int | Sequence[int]


def several(sizes: Sizes, count: int) -> tuple[int, ...]:
    """A number per dimension."""
    return (sizes,) * count if isinstance(sizes, int) else tuple(sizes)


def _conv(
    input: Operand, weight: Inner, bias: Operand, before: Sizes, after: Sizes, **rest: Any
) -> Tensor:
    """conv of x, which may lack the batch."""
    x, count = data(input), len(weight.shape) - 2
    alone = len(x.shape) == count + 1
    found = F.conv(
        F.unsqueeze(x, (0,)) if alone else x,
        weight,
        bias=None if bias is None else data(bias),
        before=several(before, count),
        after=several(after, count),
        strides=several(rest["stride"], count),
        dilations=several(rest["dilation"], count),
        groups=rest["groups"],
    )
    return wrap(F.squeeze(found, (0,)) if alone else found)


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
    rest = {"stride": stride, "dilation": dilation, "groups": groups}
    return _conv(input, kernel, bias, padding, padding, **rest)


def conv2d(
    input: Operand,
    weight: Operand,
    bias: Operand = None,
    stride: Sizes = (1, 1),
    padding: Sizes = (0, 0),
    dilation: Sizes = (1, 1),
    groups: int = 1,
    pre_padding: Sizes | None = None,
    post_padding: Sizes | None = None,
) -> Tensor:
    """x [B, C, H, W] with weight [O, C/groups, height, width]; zeros around x."""
    before = padding if pre_padding is None else pre_padding
    after = padding if post_padding is None else post_padding
    rest = {"stride": stride, "dilation": dilation, "groups": groups}
    return _conv(input, data(weight), bias, before, after, **rest)


def conv3d(
    input: Operand,
    weight: Operand,
    bias: Operand = None,
    stride: Sizes = (1, 1, 1),
    padding: Sizes = (0, 0, 0),
    dilation: Sizes = (1, 1, 1),
    groups: int = 1,
) -> Tensor:
    """x [B, C, D, H, W] with weight [O, C/groups, depth, height, width]; zeros around x."""
    rest = {"stride": stride, "dilation": dilation, "groups": groups}
    return _conv(input, data(weight), bias, padding, padding, **rest)


def conv_transpose2d(
    input: Operand,
    weight: Operand,
    bias: Operand = None,
    stride: Sizes = (1, 1),
    padding: Sizes = (0, 0),
    output_padding: Sizes = (0, 0),
    dilation: Sizes = (1, 1),
    groups: int = 1,
) -> Tensor:
    """x [B, C, H, W] with weight [C, O/groups, height, width], as the gradient of conv2d.

    `output_padding` and `dilation` are those of PyTorch; TensorRT-LLM ignores them.
    """
    x, kernel = data(input), data(weight)
    channels, out, *sizes = (int(n) for n in kernel.shape)
    alone = len(x.shape) == 3
    x = F.unsqueeze(x, (0,)) if alone else x
    steps, gaps = several(stride, 2), several(dilation, 2)
    for i in range(2):
        x = _spread(x, 2 + i, steps[i])
    # groups of [C/groups, O/groups] become one weight [O, C/groups]
    kernel = F.reshape(kernel, (groups, channels // groups, out, *sizes)).permute(0, 2, 1, 3, 4)
    kernel = F.flip(F.reshape(kernel, (groups * out, channels // groups, *sizes)), (2, 3))
    reach = [gap * (int(size) - 1) for gap, size in zip(gaps, sizes, strict=True)]
    before = [n - p for n, p in zip(reach, several(padding, 2), strict=True)]
    after = [n + p for n, p in zip(before, several(output_padding, 2), strict=True)]
    ends = [(min(0, a), min(0, b)) for a, b in zip(before, after, strict=True)]
    for i, (front, back) in enumerate(ends):  # padding beyond the reach removes elements
        if front or back:
            x = F.slice(x, 2 + i, -front, x.shape[2 + i] + back)
    more = [[max(0, n) for n in side] for side in (before, after)]
    rest = {"stride": 1, "dilation": gaps, "groups": groups}
    found = _conv(wrap(x), kernel, bias, *more, **rest)
    return wrap(F.squeeze(found.inner, (0,))) if alone else found


def _spread(x: Inner, dim: int, step: int) -> Inner:
    """x with step - 1 zeros between two elements along `dim`."""
    if step == 1:
        return x
    zeros = [0] * (len(x.shape) + 1)
    behind = [step - 1 if i == dim + 1 else 0 for i in range(len(zeros))]
    shape = x.shape
    wide = F.pad(F.unsqueeze(x, (dim + 1,)), zeros, behind)
    wide = F.reshape(wide, (*shape[:dim], shape[dim] * step, *shape[dim + 1 :]))
    return F.slice(wide, dim, 0, (shape[dim] - 1) * step + 1)


def avg_pool2d(
    input: Operand,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Sizes = (0, 0),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Tensor:
    """The means of windows of x [..., H, W], as in PyTorch; TensorRT-LLM ignores the padding."""
    x, size = data(input), several(kernel_size, 2)
    steps = size if stride is None else several(stride, 2)
    ends = several(padding, 2)
    more = _beyond(x, size, steps, ends) if ceil_mode else (0, 0)
    pooled = _window_sums(x, size, steps, ends, more)
    if not any(more) and (count_include_pad or not any(ends)):
        return wrap(pooled / float(math.prod(size)))
    ones = F.full(1.0, shape=(1, *x.shape[-2:]), dtype=x.dtype)
    if count_include_pad:
        ones = F.pad(ones, (0, *ends), (0, *ends), value=1.0)
        ends = (0, 0)
    return wrap(pooled / F.squeeze(_window_sums(ones, size, steps, ends, more), (0,)))


def _beyond(
    x: Inner, size: Sequence[int], steps: Sequence[int], ends: Sequence[int]
) -> tuple[int, ...]:
    """Per dimension, the elements beyond the padding that the last window of ceil_mode covers."""
    found: list[int] = []
    for count, n, step, end in zip(x.shape[-2:], size, steps, ends, strict=True):
        if isinstance(count, Dim):
            raise Error(f"avg_pool2d: expected a number of positions, found {count}", loc=here())
        windows = -(-(count + 2 * end - n) // step) + 1
        if (windows - 1) * step >= count + end:  # it would begin in the padding behind
            windows -= 1
        found.append(max(0, (windows - 1) * step + n - count - 2 * end))
    return tuple(found)


def _window_sums(
    x: Inner, size: Sequence[int], steps: Sequence[int], ends: Sequence[int], more: Sequence[int]
) -> Inner:
    """The sums of windows over the last two dimensions: a convolution with ones."""
    *outer, height, width = x.shape
    images = F.reshape(x, (product(tuple(outer)), 1, height, width))
    ones = F.full(1.0, shape=(1, 1, *size), dtype=x.dtype)
    after = tuple(end + extra for end, extra in zip(ends, more, strict=True))
    found = F.conv(images, ones, before=tuple(ends), after=after, strides=tuple(steps))
    return F.reshape(found, (*outer, *found.shape[-2:]))


_LINEAR = {3: "linear", 4: "bilinear", 5: "trilinear"}


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
    x = tensor(input).inner
    count, sizes = len(x.shape) - 2, x.shape[2:]
    modes = ("nearest", "nearest-exact", _LINEAR.get(len(x.shape)), "bicubic")
    if mode not in modes or (mode == "bicubic" and count != 2) or antialias:
        raise Error(f"interpolate: expected one of {modes}, found {mode!r} {x.type}", loc=here())
    if (size is None) == (scale_factor is None) or any(isinstance(n, Dim) for n in sizes):
        raise Error(
            "interpolate: expected either size or scale_factor, and known sizes of positions, "
            f"found {x.type}",
            loc=here(),
        )
    if scale_factor is None:
        wanted = several(size or 0, count)
    else:
        one_factor = isinstance(scale_factor, (int, float))
        factors = [scale_factor] * count if one_factor else list(scale_factor)
        wanted = tuple(int(int(n) * f) for n, f in zip(sizes, factors, strict=True))
    for i, (old, new) in enumerate(zip(sizes, wanted, strict=True)):
        x = _resized(x, 2 + i, int(old), new, mode, align_corners)
    return wrap(x)


def _resized(x: Inner, dim: int, old: int, new: int, mode: str, align_corners: bool) -> Inner:
    """One dimension resized."""
    places = np.arange(new)
    if mode.startswith("nearest"):
        shift = 0.5 if mode == "nearest-exact" else 0.0
        nearest = np.floor((places + shift) * (old / new)).clip(0, old - 1).astype(np.int32)
        return F.gather(x, constant_tensor(nearest).inner, dim=dim)
    if align_corners:
        source = places * ((old - 1) / max(1, new - 1))
    else:
        source = (places + 0.5) * (old / new) - 0.5
    weights = constant_tensor(_weights(source, old, mode == "bicubic"), x.dtype).inner
    last = len(x.shape) - 1
    return F.linear(x.transpose(dim, last), weights).transpose(dim, last)


def _weights(source: np.ndarray[Any, Any], old: int, cubic: bool) -> np.ndarray[Any, Any]:
    """[new, old]: the part of every element in an interpolated one; the ends are repeated."""
    found = np.zeros((len(source), old), np.float32)
    first, rows = np.floor(source).astype(int), np.arange(len(source))
    for offset in range(-1, 3) if cubic else range(2):
        away = np.abs(source - (first + offset))
        part = _cubic(away) if cubic else 1 - away
        np.add.at(found, (rows, (first + offset).clip(0, old - 1)), part)
    return found


def _cubic(x: np.ndarray[Any, Any], a: float = -0.75) -> np.ndarray[Any, Any]:
    """The kernel of cubic convolution."""
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((x - 5) * x + 8) * x * a - 4 * a
    return np.where(x <= 1, near, far)
