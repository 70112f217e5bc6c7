"""Layers over images [B, channels, height, width], and those of training that inference keeps.

Parameters and arguments have the names of torch.nn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TypeAlias

from ...errors import Error
from ...source import here
from .. import functional as F
from ..module import Module, Parameter
from ..tensor import Tensor

Pair: TypeAlias = int | tuple[int, int]  # of height and width, or of both


def _pair(size: Pair, least: int, what: str) -> tuple[int, int]:
    pair = size if isinstance(size, (tuple, list)) else (size, size)
    if len(pair) != 2 or not all(type(number) is int and number >= least for number in pair):
        raise Error(
            f"{what} is {size!r}; expected a number of at least {least}, or two such numbers",
            loc=here(),
        )
    height, width = pair
    return height, width


class Conv2d(Module):
    """Convolution; weight [out_channels, in_channels / groups, height, width], bias [out_channels].

    `padding` zeros are put around the image.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Pair,
        stride: Pair = 1,
        padding: Pair = 0,
        dilation: Pair = 1,
        groups: int = 1,
        bias: bool = True,
        dtype: str = "f32",
    ) -> None:
        if groups < 1 or in_channels % groups or out_channels % groups:
            raise Error(
                f"Conv2d: {groups} groups do not divide {in_channels} channels and {out_channels}",
                loc=here(),
            )
        sizes = _pair(kernel_size, 1, "kernel_size")
        self.weight = Parameter((out_channels, in_channels // groups, *sizes), dtype)
        self.bias = Parameter((out_channels,), dtype) if bias else None
        self.stride, self.dilation = _pair(stride, 1, "stride"), _pair(dilation, 1, "dilation")
        self.padding, self.groups = _pair(padding, 0, "padding"), groups

    def forward(self, x: Tensor) -> Tensor:
        """x [B, in_channels, height, width] to [B, out_channels, ...]."""
        return F.conv(
            x,
            self.weight,
            bias=self.bias,
            strides=self.stride,
            before=self.padding,
            after=self.padding,
            dilations=self.dilation,
            groups=self.groups,
        )


class _Pool2d(Module):
    def __init__(self, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0) -> None:
        self.kernel_size = _pair(kernel_size, 1, "kernel_size")
        self.stride = _pair(kernel_size if stride is None else stride, 1, "stride")
        self.padding = _pair(padding, 0, "padding")
        if any(2 * pad > size for pad, size in zip(self.padding, self.kernel_size, strict=True)):
            raise Error(
                f"a padding of {padding} is more than half of kernel_size {kernel_size}", loc=here()
            )

    def _pooled(self, x: Tensor, fill: float, join: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Each window's elements joined, one dimension after the other."""
        if x.ndim != 4:
            raise Error(
                f"expected an image [B, channels, height, width], found {x.type}", loc=here()
            )
        if any(self.padding):
            around = (0, 0, *self.padding)
            x = F.pad(x, before=around, after=around, value=fill)
        for dim, size, stride in zip((2, 3), self.kernel_size, self.stride, strict=True):
            first, *others = self._shifted(x, dim, size, stride)
            for other in others:
                first = join(first, other)
            x = first
        return x

    @staticmethod
    def _shifted(x: Tensor, dim: int, size: int, stride: int) -> Iterator[Tensor]:
        """The first elements of all windows, then the second ones, and so on."""
        span = x.shape[dim] - (size - 1)
        if isinstance(span, int) and span < 1:
            raise Error(f"a window of {size} does not fit into {x.type}", loc=here())
        return (F.slice(x, dim, start, start + span, step=stride) for start in range(size))


class MaxPool2d(_Pool2d):
    """The largest element of each window; `stride` is `kernel_size` by default."""

    def forward(self, x: Tensor) -> Tensor:
        """x [B, channels, height, width] to the same with fewer positions."""
        return self._pooled(x, -math.inf, F.maximum)


class AvgPool2d(_Pool2d):
    """The mean of each window, zeros of the padding included; `stride` as for MaxPool2d."""

    def forward(self, x: Tensor) -> Tensor:
        """x [B, channels, height, width] to the same with fewer positions."""
        return self._pooled(x, 0.0, F.add) / float(math.prod(self.kernel_size))


class BatchNorm(Module):
    """Norm of each channel by the mean and variance of training; torch's BatchNorm1d to 3d.

    Checkpoints also count batches, which nothing uses: ignore `*.num_batches_tracked`.
    """

    def __init__(
        self, channels: int, eps: float = 1e-5, affine: bool = True, dtype: str = "f32"
    ) -> None:
        self.weight = Parameter((channels,), dtype) if affine else None
        self.bias = Parameter((channels,), dtype) if affine else None
        self.running_mean = Parameter((channels,), dtype)
        self.running_var = Parameter((channels,), dtype)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [B, channels, ...] to the same."""
        ones = (1,) * (x.ndim - 2)
        variance = F.relu(self.running_var)  # that of random weights may be negative
        scale = (variance + self.eps) ** -0.5
        scale = scale if self.weight is None else scale * self.weight
        x = (x - self.running_mean.reshape(-1, *ones)) * scale.reshape(-1, *ones)
        return x if self.bias is None else x + self.bias.reshape(-1, *ones)


class Dropout(Module):
    """Its operand: inference drops nothing."""

    def __init__(self, p: float = 0.5) -> None:
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """x to the same."""
        return x
