"""Convolutions, whose weights are the same on every rank, and layers without weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from ..api import api, fields
from ..errors import ScriptError
from ..functional import avg_pool2d, cast, conv1d, conv2d, conv_transpose2d, softplus, tanh
from ..functional.convolution import per_dimension
from ..module import Module, Parameter


class LayerOfFields(Module):
    """A layer that holds the arguments of its row."""

    row: ClassVar[str]

    if TYPE_CHECKING:

        def __init__(self, *arguments: Any, **given: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

    else:

        def __init__(self, **given):
            vars(self).update({**fields(self.row, every=True), **given})
            self.make_parameters()

    def make_parameters(self) -> None:
        """Set the parameters of the layer."""


@api("layers.conv.Conv2d", inner=True)
class Conv2d(LayerOfFields):
    """x [B, C, H, W] convolved with weight [O, C/groups, height, width]."""

    row = "layers.conv.Conv2d"
    convolve: ClassVar[Any] = staticmethod(conv2d)

    def make_parameters(self) -> None:
        channels = self.weight_channels()
        if self.groups < 1 or any(count % self.groups for count in channels):
            raise ScriptError(
                f"expected groups that divide {self.in_channels} and {self.out_channels} channels, "
                f"found {self.groups}"
            )
        if self.padding_mode != "zeros":
            raise ScriptError(f"expected padding_mode 'zeros', found {self.padding_mode!r}")
        shape = channels[0], channels[1] // self.groups, *self.kernel_shape()
        has_bias, biases = vars(self).pop("bias"), (self.out_channels,)
        self.weight = Parameter(shape=shape, dtype=self.dtype)
        self.bias = Parameter(shape=biases, dtype=self.dtype) if has_bias else None

    def weight_channels(self) -> tuple[int, int]:
        """The channels of the first two dimensions of the weight."""
        return self.out_channels, self.in_channels

    def kernel_shape(self) -> tuple[int, ...]:
        """The last dimensions of the weight."""
        return tuple(per_dimension(self.kernel_size, 2))

    def forward(self, input: Any) -> Any:
        """[B, O, ...]."""
        moves = {name: getattr(self, name) for name in ("stride", "padding", "dilation", "groups")}
        bias = None if self.bias is None else self.bias.value
        return self.convolve(input, self.weight.value, bias, **moves)


@api("layers.conv.Conv1d", inner=True)
class Conv1d(Conv2d):
    """x [B, C, L] convolved with weight [O, C/groups, size, 1]."""

    row = "layers.conv.Conv1d"
    convolve: ClassVar[Any] = staticmethod(conv1d)

    def kernel_shape(self) -> tuple[int, ...]:
        return *per_dimension(self.kernel_size, 1), 1


@api("layers.conv.ConvTranspose2d", inner=True)
class ConvTranspose2d(Conv2d):
    """The gradient of a Conv2d: x [B, C, H, W] with weight [C, O/groups, height, width].

    As in TensorRT-LLM `output_padding` and `dilation` have no effect.
    """

    row = "layers.conv.ConvTranspose2d"
    convolve: ClassVar[Any] = staticmethod(conv_transpose2d)

    def weight_channels(self) -> tuple[int, int]:
        return self.in_channels, self.out_channels


@api("layers.pooling.AvgPool2d", inner=True)
class AvgPool2d(LayerOfFields):
    """The means of windows of x [..., H, W]; as in TensorRT-LLM there is no padding."""

    row = "layers.pooling.AvgPool2d"

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
class Cast(LayerOfFields):
    """x converted to a dtype."""

    row = "layers.cast.Cast"

    def forward(self, x: Any) -> Any:
        """Of the same shape."""
        return cast(x, self.output_dtype)
