"""Functions over symbolic tensors: `F.silu(x)`, `F.linear(x, w, bias=b)`, one per operation.

They are derived from the declarations in irc/ops at first use. `functional.pyi` declares them for
type checkers and editors; `python -m irc.frontends.stubs` writes it. Operands come first, then
required attributes; the rest are keyword-only. Operations whose names are Python keywords end in
an underscore: `F.and_`, `F.or_`, `F.not_`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import Error, did_you_mean
from ..source import here
from .tensor import ShapeLike, Tensor
from .wrappers import NOT_WRAPPED, wrapped, wrapper


def reshape(x: Tensor, shape: ShapeLike) -> Tensor:
    """The same elements in another shape; one size may be -1."""
    return x.reshape(shape)


def transpose(x: Tensor, *order: int | Sequence[int]) -> Tensor:
    """Dimensions in another order, (0, 2, 1) or 0, 2, 1; or two numbers: these exchanged."""
    return x.transpose(*order)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    cls = wrapped().get(name)
    if cls is None:
        why = f": {NOT_WRAPPED[name]}" if name in NOT_WRAPPED else did_you_mean(name, wrapped())
        raise UnknownFunction(f"there is no F.{name}{why}", loc=here())
    function = wrapper(cls)
    if cls.__module__.startswith("irc."):  # a user's file may run again and declare it again
        globals()[name] = function
    return function


def __dir__() -> list[str]:
    return sorted(wrapped())


class UnknownFunction(Error, AttributeError):
    """There is no operation of this name; an AttributeError, so that hasattr() returns false."""
