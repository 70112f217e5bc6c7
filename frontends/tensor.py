"""`Tensor`: a symbolic value in a trace, with operators and methods that append operations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import EllipsisType
from typing import Any, NoReturn, TypeAlias, cast

import numpy as np

from ..errors import Error
from ..ir.core import Op, Value
from ..ir.declare import op_class
from ..ir.dims import Dim, DimLike, Shape
from ..ir.dtypes import is_float
from ..ir.types import TensorType
from ..source import here
from .shapes import as_shape, inferred_shape, plan_index, split_sizes
from .tracer import Tracer, current

Scalar: TypeAlias = int | float | bool
Operand: TypeAlias = "Tensor | Scalar"
SizeLike: TypeAlias = DimLike | str  # a size, or the name of a symbol
ShapeLike: TypeAlias = Sequence[SizeLike]
Index: TypeAlias = int | slice | EllipsisType | None


def _binary(op: str) -> Callable[[Tensor, Operand], Tensor]:
    """The method for `x op other`."""
    return lambda x, other: one(op, x, other)


def _reflected(op: str) -> Callable[[Tensor, Scalar], Tensor]:
    """The method for `other op x`."""
    return lambda x, other: one(op, other, x)


def _unary(op: str) -> Callable[[Tensor], Tensor]:
    """The method for `op x`."""
    return lambda x: one(op, x)


class Tensor:
    """A value of the graph that is being traced.

    Arithmetic, `<`, `<=`, `>`, `>=`, `@`, `&`, `|`, `~` and indexing append operations. A number
    takes the dtype of the other operand; two tensors must have the same dtype. `==` and `!=`
    compare identity, as dicts and sets need, and append nothing; `F.eq(x, y)` compares elements.
    """

    __slots__ = ("_tracer", "_value")
    __array_priority__ = 1  # numpy's numbers and arrays defer to the operators of this class

    def __init__(self, value: Value, tracer: Tracer) -> None:
        self._value, self._tracer = value, tracer

    @property
    def value(self) -> Value:
        """The value in the graph; an Error if the tensor outlived its trace."""
        if self._tracer is not current("a tensor"):
            raise Error(
                "this tensor belongs to another trace; a model must not keep tensors between calls",
                loc=here(),
            )
        return self._value

    @property
    def type(self) -> TensorType:
        """The tensor type: dtype and shape."""
        return self._value.type

    @property
    def dtype(self) -> str:
        """The element type, such as "bf16"."""
        return self.type.dtype

    @property
    def shape(self) -> Shape:
        """The size of every dimension: ints, and symbols such as B or 2*S."""
        return self.type.shape

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    def named(self, name: str) -> Tensor:
        """This tensor, called `%name` in dumps."""
        if not name.isidentifier() or not name.isascii():
            raise Error(
                f"{name!r} is not a valid name for a tensor; use letters, digits, _", loc=here()
            )
        value, tracer = self.value, current("a tensor")
        if value not in tracer.function.args and value.producer is not None:
            value.name = name
            tracer.named.add(value)
        return self

    def __repr__(self) -> str:
        return f"<tensor {self.type}>"

    # -- comparison and conversion

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (int, float, np.generic, np.ndarray)):
            shown = other if isinstance(other, (int, float)) else "..."
            raise Error(
                "== and != compare the identity of tensors; to compare their elements "
                f"write F.eq(x, {shown}) or F.ne(x, {shown})",
                loc=here(),
            )
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __bool__(self) -> bool:
        raise Error(
            "a tensor has no truth value while a model is traced; choose between tensors with "
            "F.where, and between layers with Python values",
            loc=here(),
        )

    def __iter__(self) -> Iterator[Tensor]:
        raise Error("a tensor cannot be iterated over; use split or indexing", loc=here())

    def __len__(self) -> NoReturn:
        raise Error("a tensor has no len(); its sizes are in .shape", loc=here())

    def _no_value(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise Error(
            "a tensor has no value while a model is traced; compute with operators and with the "
            "functions of irc.frontends.functional",
            loc=here(),
        )

    __int__ = __float__ = __index__ = __array__ = __array_function__ = _no_value

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any) -> NoReturn:
        name = getattr(function, "__name__", function)
        raise Error(  # at the user's line, which is not the nearest: PyTorch calls this
            f"{name} of PyTorch got a tensor of irc, which has no value while a model is traced; "
            "compute with operators and with the functions of irc.frontends.functional"
        )

    # -- operators

    __lt__ = _binary("lt")
    __le__ = _binary("le")
    __gt__ = _binary("gt")
    __ge__ = _binary("ge")
    __add__ = _binary("add")
    __sub__ = _binary("sub")
    __mul__ = _binary("mul")
    __truediv__ = _binary("div")
    __floordiv__ = _binary("floor_div")
    __mod__ = _binary("mod")
    __pow__ = _binary("pow")
    __and__ = _binary("and")
    __or__ = _binary("or")
    __matmul__ = _binary("matmul")
    __radd__ = _reflected("add")
    __rsub__ = _reflected("sub")
    __rmul__ = _reflected("mul")
    __rtruediv__ = _reflected("div")
    __rfloordiv__ = _reflected("floor_div")
    __rmod__ = _reflected("mod")
    __rpow__ = _reflected("pow")
    __rand__ = _reflected("and")
    __ror__ = _reflected("or")
    __rmatmul__ = _reflected("matmul")
    __neg__ = _unary("neg")
    __abs__ = _unary("abs")
    __invert__ = _unary("not")

    # -- shape

    def reshape(self, *shape: SizeLike | ShapeLike) -> Tensor:
        """The same elements in another shape; one size may be -1."""
        return one("reshape", self, shape=located(inferred_shape, self.shape, shape))

    view = reshape

    def permute(self, *order: int) -> Tensor:
        """Dimensions in another order, as in `x.permute(0, 2, 1)`."""
        places = tuple(d + self.ndim if -self.ndim <= d < 0 else d for d in order)
        return one("transpose", self, order=places)

    def transpose(self, *order: int | Sequence[int]) -> Tensor:
        """Dimensions in another order, (0, 2, 1) or 0, 2, 1; or two numbers: these exchanged."""
        if len(order) != 2 or not all(isinstance(dim, int) for dim in order):
            given = order[0] if len(order) == 1 and not isinstance(order[0], int) else order
            return self.permute(*cast("Sequence[int]", given))
        first, second = cast("tuple[int, int]", order)
        places = list(range(self.ndim))
        if not all(-self.ndim <= dim < self.ndim for dim in (first, second)):
            raise Error(f"{self.type} has no dimensions {first} and {second}", loc=here())
        places[first], places[second] = places[second], places[first]
        return self.permute(*places)

    def unsqueeze(self, *dims: int) -> Tensor:
        """New dimensions of size one, at the positions `dims` of the result."""
        return one("unsqueeze", self, dims=dims)

    def squeeze(self, *dims: int) -> Tensor:
        """Without the dimensions `dims`, whose size is one."""
        return one("squeeze", self, dims=dims)

    def expand(self, *shape: SizeLike) -> Tensor:
        """Broadcast to `shape`."""
        return one("expand", self, shape=located(as_shape, shape))

    def split(self, sizes: int | Sequence[int], dim: int = -1) -> tuple[Tensor, ...]:
        """Pieces of `sizes` along `dim`; a single size means equal pieces."""
        parts = located(split_sizes, self.shape, sizes, dim)
        return many("split", self, dim=dim, sizes=parts)

    def __getitem__(self, index: Index | tuple[Index, ...]) -> Tensor:
        """Numbers, slices with a positive step, `...` and None, as in numpy."""
        parts = index if isinstance(index, tuple) else (index,)
        if any(isinstance(part, Tensor) for part in parts):
            raise Error("a tensor is not an index; use F.gather or F.embedding", loc=here())
        slices, dropped, added = located(plan_index, self.shape, index)
        tensor = self
        for dim, start, stop, step in slices:
            tensor = one("slice", tensor, dim=dim, start=start, stop=stop, step=step)
        if dropped:
            tensor = one("squeeze", tensor, dims=dropped)
        return one("unsqueeze", tensor, dims=added) if added else tensor

    def cast(self, dtype: str) -> Tensor:
        """Converted to `dtype`; the tensor itself where it has that dtype already."""
        return self if dtype == self.dtype else one("cast", self, dtype=dtype)

    to = cast

    # -- reductions

    def sum(self, dims: int | Sequence[int] | None = None, keep: bool = False) -> Tensor:
        """Sum over `dims`, or over all."""
        return self._reduce("reduce_sum", dims, keep)

    def mean(self, dims: int | Sequence[int] | None = None, keep: bool = False) -> Tensor:
        """Mean over `dims`, or over all."""
        return self._reduce("reduce_mean", dims, keep)

    def max(self, dims: int | Sequence[int] | None = None, keep: bool = False) -> Tensor:
        """Largest element over `dims`, or over all."""
        return self._reduce("reduce_max", dims, keep)

    def min(self, dims: int | Sequence[int] | None = None, keep: bool = False) -> Tensor:
        """Smallest element over `dims`, or over all."""
        return self._reduce("reduce_min", dims, keep)

    def _reduce(self, op: str, dims: int | Sequence[int] | None, keep: bool) -> Tensor:
        chosen = range(self.ndim) if dims is None else [dims] if isinstance(dims, int) else dims
        return one(op, self, dims=tuple(chosen), keep=keep)


def apply(
    cls: type[Op],
    operands: Sequence[Any],
    optional: Mapping[str, Any],
    attributes: Mapping[str, Any],
) -> tuple[Tensor, ...]:
    """Append an operation to the trace in progress, located at the user's line."""
    tracer = current(f"F.{cls.opname}")
    loc = here()
    try:
        values, named = _values(cls, operands, optional)
        tracer.prepare(cls, values)
        op = cls(*values, **named, **attributes, loc=loc)
    except Error as error:
        raise error.at(loc=loc) from None
    tracer.append(op)
    return tuple([Tensor(result, tracer) for result in op.results])


