"""LayerNorm, RmsNorm and GroupNorm; their weights are the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ....errors import Error
from ....source import here
from ..api import api
from ..arithmetic import unwrapped
from ..context import current_session
from ..functional import group_norm, layer_norm, rms_norm
from ..module import Module, Parameter


def _inner(parameter: Parameter | None) -> Any:
    return None if parameter is None else parameter.inner


@dataclass(eq=False, repr=False)
class Norm(Module):
    """The weights [normalized_shape] of a norm over the last dimensions."""

    normalized_shape: int | Sequence[int]
    eps: float = 1e-05
    elementwise_affine: bool = True
    bias: Any = False
    dtype: Any = None

    def __post_init__(self) -> None:
        sizes = self.normalized_shape
        self.normalized_shape = (sizes,) if isinstance(sizes, int) else tuple(sizes)
        has_bias = vars(self).pop("bias")
        self.weight = self.parameter() if self.elementwise_affine else None
        self.bias = self.parameter() if self.elementwise_affine and has_bias else None

    def parameter(self) -> Parameter:
        """A number per feature."""
        shape: Any = self.normalized_shape
        return Parameter(shape=shape, dtype=self.dtype)


@api("layers.normalization.LayerNorm", inner=True)
@dataclass(eq=False, repr=False)
class LayerNorm(Norm):
    """Normalizes the last dimensions of x, whose sizes are `normalized_shape`.

    With `tp_size` and a `tp_dim` the weights are the part of one rank along that dimension.
    """

    bias: Any = True
    tp_size: int = 1
    tp_dim: int = -1

    def parameter(self) -> Parameter:
        own = super().parameter()
        if self.tp_size > 1 and self.tp_dim >= 0:
            mapping = current_session().mapping
            own.sharded = (self.tp_dim, mapping.axes_of("tp") if mapping else ("tp",))
        return own

    def forward(self, x: Any, normalized_shape: Any = None) -> Any:
        """x, normalized."""
        shape = normalized_shape or self.normalized_shape
        return unwrapped(layer_norm(x, shape, _inner(self.weight), _inner(self.bias), self.eps))


@api("layers.normalization.RmsNorm", inner=True)
@dataclass(eq=False, repr=False)
class RmsNorm(Norm):
    """Normalizes the last dimensions of x by their root mean square, in `num_groups` parts."""

    eps: float = 1e-06
    num_groups: int = 1

    def forward(self, x: Any, normalized_shape: Any = None) -> Any:
        """x, normalized."""
        shape = normalized_shape or self.normalized_shape
        options: Any = {"weight": _inner(self.weight), "eps": self.eps}
        return unwrapped(rms_norm(x, shape, num_groups=self.num_groups, **options))


@api("layers.normalization.GroupNorm", inner=True)
@dataclass(eq=False, repr=False)
class GroupNorm(Module):
    """Normalizes groups of the channels of x [B, C, ...]."""

    num_groups: int
    num_channels: int
    eps: float = 1e-05
    affine: bool = True
    dtype: Any = None

    def __post_init__(self) -> None:
        if self.num_groups < 1 or self.num_channels % self.num_groups:
            raise Error(
                f"expected groups that divide the {self.num_channels} channels, found "
                f"{self.num_groups}",
                loc=here(),
            )
        shape = (self.num_channels,)
        self.weight = Parameter(shape=shape, dtype=self.dtype) if self.affine else None
        self.bias = Parameter(shape=shape, dtype=self.dtype) if self.affine else None

    def forward(self, x: Any) -> Any:
        """x, normalized."""
        weight, bias = _inner(self.weight), _inner(self.bias)
        return unwrapped(group_norm(x, self.num_groups, weight, bias, self.eps))
