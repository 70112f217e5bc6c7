"""Functions that read or write elements at indices."""

from __future__ import annotations

from collections.abc import Sequence

from ....errors import Error
from ....ops import Gather
from ....source import here
from ..arithmetic import at, matched, node, retyped, size_of, tensor
from ..tensor import Operand, Tensor, add_methods, content_of, tensor_of_sizes
from .basic import where
from .shapes import concat, expand, flatten, node_of_places, slice, view


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
    numbers = content_of(places)
    if x.content is None or numbers is None or not all(isinstance(n, int) for n in numbers):
        return node(Gather, x, places, dim=at(dim, x))
    size = len(x.content)
    if not all(-size <= n < size for n in numbers if isinstance(n, int)):
        raise Error(f"expected indices of a vector of {size}, found {[*numbers]}", loc=here())
    return node("Gather", x, places)


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


def scatter(input: Operand, dim: int, indices: Operand, updates: Operand) -> Tensor:
    """x with updates[place] at indices[place] along `dim`, for every place of indices."""
    x, new = matched(input, updates)
    return node("ScatterElements", x, indices, new, axis=dim)


def gather_nd(input: Operand, indices: Operand, batch_dims: int = 1) -> Tensor:
    """The elements or slices of x at the index tuples in the last dimension of indices.

    The first `batch_dims` dimensions of both belong together.
    """
    x, places = tensor(input), tensor(indices)
    *outer, _ = places.type.shape
    for dim in reversed(range(batch_dims)):
        own = node_of_places(outer[dim], places.entry.dtype)
        column = view(own, (outer[dim], *[1] * (len(outer) - dim)))
        places = concat([expand(column, (*outer, 1)), places], -1)
    return node("GatherND", x, places)


def scatter_nd(input: Operand, mask: Operand, source: Operand) -> Tensor:
    """x with elements or slices of source at the index tuples in the last dimension of mask."""
    x, new = matched(input, source)
    return node("ScatterND", x, mask, new)


def einsum(einsum_eq: str, inputs: Sequence[Operand]) -> Tensor:
    """The sum of products that an equation such as "ij,jk->ik" states."""
    return node("Einsum", *matched(*inputs), equation=einsum_eq)


def outer(input: Operand, vec2: Operand) -> Tensor:
    """Of vectors [M] and [N], all products: [M, N]."""
    return einsum("i,j->ij", [input, vec2])


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
    if last_token_ids is None:
        return hidden_states
    ids = last_token_ids
    if hidden_states.rank() == 2 and not remove_input_padding:
        raise Error(
            f"expected padded states [batch, tokens, hidden], found {hidden_states.type}; give "
            "remove_input_padding=True for packed ones",
            loc=here(),
        )
    *batches, tokens, hidden = hidden_states.type.shape
    if remove_input_padding and batches in ([], [1]):
        return index_select(view(hidden_states, (tokens, hidden)), 0, ids - 1)
    (batch,) = batches
    per_row = ids.rank() == 1
    kind = ids.entry.dtype
    length = tensor_of_sizes(tokens, kind)
    places = view(where(ids == 0, length, ids) - 1, (batch, 1)) if per_row else ids
    rows = node_of_places(batch, kind) * length
    flat = view(hidden_states, (batch * tokens, hidden))
    taken = index_select(flat, 0, flatten(places + view(rows, (batch, 1))))
    count = (batch,) if per_row else ids.type.shape
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


add_methods(select=select, gather=gather)
