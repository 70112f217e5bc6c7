"""Functions of TensorRT-LLM that are operators of ONNX: elements, sums, norms, products."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ....errors import Error
from ....ir.dims import exact_divide, product
from ....ir.dtypes import is_float
from ....ops import QuickGelu, Silu, SquaredRelu
from ....source import here
from ..arithmetic import at, binary, matched, node, nodes, retyped, tensor
from ..context import current_network, current_session
from ..dtypes import dim_resolve_negative, irc_dtype
from ..module import constant_tensor
from ..tensor import Operand, Tensor, add_methods, shape_of, tensor_of_sizes
from .shapes import chunk, unbind, unsqueeze, view

Dims = int | Sequence[int]


def _of_two(op: str) -> Callable[[Operand, Operand], Tensor]:
    """A function of two tensors or numbers, by irc's name of the operation."""

    def function(left: Operand, right: Operand) -> Tensor:
        return binary(op, left, right)

    return function


def _of_one(kind: Any) -> Callable[[Operand], Tensor]:
    """A function of one tensor, of its shape and dtype, by the operator of ONNX or of irc."""

    def function(input: Operand) -> Tensor:
        return node(kind, input)

    return function


# of two tensors, which broadcast; a number takes the dtype of the tensor
add, sub, mul, pow = (_of_two(op) for op in ("add", "sub", "mul", "pow"))
div = _of_two("div")  # of integers rounded towards zero
minimum, maximum = _of_two("minimum"), _of_two("maximum")
eq, lt, gt, floordiv = (_of_two(op) for op in ("eq", "lt", "gt", "floor_div"))
op_and, op_or, op_xor = (_of_two(op) for op in ("and", "or", "ne"))

round = _of_one("Round")  # halves to the even number
sqrt, exp, log = _of_one("Sqrt"), _of_one("Exp"), _of_one("Log")
sin, cos, abs, not_op = _of_one("Sin"), _of_one("Cos"), _of_one("Abs"), _of_one("Not")
relu, tanh, sigmoid, silu = _of_one("Relu"), _of_one("Tanh"), _of_one("Sigmoid"), _of_one(Silu)


def modulo(x: Operand, y: Operand) -> Tensor:
    """The remainder, with the sign of y."""
    return binary("mod", x, y)


def squared_relu(x: Operand) -> Tensor:
    """relu(x)²."""
    return node(SquaredRelu, x)


def quick_gelu(x: Operand) -> Tensor:
    """x * sigmoid(1.702 * x)."""
    return node(QuickGelu, x)


def identity(input: Operand) -> Tensor:
    """The same values, as a tensor that can have another name."""
    return Tensor.of(tensor(input).entry)


def _create_tensor(  # pyright: ignore[reportUnusedFunction]  # by scripts
    trt_tensor: Tensor, producer: Any = None
) -> Tensor:
    """The tensor itself; layers of TensorRT's network, which could make it, are refused."""
    return trt_tensor


def _by_name(functions: dict[str, Any], what: str, member: Any) -> Any:
    """The function for a member of an enumeration of TensorRT, or for its name."""
    name = str(getattr(member, "name", member)).upper()
    if name not in functions:
        raise Error(f"expected the {what} {', '.join(functions)}, found {member!r}", loc=here())
    return functions[name]


def activation(input: Tensor, act_type: Any) -> Tensor:
    """relu, tanh or sigmoid, by a member of TensorRT's ActivationType or its name."""
    functions = {"RELU": relu, "TANH": tanh, "SIGMOID": sigmoid}
    return _by_name(functions, "activation", act_type)(input)


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


def int_clip(input: Operand, lower: int, upper: int) -> Tensor:
    """Integers kept between lower and upper; known sizes stay known."""
    return maximum(minimum(input, upper), lower)


def cast(input: Operand, dtype: Any) -> Tensor:
    """x converted to a dtype, named as by TensorRT, numpy or TensorRT-LLM.

    Floats become integers towards zero; to bool is x != 0.
    """
    return retyped(tensor(input), irc_dtype(dtype))


def constant(ndarray: Any) -> Tensor:
    """A tensor of the numbers of an array; more than 16 different ones are stored as a weight."""
    return constant_tensor(ndarray)


def constant_to_tensor_(input: Operand, dtype: Any = None, to_array: bool = True) -> Tensor:
    """A number as a tensor [1], or a scalar without `to_array`; a tensor is returned as it is."""
    if not isinstance(input, (bool, int, float)):
        return tensor(input)
    scalar = tensor(input, None if dtype is None else irc_dtype(dtype))
    return unsqueeze(scalar, 0) if to_array else scalar


