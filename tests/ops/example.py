"""Examples of operations for the generic tests, as modules with random inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from irc.errors import Error
from irc.ir.core import Function, Module, Op, Result, Value
from irc.ir.declare import op_class
from irc.ir.dims import Dim, bind
from irc.ir.dtypes import DTYPES, numpy_dtype
from irc.ir.mesh import Mesh
from irc.ir.types import TensorType
from irc.ops import Return
from irc.testing.draw import Arg as Arg

FLOATS = ("f32", "f16", "bf16")
Array = Any


@dataclass(frozen=True)
class Bad:
    """Operands and attributes that must be refused, with an Error that has `message` in it."""

    message: str
    args: tuple[Arg, ...] = ()
    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Example:
    """One use of an operation.

    Shapes and attributes may hold symbols, whose values are in `sizes`. `prepare` adds to the
    module what the operation refers to, and gives further attributes. A `local` example is in the
    local view of `mesh`. At least one example of an operation lists something `bad`.
    """

    op: str
    args: tuple[Arg, ...] = ()
    attributes: dict[str, Any] = field(default_factory=dict)
    bad: tuple[Bad, ...] = ()
    dtypes: tuple[str, ...] = FLOATS
    sizes: dict[str, int] = field(default_factory=dict)
    mesh: str = ""
    local: bool = False
    prepare: Callable[[Module, str], dict[str, Any]] | None = None

    def __str__(self) -> str:
        shapes = ",".join("x".join(map(str, arg.shape)) for arg in self.args)
        attributes = ",".join(f"{k}={v}" for k, v in self.attributes.items())
        return " ".join(filter(None, (self.op, shapes, attributes)))

    def bound(self) -> Example:
        """The example with numbers in place of symbols."""
        args = tuple(replace(a, shape=bound_dims(a.shape, self.sizes)) for a in self.args)
        attributes = {k: bound_dims(v, self.sizes) for k, v in self.attributes.items()}
        return replace(self, args=args, attributes=attributes, sizes={})


def bound_dims(value: Any, sizes: dict[str, int]) -> Any:
    """A dimension, a shape, or anything else (left alone) with symbols replaced by their sizes."""
    if isinstance(value, tuple):
        return tuple(bound_dims(item, sizes) for item in value)
    return bind(value, sizes) if isinstance(value, Dim) else value


def build(op: str, args: Sequence[Arg], values: Sequence[Value], attributes: dict[str, Any]) -> Op:
    """The operation called `op` over `values`, one per argument."""
    cls = op_class(op)
    plain = [v for a, v in zip(args, values, strict=True) if not a.name]
    named = {a.name: v for a, v in zip(args, values, strict=True) if a.name}
    if cls.variadic:
        fixed = len(cls.operand_names) - 1
        return cls(*plain[:fixed], plain[fixed:], **attributes)
    return cls(*plain, **named, **attributes)


def names_of(example: Example) -> list[str]:
    """The argument names of the example's module: `x0`, `x1`, ..., and names of optional ones."""
    return [arg.name or f"x{i}" for i, arg in enumerate(example.args)]


def module_of(
    example: Example, dtype: str = "f32", types: Sequence[TensorType] | None = None
) -> Module:
    """A module whose @forward applies the operation to its arguments and returns all results.

    `types` replaces the argument types. An operation without results returns its operands.
    """
    dims = {name: (1, size, max(size, 64)) for name, size in example.sizes.items()}
    module = Module("example", Mesh.parse(example.mesh), dims, local=example.local)
    extra = example.prepare(module, dtype) if example.prepare is not None else {}
    given = list(types or (arg.type(dtype) for arg in example.args))
    given[:1] = [module.own(type) for type in given[:1]]  # what collectives communicate
    function = Function("forward", list(zip(names_of(example), given, strict=True)))
    op = build(example.op, example.args, function.args, example.attributes | extra)
    function.append(op)
    if not isinstance(op, Return):
        function.append(Return(op.results))
    for value in function.returned:
        if value.type.global_type.partial and example.local:  # on the root alone
            value.type = module.own(value.type.replicated)
    if any(value.type.global_type.varying for value in function.returned):
        function.results = tuple(Result(varies=True) for _ in function.returned)
    module.add_function(function)
    return module


def dtypes_taken(example: Example) -> list[str]:
    """The dtypes in which an example is a module; f32 alone where nothing varies."""
    if all(arg.dtype != "T" for arg in example.args):
        return ["f32"]
    accepted: list[str] = []
    for dtype in DTYPES:
        with suppress(Error):
            module_of(example, dtype)
            accepted.append(dtype)
    return accepted


def operation(module: Module) -> Op:
    """The operation that the module of an example is about."""
    first = module.functions["forward"].first
    assert first is not None
    return first


def inputs_of(
    example: Example, dtype: str, rng: np.random.Generator
) -> dict[str, np.ndarray[Any, Any]]:
    """Random arrays for the arguments of `module_of(example, dtype)`, in their declared dtypes."""
    args = example.bound().args
    return {
        name: draw(arg, arg.type(dtype), rng)
        for name, arg in zip(names_of(example), args, strict=True)
    }


def draw(arg: Arg, type: TensorType, rng: np.random.Generator) -> Array:
    """A random array of a type without symbols."""
    shape = tuple(int(size) for size in type.shape if not isinstance(size, Dim))
    kind = DTYPES[type.dtype]
    if arg.draw is not None:
        array = arg.draw(rng, shape)
    elif kind.kind == "bool":
        array = rng.integers(0, 2, shape)
    elif kind.is_integer:
        array = rng.integers(int(arg.low or 0), int(arg.high or 5), shape)
    elif arg.low is not None and arg.high is not None:
        array = rng.uniform(arg.low, arg.high, shape)
    else:
        array = rng.standard_normal(shape)
    return np.asarray(array).astype(numpy_dtype(type.dtype))
