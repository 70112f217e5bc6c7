"""Convolution over any number of positions. In 16-bit floats it accumulates in f32."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import Error
from ..ir.core import Op
from ..ir.declare import Operand, OptionalOperand, operation, optional
from ..ir.dims import Dim, DimLike, exact_divide
from ..ir.types import TensorType
from .shapes import float_operand, not_above, rule_text, same_dtype, shape_text


@operation("conv", sums="x bias | weight bias", addends="bias", reads="many")
class Conv(Op):
    """x [B, C, ...] with weight [O, C/groups, ...] moved over its positions, is [B, O, ...].

    bias [O] is added. There are `before` and `after` zeros around the positions; the weight moves
    by `strides`, and its elements are `dilations` apart: a number per dimension of positions, none
    for 1 (of zeros: 0). As in PyTorch the weight is not flipped.
    """

    x: Operand
    weight: Operand
    bias: OptionalOperand = optional()
    strides: tuple[int, ...] = ()
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    dilations: tuple[int, ...] = ()
    groups: int = 1

    def infer(self) -> TensorType:
        x, weight = float_operand(self.opname, self.x).shape, self.weight.type.shape
        if len(x) < 3 or len(weight) != len(x):
            raise Error(
                f"conv takes x [batch, channels, positions...] and a weight of as many dimensions, "
                f"not {shape_text(x)} and {shape_text(weight)}"
            )
        if self.groups < 1 or exact_divide(weight[0], self.groups) is None:
            raise Error(f"conv cannot make {self.groups} groups of {weight[0]} output channels")
        if x[1] != weight[1] * self.groups:
            raise Error(
                f"conv: x {shape_text(x)} has {x[1]} channels, but the weight {shape_text(weight)} "
                f"takes {weight[1]} in each of {self.groups} groups"
            )
        values = [self.x, self.weight]
        if self.bias is not None:
            values.append(self.bias)
            if self.bias.type.shape != weight[:1]:
                raise Error(f"conv: the bias is {self.bias.type}, expected [{weight[0]}]")
        return TensorType(same_dtype(self.opname, *values), (x[0], weight[0], *self._positions()))

    def windows(self) -> list[tuple[int, int, int, int, int]]:
        """(stride, before, after, dilation, size of the weight) of every dimension of positions."""
        sizes = self.weight.type.shape[2:]
        given = {
            "strides": self.strides or (1,) * len(sizes),
            "before": self.before or (0,) * len(sizes),
            "after": self.after or (0,) * len(sizes),
            "dilations": self.dilations or (1,) * len(sizes),
        }
        for name, numbers in given.items():
            least = int(name in ("strides", "dilations"))
            if len(numbers) != len(sizes) or min(numbers) < least:
                raise Error(
                    f"conv: {name} is {shape_text(numbers)}, "
                    f"expected {len(sizes)} numbers of at least {least}"
                )
        for size in sizes:
            if isinstance(size, Dim) or size < 1:
                raise Error(f"conv: the weight is {self.weight.type}; its positions need sizes")
        known_sizes = [size for size in sizes if isinstance(size, int)]
        return list(zip(*given.values(), known_sizes, strict=True))

    def _positions(self) -> list[DimLike]:
        """The sizes of the result: how often the weight fits."""
        results: list[DimLike] = []
        sizes = self.x.type.shape[2:]
        for size, (stride, before, after, dilation, count) in zip(
            sizes, self.windows(), strict=True
        ):
            room = size + (before + after - dilation * (count - 1) - 1)
            not_above(self.opname, 0, room, f"the weight of {count} in {size} elements: 0")
            results.append(_quotient(room, stride) + 1)
        return results

    @property
    def _by_channel(self) -> bool:
        """Whether every channel is convolved by itself, which shards of channels are as well."""
        channels, weight = self.x.type.shape[1], self.weight.type.shape
        return weight[0] == channels and weight[1] == 1

    def sharding_rule(self) -> str:
        places = [f"p{i}!" for i in range(self.x.type.ndim - 2)]
        kernel = [f"k{i}!" for i in range(len(places))]
        channels, inner, out = ("c", "c", "o") if self.groups == 1 else ("c!", "g!", "o!")
        if self._by_channel:
            channels, inner, out = "c", "g!", "c"
        operands = [["b", channels, *places], [out, inner, *kernel], [out]]
        return rule_text(operands, [["b", out, *places]])

    def localized(self, results: tuple[TensorType, ...]) -> dict[str, Any]:
        """A rank has a group for each of its channels, where every one is a group."""
        groups = results[0].shape[1] if self._by_channel else self.groups
        return self.attributes | {"groups": groups}

    @np.errstate(all="ignore")
    def evaluate(self, x: Any, weight: Any, bias: Any = None) -> Any:
        ndim, windows = x.ndim - 2, self.windows()
        padded = np.pad(x, [(0, 0), (0, 0), *((b, a) for _, b, a, _, _ in windows)])
        spans = tuple(dilation * (count - 1) + 1 for *_, dilation, count in windows)
        views = np.lib.stride_tricks.sliding_window_view(padded, spans, tuple(range(2, ndim + 2)))
        steps = [slice(None, None, window[0]) for window in windows]
        views = views[(..., *steps, *(slice(None, None, window[3]) for window in windows))]
        inner = (1, *range(ndim + 2, 2 * ndim + 2))
        parts = zip(np.split(views, self.groups, 1), np.split(weight, self.groups), strict=True)
        sums = [np.tensordot(v, w, (inner, range(1, ndim + 2))) for v, w in parts]
        result = np.moveaxis(np.concatenate(sums, -1), -1, 1)
        return result if bias is None else result + bias.reshape(-1, *[1] * ndim)


def _quotient(size: DimLike, by: int) -> DimLike:
    """size / by rounded down, known where all terms with symbols are multiples."""
    rest = size if isinstance(size, int) else dict(size.terms).get((), 0)
    quotient = exact_divide(size - rest % by, by)
    if quotient is None:
        raise Error(f"conv: {size} elements cannot be shown to be a multiple of the stride {by}")
    return quotient
