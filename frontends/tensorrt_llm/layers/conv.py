"""Convolutions, whose weights are the same on every rank, and layers without weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....errors import Error
from ....source import here
from ..functional import avg_pool2d, cast, conv1d, conv2d, conv_transpose2d, softplus, tanh
from ..functional.convolution import Sizes, several
from ..module import Module, Parameter
from ..tensor import Tensor


class Conv2d(Module):
    """x [B, C, H, W] convolved with weight [O, C/groups, height, width]."""

    transposed = False  # the weight is [C, O/groups, ...]
    convolve: Any = staticmethod(conv2d)

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: Sizes = 0,
        dilation: Sizes = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        dtype: Any = None,
    ) -> None:
        if groups < 1 or in_channels % groups or out_channels % groups:
            raise Error(
                f"expected groups that divide {in_channels} and {out_channels} channels, "
                f"found {groups}",
                loc=here(),
            )
        if padding_mode != "zeros":
            raise Error(f"expected padding_mode 'zeros', found {padding_mode!r}", loc=here())
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.kernel_size, self.stride, self.padding = kernel_size, stride, padding
        self.dilation, self.padding_mode = dilation, padding_mode
        first, second = out_channels, in_channels
        if self.transposed:
            first, second = second, first
        shape = (first, second // groups, *self.kernel_shape())
        self.weight = Parameter(shape=shape, dtype=dtype)
        self.bias = Parameter(shape=(out_channels,), dtype=dtype) if bias else None

    def kernel_shape(self) -> tuple[int, ...]:
        """The last dimensions of the weight."""
        return several(self.kernel_size, 2)

    def _weights(self) -> tuple[Any, Any]:
        return self.weight.value, None if self.bias is None else self.bias.value

    def forward(self, input: Tensor) -> Tensor:
        """[B, O, ...]."""
        rest = self.stride, self.padding, self.dilation, self.groups
        return self.convolve(input, *self._weights(), *rest)


class Conv1d(Conv2d):
    """x [B, C, L] convolved with weight [O, C/groups, size, 1]."""

    convolve = staticmethod(conv1d)

    def kernel_shape(self) -> tuple[int, ...]:
        """The last dimensions of the weight."""
        return (*several(self.kernel_size, 1), 1)


class ConvTranspose2d(Conv2d):
    """The gradient of a Conv2d: x [B, C, H, W] with weight [C, O/groups, height, width]."""

    transposed = True

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: Sizes = 0,
        output_padding: Sizes = 0,
        dilation: Sizes = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        dtype: Any = None,
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias,
            padding_mode, dtype,
        )  # fmt: skip
        self.output_padding = output_padding

    def forward(self, input: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        """[B, O, ...], of the last sizes `output_size` where that is given."""
        more = several(self.output_padding, 2)
        if output_size is not None:
            more = self._missing(input, output_size[-2:])
        rest = self.stride, self.padding, more, self.dilation, self.groups
        return conv_transpose2d(input, *self._weights(), *rest)

    def _missing(self, input: Tensor, wanted: Sequence[int]) -> tuple[int, ...]:
        """The output padding that gives the wanted sizes."""
        windows = [several(n, 2) for n in (self.stride, self.padding, self.dilation)]
        found: list[int] = []
        for i, (step, pad, gap) in enumerate(zip(*windows, strict=True)):
            reach = gap * (self.kernel_shape()[i] - 1) + 1
            least = (input.shape[i - 2] - 1) * step - 2 * pad + reach
            if input.shape[i - 2] < 0 or not least <= wanted[i] < least + step:
                raise Error(
                    f"ConvTranspose2d: expected an output size from {least} to {least + step - 1}, "
                    f"found {wanted[i]}",
                    loc=here(),
                )
            found.append(wanted[i] - least)
        return tuple(found)


class Conv3d(Conv2d):
    """x [B, C, D, H, W] convolved with weight [O, C/groups, depth, height, width]."""

    def kernel_shape(self) -> tuple[int, ...]:
        """The last dimensions of the weight."""
        return several(self.kernel_size, 3)


class AvgPool2d(Module):
    """The means of windows of x [..., H, W], as in PyTorch; TensorRT-LLM ignores the padding."""

    def __init__(
        self,
        kernel_size: Sizes,
        stride: Sizes | None = None,
        padding: Sizes = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
    ) -> None:
        self.settings = kernel_size, stride, padding, ceil_mode, count_include_pad

    def forward(self, input: Tensor) -> Tensor:
        """[..., H', W']."""
        return avg_pool2d(input, *self.settings)


class Mish(Module):
    """x * tanh(softplus(x))."""

    def forward(self, input: Tensor) -> Tensor:
        """Of the same shape."""
        return input * tanh(softplus(input, beta=1.0, threshold=20.0))


class Cast(Module):
    """x converted to a dtype."""

    def __init__(self, output_dtype: Any = "float32") -> None:
        self.output_dtype = output_dtype

    def forward(self, x: Tensor) -> Tensor:
        """Of the same shape."""
        return cast(x, self.output_dtype)
