"""`Tensor` as scripts of TensorRT-LLM use it, over a tensor of irc, with known sizes folded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, cast
from weakref import ref

import numpy as np

from ...errors import Error
from ...ir.core import Value
from ...ir.dims import Dim, DimLike
from ...ir.dtypes import DTYPES
from ...ir.types import TensorType
from ...source import here
from ..tensor import Tensor as Inner
from .contents import Content, materialized
from .context import active_network, current_network
from .dtypes import DataType, data_type, irc_dtype
from .tensorrt_enums import TensorLocation

if TYPE_CHECKING:
    from .network import Network

Operand: TypeAlias = Any  # a Tensor, a Parameter, or a number


class Tensor:
    """A tensor of the network in progress; with a name, dtype and shape it is a new input.

    `shape` has -1 for a dynamic size, whose name and ranges `dim_range` gives: dimension name ->
    one range per profile, a number or (min, opt, max). Sizes of one name are one symbol of irc.
    `content` holds the elements of an integer scalar or vector that is made of sizes and numbers;
    operations for it are appended only when it is used as data. `inner` is irc's tensor. `reuses`
    names the input whose memory the tensor overwrites when it is marked as an output.
    """

    __array_priority__ = 1

    def __init__(
        self,
        name: str | None = None,
        dtype: Any = None,
        shape: Sequence[DimLike] | None = None,
        dim_range: Any = None,
        is_network_input: bool = True,
        location: Any = None,
        network: Network | None = None,
    ) -> None:
        if not is_network_input or name is None or dtype is None or shape is None:
            raise Error(
                "an input needs a name, a dtype and a shape, as in "
                "Tensor(name='x', dtype=trt.float16, shape=[-1, 64], dim_range=...)",
                loc=here(),
            )
        owner = network or current_network()
        self._inner: Inner | None = owner.add_input(name, irc_dtype(dtype), shape, dim_range)
        self.type = self._inner.type
        self._value: Value | None = self._inner.value
        self.content: Content | None = None
        self._name = name
        self.location = TensorLocation["DEVICE"] if location is None else location
        self.network, self.reuses, self.dim_range = owner, "", dim_range
        owner.inputs[name] = self
        owner.tensors.append(ref(self))

    @classmethod
    def make(
        cls,
        inner: Inner | None,
        type: TensorType,
        content: Content | None = None,
        network: Network | None = None,
    ) -> Tensor:
        """A tensor that is no input; without `inner` its content is known."""
        self = cls.__new__(cls)
        self._inner, self.type, self.content = inner, type, content
        self._value, self._name = None, ""
        self.location, self.reuses, self.dim_range = TensorLocation["DEVICE"], "", None
        self.network = network or current_network()
        self.network.tensors.append(ref(self))
        return self

    @classmethod
    def of(cls, value: Value, network: Network, name: str = "") -> Tensor:
        """The tensor of a value of a network, also outside net_guard."""
        self = cls.make(Inner(value, network.tracer), value.type, network=network)
        self._value, self._name = value, name
        return self

    @property
    def inner(self) -> Inner:
        """irc's tensor, converted in a block of `precision`."""
        return _widened(self._made())

    def _made(self) -> Inner:
        """irc's tensor; a known content becomes operations here."""
        if self._inner is None:
            assert self.content is not None
            self._inner = materialized(self.network, self.content, self.type)
        return self._inner

    def convert(self, dtype: str) -> None:
        """Change the dtype in place."""
        self._inner, self._value = self._made().cast(dtype), None
        self.type = self._inner.type

    @property
    def ir(self) -> Value:
        """The value in the graph, also outside net_guard."""
        if self._value is None:
            self._value = self._made().value
        return self._value

    @property
    def trt_tensor(self) -> Tensor:
        """Itself: there is no tensor of TensorRT below."""
        return self

    @property
    def name(self) -> str:
        """The name of an input or output, and of any other tensor that of dumps."""
        return self._name or self.ir.name or ""

    @name.setter
    def name(self, name: str) -> None:
        self.network.rename(self, name)
        self._name = name

    @property
    def dtype(self) -> DataType:
        """The element type, as a member of DataType; of an output or an unused input it can be
        set."""
        return data_type(self.type.dtype)

    @dtype.setter
    def dtype(self, dtype: Any) -> None:
        self.network.change_dtype(self, irc_dtype(dtype))

    @property
    def is_network_input(self) -> bool:
        """Whether it is an input of its network."""
        return self.network.is_input(self)

    @property
    def is_network_output(self) -> bool:
        """Whether it is an output of its network."""
        return self.network.is_output(self)

    @property
    def is_shape_tensor(self) -> bool:
        """Whether it holds known sizes."""
        return self.content is not None

    def get_dimension_name(self, dim: int) -> str:
        """The symbol of a dynamic size; "" for a static one."""
        return "" if self.shape[dim] != -1 else str(self.type.shape[dim])

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes, -1 where they are dynamic; `type.shape` has their symbols."""
        return tuple(size if isinstance(size, int) else -1 for size in self.type.shape)

    def size(self, dim: int | None = None) -> Any:
        """One size, or all; -1 for a dynamic one."""
        return self.shape if dim is None else self.shape[dim]

    def rank(self) -> int:
        """The number of dimensions."""
        return self.type.ndim

    ndim = rank

    def is_dynamic(self, dim: int | None = None) -> bool:
        """Whether a size, or any, is dynamic."""
        return -1 in self.shape if dim is None else self.shape[dim] == -1

    def mark_output(self, name: str | None = None, dtype: Any = None) -> None:
        """Make it an output of the network in progress, converted to `dtype`."""
        current_network().mark_output(self, name, dtype)

    # -- operators

    def __hash__(self) -> int:
        return id(self)

    def __bool__(self) -> bool:
        if self.type.dtype == "bool":
            raise Error(
                "a comparison of tensors has no truth value while a network is built; choose "
                "elements with where(), and compare with None by `is`",
                loc=here(),
            )
        return True

    def _no_value(self, *args: Any) -> NoReturn:
        raise Error(
            "a tensor has no value while a network is built; its static sizes are in .shape, "
            "others in shape(x, dim)",
            loc=here(),
        )

    __int__ = __float__ = __index__ = __array__ = __iter__ = __len__ = _no_value

    def __repr__(self) -> str:
        return f"<tensor {self.type}>"

    if TYPE_CHECKING:  # the methods that `attach` adds

        def __getattr__(self, name: str) -> Any: ...

        def __eq__(self, other: object) -> Any: ...

        def __ne__(self, other: object) -> Any: ...

        def _operator(self, other: Any) -> Tensor: ...

        __add__ = __sub__ = __mul__ = __truediv__ = __floordiv__ = __mod__ = __pow__ = _operator
        __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rfloordiv__ = __rmod__ = _operator
        __lt__ = __le__ = __gt__ = __ge__ = __and__ = __or__ = __matmul__ = _operator
        __rpow__ = __rand__ = __ror__ = _operator

        def __neg__(self) -> Tensor: ...


# -- between tensors of the dialect and of irc


def wrap(inner: Inner, content: Content | None = None) -> Tensor:
    """The tensor of the dialect over one of irc; `content` are its elements where known."""
    found = Tensor.make(inner, inner.type, content)
    _ = found.ir
    scope = found.network.precision
    if scope is not None and scope.narrow and inner.dtype == scope.dtype:
        scope.made.append(ref(found))
    return found


def unwrap(x: Operand) -> Any:
    """irc's tensor under a Tensor or a Parameter; numbers and None are returned unchanged."""
    inner = x if isinstance(x, Inner) else getattr(x, "inner", x)
    return _widened(inner) if isinstance(inner, Inner) else inner


