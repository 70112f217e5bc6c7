"""Convolutions, whose weights are the same on every rank, and layers without weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....errors import Error
from ....source import here
from ..dimensions import Sizes, per_dimension
from ..functional import avg_pool2d, cast, conv1d, conv2d, conv_transpose2d, softplus, tanh
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
        return per_dimension(self.kernel_size, 2)

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
        return (*per_dimension(self.kernel_size, 1), 1)


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
        """[B, O, ...]; as in TensorRT-LLM `output_size` and `output_padding` have no effect."""
        return conv_transpose2d(input, *self._weights(), self.stride, self.padding, self.groups)


class Conv3d(Conv2d):
    """x [B, C, D, H, W] convolved with weight [O, C/groups, depth, height, width]."""

    def kernel_shape(self) -> tuple[int, ...]:
        """The last dimensions of the weight."""
        return per_dimension(self.kernel_size, 3)


class AvgPool2d(Module):
    """The means of windows of x [..., H, W]; as in TensorRT-LLM there is no padding."""

    def __init__(
        self,
        kernel_size: Sizes,
        stride: Sizes | None = None,
        padding: Sizes = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
    ) -> None:
        self.settings = kernel_size, stride

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
