"""Functions that read or write elements at indices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast

from ....errors import Error
from ....ir.core import Op
from ....ir.dims import DimLike, product
from ....source import here
from ... import functional as F
from ...onnx.builder import Builder
from ...onnx.entry import Node
from ...onnx.readings import TABLE
from ...tensor import Tensor as Inner
from ...tensor import located
from ...tracer import current
from ..arithmetic import data, matched, retyped, tensor
from ..dtypes import dim_resolve_negative
from ..tensor import Operand, Tensor, attach, content_of, known, wrap
from .basic import where
from .shapes import concat, expand, flatten, slice, squeeze, view


def gather(input: Operand, dim: int, indices: Operand) -> Tensor:
    """Per place of indices, the element of x there, but at indices[place] along `dim`.

    Indices have as many dimensions as x, and no more elements along the others. Of a vector a
    number is an index as well.
    """
    x = tensor(input)
    at = dim_resolve_negative(dim, x.type.ndim)[0]
    if (found := _known_elements(x, indices)) is not None:
        return found
    places = tensor(indices)
    places = places if places.type.ndim else view(places, [1])
    sizes = places.type.shape
    if len(sizes) == x.type.ndim:
        kept = [x.type.shape[i] if i == at else size for i, size in enumerate(sizes)]
        x = slice(x, [0] * len(sizes), kept)
    return wrap(F.gather_elements(x.inner, places.inner, at))


def _known_elements(x: Tensor, indices: Operand) -> Tensor | None:
    """The elements of a vector at indices, where both are known."""
    numbers = [i for i in content_of(indices) or () if isinstance(i, int)]
    if x.content is None or not numbers or len(numbers) < len(content_of(indices) or ()):
        return None
    size = len(x.content)
    if not -size <= min(numbers) <= max(numbers) < size:
        raise Error(f"expected indices of a vector of {size}, found {numbers}", loc=here())
    return known([x.content[i] for i in numbers], x.type.dtype)


def select(input: Operand, dim: int, index: Operand) -> Tensor:
    """The slice of x at `index`, a number, a scalar or a vector [1], without `dim`."""
    found = index_select(input, dim, flatten(index))
    return squeeze(found, dim_resolve_negative(dim, found.type.ndim)[0])


def index_select(input: Operand, dim: int, index: Operand) -> Tensor:
    """The slices of x along `dim` at the indices of a vector, one after the other."""
    x = tensor(input)
    if (found := _known_elements(x, index)) is not None:
        return found
    places = tensor(index)
    if places.type.ndim != 1:
        raise Error(f"expected a vector of indices, found {places.type}", loc=here())
    return wrap(F.gather(x.inner, places.inner, dim=dim))


def scatter(input: Operand, dim: int, indices: Operand, updates: Operand) -> Tensor:
    """x with updates[place] at indices[place] along `dim`, for every place of indices."""
    x, new = matched(input, updates)
    return wrap(F.scatter_elements(x.inner, data(indices), new.inner, dim))


def gather_nd(input: Operand, indices: Operand, batch_dims: int = 1) -> Tensor:
    """The elements or slices of x at the index tuples in the last dimension of indices.

    The first `batch_dims` dimensions of both belong together.
    """
    places = data(indices)
    *outer, _ = places.shape
    for dim in reversed(range(batch_dims)):
        own = F.iota(outer[dim], dtype=places.dtype)
        column = F.reshape(own, (outer[dim], *[1] * (len(outer) - dim)))
        places = F.concat([F.expand(column, (*outer, 1)), places], -1)
    return _by_onnx("GatherND", input, places)


def scatter_nd(input: Operand, mask: Operand, source: Operand) -> Tensor:
    """x with elements or slices of source at the index tuples in the last dimension of mask."""
    x, new = matched(input, source)
    return _by_onnx("ScatterND", x, mask, new)


def einsum(einsum_eq: str, inputs: Sequence[Operand]) -> Tensor:
    """The sum of products that an equation such as "ij,jk->ik" states."""
    return _by_onnx("Einsum", *matched(*inputs), equation=einsum_eq)


def outer(input: Operand, vec2: Operand) -> Tensor:
    """Of vectors [M] and [N], all products: [M, N]."""
    return einsum("i,j->ij", [input, vec2])


class _Appending(Builder):
    """Appends the operations of a rule to the network in progress, at the user's line."""

    def add(self, op: Op) -> Op:
        op.loc = here()
        current("a function").append(op)
        return op