def _widened(inner: Inner) -> Inner:
    """A tensor as an operand: in a block of `precision` a narrower float is converted."""
    network = active_network()
    scope = None if network is None else network.precision
    row = DTYPES[inner.dtype]
    if scope is None or not row.is_float or row.bits >= DTYPES[scope.dtype].bits:
        return inner
    scope.narrow = inner.dtype
    return inner.cast(scope.dtype)


class Precision:
    """A block that computes floats in at least `dtype`.

    What it makes of narrower floats is converted back to their dtype, `narrow`, at the end.
    """

    def __init__(self, dtype: str) -> None:
        self.dtype, self.narrow = dtype, ""
        self.made: list[ref[Tensor]] = []

    def end(self) -> None:
        """Convert the tensors that are still used."""
        for tensor in (each() for each in self.made):
            if tensor is not None:
                tensor.convert(self.narrow)


def type_of(x: Operand) -> TensorType:
    """The type of a Tensor or a Parameter, without appending operations."""
    return getattr(x, "inner", x).type if not isinstance(x, Tensor) else x.type


def known(content: Sequence[DimLike] | DimLike, dtype: str = "i32") -> Tensor:
    """A tensor of sizes and numbers: a scalar of one, a vector of several. Nothing is appended."""
    if isinstance(content, (int, Dim)):
        return Tensor.make(None, TensorType(dtype, ()), (content,))
    return Tensor.make(None, TensorType(dtype, (len(content),)), tuple(content))


def content_of(x: Operand) -> Content | None:
    """The elements of an integer, of a Tensor of known content, or of a list of these."""
    if isinstance(x, Tensor):
        return x.content
    if isinstance(x, Dim):
        return (x,)
    if isinstance(x, (list, tuple)):
        parts = [content_of(each) for each in cast("Sequence[Any]", x)]
        return None if None in parts else tuple(size for part in parts for size in part or ())
    if not isinstance(x, (int, np.integer, np.ndarray)):
        return None
    array = np.asarray(cast("Any", x))
    return tuple(array.reshape(-1).tolist()) if array.dtype.kind in "iu" else None


def shape_of(sizes: Operand) -> Content:
    """A target shape, in which one size may be -1; an Error where a size comes from data."""
    found = content_of(sizes)
    if found is None:
        raise Error(
            f"expected a shape made of numbers and of sizes such as shape(x, 0), found {sizes!r}; "
            "a shape cannot depend on the elements of a tensor",
            loc=here(),
        )
    return found


def attach(**methods: Callable[..., Any]) -> None:
    """Make functions of the dialect methods of Tensor."""
    for name, function in methods.items():
        setattr(Tensor, name, function)
