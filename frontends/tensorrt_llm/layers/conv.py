"""Convolutions, whose weights are the same on every rank, and layers without weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ....errors import Error
from ....source import here
from ..api import api
from ..dimensions import Sizes, per_dimension
from ..functional import avg_pool2d, cast, conv1d, conv2d, conv_transpose2d, softplus, tanh
from ..module import Module, Parameter


@api("layers.conv.Conv2d", inner=True)
@dataclass(eq=False, repr=False)
class Conv2d(Module):
    """x [B, C, H, W] convolved with weight [O, C/groups, height, width]."""

    convolve: ClassVar[Any] = staticmethod(conv2d)

    in_channels: int
    out_channels: int
    kernel_size: Sizes
    stride: Sizes = 1
    padding: Sizes = 0
    dilation: Sizes = 1
    groups: int = 1
    bias: Any = True
    padding_mode: str = "zeros"
    dtype: Any = None

    def __post_init__(self) -> None:
        groups, channels = self.groups, (self.out_channels, self.in_channels)
        if groups < 1 or any(each % groups for each in channels):
            raise Error(
                f"expected groups that divide {channels[1]} and {channels[0]} channels, found "
                f"{groups}",
                loc=here(),
            )
        if self.padding_mode != "zeros":
            raise Error(f"expected padding_mode 'zeros', found {self.padding_mode!r}", loc=here())
        first, second = self.weight_channels()
        shape = first, second // groups, *self.kernel_shape()
        has_bias = vars(self).pop("bias")
        self.weight = Parameter(shape=shape, dtype=self.dtype)
        own = (self.out_channels,)
        self.bias = Parameter(shape=own, dtype=self.dtype) if has_bias else None

    def weight_channels(self) -> tuple[int, int]:
        """The channels of the first two dimensions of the weight."""
        return self.out_channels, self.in_channels

    def kernel_shape(self) -> tuple[int, ...]:
        """The last dimensions of the weight."""
        return tuple(per_dimension(self.kernel_size, 2))

    def weights(self) -> tuple[Any, Any]:
        """The tensors of the weight and the bias."""
        return self.weight.value, None if self.bias is None else self.bias.value

    def forward(self, input: Any) -> Any:
        """[B, O, ...]."""
        names = "stride", "padding", "dilation", "groups"
        return self.convolve(input, *self.weights(), **{n: getattr(self, n) for n in names})


@api("layers.conv.Conv1d", inner=True)
@dataclass(eq=False, repr=False)
class Conv1d(Conv2d):
    """x [B, C, L] convolved with weight [O, C/groups, size, 1]."""

    convolve: ClassVar[Any] = staticmethod(conv1d)

    def kernel_shape(self) -> tuple[int, ...]:
        return *per_dimension(self.kernel_size, 1), 1


@api("layers.conv.ConvTranspose2d", inner=True)
@dataclass(eq=False, repr=False)
class ConvTranspose2d(Conv2d):
    """The gradient of a Conv2d: x [B, C, H, W] with weight [C, O/groups, height, width].

    As in TensorRT-LLM `output_padding` and `dilation` have no effect.
    """

    output_padding: Sizes = 0

    def weight_channels(self) -> tuple[int, int]:
        return self.in_channels, self.out_channels

    def forward(self, input: Any) -> Any:
        """[B, O, ...]."""
        weight, bias = self.weights()
        moves: Any = {"stride": self.stride, "padding": self.padding, "groups": self.groups}
        return conv_transpose2d(input=input, weight=weight, bias=bias, **moves)


@api("layers.pooling.AvgPool2d", inner=True)
@dataclass(eq=False, repr=False)
class AvgPool2d(Module):
    """The means of windows of x [..., H, W]; as in TensorRT-LLM there is no padding."""

    kernel_size: Sizes
    stride: Sizes | None = None

    def forward(self, input: Any) -> Any:
        """[..., H', W']."""
        return avg_pool2d(input=input, kernel_size=self.kernel_size, stride=self.stride)


@api("layers.activation.Mish", inner=True)
class Mish(Module):
    """x * tanh(softplus(x))."""

    def forward(self, input: Any) -> Any:
        """Of the same shape."""
        return tanh(softplus(input, beta=1.0, threshold=20.0)) * input


@api("layers.cast.Cast", inner=True)
@dataclass(eq=False, repr=False)
class Cast(Module):
    """x converted to a dtype."""

    output_dtype: Any = "float32"

    def forward(self, x: Any) -> Any:
        """Of the same shape."""
        return cast(x, self.output_dtype)
