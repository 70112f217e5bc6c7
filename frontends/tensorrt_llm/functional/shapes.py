"""Functions that give the same elements another shape or order, and sizes as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....errors import Error
from ....ir.dims import Dim, DimLike, product
from ....ir.types import TensorType
from ....source import here
from ... import functional as F
from ...shapes import inferred_shape
from ...tensor import located
from ..arithmetic import agree, binary, matched, retyped, tensor
from ..context import dialect
from ..dtypes import dim_resolve_negative, irc_dtype
from ..tensor import Operand, Tensor, attach, content_of, known, shape_of, wrap


def shape(
    input: Operand,
    dim: int | None = None,
    cast_to_dtype: Any = None,
    clip_before_cast: Sequence[int] | None = None,
) -> Tensor:
    """The sizes of x as a vector, or that of one dimension as a scalar: i64, i32 in dialect A.

    Sizes are known while the network is traced, so that arithmetic with them costs nothing.
    """
    sizes = tensor(input).type.shape
    kind = "i32" if dialect() == "A" else "i64"
    found = known(sizes if dim is None else sizes[_at(dim, len(sizes))], kind)
    if clip_before_cast is not None and cast_to_dtype is not None:
        low, high = clip_before_cast
        found = binary("maximum", binary("minimum", found, high), low)
    return found if cast_to_dtype is None else retyped(found, irc_dtype(cast_to_dtype))


def _at(dim: int, ndim: int) -> int:
    """A dimension counted from the front."""
    return dim_resolve_negative(dim, ndim)[0]


def view(input: Operand, shape: Operand, zero_is_placeholder: bool = True) -> Tensor:
    """x in another shape of numbers and sizes; -1 stands for the size that is left.

    With `zero_is_placeholder` 0 stands for the size of x in the same place.
    """
    x = tensor(input)
    old, wanted = x.type.shape, list(shape_of(shape))
    if zero_is_placeholder:
        for i, size in enumerate(wanted):
            if size == 0:
                wanted[i] = old[_at(i, len(old))]
    return _reshaped(x, located(inferred_shape, old, wanted))


def _reshaped(x: Tensor, shape: tuple[DimLike, ...]) -> Tensor:
    """x in a shape; known sizes stay known in scalars and vectors."""
    if shape == x.type.shape:  # a tensor of its own, which can have another name
        return Tensor.make(None if x.content else x.inner, x.type, x.content)
    if x.content is not None and len(shape) < 2:
        return Tensor.make(None, TensorType(x.type.dtype, shape), x.content)
    return wrap(F.reshape(x.inner, shape))


def flatten(input: Operand, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    """x with dimensions start_dim to end_dim joined."""
    x = tensor(input)
    sizes = x.type.shape
    if not sizes:
        return _reshaped(x, (1,))
    first, end = _at(start_dim, len(sizes)), _at(end_dim, len(sizes)) + 1
    return _reshaped(x, (*sizes[:first], product(sizes[first:end]), *sizes[end:]))


def permute(input: Operand, dims: Sequence[int]) -> Tensor:
    """x with dimension dims[i] as dimension i."""
    return wrap(tensor(input).inner.permute(*dims))


def transpose(input: Operand, dim0: int, dim1: int) -> Tensor:
    """x with two dimensions exchanged."""
    return wrap(tensor(input).inner.transpose(dim0, dim1))


def expand_dims(input: Operand, dim: int | Sequence[int], shape_cast_dtype: Any = None) -> Tensor:
    """x with new dimensions of size 1 at the positions `dim` of the result."""
    x = tensor(input)
    dims = [dim] if isinstance(dim, int) else list(dim)
    if not dims:
        return x
    places, sizes = dim_resolve_negative(dims, x.type.ndim + len(dims)), iter(x.type.shape)
    if len(set(places)) < len(dims):
        raise Error(f"expand_dims: expected different dimensions, found {dims}", loc=here())
    total = range(x.type.ndim + len(dims))
    return _reshaped(x, tuple(1 if i in places else next(sizes) for i in total))


def unsqueeze(input: Operand, axis: int) -> Tensor:
    """x with a new dimension of size 1 at `axis` of the result."""
    return expand_dims(input, axis)


def squeeze(
    input: Operand, dim: int | Sequence[int] | None = None, zero_is_placeholder: bool = False
) -> Tensor:
    """x without those of the dimensions `dim` (all unless told) that are known to have size 1."""
    x = tensor(input)
    sizes = x.type.shape
    dims = range(len(sizes)) if dim is None else dim_resolve_negative(dim, len(sizes))
    return _reshaped(x, tuple(n for i, n in enumerate(sizes) if n != 1 or i not in dims))


def expand_dims_like(left: Operand, right: Tensor) -> Tensor:
    """left with dimensions of size 1 in front, as many dimensions as right has."""
    x, _ = matched(left, right)
    return expand_dims(x, range(max(0, right.type.ndim - x.type.ndim)))


def broadcast_helper(left: Operand, right: Operand) -> tuple[Tensor, Tensor]:
    """Both with as many dimensions as the larger; a number takes the dtype of the other."""
    x, y = matched(left, right)
    return expand_dims_like(x, y), expand_dims_like(y, x)


def expand(input: Operand, expand_shape: Operand) -> Tensor:
    """x repeated along dimensions of size 1 to fill a shape of numbers and sizes."""
    return wrap(F.expand(tensor(input).inner, shape_of(expand_shape)))


def concat(inputs: Sequence[Operand], dim: int = 0) -> Tensor:
    """The tensors one after the other along `dim`; scalars and numbers count as vectors [1].

    A vector of sizes and numbers may be the target of view and expand.
    """
    parts = [x if x.type.ndim else _reshaped(x, (1,)) for x in matched(*inputs)]
    agree(*parts, but=[_at(dim, parts[0].type.ndim) - parts[0].type.ndim])
    contents = [x.content for x in parts]
    if None not in contents and _at(dim, parts[0].type.ndim) == 0:
        return known([size for part in contents for size in part or ()], parts[0].type.dtype)
    return wrap(F.concat([x.inner for x in parts], dim))


def stack(inputs: Sequence[Operand], dim: int = 0) -> Tensor:
    """The tensors, all of one shape, along a new dimension."""
    return wrap(F.stack([x.inner for x in matched(*inputs)], dim=dim))


def slice(
    input: Operand,
    starts: Operand,
    sizes: Operand,
    strides: Operand = None,
    mode: Any = None,
    fill_value: Any = None,
) -> Tensor:
    """sizes[i] elements of every dimension i from starts[i] on, strides[i] apart.

    Starts may also be a tensor of the graph; sizes and strides are numbers and sizes. All elements
    must lie in x.
    """
    if mode is not None and "STRICT" not in str(mode).upper():
        raise Error(f"slice: expected no mode, found {mode}; use pad, or index_select", loc=here())
    x = tensor(input)
    counts = shape_of(sizes)
    begins, steps = content_of(starts), shape_of([1] * len(counts) if strides is None else strides)
    if not x.type.ndim == len(counts) == len(steps) or len(begins or counts) != len(counts):
        raise Error(
            f"slice: expected {x.type.ndim} starts, sizes and strides for {x.type}", loc=here()
        )
    for dim, (size, step) in enumerate(zip(counts, steps, strict=True)):
        start: Any = begins[dim] if begins is not None else tensor(starts)
        x = _sliced(x, dim, start, size, step)
    return x


def _sliced(x: Tensor, dim: int, start: Any, size: DimLike, step: DimLike) -> Tensor:
    """`size` elements of a dimension from `start` on, a vector of which has one per dimension."""
    given = isinstance(start, Tensor)
    if (size, step) == (x.type.shape[dim], 1) and (given or start == 0):
        return x
    if isinstance(step, Dim):
        raise Error(f"slice: expected a number as stride, found {step}", loc=here())
    if x.content is not None and isinstance(start, int) and isinstance(size, int):
        places = range(start, start + size * step, step)
        if all(0 <= place < len(x.content) for place in places):
            return known([x.content[place] for place in places], x.type.dtype)
    if not given and step > 0:
        stop = start + (size - 1) * step + 1
        return wrap(F.slice(x.inner, dim, start, stop, step=step))
    kind = start.type.dtype if given else "i32"
    first = wrap(start.inner[dim]) if given else known(start, kind)
    places = wrap(F.iota(size, dtype=kind)) * step + first
    return wrap(F.gather(x.inner, places.inner, dim=dim))


def split(
    tensor: Operand, split_size_or_sections: int | Sequence[int], dim: int = 0
) -> list[Tensor]:
    """Pieces along `dim`, of one size that divides it, or of the given sizes."""
    x = matched(tensor)[0]
    if isinstance(split_size_or_sections, int):
        total, size = x.type.shape[_at(dim, x.type.ndim)], split_size_or_sections
        if isinstance(total, Dim) or size < 1 or total % size:
            raise Error(f"split: {total} elements are no multiple of {size}", loc=here())
        sizes = [size] * (total // size)
    else:
        sizes = list(split_size_or_sections)
    if x.content is not None and sum(sizes) == len(x.content):
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        pairs = zip(ends, sizes, strict=True)
        return [known(x.content[end - size : end], x.type.dtype) for end, size in pairs]
    return [wrap(part) for part in F.split(x.inner, dim, sizes)]


def chunk(tensor: Operand, chunks: int, dim: int = 0) -> list[Tensor]:
    """`chunks` pieces of one size along `dim`."""
    x = matched(tensor)[0]
    total = x.type.shape[_at(dim, x.type.ndim)]
    size = None if isinstance(total, Dim) or total % chunks else total // chunks
    if size is None:
        raise Error(f"chunk: {total} elements do not make {chunks} equal pieces", loc=here())
    return split(x, size, dim)


def unbind(input: Operand, dim: int = 0) -> list[Tensor]:
    """The slices along `dim`, without it."""
    x = tensor(input)
    at = _at(dim, x.type.ndim)
    return [
        _reshaped(part, (*part.type.shape[:at], *part.type.shape[at + 1 :]))
        for part in split(x, 1, at)
    ]


def repeat(input: Operand, sizes: Sequence[int]) -> Tensor:
    """x as many times along every dimension as `sizes` says; new dimensions are in front."""
    x = tensor(input)
    if len(sizes) < x.type.ndim:
        raise Error(
            f"repeat: expected {x.type.ndim} numbers or more for {x.type}, found {sizes}",
            loc=here(),
        )
    x = expand_dims(x, range(len(sizes) - x.type.ndim))
    for dim, count in enumerate(sizes):
        x = concat([x] * count, dim=dim) if count != 1 else x
    return x


def repeat_interleave(tensor: Operand, repeats: int, dim: int) -> Tensor:
    """Every element along `dim`, `repeats` times in a row."""
    (count,) = shape_of(repeats)
    if isinstance(count, Dim):
        raise Error(f"repeat_interleave: expected a number of repeats, found {count}", loc=here())
    return wrap(F.repeat(matched(tensor)[0].inner, dim, count))


def meshgrid2d(x: Operand, y: Operand) -> tuple[Tensor, Tensor]:
    """Of vectors [X] and [Y], two tensors [X, Y]: x along the rows, y along the columns."""
    a, b = flatten(x), flatten(y)
    sizes = (*a.type.shape, *b.type.shape)
    return expand(unsqueeze(a, 1), sizes), expand(unsqueeze(b, 0), sizes)


def arange(start: Operand, end: Operand, dtype: Any) -> Tensor:
    """The integers from start on below end, as a vector of `dtype`; both are numbers and sizes."""
    (low,), (high,) = shape_of(start), shape_of(end)
    kind = irc_dtype(dtype)
    counted = wrap(F.iota(high - low, dtype=kind))
    return counted if low == 0 else counted + retyped(known(low, "i64"), kind)


def flip(input: Operand, dims: Sequence[int]) -> Tensor:
    """x with the elements along `dims` in reverse order."""
    return wrap(F.flip(tensor(input).inner, tuple(dims)))


def pad(input: Operand, pad: Operand, mode: str = "constant", value: float | None = None) -> Tensor:
    """x with elements of `value` around: (before, after) of the last dimension first.

    Negative numbers remove elements, as in PyTorch.
    """
    if mode != "constant":
        raise Error(f"pad: expected the mode 'constant', found {mode!r}", loc=here())
    x, ends = tensor(input), shape_of(pad)
    if len(ends) % 2 or len(ends) > 2 * x.type.ndim:
        raise Error(f"pad: expected two numbers for each padded dimension of {x.type}", loc=here())
    inner = x.inner
    added: tuple[list[DimLike], ...] = [0] * x.type.ndim, [0] * x.type.ndim
    for i, end in enumerate(ends):
        dim, behind = x.type.ndim - 1 - i // 2, i % 2
        if not isinstance(end, int) or end >= 0:
            added[behind][dim] = end
            continue
        size = inner.shape[dim]
        inner = F.slice(inner, dim, 0 if behind else -end, size + end if behind else size)
    return wrap(F.pad(inner, *added, value=value or 0))


attach(
    view=view, flatten=flatten, permute=permute, transpose=transpose, squeeze=squeeze,
    unsqueeze=unsqueeze, split=split, unbind=unbind, repeat=repeat,
)  # fmt: skip
