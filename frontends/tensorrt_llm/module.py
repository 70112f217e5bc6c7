"""`Module`, `ModuleList` and `Parameter` as scripts of TensorRT-LLM use them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np

from ...errors import Error
from ...ir.dtypes import dtype_of, is_float, numpy_dtype
from ...ir.mesh import Mesh
from ...ir.types import TensorType
from ...ops import Full
from ...ops.control import LARGEST_CONSTANT
from ...source import current_scope, scope
from ...weights import Cast, Ref, Shard, UnboundRef, ref_dtype, ref_shape
from .. import module as base
from ..onnx.builder import ImportedValue, numbers
from ..tensor import Tensor as Inner
from .api import api
from .context import current_network, current_session
from .dtypes import DataType, as_array, data_type, irc_dtype
from .errors import ScriptError
from .tensor import Tensor, wrap


class Weight(base.Parameter):
    """irc's parameter under a Parameter of a script; its reference is made at the end."""

    __slots__ = ("owner",)

    def __init__(self, shape: Sequence[int], dtype: str, owner: Parameter) -> None:
        super().__init__(shape, dtype)
        self.owner = owner


@api("parameter.Parameter")
class Parameter:
    """A trained tensor, whose shape is that on one rank.

    `value` is set to an array of numpy or PyTorch, or to a weight reference of irc, and read as the
    Tensor of the network in progress. A parameter without a value stays unbound: the build says so
    by its name. `sharded` is (dim, mesh axes) where the ranks hold different parts of one tensor;
    it determines how an unbound parameter is read from a checkpoint.
    """

    def __init__(
        self,
        value: Any = None,
        shape: Sequence[int] | None = None,
        dtype: Any = None,
        is_buffer: bool = False,
    ) -> None:
        array = None if value is None or isinstance(value, Ref) else as_array(value)
        if shape is None and array is None:
            raise ScriptError("a parameter needs a value or a shape")
        own = "f32" if array is None else dtype_of(array)
        kind = own if dtype is None else irc_dtype(dtype)
        sizes = tuple(int(size) for size in (shape if array is None else array.shape) or ())
        self.inner = Weight(sizes, kind, self)
        self.is_buffer, self._has_dtype = is_buffer, dtype is not None
        self.sharded: tuple[int, tuple[str, ...]] | None = None
        self.whole_size = 0  # of the sharded dimension, where the last shards have padding
        self.bound: np.ndarray[Any, Any] | Ref | None = None
        self.name = ""
        if value is not None:
            self.value = value

    @property
    def type(self) -> TensorType:
        """dtype and shape on one rank."""
        return self.inner.type

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape on one rank."""
        return cast("tuple[int, ...]", self.type.shape)

    @property
    def dtype(self) -> DataType:
        """The element type, as a member of DataType."""
        return data_type(self.type.dtype)

    @property
    def value(self) -> Any:
        """The tensor of the parameter in the network in progress."""
        return wrap(self.inner)

    @value.setter
    def value(self, value: Any) -> None:
        if isinstance(value, Ref):
            self.bound = value
            return
        array = as_array(value)
        if array.shape != self.shape:
            raise ScriptError(
                f"the parameter {self.name or self.type} has the shape {list(self.shape)}, but "
                f"its new value has {list(array.shape)}; expected the shape on one rank"
            )
        if is_float(dtype_of(array)) and not is_float(self.type.dtype):
            raise ScriptError(
                f"the parameter {self.name or self.type} holds codes of {self.type.dtype}, but its "
                f"new value has floats of {dtype_of(array)}; quantize them first, as "
                "torch.ops.trtllm.symmetric_quantize_last_axis_of_batched_matrix does"
            )
        if dtype_of(array) in ("f16", "bf16") and not self._has_dtype:
            self.inner = Weight(self.shape, dtype_of(array), self)
        if dtype_of(array) != self.type.dtype:
            current_session().note(
                f"values of {dtype_of(array)} are converted to {self.type.dtype}, the dtype of "
                "their parameter"
            )
            array = array.astype(numpy_dtype(self.type.dtype))
        self.bound = array

    @property
    def raw_value(self) -> np.ndarray[Any, Any]:
        """The array that was set; an Error where there is none."""
        if not isinstance(self.bound, np.ndarray):
            raise ScriptError(f"the parameter {self.name or self.type} has no array")
        return self.bound

    def is_inited(self) -> bool:
        """Whether it has a value."""
        return self.bound is not None

    def reference(self, name: str, mesh: Mesh, value: Any) -> Ref:
        """The weight reference on this rank of its `value`, which is a reference or None."""
        if isinstance(value, Ref):
            ref, kind = value, ref_dtype(value)
            if kind not in (None, self.type.dtype):
                ref = ref.then(Cast(self.type.dtype))
            shape = ref_shape(ref, mesh)
            if shape is not None and shape != self.type.shape:
                raise Error(
                    f"the parameter {name} is {self.type}, but {value} has the shape "
                    f"{list(shape)} on one rank"
                )
            return ref
        axes = [a for a in (self.sharded or (0, ()))[1] if a in mesh.names]
        if not axes or self.sharded is None:
            return UnboundRef(name)
        dim, size = self.sharded[0] % len(self.shape), mesh.group_size(tuple(axes))
        every = self.whole_size or self.shape[dim] * size
        whole = tuple(every if i == dim else n for i, n in enumerate(self.shape))
        return UnboundRef(name, whole).then(Shard(dim, tuple(axes)))

    def __repr__(self) -> str:
        return f"<parameter {self.type}>"


@api("module.Module")
class Module(base.Module):
    """A component of a model; parameters and modules are attributes, `forward` builds."""

    network_outputs: Mapping[str, Tensor] = {}  # those that this module registered

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        network = current_network()
        path = network.path_of(self)
        with scope(base.relative_path(path, current_scope())):
            results = cast("Any", self).forward(*args, **kwargs)
        several: Any = results
        first = cast("Any", [*several, None])[0] if isinstance(several, tuple) else several
        is_given = any(first is x for x in (*args, *kwargs.values()))
        if isinstance(first, Tensor) and not is_given:
            network.suggest(first, base.result_hint(path))
        elif isinstance(first, Inner) and not is_given and (hint := base.result_hint(path)):
            network.tracer.suggest(first.value, hint)
        return results

    def children(self) -> Iterator[tuple[str, Any]]:
        """(attribute, module or parameter), in the order of assignment."""
        for name, part in vars(self).items():
            if isinstance(part, (base.Module, Parameter)):
                yield name, part

    def named_children(self) -> Iterator[tuple[str, Any]]:
        """(attribute, module)."""
        return ((n, part) for n, part in self.children() if isinstance(part, base.Module))

    def named_modules(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Any]]:
        """(path, module) of this module and of all below it, each once."""
        parts = base.walk(self, prefix, set())
        return ((path, part) for path, part in parts if isinstance(part, base.Module))

    def named_modules_with_parent(
        self, memo: Any = None, prefix: str = "", parent: Any = None, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Any, Any]]:
        """(path, module, the module that has it) of this module and of all below it, each once."""
        modules: dict[str, Any] = {}
        for path, module in self.named_modules(memo, prefix):
            above = path.rpartition(".")[0]
            yield path, module, parent if module is self else modules.get(above, self)
            modules[path] = module

    def modules(self) -> Iterator[Any]:
        """This module and all below it, each once."""
        return (module for _, module in self.named_modules())

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Any]]:
        """(path, parameter), each once, under its first path."""
        for path, part in base.walk(self, prefix, set()):
            inside = path[len(prefix) :].lstrip(".") if prefix else path
            if isinstance(part, Parameter) and (recurse or "." not in inside):
                yield path, part

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        """All parameters, each once."""
        return (parameter for _, parameter in self.named_parameters(recurse=recurse))

    parameter = parameters  # its name until 0.9

    def register_parameter(self, name: str, param: Parameter | None) -> None:
        """Assign a parameter, or None for one that this layer does without."""
        setattr(self, name, param)

    def register_network_output(self, name: str, value: Tensor) -> None:
        """Keep a tensor for debugging; `named_network_outputs` lists those of all modules."""
        self.network_outputs = {**self.network_outputs, name: value}

    def named_network_outputs(self) -> Iterator[tuple[str, Tensor]]:
        """(path, tensor) of every tensor that a module registered."""
        for path, module in self.named_modules():
            for name, value in module.network_outputs.items():
                yield (f"{path}.{name}" if path else name), value

    def apply(self, fn: Any) -> Any:
        """Call a function on every module below this one, and on this one last."""
        for module in reversed(list(self.modules())):
            fn(module)
        return self


class ModuleList(base.ModuleList[Any], Module):
    """A list of modules, named by their index."""

    def __getitem__(self, index: Any) -> Any:
        part = super().__getitem__(index)
        return ModuleList(part) if isinstance(index, slice) else part

    def __setitem__(self, index: int, module: Any) -> None:
        self._items[index] = module

    def __getattr__(self, name: str) -> Any:
        if not name.isdigit():
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return self[int(name)]


api("module.ModuleList")(ModuleList)


def constant_tensor(values: Any, dtype: Any = None) -> Tensor:
    """The tensor of an array; more than 16 different numbers become a weight."""
    array = as_array(values)
    kind = irc_dtype(dtype) if dtype is not None else dtype_of(array)
    array = array.astype(numpy_dtype(kind))
    builder = current_network().builder
    is_small = array.size <= LARGEST_CONSTANT
    if is_small and array.ndim < 2 and kind in ("i32", "i64"):
        return Tensor.of(ImportedValue(kind, array.shape, content=numbers(array)))
    if array.size and (array == array.flat[0]).all():
        value = builder.value(Full(value=array.flat[0].item(), shape=array.shape, dtype=kind))
    elif is_small:
        value = builder.constant(numbers(array), kind, array.shape)
    else:
        return Parameter(array, dtype=kind, is_buffer=True).value
    return Tensor.of(builder.imported(value))
