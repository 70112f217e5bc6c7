"""Feed-forward layers, and activations by their names in config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from ...errors import Error, did_you_mean
from ...source import here
from .. import functional as F
from ..module import Module
from ..tensor import Tensor
from .basic import Linear

Function = TypeVar("Function", bound=Callable[..., object])

# Names as in config.json; "gelu" is exact.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: F.silu(x),
    "swish": lambda x: F.silu(x),
    "gelu": lambda x: F.gelu(x),
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: F.quick_gelu(x),
    "relu": lambda x: F.relu(x),
    "relu2": lambda x: F.squared_relu(x),
    "squared_relu": lambda x: F.squared_relu(x),
    "tanh": lambda x: F.tanh(x),
    "sigmoid": lambda x: F.sigmoid(x),
}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The activation named `name`; an Error suggests the nearest name."""
    return find_activation(name, ACTIVATIONS)


def find_activation(name: str, functions: Mapping[str, Function]) -> Function:
    """The function of this name; an Error suggests the nearest name."""
    function = functions.get(name)
    if function is None:
        hint = did_you_mean(name, functions)
        names = ", ".join(functions)
        raise Error(f"no activation called {name!r}{hint}; there are {names}", loc=here())
    return function


class MLP(Module):
    """down(act(up(x)))."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        act: str = "gelu",
        bias: bool = True,
        dtype: str = "f32",
    ) -> None:
        self.up_proj = Linear(hidden_size, intermediate_size, bias, dtype)
        self.down_proj = Linear(intermediate_size, hidden_size, bias, dtype)
        self.act = activation(act)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden_size] to the same."""
        return self.down_proj(self.act(self.up_proj(x)))


class GatedMLP(Module):
    """down(act(gate(x)) * up(x)); the pass fuse-gated-mlp fuses the operations."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        act: str = "silu",
        bias: bool = False,
        dtype: str = "f32",
    ) -> None:
        self.gate_proj = Linear(hidden_size, intermediate_size, bias, dtype)
        self.up_proj = Linear(hidden_size, intermediate_size, bias, dtype)
        self.down_proj = Linear(intermediate_size, hidden_size, bias, dtype)
        self.act = activation(act)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden_size] to the same."""
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))