def _by_onnx(kind: str, *operands: Operand, **attributes: Any) -> Tensor:
    """The result of an operator of ONNX, by the rule that reads its nodes."""
    tracer, nothing = current(kind), cast("Any", None)
    builder = _Appending(nothing, tracer.function, nothing)
    inputs = [builder.entry(data(x).value) for x in operands]
    node = Node(kind, "", "", 0, 18, [*inputs], [""], attributes, here())
    made = located(TABLE["", kind].rule, builder, node)
    return wrap(Inner(builder.get(getattr(made, "result", made)), tracer))


def _depends_on_data(name: str) -> Callable[..., NoReturn]:
    """A function whose result has a shape that depends on the elements."""

    def refused(*args: Any, **kwargs: Any) -> NoReturn:
        raise Error(
            f"expected a result whose shape is known while the network is built, but that of {name}"
            " depends on the elements; keep all elements and a mask, and choose with where",
            loc=here(),
        )

    return refused


nonzero, masked_select = _depends_on_data("nonzero"), _depends_on_data("masked_select")


def masked_scatter(input: Operand, mask: Operand, source: Operand) -> Tensor:
    """x with the elements of source, in order, where the mask is true.

    As in PyTorch source has at least as many elements as the mask has true ones.
    """
    (x, new), chosen = matched(input, source), tensor(mask)
    shape, values = x.type.shape, flatten(new)
    counted = retyped(flatten(expand(chosen, shape)), "i32")
    last = values.type.shape[0] - 1
    ends = F.minimum(F.cumsum(counted.inner) - 1, known(last).inner)
    found = F.gather(values.inner, ends)  # -1, before the first, is the last
    return where(chosen, wrap(F.reshape(found, shape)), x)


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
    if hidden_states.type.ndim == 2 and not remove_input_padding:
        raise Error(
            f"expected padded states [batch, tokens, hidden], found {hidden_states.type}; give "
            "remove_input_padding=True for packed ones",
            loc=here(),
        )
    *batches, tokens, hidden = hidden_states.type.shape
    if remove_input_padding and batches in ([], [1]):
        return index_select(view(hidden_states, (tokens, hidden)), 0, ids - 1)
    (batch,) = batches
    per_row = ids.type.ndim == 1
    last = known(tokens, ids.type.dtype)
    places = view(where(ids == 0, last, ids) - 1, (batch, 1)) if per_row else ids
    rows = wrap(F.iota(batch, dtype=ids.type.dtype)) * last
    flat = view(hidden_states, (product((batch, tokens)), hidden))
    wanted = flatten(places + view(rows, (batch, 1)))
    count: tuple[DimLike, ...] = (batch,) if per_row else ids.type.shape
    return view(index_select(flat, 0, wanted), (*count, hidden), zero_is_placeholder=False)


def expand_mask(mask: Operand, tgt_len: Operand = None) -> Tensor:
    """A mask [B, S] as a bias f32 [B, 1, T, S]: 0, and -infinity where the mask is 0.

    T is `tgt_len`, or S.
    """
    x = tensor(mask)
    rows, columns = x.type.shape
    count = columns if tgt_len is None else tgt_len
    wide = expand(view(x, [rows, 1, 1, columns]), concat([rows, 1, count, columns]))
    hidden = wide == (False if x.type.dtype == "bool" else 0)
    return where(hidden, float("-inf"), 0.0)


attach(select=select, gather=gather)
