"""Functions of TensorRT-LLM that are operators of ONNX: elements, sums, norms, products."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ....errors import Error
from ....ir.core import Op
from ....ir.dims import exact_divide, product
from ....ir.dtypes import is_float
from ....ops import FloorDiv, Ne, QuickGelu, Repeat, Silu, SquaredRelu
from ....source import here
from ..arithmetic import binary, matched, node, nodes, retyped, tensor
from ..context import current_network, current_session
from ..dtypes import dim_resolve_negative, irc_dtype
from ..module import constant_tensor
from ..tensor import Operand, Tensor, shape_of, tensor_of_sizes
from .shapes import chunk, unbind, view, where

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
cumsum = _one("CumSum", "input dim")  # running sums, with the element itself
scatter = _one("ScatterElements", "input dim indices updates", axis="dim")
scatter_nd = _one("ScatterND", "input mask source")  # slices at the index tuples of mask
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


def gegelu(x: Tensor, limit: float | None = None) -> Tensor:
    """[..., 2*N] to [..., N]: quick_gelu(even elements) * (odd elements + 1).

    With a limit the even elements are at most that, the odd ones between it and its negative.
    """
    *outer, size = x.type.shape
    even, odd = unbind(view(x, (*outer, size // 2, 2)), -1)
    if limit is not None:
        even, odd = clip(even, -math.inf, limit), clip(odd, -limit, limit)
    return quick_gelu(even) * (odd + 1.0)


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
    "geglu": geglu, "gegelu": gegelu, "identity": identity, "softplus": softplus,
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
        raise Error(f"expected the reduction {', '.join(_REDUCTIONS)}, found {op!r}", loc=here())
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


def matmul(input: Operand, mat2: Operand, transa: bool = False, transb: bool = False) -> Tensor:
    """The matrix product over the last two dimensions, of operands that may be transposed.

    16-bit floats are always summed in f32. A vector counts as a matrix of one row or column, which
    the result does not have.
    """
    x, y = matched(input, mat2)
    x, y = _turned(x) if transa else x, _turned(y) if transb else y
    network = current_network()
    network.unify(x.entry.shape[-1], y.entry.shape[-2 if y.rank() > 1 else -1])
    network.agree(x, y, but=(-1, -2))
    return node("MatMul", x, y)


def _turned(x: Tensor) -> Tensor:
    """A tensor with its last two dimensions exchanged; a vector as it is."""
    *outer, rows, columns = range(x.rank()) if x.rank() > 1 else (0, 0)
    return node("Transpose", x, perm=[*outer, columns, rows]) if x.rank() > 1 else x


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
        raise Error(f"expected {x.type} to end in the sizes {list(shape)}", loc=here())
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
        raise Error(f"rms_norm: {num_groups} groups do not divide {size} features", loc=here())
    parts = view(x, (*outer, num_groups, part), zero_is_placeholder=False)
    parts = node("RMSNormalization", parts, matched(x, 1)[1], axis=-1, epsilon=eps)
    return view(parts, x.type.shape, zero_is_placeholder=False) * gain


def group_norm(
    input: Operand, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-05
) -> Tensor:
    """Layer norm over each group of the channels of x [B, C, ...], times weight [C] plus bias."""
    x, gain, shift = matched(input, 1 if weight is None else weight, 0 if bias is None else bias)
    channels = x.type.shape[1]
    gain, shift = (node("Expand", each, (channels,)) for each in (gain, shift))
    return node("GroupNormalization", x, gain, shift, num_groups=num_groups, epsilon=eps)
