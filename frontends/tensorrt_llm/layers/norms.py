"""LayerNorm, RmsNorm and GroupNorm; their weights are the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..api import api
from ..arithmetic import unwrapped
from ..errors import ScriptError
from ..functional import group_norm, layer_norm, rms_norm
from ..module import Module, Parameter


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
        shape = self.normalized_shape = (sizes,) if isinstance(sizes, int) else tuple(sizes)
        affine, biased = self.elementwise_affine, vars(self).pop("bias")
        self.weight = Parameter(shape=shape, dtype=self.dtype) if affine else None
        self.bias = Parameter(shape=shape, dtype=self.dtype) if affine and biased else None


@api("layers.normalization.LayerNorm", inner=True)
@dataclass(eq=False, repr=False)
class LayerNorm(Norm):
    """Normalizes the last dimensions of x, whose sizes are `normalized_shape`."""

    bias: Any = True

    def forward(self, x: Any, normalized_shape: Any = None) -> Any:
        """x, normalized."""
        shape = normalized_shape or self.normalized_shape
        return unwrapped(layer_norm(x, shape, self.weight, self.bias, self.eps))


@api("layers.normalization.RmsNorm", inner=True)
@dataclass(eq=False, repr=False)
class RmsNorm(Norm):
    """Normalizes the last dimensions of x by their root mean square, in `num_groups` parts."""

    eps: float = 1e-06
    num_groups: int = 1

    def forward(self, x: Any, normalized_shape: Any = None) -> Any:
        """x, normalized."""
        shape = normalized_shape or self.normalized_shape
        groups: Any = {"num_groups": self.num_groups}
        return unwrapped(rms_norm(x, shape, weight=self.weight, eps=self.eps, **groups))


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
            raise ScriptError(
                f"expected groups that divide the {self.num_channels} channels, found "
                f"{self.num_groups}"
            )
        shape = (self.num_channels,)
        self.weight = Parameter(shape=shape, dtype=self.dtype) if self.affine else None
        self.bias = Parameter(shape=shape, dtype=self.dtype) if self.affine else None

    def forward(self, x: Any) -> Any:
        """x, normalized."""
        return unwrapped(group_norm(x, self.num_groups, self.weight, self.bias, self.eps))
