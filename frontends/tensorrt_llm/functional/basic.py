"""Functions of TensorRT-LLM that are operators of ONNX, or few of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

from ....ir.core import Op
from ....ir.dims import Dim, DimLike, exact_divide, product
from ....ir.dtypes import is_float
from ....ops import Flip, FloorDiv, Gather, Ne, QuickGelu, Repeat, Silu, SquaredRelu
from ..api import release
from ..arithmetic import at, binary, count_up_to, matched, node, nodes, retyped, size_of, tensor
from ..context import current_network, current_session
from ..dtypes import dim_resolve_negative, irc_dtype
from ..errors import ScriptError
from ..module import constant_tensor
from ..tensor import Operand, Tensor, content_of, shape_of, tensor_of_sizes

_FAR = 1 << 31  # before the first element, as Slice writes it
_LONG = 256  # running sums of more floats are made of those of parts, so that they stay exact
Dims = int | Sequence[int]


def _one(
    kind: str | type[Op], order: str = "input", call: Any = node, **attributes: str
) -> Callable[..., Tensor]:
    """A function that is one operator of ONNX or of irc: its arguments in order, of which some are
    attributes."""
    names = order.split()

    def function(*arguments: Operand, **fields: Operand) -> Tensor:
        given = dict(zip(names, arguments, strict=False)) | fields
        chosen = {key: given.get(name) for key, name in attributes.items()}
        operands = [given[name] for name in names if name not in attributes.values()]
        return call(kind, *operands, **{k: x for k, x in chosen.items() if x is not None})

    return function


# of two tensors, which broadcast; a number takes the dtype of the tensor
_two = partial(_one, order="left right", call=binary)
add, sub, mul, pow = _two("Add"), _two("Sub"), _two("Mul"), _two("Pow")
div, floordiv = _two("Div"), _two(FloorDiv)  # of integers rounded towards zero, and down
modulo = _two("Mod", order="x y")  # with the sign of y
minimum, maximum = _two("Min"), _two("Max")
eq, lt, gt = _two("Equal"), _two("Less"), _two("Greater")
op_and, op_or, op_xor = _two("And"), _two("Or"), _two(Ne)

round = _one("Round")  # halves to the even number
sqrt, exp, log = _one("Sqrt"), _one("Exp"), _one("Log")
sin, cos, abs, not_op = _one("Sin"), _one("Cos"), _one("Abs"), _one("Not")
relu, tanh, sigmoid, silu = _one("Relu"), _one("Tanh"), _one("Sigmoid"), _one(Silu)
squared_relu = _one(SquaredRelu, "x")  # relu(x)²
quick_gelu = _one(QuickGelu, "x")  # x * sigmoid(1.702 * x)
softmax = _one("Softmax", "input dim", axis="dim")  # along the last dimension unless told
log_softmax = _one("LogSoftmax", "input dim", axis="dim")
scatter = _one("ScatterElements", "input dim indices updates", axis="dim")
scatter_nd = _one("ScatterND", "input mask source")  # slices at the index tuples of mask
expand_dims = _one("Unsqueeze", "input dim")  # new dimensions at these positions of the result
unsqueeze = _one("Unsqueeze", "input axis")
expand = _one("Expand", "input expand_shape")  # to a shape of numbers and sizes
repeat_interleave = _one(Repeat, "tensor repeats dim", count="repeats", dim="dim")


def identity(input: Operand) -> Tensor:
    """The same values, as a tensor that can have another name."""
    return Tensor.of(tensor(input).entry)


def gelu(x: Operand) -> Tensor:
    """gelu by the formula with tanh, as TensorRT-LLM computes every gelu."""
    return node("Gelu", x, approximate="tanh")


def swiglu(input: Tensor) -> Tensor:
    """[..., 2*N] to [..., N]: the first half times silu of the second half."""
    x, gate = chunk(input, 2, dim=-1)
    return x * silu(gate)


def geglu(x: Tensor) -> Tensor:
    """[..., 2*N] to [..., N]: the first half times gelu of the second half."""
    x, gate = chunk(x, 2, dim=-1)
    return x * gelu(gate)


def softplus(input: Tensor, beta: float, threshold: float) -> Tensor:
    """log(1 + exp(beta * x)) / beta; x itself where beta * x exceeds `threshold`."""
    scaled = input * beta
    return where(scaled > threshold, input, node("Softplus", scaled) / beta)


def clip(input: Tensor, alpha: float, beta: float) -> Tensor:
    """x kept between alpha and beta; an infinite bound is none."""
    kind = float if is_float(tensor(input).entry.dtype) else int
    bounds = (None if math.isinf(bound) else kind(bound) for bound in (alpha, beta))
    return node("Clip", input, *bounds)


def cast(input: Operand, dtype: Any) -> Tensor:
    """x converted to a dtype, named as by TensorRT, numpy or TensorRT-LLM.

    Floats become integers towards zero; to bool is x != 0.
    """
    return retyped(tensor(input), irc_dtype(dtype))


def constant(ndarray: Any) -> Tensor:
    """A tensor of the numbers of an array; more than 16 different ones are stored as a weight."""
    return constant_tensor(ndarray)


def assertion(condition: Tensor, message: str = "") -> None:
    """Accepted without effect: irc checks shapes while it traces, and indices at run time."""
    current_session().note(
        f"assertion({message!r}) has no effect: shapes are checked while the network is traced"
    )


ACT2FN: dict[str, Callable[..., Tensor]] = {
    **dict.fromkeys(("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "openai-gelu"), gelu),
    **dict.fromkeys(("relu2", "squared-relu"), squared_relu),
    **dict.fromkeys(("swiglu", "fast-swiglu"), swiglu),
    "relu": relu, "tanh": tanh, "sigmoid": sigmoid, "silu": silu, "quick_gelu": quick_gelu,
    "geglu": geglu, "identity": identity, "softplus": softplus,
}  # fmt: skip
GATED_ACT_2_ACT = {"swiglu": "silu", "fast-swiglu": "silu", "geglu": "gelu"}


def is_gated_activation(activation: str) -> bool:
    """Whether an activation takes two halves."""
    return activation in GATED_ACT_2_ACT


def non_gated_version(activation: str) -> str:
    """The activation of the gate of a gated one; of others the name itself."""
    return GATED_ACT_2_ACT.get(activation, activation)


# -- reductions, norms and products


def _reduction(kind: str) -> Callable[..., Tensor]:
    """A reduction over one dimension or several, which `keepdim` leaves in place with size 1."""

    def function(input: Operand, dim: Dims, keepdim: bool = False) -> Tensor:
        x = tensor(input)
        axes = list(dim_resolve_negative(dim, x.rank()))
        return node(kind, x, axes=axes, keepdims=keepdim, noop_with_empty_axes=1)

    return function


sum, prod, mean = (_reduction(f"Reduce{name}") for name in ("Sum", "Prod", "Mean"))
max, min = _reduction("ReduceMax"), _reduction("ReduceMin")
_REDUCTIONS = {"SUM": sum, "PROD": prod, "MAX": max, "MIN": min, "AVG": mean}


def reduce(input: Operand, op: Any, dim: Dims, keepdim: bool = False) -> Tensor:
    """A reduction by a member of TensorRT's ReduceOperation or its name."""
    name = str(getattr(op, "name", op)).upper()
    if name not in _REDUCTIONS:
        raise ScriptError(f"expected the reduction {', '.join(_REDUCTIONS)}, found {op!r}")
    return _REDUCTIONS[name](input, dim, keepdim)


