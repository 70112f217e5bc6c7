"""Reductions, norms and matrix products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ....errors import Error
from ....ir.dims import DimLike, exact_divide, product
from ....ir.dtypes import is_float
from ....source import here
from ... import functional as F
from ...tensor import Tensor as Inner
from ..arithmetic import agree, binary, matched, retyped, tensor
from ..context import current_network, signatures
from ..dtypes import dim_resolve_negative
from ..tensor import Operand, Tensor, attach, known, shape_of, wrap
from .basic import abs as _abs
from .basic import cast, log, where
from .basic import sqrt as _sqrt

_FOLDED = {
    "reduce_sum": "add",
    "reduce_prod": "mul",
    "reduce_max": "maximum",
    "reduce_min": "minimum",
}


def _reduction(op: str) -> Callable[..., Tensor]:
    """A reduction over one dimension or several, which `keepdim` leaves in place with size 1."""

    def function(input: Operand, dim: int | Sequence[int], keepdim: bool = False) -> Tensor:
        x = tensor(input)
        dims = dim_resolve_negative(dim, x.type.ndim)
        if x.content is not None and op in _FOLDED and x.content:
            total = known(x.content[0], x.type.dtype)
            for size in x.content[1:]:
                total = binary(_FOLDED[op], total, known(size, x.type.dtype))
            if total.content is not None:
                return known([*total.content], x.type.dtype) if keepdim else total
        return wrap(getattr(F, op)(x.inner, dims, keep=keepdim))

    return function


sum, prod = _reduction("reduce_sum"), _reduction("reduce_prod")
max, min = _reduction("reduce_max"), _reduction("reduce_min")
mean = _reduction("reduce_mean")


def reduce(input: Operand, op: Any, dim: int | Sequence[int], keepdim: bool = False) -> Tensor:
    """A reduction by the name of TensorRT: SUM, PROD, MAX, MIN or AVG."""
    known_ops = {"SUM": sum, "PROD": prod, "MAX": max, "MIN": min, "AVG": mean}
    name = str(getattr(op, "name", op)).upper()
    if name not in known_ops:
        raise Error(f"expected the reduction {', '.join(known_ops)}, found {op!r}", loc=here())
    return known_ops[name](input, dim, keepdim)


def argmax(input: Operand, dim: int, keepdim: bool = False) -> Tensor:
    """The position of the largest element along `dim`, i32; the first of equals."""
    return wrap(F.argmax(tensor(input).inner, dim=dim, keep=keepdim))


def topk(
    input: Operand, k: Operand, dim: int, largest: bool = True, prefer_plugin: bool = True
) -> tuple[Tensor, Tensor]:
    """The k largest or smallest elements along `dim`, in order, and their positions as i32.

    Of equal elements the one in front comes first.
    """
    x, (count,) = tensor(input).inner, shape_of(k)
    values, places = F.topk(x if largest else _reversed(x), count, dim=dim)
    return wrap(values if largest else _reversed(values)), wrap(places)


def _reversed(x: Inner) -> Inner:
    """Numbers in the reverse order; applied twice they are as before."""
    return -x if is_float(x.dtype) else -1 - x


def cumsum(input: Operand, dim: int, prefer_plugin: bool = True) -> Tensor:
    """Running sums along `dim`, with the element itself."""
    return wrap(F.cumsum(tensor(input).inner, dim=dim))


def softmax(input: Operand, dim: int | None = None) -> Tensor:
    """exp(x) / sum of exp(x) along `dim`, the last unless told."""
    return wrap(F.softmax(tensor(input).inner, dim=-1 if dim is None else dim))


def log_softmax(input: Operand, dim: int) -> Tensor:
    """The logarithm of softmax."""
    return wrap(F.log_softmax(tensor(input).inner, dim=dim))


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
    total = F.cumsum(probs.inner / probs.inner.sum(-1, keep=True))
    before = wrap(F.lt(total, F.unsqueeze(rand_data.inner, (-1,))))
    found = sum(retyped(before, "i32"), -1)
    return binary("minimum", found, known(probs.type.shape[-1] - 1, "i32"))


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
    x, y = (each.inner for each in _multiplied(*matched(input, mat2), transa, transb))
    rows, columns = len(x.shape) == 1, len(y.shape) == 1
    x = F.unsqueeze(x, (0,)) if rows else x.transpose(-2, -1) if transa else x
    y = F.unsqueeze(y, (1,)) if columns else y.transpose(-2, -1) if transb else y
    found = F.matmul(x, y)
    gone = (*([-2] if rows else []), *([-1] if columns else []))
    return wrap(F.squeeze(found, gone) if gone else found)


def _multiplied(x: Tensor, y: Tensor, transa: bool, transb: bool) -> tuple[Tensor, Tensor]:
    """The operands of a product, whose unnamed sizes that must be equal are."""
    inner = -2 if transa and x.type.ndim > 1 else -1, -1 if transb or y.type.ndim == 1 else -2
    current_network().unify(x.type.shape[inner[0]], y.type.shape[inner[1]])
    agree(x, y, but=(-1, -2))
    return x, y


def _features(x: Inner, normalized_shape: int | Sequence[int]) -> tuple[Inner, DimLike]:
    """(x with the normalized dimensions joined, their product)."""
    sizes = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if not sizes or tuple(x.shape[len(x.shape) - len(sizes) :]) != sizes:
        raise Error(f"expected {x.type} to end in the sizes {list(sizes)}", loc=here())
    joined = product(sizes)
    return F.reshape(x, (*x.shape[: len(x.shape) - len(sizes)], joined)), joined


def _vector(x: Operand, size: DimLike) -> Inner | None:
    """A weight or bias as a vector; None for a number, which the caller applies."""
    if x is None or isinstance(x, (int, float)):
        return None
    return F.reshape(tensor(x).inner, (size,))


def layer_norm(
    input: Operand,
    normalized_shape: int | Sequence[int],
    weight: Operand = None,
    bias: Operand = None,
    eps: float = 1e-05,
    use_diff_of_squares: bool = True,
) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimensions, in f32."""
    x = tensor(input).inner
    flat, size = _features(x, normalized_shape)
    gain, shift = _vector(weight, size), _vector(bias, size)
    found = wrap(F.reshape(F.layer_norm(flat, weight=gain, bias=shift, eps=eps), x.shape))
    found = found * weight if isinstance(weight, (int, float)) and weight != 1 else found
    return found + bias if isinstance(bias, (int, float)) and bias != 0 else found


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
    x = tensor(input).inner
    flat, size = _features(x, normalized_shape)
    part = exact_divide(size, num_groups) if num_groups > 0 else None
    if part is None:
        raise Error(f"rms_norm: {num_groups} groups do not divide {size} features", loc=here())
    gain = _vector(weight, size)
    if num_groups == 1 and gain is not None:
        return wrap(F.reshape(F.rms_norm(flat, gain, eps=eps), x.shape))
    ones = F.full(1.0, shape=(part,), dtype=x.dtype)
    parts = F.reshape(flat, (*flat.shape[:-1], num_groups, part))
    found = F.reshape(F.rms_norm(parts, ones, eps=eps), flat.shape)
    result = wrap(F.reshape(found if gain is None else found * gain, x.shape))
    return result * weight if isinstance(weight, (int, float)) and weight != 1 else result


def group_norm(
    input: Operand,
    num_groups: int,
    weight: Operand = None,
    bias: Operand = None,
    eps: float = 1e-05,
) -> Tensor:
    """Layer norm over each group of the channels of x [B, C, ...], times weight [C] plus bias."""
    gain, shift = (None if each is None else tensor(each).inner for each in (weight, bias))
    return wrap(F.group_norm(tensor(input).inner, num_groups, weight=gain, bias=shift, eps=eps))


attach(
    mean=mean, max=max, min=min, sum=sum, abs=_abs, sqrt=_sqrt, log=log, cast=cast, where=where
)  # fmt: skip
