"""`Tensor` as scripts of TensorRT-LLM use it: an entry of the ONNX reader in a network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, cast

import numpy as np

from ...ir.core import Value
from ...ir.dims import Dim, DimLike
from ...ir.dtypes import DTYPES
from ...ir.types import TensorType
from ..onnx.builder import ImportedValue, sizes
from ..tensor import Tensor as Inner
from .api import api
from .context import current_network
from .dtypes import DataType, data_type, irc_dtype
from .enums import OF_TENSORRT
from .errors import ScriptError

if TYPE_CHECKING:
    from .network import Network

Operand: TypeAlias = Any  # a Tensor, a Parameter, or a number


@api("functional.Tensor")
class Tensor:
    """A tensor of the network in progress; with a name, dtype and shape it is a new input.

    `shape` has -1 for a dynamic size, whose name and ranges `dim_range` gives: dimension name ->
    one range per profile, a number or (min, opt, max). Sizes of one name are one symbol of irc.
    `entry` has its value in the graph, or its known elements: sizes and numbers, for which
    operations are appended only when they are used as data. `reuses` names the input whose memory
    the tensor overwrites when it is marked as an output.
    """

    __array_priority__ = 1

    def __init__(
        self,
        name: Any = None,
        dtype: Any = None,
        shape: Any = None,
        dim_range: Any = None,
        **fields: Any,
    ) -> None:
        is_input = fields.get("is_network_input", True)
        if not is_input or name is None or dtype is None or shape is None:
            raise ScriptError(
                "an input needs a name, a dtype and a shape, as in "
                "Tensor(name='x', dtype=trt.float16, shape=[-1, 64], dim_range=...)"
            )
        network: Network = fields.get("network") or current_network()
        value = network.add_input(name, irc_dtype(dtype), shape, dim_range)
        self._set(network.builder.imported(value), network, name)
        self.location = fields.get("location") or self.location
        network.inputs[name] = self

    def _set(self, entry: ImportedValue, network: Network, name: str = "") -> None:
        self.entry, self.network, self._name, self.reuses = entry, network, name, ""
        self.location = OF_TENSORRT["TensorLocation"].DEVICE
        network.entries.add(entry)

    @classmethod
    def of(cls, entry: ImportedValue, network: Network | None = None, name: str = "") -> Tensor:
        """The tensor of an entry of a network, by default the one in progress."""
        self = cls.__new__(cls)
        self._set(entry, network or current_network(), name)
        return self

    @property
    def type(self) -> TensorType:
        """dtype and shape."""
        return TensorType(self.entry.dtype, self.entry.shape)

    @property
    def content(self) -> tuple[DimLike, ...] | None:
        """The elements, where they are known integers and sizes."""
        content = self.entry.content
        if content is None or not DTYPES[self.entry.dtype].is_integer:
            return None
        return tuple(content.reshape(-1).tolist())

    @property
    def ir(self) -> Value:
        """The value in the graph, also outside net_guard; known elements become operations."""
        return self.network.builder.get(self.entry)

    @property
    def inner(self) -> Inner:
        """irc's tensor."""
        return Inner(self.ir, self.network.tracer)

    def convert(self, dtype: str) -> None:
        """Change the dtype in place."""
        self.entry = self.network.builder.cast(self.entry, dtype)
        self.network.entries.add(self.entry)

    @property
    def trt_tensor(self) -> Tensor:
        """Itself: there is no tensor of TensorRT below."""
        return self

    @property
    def name(self) -> str:
        """The name of an input or output, and of any other tensor that of dumps."""
        return self._name or (self.entry.value.name if self.entry.value else "") or ""

    @name.setter
    def name(self, name: str) -> None:
        self.network.rename(self, name)
        self._name = name

    @property
    def dtype(self) -> DataType:
        """The element type, as a member of DataType; of an output or an unused input it can be
        set."""
        return data_type(self.entry.dtype)

    @dtype.setter
    def dtype(self, dtype: Any) -> None:
        self.network.change_dtype(self, irc_dtype(dtype))

    @property
    def is_shape_tensor(self) -> bool:
        """Whether its elements are known sizes and numbers."""
        return self.entry.content is not None

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes, -1 where they are dynamic; `type.shape` has their symbols."""
        return tuple(size if isinstance(size, int) else -1 for size in self.entry.shape)

    def size(self, dim: int | None = None) -> Any:
        """One size, or all; -1 for a dynamic one."""
        return self.shape if dim is None else self.shape[dim]

    def rank(self) -> int:
        """The number of dimensions."""
        return self.entry.ndim

    ndim = rank

    def mark_output(self, name: str | None = None, dtype: Any = None) -> None:
        """Make it an output of the network in progress, converted to `dtype`."""
        current_network().mark_output(self, name, dtype)

    # -- operators

    def __hash__(self) -> int:
        return id(self)

    def __bool__(self) -> bool:
        if self.entry.dtype == "bool":
            raise ScriptError(
                "a comparison of tensors has no truth value while a network is built; choose "
                "elements with where(), and compare with None by `is`"
            )
        return True

    def _no_value(self, *args: Any) -> NoReturn:
        raise ScriptError(
            "a tensor has no value while a network is built; its static sizes are in .shape, "
            "others in shape(x, dim)"
        )

    __int__ = __float__ = __index__ = __array__ = __iter__ = __len__ = _no_value

    def __repr__(self) -> str:
        return f"<tensor {self.type}>"

    if TYPE_CHECKING:  # what `arithmetic` and `functional` add

        def __getattr__(self, name: str) -> Any: ...

        def _operator(self, *other: Any) -> Any: ...

        __add__ = __sub__ = __mul__ = __truediv__ = __floordiv__ = __mod__ = __pow__ = _operator
        __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rfloordiv__ = __rmod__ = _operator
        __and__ = __rand__ = __or__ = __ror__ = __rpow__ = __neg__ = _operator
        __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _operator


# -- between tensors of scripts and of irc


def wrap(inner: Inner) -> Tensor:
    """The tensor of a script over one of irc."""
    return Tensor.of(current_network().builder.imported(inner.value))


# -- sizes


def tensor_of_sizes(content: Sequence[DimLike] | DimLike, dtype: str = "i32") -> Tensor:
    """A tensor of sizes and numbers: a scalar of one, a vector of several. Nothing is appended."""
    if isinstance(content, (int, Dim)):
        return Tensor.of(ImportedValue(dtype, (), content=np.array(content, object)))
    return Tensor.of(ImportedValue(dtype, (len(content),), content=sizes(*content)))


def type_of(x: Operand) -> TensorType:
    """The type of a Tensor or a Parameter, without appending operations."""
    return x.type if isinstance(x, Tensor) else getattr(x, "inner", x).type


def content_of(x: Operand) -> tuple[DimLike, ...] | None:
    """The elements of an integer, of a Tensor whose elements are known, or of a list of these."""
    if isinstance(x, Tensor):
        return x.content
    if isinstance(x, Dim):
        return (x,)
    if isinstance(x, (list, tuple)):
        parts = [content_of(part) for part in cast("Sequence[Any]", x)]
        return None if None in parts else tuple(size for part in parts for size in part or ())
    if not isinstance(x, (int, np.integer, np.ndarray)):
        return None
    array = np.asarray(cast("Any", x))
    return tuple(array.reshape(-1).tolist()) if array.dtype.kind in "iu" else None


def shape_of(sizes: Operand) -> tuple[DimLike, ...]:
    """A target shape, in which one size may be -1; an Error where a size comes from data."""
    content = content_of(sizes)
    if content is None:
        raise ScriptError(
            f"expected a shape made of numbers and of sizes such as shape(x, 0), found {sizes!r}; "
            "a shape cannot depend on the elements of a tensor"
        )
    return content
