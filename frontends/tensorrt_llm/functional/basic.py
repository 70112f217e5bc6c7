"""Functions of one element at a time: arithmetic, comparison, logic, activations, conversion."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ....errors import Error
from ....ir.dtypes import is_float
from ....ops import QuickGelu, Silu, SquaredRelu
from ....source import here
from ..arithmetic import agree, matched, node, of_two, retyped, tensor
from ..context import current_session
from ..dtypes import irc_dtype
from ..module import constant_tensor
from ..tensor import Operand, Tensor
from .shapes import chunk, unbind, unsqueeze, view

Number = int | float


# of two tensors, which broadcast; a number takes the dtype of the tensor
add, sub, mul, pow = (of_two(op) for op in ("add", "sub", "mul", "pow"))
div = of_two("div")  # of integers rounded towards zero
floordiv, modulo = of_two("floor_div"), of_two("mod")  # modulo: the sign of the divisor
minimum, maximum = of_two("minimum"), of_two("maximum")
eq, lt, gt = (of_two(op) for op in ("eq", "lt", "gt"))
op_and, op_or, op_xor = (of_two(op) for op in ("and", "or", "ne"))


def _of_one(kind: Any, **attributes: Any) -> Callable[[Operand], Tensor]:
    """A function of one tensor, of its shape and dtype, by the operator of ONNX or of irc."""

    def function(input: Operand) -> Tensor:
        return node(kind, input, **attributes)

    return function


round = _of_one("Round")  # halves to the even number
sqrt, exp, log = _of_one("Sqrt"), _of_one("Exp"), _of_one("Log")
sin, cos, abs, not_op = _of_one("Sin"), _of_one("Cos"), _of_one("Abs"), _of_one("Not")
relu, tanh, sigmoid, silu = _of_one("Relu"), _of_one("Tanh"), _of_one("Sigmoid"), _of_one(Silu)
squared_relu, quick_gelu = _of_one(SquaredRelu), _of_one(QuickGelu)


def identity(input: Operand) -> Tensor:
    """The same values, as a tensor that can have another name."""
    return Tensor.of(tensor(input).entry)


def activation(input: Tensor, act_type: Any) -> Tensor:
    """relu, tanh or sigmoid, by a name or a member of TensorRT's ActivationType."""
    name = str(getattr(act_type, "name", act_type)).lower()
    functions = {"relu": relu, "tanh": tanh, "sigmoid": sigmoid}
    if name not in functions:
        expected = ", ".join(functions)
        raise Error(f"expected the activation {expected}, found {act_type!r}", loc=here())
    return functions[name](input)


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


def clip(input: Tensor, alpha: Number, beta: Number) -> Tensor:
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


def constant(ndarray: Any, as_dtype: Any = None, as_shape: Any = None) -> Tensor:
    """A tensor of the numbers of an array; more than 16 different ones are stored as a weight."""
    values = constant_tensor(ndarray, as_dtype)
    return values if as_shape is None else view(values, tuple(as_shape), False)


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
    agree(tensor(condition), x, y)
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