def argmax(input: Operand, dim: int, keepdim: bool = False) -> Tensor:
    """The position of the largest element along `dim`, i32; the first of equals."""
    return retyped(node("ArgMax", input, axis=dim, keepdims=keepdim), "i32")


def topk(input: Operand, k: Operand, dim: int, largest: bool = True) -> tuple[Tensor, Tensor]:
    """The k largest or smallest elements along `dim`, in order, and their positions as i32.

    Of equal elements the one in front comes first.
    """
    values, places = nodes("TopK", input, shape_of(k), outputs=2, axis=dim, largest=largest)
    return values, retyped(places, "i32")


def cumsum(input: Operand, dim: int) -> Tensor:
    """Running sums along `dim`, with the element itself."""
    x, axis = tensor(input), at(dim, tensor(input))
    shape, size = x.type.shape, size_of(x, dim)
    if not is_float(x.entry.dtype) or isinstance(size, Dim) or size <= _LONG:
        return node("CumSum", x, axis)
    count = math.ceil(size / _LONG)
    x = node("Pad", x, (0, count * _LONG - size), 0, [axis])
    parts = view(x, (*shape[:axis], count, _LONG, *shape[axis + 1 :]), zero_is_placeholder=False)
    before = node("CumSum", sum(parts, axis + 1, keepdim=True), axis, exclusive=1)
    sums = view(node("CumSum", parts, axis + 1) + before, x.type.shape, zero_is_placeholder=False)
    return _sliced(sums, axis, 0, size)


