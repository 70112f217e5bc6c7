"""Reductions, norms and matrix products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ....errors import Error
from ....ir.dims import DimLike, exact_divide, product
from ....source import here
from ..arithmetic import agree, at, matched, node, nodes, retyped, tensor
from ..context import current_network, signatures
from ..dtypes import dim_resolve_negative
from ..tensor import Operand, Tensor, add_methods, shape_of, tensor_of_sizes
from .basic import abs as _abs
from .basic import cast, log, where
from .basic import sqrt as _sqrt
from .shapes import view


def _reduction(kind: str) -> Callable[..., Tensor]:
    """A reduction over one dimension or several, which `keepdim` leaves in place with size 1."""

    def function(input: Operand, dim: int | Sequence[int], keepdim: bool = False) -> Tensor:
        x = tensor(input)
        dims = dim_resolve_negative(dim, x.rank())
        return node(kind, x, axes=list(dims), keepdims=keepdim, noop_with_empty_axes=1)

    return function


sum, prod = _reduction("ReduceSum"), _reduction("ReduceProd")
max, min = _reduction("ReduceMax"), _reduction("ReduceMin")
mean = _reduction("ReduceMean")


def reduce(input: Operand, op: Any, dim: int | Sequence[int], keepdim: bool = False) -> Tensor:
    """A reduction by the name of TensorRT: SUM, PROD, MAX, MIN or AVG."""
    functions = {"SUM": sum, "PROD": prod, "MAX": max, "MIN": min, "AVG": mean}
    name = str(getattr(op, "name", op)).upper()
    if name not in functions:
        raise Error(f"expected the reduction {', '.join(functions)}, found {op!r}", loc=here())
    return functions[name](input, dim, keepdim)


def argmax(input: Operand, dim: int, keepdim: bool = False) -> Tensor:
    """The position of the largest element along `dim`, i32; the first of equals."""
    return retyped(node("ArgMax", input, axis=dim, keepdims=keepdim), "i32")


def topk(
    input: Operand, k: Operand, dim: int, largest: bool = True, prefer_plugin: bool = True
) -> tuple[Tensor, Tensor]:
    """The k largest or smallest elements along `dim`, in order, and their positions as i32.

    Of equal elements the one in front comes first.
    """
    values, places = nodes("TopK", input, shape_of(k), count=2, axis=dim, largest=largest)
    return values, retyped(places, "i32")


def cumsum(input: Operand, dim: int, prefer_plugin: bool = True) -> Tensor:
    """Running sums along `dim`, with the element itself."""
    return node("CumSum", input, at(dim, tensor(input)))


def softmax(input: Operand, dim: int | None = None) -> Tensor:
    """exp(x) / sum of exp(x) along `dim`, the last unless told."""
    return node("Softmax", input, axis=-1 if dim is None else dim)


def log_softmax(input: Operand, dim: int) -> Tensor:
    """The logarithm of softmax."""
    return node("LogSoftmax", input, axis=dim)


def categorical_sample(probs: Tensor, rand_data: Tensor | None = None) -> Tensor:
    """An index of the last dimension per row, with probabilities proportional to probs, as i32.

    rand_data has the shape of the rows, with random numbers from 0 to 1: a compiled network draws
    none itself.
    """
    if rand_data is None:
        raise Error(
            "categorical_sample: expected rand_data, an input of random numbers from 0 to 1, found "
            "none; a compiled network draws no numbers",
            loc=here(),
        )
    total = cumsum(probs / sum(probs, -1, keepdim=True), -1)
    before = total < view(rand_data, (*rand_data.type.shape, 1))
    return node("Min", sum(retyped(before, "i32"), -1), tensor_of_sizes(probs.type.shape[-1] - 1))


def matmul(
    input: Operand,
    mat2: Operand,
    transa: bool = False,
    transb: bool = False,
    use_fp32_acc: bool = True,
) -> Tensor:
    """The matrix product over the last two dimensions, of operands that may be transposed.

    16-bit floats are always summed in f32. A vector counts as a matrix of one row or column, which
    the result does not have.
    """
    x, y = matched(input, mat2)
    x, y = _turned(x) if transa else x, _turned(y) if transb else y
    current_network().unify(x.entry.shape[-1], y.entry.shape[-2 if y.rank() > 1 else -1])
    agree(x, y, but=(-1, -2))
    return node("MatMul", x, y)


def _turned(x: Tensor) -> Tensor:
    """A tensor with its last two dimensions exchanged; a vector as it is."""
    *outer, rows, columns = range(x.rank()) if x.rank() > 1 else (0, 0)
    return node("Transpose", x, perm=[*outer, columns, rows]) if x.rank() > 1 else x


def _normalized_dims(x: Tensor, normalized_shape: int | Sequence[int]) -> int:
    """How many dimensions at the end of x a norm is over."""
    sizes = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if not sizes or x.type.shape[x.rank() - len(sizes) :] != sizes:
        raise Error(f"expected {x.type} to end in the sizes {list(sizes)}", loc=here())
    return len(sizes)


def layer_norm(
    input: Operand,
    normalized_shape: int | Sequence[int],
    weight: Operand = None,
    bias: Operand = None,
    eps: float = 1e-05,
    use_diff_of_squares: bool = True,
) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimensions, in f32."""
    x, gain = matched(input, 1 if weight is None else weight)
    count = _normalized_dims(x, normalized_shape)
    shift = None if bias is None else matched(x, bias)[1]
    return node("LayerNormalization", x, gain, shift, axis=-count, epsilon=eps)


@signatures(
    a="input, normalized_shape, weight, eps", b="input, normalized_shape, num_groups, weight, eps"
)
def rms_norm(
    input: Operand,
    normalized_shape: int | Sequence[int],
    num_groups: int = 1,
    weight: Operand = None,
    eps: float = 1e-06,
) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last dimensions, in f32.

    With groups the mean is that of each of so many parts of the last dimension.
    """
    x, gain = matched(input, 1 if weight is None else weight)
    count = _normalized_dims(x, normalized_shape)
    if num_groups == 1:
        return node("RMSNormalization", x, gain, axis=-count, epsilon=eps)
    outer, size = x.type.shape[:-count], product(x.type.shape[-count:])
    part: DimLike | None = exact_divide(size, num_groups) if num_groups > 0 else None
    if part is None:
        raise Error(f"rms_norm: {num_groups} groups do not divide {size} features", loc=here())
    parts = view(x, (*outer, num_groups, part), zero_is_placeholder=False)
    parts = node("RMSNormalization", parts, matched(x, 1)[1], axis=-1, epsilon=eps)
    return view(parts, x.type.shape, zero_is_placeholder=False) * gain


def group_norm(
    input: Operand,
    num_groups: int,
    weight: Operand = None,
    bias: Operand = None,
    eps: float = 1e-05,
) -> Tensor:
    """Layer norm over each group of the channels of x [B, C, ...], times weight [C] plus bias."""
    x, gain, shift = matched(input, 1 if weight is None else weight, 0 if bias is None else bias)
    channels = x.type.shape[1]
    gain, shift = (node("Expand", each, (channels,)) for each in (gain, shift))
    return node("GroupNormalization", x, gain, shift, num_groups=num_groups, epsilon=eps)


add_methods(
    mean=mean, max=max, min=min, sum=sum, abs=_abs, sqrt=_sqrt, log=log, cast=cast, where=where
)  # fmt: skip
