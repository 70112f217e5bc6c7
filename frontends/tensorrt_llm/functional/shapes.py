"""Functions that give the same elements another shape or order, and sizes as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....errors import Error
from ....ir.dims import Dim, DimLike
from ....ops import Flip, Iota, Repeat
from ....source import here
from ..arithmetic import agree, at, binary, matched, node, nodes, retyped, size_of, tensor
from ..context import current_network, dialect
from ..dtypes import dim_resolve_negative, irc_dtype
from ..tensor import Operand, Tensor, add_methods, content_of, shape_of, tensor_of_sizes

_FAR = 1 << 31  # before the first element, as Slice writes it


def shape(
    input: Operand,
    dim: int | None = None,
    cast_to_dtype: Any = None,
    clip_before_cast: Sequence[int] | None = None,
) -> Tensor:
    """The sizes of x as a vector, or that of one dimension as a scalar: i64, i32 in dialect A.

    Sizes are known while the network is traced, so that arithmetic with them costs nothing.
    """
    x = tensor(input)
    kind = "i32" if dialect() == "A" else "i64"
    sizes = tensor_of_sizes(x.type.shape if dim is None else size_of(x, dim), kind)
    if clip_before_cast is not None and cast_to_dtype is not None:
        low, high = clip_before_cast
        sizes = binary("maximum", binary("minimum", sizes, high), low)
    return sizes if cast_to_dtype is None else retyped(sizes, irc_dtype(cast_to_dtype))


def view(input: Operand, shape: Operand, zero_is_placeholder: bool = True) -> Tensor:
    """x in another shape of numbers and sizes; -1 stands for the size that is left.

    With `zero_is_placeholder` 0 stands for the size of x in the same place.
    """
    x, sizes = tensor(input), shape_of(shape)
    if sizes == x.type.shape:
        return Tensor.of(x.entry)
    return node("Reshape", x, sizes, allowzero=not zero_is_placeholder)


def flatten(input: Operand, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    """x with dimensions start_dim to end_dim joined."""
    x = tensor(input)
    if not x.rank():
        return view(x, (1,))
    sizes, first, end = x.type.shape, at(start_dim, x), at(end_dim, x) + 1
    return view(x, (*sizes[:first], -1, *sizes[end:]), zero_is_placeholder=False)


def permute(input: Operand, dims: Sequence[int]) -> Tensor:
    """x with dimension dims[i] as dimension i."""
    x = tensor(input)
    return node("Transpose", x, perm=[at(dim, x) for dim in dims])


def transpose(input: Operand, dim0: int, dim1: int) -> Tensor:
    """x with two dimensions exchanged."""
    x = tensor(input)
    order = list(range(x.rank()))
    order[at(dim0, x)], order[at(dim1, x)] = at(dim1, x), at(dim0, x)
    return node("Transpose", x, perm=order)


def expand_dims(input: Operand, dim: int | Sequence[int], shape_cast_dtype: Any = None) -> Tensor:
    """x with new dimensions of size 1 at the positions `dim` of the result."""
    dims = [dim] if isinstance(dim, int) else list(dim)
    return node("Unsqueeze", input, dims) if dims else tensor(input)


def unsqueeze(input: Operand, axis: int) -> Tensor:
    """x with a new dimension of size 1 at `axis` of the result."""
    return expand_dims(input, axis)


def squeeze(
    input: Operand, dim: int | Sequence[int] | None = None, zero_is_placeholder: bool = False
) -> Tensor:
    """x without those of the dimensions `dim` (all unless told) that are known to have size 1."""
    x = tensor(input)
    dims = range(x.rank()) if dim is None else dim_resolve_negative(dim, x.rank())
    ones = [i for i in dims if x.type.shape[i] == 1]
    return node("Squeeze", x, ones) if ones else Tensor.of(x.entry)


def expand_dims_like(left: Operand, right: Tensor) -> Tensor:
    """left with dimensions of size 1 in front, as many dimensions as right has."""
    x, _ = matched(left, right)
    return expand_dims(x, range(max(0, right.rank() - x.rank())))


def broadcast_helper(left: Operand, right: Operand) -> tuple[Tensor, Tensor]:
    """Both with as many dimensions as the larger; a number takes the dtype of the other."""
    x, y = matched(left, right)
    return expand_dims_like(x, y), expand_dims_like(y, x)


def expand(input: Operand, expand_shape: Operand) -> Tensor:
    """x repeated along dimensions of size 1 to fill a shape of numbers and sizes."""
    return node("Expand", input, shape_of(expand_shape))


def concat(inputs: Sequence[Operand], dim: int = 0) -> Tensor:
    """The tensors one after the other along `dim`; scalars and numbers count as vectors [1].

    A vector of sizes and numbers may be the target of view and expand.
    """
    parts = [x if x.rank() else view(x, (1,)) for x in matched(*inputs)]
    agree(*parts, but=[at(dim, parts[0]) - parts[0].rank()])
    return node("Concat", *parts, axis=dim)


def stack(inputs: Sequence[Operand], dim: int = 0) -> Tensor:
    """The tensors, all of one shape, along a new dimension."""
    return concat([unsqueeze(x, dim) for x in matched(*inputs)], dim)


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
    name = str(getattr(mode, "name", mode)).upper()
    if mode is not None and "STRICT" not in name:
        raise Error(f"slice: expected no mode, found {mode}; use pad, or index_select", loc=here())
    x = tensor(input)
    counts = shape_of(sizes)
    begins, steps = content_of(starts), shape_of([1] * len(counts) if strides is None else strides)
    if not x.rank() == len(counts) == len(steps) or len(begins or counts) != len(counts):
        raise Error(
            f"slice: expected {x.rank()} starts, sizes and strides for {x.type}", loc=here()
        )
    for dim, (size, step) in enumerate(zip(counts, steps, strict=True)):
        if isinstance(step, Dim):
            raise Error(f"slice: expected a number as stride, found {step}", loc=here())
        if begins is not None:
            x = _sliced(x, dim, begins[dim], size, step)
        elif (size, step) != (x.type.shape[dim], 1):
            kind = tensor(starts).entry.dtype
            places = node_of_places(size, kind) * step + node("Gather", starts, dim)
            x = node("Gather", x, places, axis=dim)
    return Tensor.of(x.entry)


def node_of_places(size: DimLike, dtype: str) -> Tensor:
    """The numbers from 0 to size - 1."""
    builder = current_network().builder
    return Tensor.of(builder.entry(builder.value(Iota(size=size, dtype=dtype))))


def _sliced(x: Tensor, dim: int, start: DimLike, size: DimLike, step: int) -> Tensor:
    """`size` elements of a dimension from `start` on."""
    total = x.type.shape[dim]
    if (start, size, step) == (0, total, 1):
        return x
    last = start + (size - 1) * step
    for place in (start, last) if size != 0 else ():
        if isinstance(place, int) and (place < 0 or (isinstance(total, int) and place >= total)):
            raise Error(f"slice: element {place} lies beyond the {total} of {x.type}", loc=here())
    stop = last + 1 if step > 0 else last - 1
    return node("Slice", x, [start], [-_FAR if stop == -1 else stop], [dim], [step])


def split(
    tensor: Operand, split_size_or_sections: int | Sequence[int], dim: int = 0
) -> list[Tensor]:
    """Pieces along `dim`, of one size that divides it, or of the given sizes."""
    (x,) = matched(tensor)
    sizes = split_size_or_sections
    if isinstance(sizes, int):
        total = size_of(x, dim)
        if isinstance(total, Dim) or sizes < 1 or total % sizes:
            raise Error(f"split: {total} elements are no multiple of {sizes}", loc=here())
        sizes = [sizes] * (total // sizes)
    if x.content is None:
        return nodes("Split", x, list(sizes), count=len(sizes), axis=dim)
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [_sliced(x, 0, end - size, size, 1) for end, size in zip(ends, sizes, strict=True)]


def chunk(tensor: Operand, chunks: int, dim: int = 0) -> list[Tensor]:
    """`chunks` pieces of one size along `dim`."""
    (x,) = matched(tensor)
    total = size_of(x, dim)
    if isinstance(total, Dim) or total % chunks:
        raise Error(f"chunk: {total} elements do not make {chunks} equal pieces", loc=here())
    return split(x, total // chunks, dim)


def unbind(input: Operand, dim: int = 0) -> list[Tensor]:
    """The slices along `dim`, without it."""
    return [squeeze(part, dim) for part in split(input, 1, dim)]


def repeat(input: Operand, sizes: Sequence[int]) -> Tensor:
    """x as many times along every dimension as `sizes` says; new dimensions are in front."""
    x = tensor(input)
    if len(sizes) < x.rank():
        raise Error(
            f"repeat: expected {x.rank()} numbers or more for {x.type}, found {sizes}", loc=here()
        )
    return node("Tile", expand_dims(x, range(len(sizes) - x.rank())), list(sizes))


def repeat_interleave(tensor: Operand, repeats: int, dim: int) -> Tensor:
    """Every element along `dim`, `repeats` times in a row."""
    (count,) = shape_of(repeats)
    if isinstance(count, Dim):
        raise Error(f"repeat_interleave: expected a number of repeats, found {count}", loc=here())
    return node(Repeat, tensor, dim=dim, count=count)


def meshgrid2d(x: Operand, y: Operand) -> tuple[Tensor, Tensor]:
    """Of vectors [X] and [Y], two tensors [X, Y]: x along the rows, y along the columns."""
    a, b = flatten(x), flatten(y)
    sizes = (*a.type.shape, *b.type.shape)
    return expand(unsqueeze(a, 1), sizes), expand(unsqueeze(b, 0), sizes)


def arange(start: Operand, end: Operand, dtype: Any) -> Tensor:
    """The integers from start on below end, as a vector of `dtype`; both are numbers and sizes."""
    (low,), (high,) = shape_of(start), shape_of(end)
    kind = irc_dtype(dtype)
    places = node_of_places(high - low, kind)
    return places if low == 0 else places + retyped(tensor_of_sizes(low, "i64"), kind)


def flip(input: Operand, dims: Sequence[int]) -> Tensor:
    """x with the elements along `dims` in reverse order."""
    return node(Flip, input, dims=tuple(dims))


def pad(input: Operand, pad: Operand, mode: str = "constant", value: float | None = None) -> Tensor:
    """x with elements of `value` around: (before, after) of the last dimension first.

    Negative numbers remove elements, as in PyTorch.
    """
    if mode != "constant":
        raise Error(f"pad: expected the mode 'constant', found {mode!r}", loc=here())
    x, ends = tensor(input), shape_of(pad)
    if len(ends) % 2 or len(ends) > 2 * x.rank():
        raise Error(f"pad: expected two numbers for each padded dimension of {x.type}", loc=here())
    axes = [x.rank() - 1 - i for i in range(len(ends) // 2)]
    return node("Pad", x, (*ends[::2], *ends[1::2]), value or 0, axes)


add_methods(
    view=view, flatten=flatten, permute=permute, transpose=transpose, squeeze=squeeze,
    unsqueeze=unsqueeze, split=split, unbind=unbind, repeat=repeat,
)  # fmt: skip
