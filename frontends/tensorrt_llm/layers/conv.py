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
    options: ClassVar[tuple[str, ...]] = "stride", "padding", "dilation", "groups"

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
        groups, channels = self.groups, (self.in_channels, self.out_channels)
        if groups < 1 or any(each % groups for each in channels):
            raise Error(
                f"expected groups that divide {channels[0]} and {channels[1]} channels, found "
                f"{groups}",
                loc=here(),
            )
        if self.padding_mode != "zeros":
            raise Error(f"expected padding_mode 'zeros', found {self.padding_mode!r}", loc=here())
        has_bias, own = vars(self).pop("bias"), (self.out_channels,)
        self.weight = Parameter(shape=self.weight_shape(), dtype=self.dtype)
        self.bias = Parameter(shape=own, dtype=self.dtype) if has_bias else None

    def weight_shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        inputs = self.in_channels // self.groups
        return self.out_channels, inputs, *per_dimension(self.kernel_size, 2)

    def forward(self, input: Any) -> Any:
        """[B, O, ...]."""
        options = {name: getattr(self, name) for name in self.options}
        return self.convolve(input, self.weight, self.bias, **options)


@api("layers.conv.Conv1d", inner=True)
@dataclass(eq=False, repr=False)
class Conv1d(Conv2d):
    """x [B, C, L] convolved with weight [O, C/groups, size, 1]."""

    convolve: ClassVar[Any] = staticmethod(conv1d)

    def weight_shape(self) -> tuple[int, ...]:
        inputs = self.in_channels // self.groups
        return self.out_channels, inputs, *per_dimension(self.kernel_size, 1), 1


@api("layers.conv.ConvTranspose2d", inner=True)
@dataclass(eq=False, repr=False)
class ConvTranspose2d(Conv2d):
    """The gradient of a Conv2d: x [B, C, H, W] with weight [C, O/groups, height, width].

    As in TensorRT-LLM `output_padding` and `dilation` have no effect.
    """

    convolve: ClassVar[Any] = staticmethod(conv_transpose2d)
    options: ClassVar[tuple[str, ...]] = "stride", "padding", "groups"

    output_padding: Sizes = 0

    def weight_shape(self) -> tuple[int, ...]:
        outputs = self.out_channels // self.groups
        return self.in_channels, outputs, *per_dimension(self.kernel_size, 2)


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
