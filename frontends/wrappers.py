"""Derives a Python function from the declaration of an operation: signature, body, docstring."""

from __future__ import annotations

import inspect
import keyword
import types
import typing
from collections.abc import Callable
from typing import Any, Literal

from ..attributes import Number, choices, kind_name
from ..core import Function, Op
from ..declare import REGISTRY
from ..dims import DimLike
from ..errors import Error
from ..ops.control import Return
from ..source import here
from ..types import TensorType
from .shapes import as_dim, as_shape
from .tensor import apply

NOT_WRAPPED = {
    Return.opname: "what a model returns becomes the return of the traced function",
}


def function_name(op: str) -> str:
    """What the operation is called in Python: `and` is `and_`."""
    return f"{op}_" if keyword.iskeyword(op) else op


def wrapped() -> dict[str, type[Op]]:
    """Function name -> operation class, for every operation that a script may call."""
    return {function_name(op): cls for op, cls in REGISTRY.items() if op not in NOT_WRAPPED}


def signature(cls: type[Op], annotated: bool = False) -> list[str]:
    """The parameters: operands, attributes without a default, then by keyword all that may be
    left out. With `annotated`, as a type checker reads them."""
    defaults = cls.attribute_defaults

    def note(kind: str) -> str:
        return f": {kind}" if annotated else ""

    plain = list(cls.operand_names)
    parts = [name + note("Operand") for name in plain]
    if cls.variadic:
        parts[-1] = plain[-1] + note("Iterable[Operand]")
    for name, kind in cls.attribute_types.items():
        if name not in defaults:
            parts.append(name + note(_annotation(kind)))
    late = [
        name + note("Operand | None") + _equals("None", annotated) for name in cls.optional_names
    ]
    for name, kind in cls.attribute_types.items():
        if name in defaults:
            late.append(name + note(_annotation(kind)) + _equals(repr(defaults[name]), annotated))
    return [*parts, *(["*", *late] if late else [])]


def returns(cls: type[Op]) -> str:
    """The annotation of what the function gives back: a composite operation has one result."""
    annotation = cls.infer.__annotations__.get("return", TensorType)
    single = cls.composite or annotation in (TensorType, TensorType.__name__)
    return "Tensor" if single else "tuple[Tensor, ...]"


def documentation(cls: type[Op]) -> str:
    """The docstring of the operation and the kinds of its attributes."""
    kinds = [f"    {name}: {kind_name(kind)}" for name, kind in cls.attribute_types.items()]
    text = inspect.cleandoc(cls.__doc__ or "")
    return "\n".join([text, "", "Attributes:", *kinds]) if kinds else text


def wrapper(cls: type[Op]) -> Callable[..., Any]:
    """A function that appends the operation to the trace in progress."""
    name = function_name(cls.opname)
    operands = "".join(f"{operand}, " for operand in cls.operand_names)
    optional = ", ".join(f"{o!r}: {o}" for o in cls.optional_names)
    attributes = ", ".join(
        f"{a!r}: {_conversion(kind)}({a})" for a, kind in cls.attribute_types.items()
    )
    result = "(result,)" if returns(cls) == "Tensor" else "result"
    source = (
        f"def {name}({', '.join(signature(cls))}):\n"
        f" {result} = _apply(_cls, ({operands}), {{{optional}}}, {{{attributes}}})\n"
        " return result\n"
    )
    scope: dict[str, Any] = {"_apply": apply, "_cls": cls, "_dim": _dim, "_dims": _dims}
    # no parameter begins with an underscore, so that none hides these names;
    # under this file's name the frame counts as irc's own, and the location is the caller's
    exec(compile(source, __file__, "exec"), scope)
    made = scope[name]
    made.__doc__ = documentation(cls)
    made.__module__ = "irc.frontends.functional"
    return made


def _equals(default: str, annotated: bool) -> str:
    return f" = {default}" if annotated else f"={default}"


def _conversion(kind: Any) -> str:
    """The function that reads symbols written as text."""
    if kind == DimLike:
        return "_dim"
    return "_dims" if kind == tuple[DimLike, ...] else ""


def _dim(size: Any) -> Any:
    try:
        return as_dim(size)
    except Error as error:
        raise error.at(loc=here()) from None


def _dims(sizes: Any) -> Any:
    try:
        return as_shape((sizes,))
    except Error as error:
        raise error.at(loc=here()) from None


_NAMES: dict[Any, str] = {
    DimLike: "SizeLike",
    Number: "float",
    Function: "Function",
    type(None): "None",
}


def _annotation(kind: Any) -> str:
    """An attribute's kind as a type checker reads it."""
    if kind in _NAMES:
        return _NAMES[kind]
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, choices(kind)))}]"
    if origin is tuple:
        return f"Sequence[{_annotation(args[0])}]"
    if origin in (typing.Union, types.UnionType):
        return " | ".join(_annotation(arg) for arg in args)
    return kind.__name__
