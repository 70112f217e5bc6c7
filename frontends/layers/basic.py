"""Layers of one operation: linear, embedding and the norms."""

from __future__ import annotations

from .. import functional as F
from ..module import Module, Parameter
from ..tensor import Tensor


class Linear(Module):
    """x · weightᵀ + bias over the last dimension; weight [out_features, in_features]."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, dtype: str = "f32"
    ) -> None:
        self.weight = Parameter((out_features, in_features), dtype)
        self.bias = Parameter((out_features,), dtype) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] to [..., out_features]."""
        return F.linear(x, self.weight, bias=self.bias)


class Embedding(Module):
    """Lookup of rows of a table [size, features]; out-of-range indices give zeros."""

    def __init__(self, size: int, features: int, dtype: str = "f32") -> None:
        self.weight = Parameter((size, features), dtype)

    def forward(self, ids: Tensor) -> Tensor:
        """ids i32|i64 [...] to [..., features]."""
        return F.embedding(ids, self.weight)


class RmsNorm(Module):
    """RMS norm over the last dimension; `offset` is added to the weight (1 in Gemma)."""

    def __init__(
        self,
        size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        dtype: str = "f32",
        affine: bool = True,
    ) -> None:
        self.weight = Parameter((size,), dtype) if affine else None
        self.size, self.eps, self.offset = size, eps, offset

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] to the same."""
        if self.weight is None:
            return F.rms_norm(x, F.full(1.0, shape=(self.size,), dtype=x.dtype), eps=self.eps)
        return F.rms_norm(x, self.weight, eps=self.eps, offset=self.offset)


class LayerNorm(Module):
    """Layer norm over the last dimension."""

    def __init__(
        self,
        size: int,
        eps: float = 1e-5,
        affine: bool = True,
        bias: bool = True,
        dtype: str = "f32",
    ) -> None:
        self.weight = Parameter((size,), dtype) if affine else None
        self.bias = Parameter((size,), dtype) if affine and bias else None
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] to the same."""
        return F.layer_norm(x, weight=self.weight, bias=self.bias, eps=self.eps)


class GroupNorm(Module):
    """Norm over groups of the channels, which are dimension 1."""

    def __init__(
        self, groups: int, channels: int, eps: float = 1e-5, affine: bool = True, dtype: str = "f32"
    ) -> None:
        self.weight = Parameter((channels,), dtype) if affine else None
        self.bias = Parameter((channels,), dtype) if affine else None
        self.groups, self.eps = groups, eps

    def forward(self, x: Tensor) -> Tensor:
        """x [B, channels, ...] to the same."""
        weight, bias = self.weight, self.bias
        return F.group_norm(x, groups=self.groups, weight=weight, bias=bias, eps=self.eps)
