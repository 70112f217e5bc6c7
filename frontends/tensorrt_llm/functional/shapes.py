"""Functions that move elements: other shapes and orders, pieces, elements at indices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....errors import Error
from ....ir.dims import Dim, DimLike
from ....ops import Flip, Gather
from ....source import here
from ..api import release
from ..arithmetic import at, binary, count_up_to, matched, node, nodes, retyped, size_of, tensor
from ..context import current_network
from ..dtypes import dim_resolve_negative, irc_dtype
from ..tensor import Operand, Tensor, content_of, shape_of, tensor_of_sizes

_FAR = 1 << 31  # before the first element, as Slice writes it


def shape(
    input: Operand,
    dim: int | None = None,
    cast_to_dtype: Any = None,
    clip_before_cast: Sequence[int] | None = None,
) -> Tensor:
    """The sizes of x as a vector, or that of one dimension as a scalar: i64, i32 until 0.7.

    Sizes are known while the network is traced, so that arithmetic with them costs nothing.
    """
    x = tensor(input)
    kind = "i32" if release() < 8 else "i64"
    sizes = tensor_of_sizes(x.type.shape if dim is None else size_of(x, dim), kind)
    if clip_before_cast is not None and cast_to_dtype is not None:
        low, high = clip_before_cast
        sizes = binary("Max", binary("Min", sizes, high), low)
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
    return node("Transpose", x, perm=list(dim_resolve_negative(dims, x.rank())))


def transpose(input: Operand, dim0: int, dim1: int) -> Tensor:
    """x with two dimensions exchanged."""
    x = tensor(input)
    order = list(range(x.rank()))
    order[at(dim0, x)], order[at(dim1, x)] = at(dim1, x), at(dim0, x)
    return permute(x, order)


def expand_dims(input: Operand, dim: int | Sequence[int]) -> Tensor:
    """x with new dimensions of size 1 at the positions `dim` of the result."""
    dims = [dim] if isinstance(dim, int) else list(dim)
    return node("Unsqueeze", input, dims) if dims else tensor(input)


def unsqueeze(input: Operand, axis: int) -> Tensor:
    """x with a new dimension of size 1 at `axis` of the result."""
    return expand_dims(input, axis)


def squeeze(input: Operand, dim: int | Sequence[int] | None = None) -> Tensor:
    """x without those of the dimensions `dim` (all unless told) that are known to have size 1."""
    x = tensor(input)
    dims = range(x.rank()) if dim is None else dim_resolve_negative(dim, x.rank())
    ones = [i for i in dims if x.type.shape[i] == 1]
    return node("Squeeze", x, ones) if ones else Tensor.of(x.entry)


def expand(input: Operand, expand_shape: Operand) -> Tensor:
    """x repeated along dimensions of size 1 to fill a shape of numbers and sizes."""
    return node("Expand", input, shape_of(expand_shape))


def concat(inputs: Sequence[Operand], dim: int = 0) -> Tensor:
    """The tensors one after the other along `dim`; scalars and numbers count as vectors [1].

    A vector of sizes and numbers may be the target of view and expand.
    """
    parts = [x if x.rank() else view(x, (1,)) for x in matched(*inputs)]
    current_network().agree(*parts, but=[at(dim, parts[0]) - parts[0].rank()])
    return node("Concat", *parts, axis=dim)


def stack(inputs: Sequence[Operand], dim: int = 0) -> Tensor:
    """The tensors, all of one shape, along a new dimension."""
    return concat([unsqueeze(x, dim) for x in matched(*inputs)], dim)


def slice(input: Operand, starts: Operand, sizes: Operand, strides: Operand = None) -> Tensor:
    """sizes[i] elements of every dimension i from starts[i] on, strides[i] apart.

    Starts may also be a tensor of the graph; sizes and strides are numbers and sizes. All elements
    must lie in x.
    """
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
            places = count_up_to(size, tensor(starts).entry.dtype) * step
            x = node("Gather", x, places + node("Gather", starts, dim), axis=dim)
    return Tensor.of(x.entry)


def _sliced(x: Tensor, dim: int, start: DimLike, size: DimLike, step: int = 1) -> Tensor:
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
    (x,), sizes = matched(tensor), split_size_or_sections
    if isinstance(sizes, int):
        total = size_of(x, dim)
        if isinstance(total, Dim) or sizes < 1 or total % sizes:
            raise Error(f"split: {total} elements are no multiple of {sizes}", loc=here())
        sizes = [sizes] * (total // sizes)
    if x.content is None:
        return nodes("Split", x, list(sizes), outputs=len(sizes), axis=dim)
    return [_sliced(x, 0, sum(sizes[:i]), size) for i, size in enumerate(sizes)]


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
        expected = f"repeat: expected {x.rank()} numbers or more for {x.type}"
        raise Error(f"{expected}, found {sizes}", loc=here())
    return node("Tile", expand_dims(x, range(len(sizes) - x.rank())), list(sizes))


def arange(start: Operand, end: Operand, dtype: Any) -> Tensor:
    """The integers from start on below end, as a vector of `dtype`; both are numbers and sizes."""
    (low,), (high,) = shape_of(start), shape_of(end)
    kind = irc_dtype(dtype)
    places = count_up_to(high - low, kind)
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


# -- indices


def gather(input: Operand, dim: int, indices: Operand) -> Tensor:
    """Per place of indices, the element of x there, but at indices[place] along `dim`.

    Indices have as many dimensions as x, and no more elements along the others. Of a vector a
    number is an index as well.
    """
    x, places = tensor(input), tensor(indices)
    if x.rank() == 1:
        return _taken(x, dim, places if places.rank() else view(places, [1]))
    sizes = places.type.shape
    if len(sizes) == x.rank():
        kept = [x.type.shape[i] if i == at(dim, x) else size for i, size in enumerate(sizes)]
        x = slice(x, [0] * len(sizes), kept)
    return node("GatherElements", x, places, axis=dim)


def _taken(x: Tensor, dim: int, places: Tensor) -> Tensor:
    """Slices of x; of known elements known ones."""
    axis, size = at(dim, x), size_of(x, dim)
    for place in content_of(places) or ():
        if isinstance(place, int) and isinstance(size, int) and not -size <= place < size:
            raise Error(f"expected indices below {size}, found {place}", loc=here())
    is_known = x.entry.content is not None
    return node("Gather", x, places, axis=axis) if is_known else node(Gather, x, places, dim=axis)


def select(input: Operand, dim: int, index: Operand) -> Tensor:
    """The slice of x at `index`, a number, a scalar or a vector [1], without `dim`."""
    place = tensor(index)
    return _taken(tensor(input), dim, view(place, ()) if place.rank() else place)


def index_select(input: Operand, dim: int, index: Operand) -> Tensor:
    """The slices of x along `dim` at the indices of a vector, one after the other."""
    x, places = tensor(input), tensor(index)
    if places.rank() != 1 and x.content is None:
        raise Error(f"expected a vector of indices, found {places.type}", loc=here())
    return _taken(x, dim, places)


def gather_nd(input: Operand, indices: Operand, batch_dims: int = 1) -> Tensor:
    """The elements or slices of x at the index tuples in the last dimension of indices.

    The first `batch_dims` dimensions of both belong together.
    """
    x, places = tensor(input), tensor(indices)
    *outer, _ = places.type.shape
    for dim in reversed(range(batch_dims)):
        own = count_up_to(outer[dim], places.entry.dtype)
        column = view(own, (outer[dim], *[1] * (len(outer) - dim)))
        places = concat([expand(column, (*outer, 1)), places], -1)
    return node("GatherND", x, places)


def where(condition: Operand, left: Operand, right: Operand) -> Tensor:
    """Elements of left where the condition holds, else of right; all broadcast."""
    x, y = matched(left, right)
    current_network().agree(tensor(condition), x, y)
    return node("Where", condition, x, y)


def masked_scatter(input: Operand, mask: Operand, source: Operand) -> Tensor:
    """x with the elements of source, in order, where the mask is true.

    As in PyTorch source has at least as many elements as the mask has true ones.
    """
    (x, new), chosen = matched(input, source), tensor(mask)
    shape, values = x.type.shape, flatten(new)
    counted = retyped(flatten(expand(chosen, shape)), "i32")
    last = tensor_of_sizes(size_of(values, 0) - 1)
    ends = node("Min", node("CumSum", counted, 0) - 1, last)
    taken = node(Gather, values, ends, dim=0)  # -1, before the first, is the last
    return where(chosen, view(taken, shape, zero_is_placeholder=False), x)


def gather_last_token_logits(
    hidden_states: Tensor, last_token_ids: Tensor | None, remove_input_padding: bool
) -> Tensor:
    """The hidden states whose logits are wanted; all of them without last_token_ids.

    Packed states [tokens, hidden] or [1, tokens, hidden] are taken at the ends of the sequences,
    which are prefix sums of their lengths, to [batch, hidden]. Padded states [batch, tokens,
    hidden] are taken at the lengths [batch], less one, to [batch, hidden] (length 0 is the last
    token, as index -1 is), or at positions [batch, n], to [batch, n, hidden].
    """
    ids, (*batches, tokens, hidden) = last_token_ids, hidden_states.type.shape
    if ids is None:
        return hidden_states
    if remove_input_padding and batches in ([], [1]):
        return index_select(view(hidden_states, (tokens, hidden)), 0, ids - 1)
    if not batches:
        raise Error(
            f"expected padded states [batch, tokens, hidden], found {hidden_states.type}; give "
            "remove_input_padding=True for packed ones",
            loc=here(),
        )
    (batch,) = batches
    current_network().unify(batch, ids.type.shape[0], named=True)
    kind, count = ids.entry.dtype, ids.type.shape
    length = tensor_of_sizes(tokens, kind)
    places = view(where(ids == 0, length, ids) - 1, (batch, 1)) if ids.rank() == 1 else ids
    rows = view(count_up_to(batch, kind) * length, (batch, 1))
    flat = view(hidden_states, (batch * tokens, hidden))
    taken = index_select(flat, 0, flatten(places + rows))
    return view(taken, (*count, hidden), zero_is_placeholder=False)


def expand_mask(mask: Operand, tgt_len: Operand = None) -> Tensor:
    """A mask [B, S] as a bias f32 [B, 1, T, S]: 0, and -infinity where the mask is 0.

    T is `tgt_len`, or S.
    """
    x = tensor(mask)
    rows, columns = x.type.shape
    count = columns if tgt_len is None else tgt_len
    wide = expand(view(x, [rows, 1, 1, columns]), concat([rows, 1, count, columns]))
    hidden = wide == (False if x.entry.dtype == "bool" else 0)
    return where(hidden, float("-inf"), 0.0)