def one(op: str, *operands: Any, **attributes: Any) -> Tensor:
    """The result of a new operation named `op`, which has one result."""
    (result,) = apply(op_class(op), operands, {}, attributes)
    return result


def many(op: str, *operands: Any, **attributes: Any) -> tuple[Tensor, ...]:
    """All results of a new operation named `op`."""
    return apply(op_class(op), operands, {}, attributes)


def located(function: Any, *args: Any) -> Any:
    """The result of a function; an Error gets the user's line."""
    try:
        return function(*args)
    except Error as error:
        raise error.at(loc=here()) from None


def _values(
    cls: type[Op], operands: Sequence[Any], optional: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """The operands as values; numbers become constants of the dtype of the tensor operands."""
    fixed = list(operands)
    rest: list[Any] | None = None
    if cls.variadic:
        rest = _listed(cls, fixed.pop())
    every = [*fixed, *(rest or ()), *optional.values()]
    kinds = [x.dtype for x in every if isinstance(x, Tensor)]

    def convert(x: Any) -> Value:
        return x.value if isinstance(x, Tensor) else _number(cls, x, kinds)

    values: list[Any] = [convert(x) for x in fixed]
    if rest is not None:
        values.append([convert(x) for x in rest])
    return values, {n: None if x is None else convert(x) for n, x in optional.items()}


def _listed(cls: type[Op], tensors: Any) -> list[Any]:
    if isinstance(tensors, Tensor) or not isinstance(tensors, Iterable):
        raise Error(f"{cls.opname} takes a list of tensors")
    return list(cast("Iterable[Any]", tensors))


def _number(cls: type[Op], number: Any, kinds: list[str]) -> Value:
    """A Python or numpy number as a constant of the dtype of the other operands."""
    number = cast("Any", number).item() if isinstance(number, np.generic) else number
    if not isinstance(number, (bool, int, float)):
        raise Error(f"{cls.opname}: an operand is {kind_name(number)}, not a tensor of irc")
    if isinstance(number, bool):
        if "bool" not in kinds or set(kinds) != {"bool"}:
            raise Error(
                f"{cls.opname}: an operand is the Python value {number}; if it came from "
                "comparing tensors with == or !=, write F.eq or F.ne"
            )
        return one("full", value=number, dtype="bool").value
    dtype = next((kind for kind in kinds if kind != "bool"), None)
    if dtype is None:
        raise Error(f"{cls.opname}: {number} has no dtype here; write F.full({number}, dtype=...)")
    if isinstance(number, float) and not is_float(dtype):
        raise Error(
            f"{cls.opname}: {number} is used with a tensor of {dtype}; cast the tensor to a float"
        )
    return one("full", value=float(number) if is_float(dtype) else number, dtype=dtype).value


def kind_name(item: Any) -> str:
    """The type of an object in a message, such as "a list"."""
    if item is None:
        return "None"
    if isinstance(item, np.ndarray):
        return "a numpy array (use F.constant for a few numbers, a Parameter for data)"
    if isinstance(item, Dim):
        return f"{item}, which has no value while tracing"
    if type(item).__module__ == "torch":
        return "a tensor of PyTorch (use a Parameter for data)"
    name = type(item).__name__
    return f"an {name}" if name[0] in "aeioAEIO" else f"a {name}"