def constants_to_tensors_(*inputs: Operand) -> tuple[Tensor, ...]:
    """Numbers as tensors [1]; i32 becomes i64 where another tensor is i64."""
    return matched(*[constant_to_tensor_(each) for each in inputs])


def where(condition: Operand, left: Operand, right: Operand) -> Tensor:
    """Elements of left where the condition holds, else of right; all broadcast."""
    x, y = matched(left, right)
    current_network().agree(tensor(condition), x, y)
    return node("Where", condition, x, y)


class Conditional:
    """Chooses between two results by one bool, after both branches are computed."""

    def __init__(self, condition: Tensor) -> None:
        self.condition = view(condition, ())

    def add_input(self, input: Tensor) -> Tensor:
        """The tensor, as the branches see it."""
        return input

    def add_output(self, true_value: Tensor, false_value: Tensor) -> Tensor:
        """The result of the branch that the condition chooses."""
        return where(self.condition, true_value, false_value)


def assertion(condition: Tensor, message: str = "") -> None:
    """Accepted without effect: irc checks shapes while it traces, and indices at run time."""
    current_session().note(
        f"assertion({message!r}) has no effect: shapes are checked while the network is traced"
    )


def cuda_stream_sync(input_list: list[Tensor]) -> Tensor:
    """The first tensor; backends order their streams themselves."""
    return input_list[0]


ACT2FN: dict[str, Callable[..., Tensor]] = {
    **dict.fromkeys(("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "openai-gelu"), gelu),
    **dict.fromkeys(("relu2", "squared-relu"), squared_relu),
    **dict.fromkeys(("swiglu", "fast-swiglu"), swiglu),
    "relu": relu,
    "tanh": tanh,
    "sigmoid": sigmoid,
    "silu": silu,
    "quick_gelu": quick_gelu,
    "geglu": geglu,
    "gegelu": gegelu,
    "identity": identity,
    "softplus": softplus,
}
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
        dims = dim_resolve_negative(dim, x.rank())
        return node(kind, x, axes=list(dims), keepdims=keepdim, noop_with_empty_axes=1)

    return function


sum, prod = _reduction("ReduceSum"), _reduction("ReduceProd")
max, min = _reduction("ReduceMax"), _reduction("ReduceMin")
mean = _reduction("ReduceMean")


def reduce(input: Operand, op: Any, dim: Dims, keepdim: bool = False) -> Tensor:
    """A reduction by a member of TensorRT's ReduceOperation or its name."""
    functions = {"SUM": sum, "PROD": prod, "MAX": max, "MIN": min, "AVG": mean}
    return _by_name(functions, "reduction", op)(input, dim, keepdim)


def argmax(input: Operand, dim: int, keepdim: bool = False) -> Tensor:
    """The position of the largest element along `dim`, i32; the first of equals."""
    return retyped(node("ArgMax", input, axis=dim, keepdims=keepdim), "i32")


def topk(input: Operand, k: Operand, dim: int, largest: bool = True) -> tuple[Tensor, Tensor]:
    """The k largest or smallest elements along `dim`, in order, and their positions as i32.

    Of equal elements the one in front comes first.
    """
    values, places = nodes("TopK", input, shape_of(k), count=2, axis=dim, largest=largest)
    return values, retyped(places, "i32")


def cumsum(input: Operand, dim: int) -> Tensor:
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


def _normalized_dims(x: Tensor, normalized_shape: Dims) -> int:
    """How many dimensions at the end of x a norm is over."""
    sizes = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if not sizes or x.type.shape[x.rank() - len(sizes) :] != sizes:
        raise Error(f"expected {x.type} to end in the sizes {list(sizes)}", loc=here())
    return len(sizes)


def layer_norm(
    input: Operand,
    normalized_shape: Dims,
    weight: Operand = None,
    bias: Operand = None,
    eps: float = 1e-05,
) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimensions, in f32."""
    x, gain = matched(input, 1 if weight is None else weight)
    count = _normalized_dims(x, normalized_shape)
    shift = None if bias is None else matched(x, bias)[1]
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
    x, gain = matched(input, 1 if weight is None else weight)
    count = _normalized_dims(x, normalized_shape)
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
    mean=mean, max=max, min=min, sum=sum, abs=abs, sqrt=sqrt, log=log, cast=cast, where=where
)  # fmt: skip
