"""Arithmetic of tensors, parameters and numbers, in dtypes that agree; operators of Tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from itertools import pairwise
from typing import Any, cast

import numpy as np

from ...errors import Error
from ...ir.dims import Dim
from ...ir.dtypes import DTYPES, is_float
from ...source import here
from ..tensor import Tensor as Inner
from ..tensor import kind_name, one
from .contents import fold
from .context import current_network
from .module import Parameter
from .tensor import Operand, Tensor, attach, known, type_of, wrap

_TENSORS = (Tensor, Parameter, Inner)
_inside: ContextVar[bool] = ContextVar("irc_trt_llm_inside", default=False)
_NUMBERS = (bool, int, float, np.generic, Dim)


def tensor(x: Any, dtype: str | None = None) -> Tensor:
    """A Tensor of a tensor, a parameter, or a number; a number is bool, i32, f32, or of `dtype`."""
    if isinstance(x, Tensor):
        return x
    if isinstance(x, Inner):
        return wrap(x)
    if isinstance(x, Parameter):
        return cast("Tensor", x.value)
    if isinstance(x, Dim):
        return known(x, dtype or "i32")
    number = _number(x)
    if number is None:
        raise Error(f"expected a tensor or a number, found {kind_name(x)}", loc=here())
    own = "i32" if isinstance(number, int) else "f32"
    kind = dtype or ("bool" if isinstance(number, bool) else own)
    if kind in ("i32", "i64"):
        return known(int(number), kind)
    return wrap(one("full", value=float(number) if is_float(kind) else number, dtype=kind))


def _number(x: Any) -> bool | int | float | None:
    """A number of Python, of one of Python or numpy; None for anything else."""
    found = cast("Any", x).item() if isinstance(x, np.generic) else x
    return found if isinstance(found, (bool, int, float)) else None


def data(x: Any) -> Inner:
    """irc's tensor of a tensor, a parameter, or a number."""
    return tensor(x).inner


def with_inner_tensors(
    function: Callable[..., Any], bound: tuple[Any, ...], given: dict[str, Any]
) -> Any:
    """The results of a function that takes and returns tensors of irc, for a script's tensors.

    Within such a function others are called with irc's tensors, and return them.
    """
    outermost = not _inside.get()
    token = _inside.set(True)
    try:
        results = function(*bound, **{name: unwrapped(value) for name, value in given.items()})
    finally:
        _inside.reset(token)
    return wrapped(results) if outermost else results


def unwrapped(value: Any) -> Any:
    """irc's tensors in place of those of a script, also in a list or tuple."""
    if isinstance(value, (Tensor, Parameter)):
        return tensor(value).inner
    if isinstance(value, (list, tuple)):
        return type(value)(unwrapped(each) for each in cast("list[Any]", value))
    return value


def wrapped(value: Any) -> Any:
    """A script's tensors in place of irc's, also in a list or tuple."""
    if isinstance(value, Inner):
        return wrap(value)
    if isinstance(value, (list, tuple)):
        return type(value)(wrapped(each) for each in cast("list[Any]", value))
    return value


def matched(*operands: Any) -> tuple[Tensor, ...]:
    """The operands as tensors: a number takes the dtype of the tensors, and i32 becomes i64 where
    another tensor is i64."""
    kinds = [type_of(x).dtype for x in operands if isinstance(x, _TENSORS)]
    first = _computed(kinds[0]) if kinds else None
    tensors = [tensor(x, _fitting(x, first)) for x in operands]
    if "i64" in [x.type.dtype for x in tensors]:
        return tuple(retyped(x, "i64") if x.type.dtype == "i32" else x for x in tensors)
    return tuple(tensors)


def _computed(kind: str) -> str:
    """The dtype that computes operands of a dtype: in a block of `precision` a wider one."""
    scope = current_network().precision
    narrow = scope is not None and is_float(kind) and DTYPES[kind].bits < DTYPES[scope.dtype].bits
    return scope.dtype if scope is not None and narrow else kind


def _fitting(x: Any, kind: str | None) -> str | None:
    """The dtype that a number takes beside tensors of `kind`; its own where that holds it not."""
    number = _number(x)
    if kind is None or number is None:
        return kind if isinstance(x, Dim) else None
    if kind == "bool" and number not in (0, 1):
        return None
    if kind == "i32" and isinstance(number, int) and not -(1 << 31) <= number < 1 << 31:
        return "i64"
    fits = is_float(kind) or not isinstance(number, float) or number.is_integer()
    return kind if fits else None


def retyped(x: Tensor, dtype: str) -> Tensor:
    """x converted to `dtype`; known sizes stay known in integers."""
    if x.type.dtype == dtype:
        return x
    if x.content is not None and dtype in ("i32", "i64"):
        return known(x.content if x.type.ndim else x.content[0], dtype)
    inner = x.inner.cast(dtype)
    return Tensor.make(inner, inner.type)


def binary(op: str, left: Operand, right: Operand) -> Tensor:
    """`left op right` by irc's name of the operation, elementwise with broadcasting.

    A number takes the dtype of the tensor; of i32 and i64 the result is i64. Of integers, `div`
    truncates towards zero. Known contents are computed, and appended only when they are used.
    """
    x, y = matched(left, right)
    if (folded := _folded(op, x, y)) is not None:
        return folded
    agree(x, y)
    a, b = x.inner, y.inner
    if op == "div" and DTYPES[a.dtype].is_integer:
        quotient = one("floor_div", one("abs", a), one("abs", b))
        return wrap(one("mul", quotient, one("mul", one("sign", a), one("sign", b))))
    return wrap(one(op, a, b))


def agree(*tensors: Tensor, but: Sequence[int] = ()) -> None:
    """Take sizes of tensors in the same dimension, counted from the end, for one size where the
    script gave them no names; not in the dimensions `but`."""
    network = current_network()
    if not network.unnamed:
        return
    for place in range(-max(x.type.ndim for x in tensors), 0):
        aligned = [x for x in tensors if x.type.ndim >= -place and place not in but]
        for x, y in pairwise(aligned):
            if x.type.shape[place] != y.type.shape[place]:
                network.unify(x.type.shape[place], y.type.shape[place])


def _folded(op: str, x: Tensor, y: Tensor) -> Tensor | None:
    """The result where both contents are known; else None."""
    sizes = None if x.content is None or y.content is None else fold(op, x.content, y.content)
    if sizes is None:
        return None
    return known(sizes if x.type.ndim or y.type.ndim else sizes[0], x.type.dtype)


def _compared(op: str) -> Callable[[Tensor, object], Any]:
    """The operator `==` or `!=`, elementwise with operands alone."""

    def compare(x: Tensor, y: object) -> Any:
        is_operand = isinstance(y, (*_TENSORS, *_NUMBERS))
        return binary(op, x, y) if is_operand else NotImplemented

    return compare


def _negated(x: Tensor) -> Tensor:
    return binary("sub", 0, x)


def _operator(op: str, swapped: bool = False) -> Callable[[Tensor, Any], Tensor]:
    return lambda x, y: binary(op, y, x) if swapped else binary(op, x, y)


for _name, _op in {
    "add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "floordiv": "floor_div",
    "mod": "mod", "pow": "pow", "and": "and", "or": "or", "matmul": "matmul",
}.items():  # fmt: skip
    attach(**{f"__{_name}__": _operator(_op), f"__r{_name}__": _operator(_op, swapped=True)})
attach(**{f"__{_op}__": _operator(_op) for _op in ("lt", "le", "gt", "ge")})
attach(__eq__=_compared("eq"), __ne__=_compared("ne"), __neg__=_negated)
