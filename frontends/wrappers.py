"""Derives a Python function from the declaration of an operation: signature, body, docstring."""

from __future__ import annotations

import inspect
import keyword
import types
import typing
from collections.abc import Callable
from typing import Any, Literal

from ..ir.attributes import Number, choices, kind_name
from ..ir.core import Function, Op
from ..ir.declare import REGISTRY
from ..ir.dims import DimLike
from ..ir.types import TensorType
from ..ops.control import Return
from .shapes import as_dim, as_shape
from .tensor import apply, located

NOT_WRAPPED = {
    Return.opname: "the value that a model returns becomes the return of the traced function"
}


def function_name(op: str) -> str:
    """The Python name of an operation: `and_` for `and`."""
    return f"{op}_" if keyword.iskeyword(op) else op


def wrapped() -> dict[str, type[Op]]:
    """Function name -> operation class, for every operation that a script may call."""
    return {function_name(op): cls for op, cls in REGISTRY.items() if op not in NOT_WRAPPED}


def signature(cls: type[Op], annotated: bool = False) -> list[str]:
    """The parameters: operands, required attributes, then keyword-only optional operands and
    attributes with defaults; with type annotations if `annotated`."""

    def parameter(name: str, kind: str, default: str = "") -> str:
        if annotated:
            return f"{name}: {kind}" + (f" = {default}" if default else "")
        return f"{name}={default}" if default else name

    parts = [parameter(name, "Operand") for name in cls.operand_names]
    if cls.variadic:
        parts[-1] = parameter(cls.operand_names[-1], "Iterable[Operand]")
    late = [parameter(name, "Operand | None", "None") for name in cls.optional_names]
    for name, kind in cls.attribute_types.items():
        if name in cls.attribute_defaults:
            default = repr(cls.attribute_defaults[name])
            late.append(parameter(name, _annotation(kind), default))
        else:
            parts.append(parameter(name, _annotation(kind)))
    return [*parts, *(["*", *late] if late else [])]


def returns(cls: type[Op]) -> str:
    """The return annotation: that of `infer`, or of the expansion that stands in for it."""
    source = cls.expand if cls.composite and cls.infer is Op.infer else cls.infer
    annotation = source.__annotations__.get("return", TensorType)
    return "tuple[Tensor, ...]" if "tuple" in str(annotation) else "Tensor"


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
        f"{a!r}: {_converted(a, kind)}" for a, kind in cls.attribute_types.items()
    )
    result = "(result,)" if returns(cls) == "Tensor" else "result"
    source = (
        f"def {name}({', '.join(signature(cls))}):\n"
        f" {result} = _apply(_cls, ({operands}), {{{optional}}}, {{{attributes}}})\n"
        " return result\n"
    )
    scope: dict[str, Any] = {"_apply": apply, "_cls": cls, "_located": located}
    scope |= {"_as_dim": as_dim, "_as_shape": as_shape}
    # no parameter begins with an underscore, so none hides these names; compiled under this
    # file's name, the frame counts as irc's own, so the location is the caller's
    exec(compile(source, __file__, "exec"), scope)
    wrapper = scope[name]
    wrapper.__doc__ = documentation(cls)
    wrapper.__module__ = "irc.frontends.functional"
    return wrapper


def _converted(name: str, kind: Any) -> str:
    """The code that parses symbols in an attribute."""
    if kind == DimLike:
        return f"_located(_as_dim, {name})"
    return f"_located(_as_shape, ({name},))" if kind == tuple[DimLike, ...] else name


_NAMES: dict[Any, str] = {
    DimLike: "SizeLike",
    Number: "float",
    Function: "Function",
    type(None): "None",
}


def _annotation(kind: Any) -> str:
    """The type annotation of an attribute."""
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