def categorical_sample(probs: Tensor, rand_data: Tensor | None = None) -> Tensor:
    """An index of the last dimension per row, with probabilities proportional to probs, as i32.

    rand_data has the shape of the rows, with random numbers from 0 to 1: a compiled network draws
    none itself.
    """
    if rand_data is None:
        raise ScriptError(
            "categorical_sample: expected rand_data, an input of random numbers from 0 to 1, found "
            "none; a compiled network draws no numbers"
        )
    total = cumsum(probs / sum(probs, -1, keepdim=True), -1)
    before = total < view(rand_data, (*rand_data.type.shape, 1))
    return node("Min", sum(retyped(before, "i32"), -1), tensor_of_sizes(probs.type.shape[-1] - 1))


def matmul(input: Operand, mat2: Operand, transa: bool = False, transb: bool = False) -> Tensor:
    """The matrix product over the last two dimensions, of operands that may be transposed.

    16-bit floats are always summed in f32. A vector counts as a matrix of one row or column, which
    the result does not have.
    """
    x, y = matched(input, mat2)
    x = transpose(x, -2, -1) if transa and x.rank() > 1 else x
    y = transpose(y, -2, -1) if transb and y.rank() > 1 else y
    network = current_network()
    network.unify(x.entry.shape[-1], y.entry.shape[-2 if y.rank() > 1 else -1])
    network.agree(x, y, but=(-1, -2))
    return node("MatMul", x, y)


def einsum(einsum_eq: str, inputs: Sequence[Operand]) -> Tensor:
    """The sum of products that an equation such as "ij,jk->ik" states."""
    return node("Einsum", *matched(*inputs), equation=einsum_eq)


def outer(input: Operand, vec2: Operand) -> Tensor:
    """Of vectors [M] and [N], all products: [M, N]."""
    return einsum("i,j->ij", [input, vec2])


def _affine(
    input: Operand, sizes: Dims, weight: Operand, bias: Operand = None
) -> tuple[Tensor, Tensor, Tensor | None, int]:
    """(x, the factors, the summands, how many dimensions at the end of x a norm is over)."""
    x, gain = matched(input, 1 if weight is None else weight)
    shape = (sizes,) if isinstance(sizes, int) else tuple(sizes)
    if not shape or x.type.shape[x.rank() - len(shape) :] != shape:
        raise ScriptError(f"expected {x.type} to end in the sizes {list(shape)}")
    return x, gain, None if bias is None else matched(x, bias)[1], len(shape)


