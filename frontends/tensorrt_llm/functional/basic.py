"""Functions of one element at a time: arithmetic, comparison, logic, activations, conversion."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from ....errors import Error
from ....ir.dtypes import is_float
from ....source import here
from ... import functional as F
from ..arithmetic import agree, binary, matched, retyped, tensor
from ..context import current_session
from ..dtypes import irc_dtype
from ..module import constant_tensor
from ..tensor import Operand, Tensor, wrap
from .shapes import chunk, unbind, unsqueeze, view

Number = int | float


# of two tensors, which broadcast; a number takes the dtype of the tensor
add, sub, mul, pow = (partial(binary, op) for op in ("add", "sub", "mul", "pow"))
div = partial(binary, "div")  # of integers rounded towards zero
floordiv, modulo = partial(binary, "floor_div"), partial(binary, "mod")  # modulo: the sign of right
minimum, maximum = partial(binary, "minimum"), partial(binary, "maximum")
eq, lt, gt = (partial(binary, op) for op in ("eq", "lt", "gt"))
op_and, op_or, op_xor = (partial(binary, op) for op in ("and", "or", "ne"))


def _unary(op: str) -> Callable[[Operand], Tensor]:
    """A function of one tensor, of its shape and dtype."""

    def function(input: Operand) -> Tensor:
        return wrap(getattr(F, op)(tensor(input).inner))

    return function


round = _unary("round")  # halves to the even number
sqrt, exp, log = _unary("sqrt"), _unary("exp"), _unary("log")
sin, cos, abs, not_op = _unary("sin"), _unary("cos"), _unary("abs"), _unary("not_")
relu, tanh, sigmoid, silu = _unary("relu"), _unary("tanh"), _unary("sigmoid"), _unary("silu")
squared_relu, quick_gelu = _unary("squared_relu"), _unary("quick_gelu")


def identity(input: Tensor) -> Tensor:
    """The same values, as a tensor that can have another name."""
    return wrap(input.inner)


def activation(input: Tensor, act_type: Any) -> Tensor:
    """relu, tanh or sigmoid, by a name or a member of TensorRT's ActivationType."""
    name = str(getattr(act_type, "name", act_type)).lower()
    known = {"relu": relu, "tanh": tanh, "sigmoid": sigmoid}
    if name not in known:
        raise Error(f"expected the activation {', '.join(known)}, found {act_type!r}", loc=here())
    return known[name](input)


def gelu(x: Operand) -> Tensor:
    """gelu by the formula with tanh, as TensorRT-LLM computes every gelu."""
    return wrap(F.gelu(tensor(x).inner, approximate="tanh"))


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
    return where(scaled > threshold, input, wrap(F.softplus(scaled.inner)) / beta)


def clip(input: Tensor, alpha: Number, beta: Number) -> Tensor:
    """x kept between alpha and beta; an infinite bound is none."""
    kind = float if is_float(input.type.dtype) else int
    low, high = (None if math.isinf(bound) else kind(bound) for bound in (alpha, beta))
    return wrap(F.clip(input.inner, low=low, high=high))


def int_clip(input: Operand, lower: int, upper: int) -> Tensor:
    """Integers kept between lower and upper; known sizes stay known."""
    return maximum(minimum(input, upper), lower)


def cast(input: Operand, dtype: Any) -> Tensor:
    """x converted to a dtype, named as by TensorRT, numpy or TensorRT-LLM.

    Floats become integers towards zero; to bool is x != 0.
    """
    return retyped(tensor(input), irc_dtype(dtype))


def constant(ndarray: Any, as_dtype: Any = None, as_shape: Any = None) -> Tensor:
    """A tensor of the numbers of an array; more than 16 different ones are stored as a weight."""
    found = constant_tensor(ndarray, as_dtype)
    if as_shape is None or tuple(as_shape) == found.type.shape:
        return found
    return wrap(F.reshape(found.inner, tuple(as_shape)))


def constant_to_tensor_(input: Operand, dtype: Any = None, to_array: bool = True) -> Tensor:
    """A number as a tensor [1], or a scalar without `to_array`; a tensor is returned as it is."""
    if not isinstance(input, (bool, int, float)):
        return tensor(input)
    found = tensor(input, None if dtype is None else irc_dtype(dtype))
    return unsqueeze(found, 0) if to_array else found


def constants_to_tensors_(*inputs: Operand) -> tuple[Tensor, ...]:
    """Numbers as tensors [1]; i32 becomes i64 where another tensor is i64."""
    return matched(*[constant_to_tensor_(each) for each in inputs])


def where(condition: Operand, left: Operand, right: Operand) -> Tensor:
    """Elements of left where the condition holds, else of right; all broadcast."""
    x, y = matched(left, right)
    agree(tensor(condition), x, y)
    return wrap(F.where(tensor(condition).inner, x.inner, y.inner))


class Conditional:
    """Chooses between two results by one bool, after both branches are computed."""

    def __init__(self, condition: Tensor) -> None:
        self.condition = wrap(F.reshape(condition.inner, ()))

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


def cuda_stream_sync(input_list: list[Tensor], side_stream_id: Any = None) -> Tensor:
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
