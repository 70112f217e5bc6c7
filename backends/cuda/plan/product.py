"""One matrix product of a library: sizes, dtypes, and what is done to its result."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from .core import Settings

SIZES = ("batch", "rows", "columns", "inner")
OPTIONAL = ("bias", "residual", "x_scale", "weight_scale")  # operands, in order


@dataclass(frozen=True)
class Operand:
    """A dense operand in row-major order."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Product:
    """y = activation(alpha * scales * x w + bias + residual), summed in f32 and rounded once.

    x [batch, rows, inner] and the weight w [batch, inner, columns], or [batch, columns, inner] if
    `transposed`, are of `dtype`; y and residual [batch, rows, columns] and bias [columns] of
    `result`. `x_shared`: one x for the whole batch.

    `scales` of 8-bit numbers, in f32: "tensor" is one number per operand, "rows" one per row of x
    and one per column of y; `x_scale` and `weight_scale` say which operands have them.
    """

    dtype: str
    result: str
    batch: int
    rows: int
    columns: int
    inner: int
    transposed: bool = True
    x_shared: bool = False
    bias: bool = False
    residual: bool = False
    activation: str = ""  # or "relu"
    scales: str = ""
    x_scale: bool = False
    weight_scale: bool = False
    alpha: float = 1.0

    @staticmethod
    def of(settings: Settings) -> Product:
        """The product with the settings of a library call."""
        values: dict[str, Any] = dict(settings)
        return Product(**values)

    def settings(self) -> Settings:
        """The settings of the library call: what is not the default."""
        values = ((f.name, getattr(self, f.name), f.default) for f in fields(self))
        return {name: x for name, x, usual in values if x != usual}

    def operands(self) -> tuple[Operand, ...]:
        """The arguments of the call in order: what it reads, then y."""
        weight = (self.columns, self.inner) if self.transposed else (self.inner, self.columns)
        y = (self.batch, self.rows, self.columns)
        by_rows = self.scales == "rows"
        every = {
            "x": (self.dtype, (1 if self.x_shared else self.batch, self.rows, self.inner), True),
            "weight": (self.dtype, (self.batch, *weight), True),
            "bias": (self.result, (self.columns,), self.bias),
            "residual": (self.result, y, self.residual),
            "x_scale": ("f32", (self.rows if by_rows else 1,), self.x_scale),
            "weight_scale": ("f32", (self.columns if by_rows else 1,), self.weight_scale),
            "y": (self.result, y, True),
        }
        return tuple(
            Operand(name, kind, shape) for name, (kind, shape, there) in every.items() if there
        )

    @property
    def is_empty(self) -> bool:
        """Whether y has no elements."""
        return not self.batch * self.rows * self.columns

    def __str__(self) -> str:
        batch = f"{self.batch} x " if self.batch > 1 else ""
        return (
            f"{self.dtype} product [{batch}{self.rows}, {self.inner}] x "
            f"[{self.inner}, {self.columns}] in {self.result}"
        )