def layer_norm(
    input: Operand, normalized_shape: Dims, weight: Any = None, bias: Any = None, eps: float = 1e-05
) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimensions, in f32."""
    x, gain, shift, count = _affine(input, normalized_shape, weight, bias)
    return node("LayerNormalization", x, gain, shift, axis=-count, epsilon=eps)


def rms_norm(
    input: Operand,
    normalized_shape: Dims,
    num_groups: int = 1,
    weight: Operand = None,
    eps: float = 1e-06,
) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last dimensions, in f32.

    With groups the mean is that of each of so many parts of the last dimension.
    """
    x, gain, _, count = _affine(input, normalized_shape, weight)
    if num_groups == 1:
        return node("RMSNormalization", x, gain, axis=-count, epsilon=eps)
    outer, size = x.type.shape[:-count], product(x.type.shape[-count:])
    part = exact_divide(size, num_groups) if num_groups > 0 else None
    if part is None:
        raise ScriptError(f"rms_norm: {num_groups} groups do not divide {size} features")
    parts = view(x, (*outer, num_groups, part), zero_is_placeholder=False)
    parts = node("RMSNormalization", parts, matched(x, 1)[1], axis=-1, epsilon=eps)
    return view(parts, x.type.shape, zero_is_placeholder=False) * gain


def group_norm(
    input: Operand, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-05
) -> Tensor:
    """Layer norm over each group of the channels of x [B, C, ...], times weight [C] plus bias."""
    x, gain, shift = matched(input, 1 if weight is None else weight, 0 if bias is None else bias)
    channels = x.type.shape[1]
    gain, shift = (node("Expand", vector, (channels,)) for vector in (gain, shift))
    return node("GroupNormalization", x, gain, shift, num_groups=num_groups, epsilon=eps)


# -- shapes and pieces


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


def squeeze(input: Operand, dim: int | Sequence[int] | None = None) -> Tensor:
    """x without those of the dimensions `dim` (all unless told) that are known to have size 1."""
    x = tensor(input)
    dims = range(x.rank()) if dim is None else dim_resolve_negative(dim, x.rank())
    ones = [i for i in dims if x.type.shape[i] == 1]
    return node("Squeeze", x, ones) if ones else Tensor.of(x.entry)


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
        raise ScriptError(f"slice: expected {x.rank()} starts, sizes and strides for {x.type}")
    for dim, (size, step) in enumerate(zip(counts, steps, strict=True)):
        if isinstance(step, Dim):
            raise ScriptError(f"slice: expected a number as stride, found {step}")
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
            raise ScriptError(f"slice: element {place} lies beyond the {total} of {x.type}")
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
            raise ScriptError(f"split: {total} elements are not a multiple of {sizes}")
        sizes = [sizes] * (total // sizes)
    if x.content is None:
        return nodes("Split", x, list(sizes), outputs=len(sizes), axis=dim)
    starts = accumulate(sizes, initial=0)
    return [_sliced(x, 0, start, size) for start, size in zip(starts, sizes, strict=False)]


def chunk(tensor: Operand, chunks: int, dim: int = 0) -> list[Tensor]:
    """`chunks` pieces of one size along `dim`."""
    (x,) = matched(tensor)
    total = size_of(x, dim)
    if isinstance(total, Dim) or total % chunks:
        raise ScriptError(f"chunk: {total} elements do not make {chunks} equal pieces")
    return split(x, total // chunks, dim)


def unbind(input: Operand, dim: int = 0) -> list[Tensor]:
    """The slices along `dim`, without it."""
    return [squeeze(part, dim) for part in split(input, 1, dim)]


def repeat(input: Operand, sizes: Sequence[int]) -> Tensor:
    """x as many times along every dimension as `sizes` says; new dimensions are in front."""
    x, more = tensor(input), len(sizes) - tensor(input).rank()
    if more < 0:
        expected = f"repeat: expected {x.rank()} numbers or more for {x.type}"
        raise ScriptError(f"{expected}, found {sizes}")
    return node("Tile", expand_dims(x, list(range(more))) if more else x, list(sizes))


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
        raise ScriptError(f"pad: expected the mode 'constant', found {mode!r}")
    x, ends = tensor(input), shape_of(pad)
    if len(ends) % 2 or len(ends) > 2 * x.rank():
        raise ScriptError(f"pad: expected two numbers for each padded dimension of {x.type}")
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
            raise ScriptError(f"expected indices below {size}, found {place}")
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
        raise ScriptError(f"expected a vector of indices, found {places.type}")
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
        raise ScriptError(
            f"expected padded states [batch, tokens, hidden], found {hidden_states.type}; give "
            "remove_input_padding=True for packed ones"
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
