"""LayerNorm, RmsNorm and GroupNorm; their weights are the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....errors import Error
from ....source import here
from ..context import current_session, signatures
from ..functional import group_norm, layer_norm, rms_norm
from ..module import Module, Parameter
from ..tensor import Tensor


def _sizes(normalized_shape: int | Sequence[int]) -> tuple[int, ...]:
    return (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)


def _value(parameter: Parameter | None) -> Any:
    return None if parameter is None else parameter.value


class LayerNorm(Module):
    """Normalizes the last dimensions of x, whose sizes are `normalized_shape`.

    With `tp_size` and a `tp_dim` the weights are the part of one rank along that dimension.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-05,
        elementwise_affine: bool = True,
        bias: bool = True,
        dtype: Any = None,
        tp_size: int = 1,
        tp_dim: int = -1,
    ) -> None:
        self.normalized_shape, self.eps, self.dtype = _sizes(normalized_shape), eps, dtype
        self.elementwise_affine, self.tp_size, self.tp_dim = elementwise_affine, tp_size, tp_dim
        self.weight = self._parameter() if elementwise_affine else None
        self.bias = self._parameter() if elementwise_affine and bias else None

    def _parameter(self) -> Parameter:
        found = Parameter(shape=self.normalized_shape, dtype=self.dtype)
        if self.tp_size > 1 and self.tp_dim >= 0:
            mapping = current_session().mapping
            found.sharded = (self.tp_dim, mapping.axes_of("tp") if mapping else ("tp",))
        return found

    def forward(self, x: Tensor, normalized_shape: Any = None) -> Tensor:
        """x, normalized."""
        shape = normalized_shape or self.normalized_shape
        return layer_norm(x, shape, _value(self.weight), _value(self.bias), self.eps)


class RmsNorm(Module):
    """Normalizes the last dimensions of x by their root mean square, in `num_groups` parts."""

    @signatures(
        a="normalized_shape, eps, elementwise_affine, dtype",
        b="normalized_shape, num_groups, eps, elementwise_affine, dtype",
    )
    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        num_groups: int = 1,
        eps: float = 1e-06,
        elementwise_affine: bool = True,
        dtype: Any = None,
    ) -> None:
        self.normalized_shape, self.eps, self.dtype = _sizes(normalized_shape), eps, dtype
        self.num_groups, self.elementwise_affine = num_groups, elementwise_affine
        self.weight = None
        if elementwise_affine:
            self.weight = Parameter(shape=self.normalized_shape, dtype=dtype)

    def forward(self, x: Tensor, normalized_shape: Any = None) -> Tensor:
        """x, normalized."""
        return rms_norm(
            input=x,
            normalized_shape=normalized_shape or self.normalized_shape,
            num_groups=self.num_groups,
            weight=_value(self.weight),
            eps=self.eps,
        )


class GroupNorm(Module):
    """Normalizes groups of the channels of x [B, C, ...]."""

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-05,
        affine: bool = True,
        dtype: Any = None,
    ) -> None:
        if num_groups < 1 or num_channels % num_groups:
            raise Error(
                f"expected groups that divide the {num_channels} channels, found {num_groups}",
                loc=here(),
            )
        self.num_groups, self.num_channels, self.eps = num_groups, num_channels, eps
        self.affine = affine
        self.weight = Parameter(shape=(num_channels,), dtype=dtype) if affine else None
        self.bias = Parameter(shape=(num_channels,), dtype=dtype) if affine else None

    def forward(self, x: Tensor) -> Tensor:
        """x, normalized."""
        return group_norm(x, self.num_groups, _value(self.weight), _value(self.bias), self.eps)
