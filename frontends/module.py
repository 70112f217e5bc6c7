"""`Module` and `Parameter`: a model as a tree whose attribute paths name its weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar, overload

from ..errors import Error
from ..ir.core import Value
from ..ir.dtypes import dtype as check_dtype
from ..ir.types import TensorType
from ..source import current_scope, here, scope
from ..weights import ConcatRef, Ref, UnboundRef, Unsqueeze
from .tensor import Tensor
from .tracer import active, current


class Parameter(Tensor):
    """A trained tensor. Its name is the path of attributes that leads to it.

    Sizes are numbers. One parameter under two paths (tied embeddings) is one weight, named by the
    first. `name` is for parameters of a traced function, which belong to no Module.
    """

    __slots__ = ("_type", "name")

    def __init__(self, shape: Sequence[int], dtype: str = "f32", name: str | None = None) -> None:
        sizes = tuple(shape)
        if not all(type(size) is int and size > 0 for size in sizes):
            raise Error(f"a parameter's sizes are positive numbers, not {list(sizes)}", loc=here())
        try:
            check_dtype(dtype)
        except Error as error:
            raise error.at(loc=here()) from None
        self._type, self.name = TensorType(dtype, sizes), name

    @property
    def value(self) -> Value:
        """The weight of the parameter in the trace in progress."""
        return current("a parameter").weight(self)

    @property
    def type(self) -> TensorType:
        """The tensor type: dtype and shape."""
        return self._type

    def reference(self, path: str) -> Ref:
        """The source of the values of a parameter whose path is `path`."""
        return UnboundRef(path)

    def __repr__(self) -> str:
        return f"<parameter {self.type}>"


class StackedParameter(Parameter):
    """A parameter [count, *shape] that a checkpoint stores as `count` tensors of `shape`.

    At the path `experts.gate`, with the part "w1.weight", the tensors are `experts.0.w1.weight`,
    `experts.1.w1.weight`, and so on.
    """

    __slots__ = ("part",)

    def __init__(self, count: int, shape: Sequence[int], part: str, dtype: str = "f32") -> None:
        super().__init__((count, *shape), dtype)
        self.part = part

    def reference(self, path: str) -> Ref:
        """The tensors of the checkpoint, stacked."""
        count, *shape = (size for size in self.type.shape if isinstance(size, int))
        inside = path.rpartition(".")[0]
        names = (f"{inside}.{i}.{self.part}".lstrip(".") for i in range(count))
        parts = (UnboundRef(name, tuple(shape)).then(Unsqueeze(0)) for name in names)
        return ConcatRef(tuple(parts), 0)


class Module:
    """A component of a model: parameters and submodules as attributes, and a method `forward`.

    `__init__` of this class does nothing and need not be called. Modules in a plain list are not
    found; use a ModuleList.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = getattr(self, "forward", None)
        if forward is None:
            raise Error(f"{type(self).__name__} has no method called forward", loc=here())
        tracer = active()
        if tracer is None:
            raise Error(
                f"{type(self).__name__} runs only inside irc.trace, which calls it with tensors",
                loc=here(),
            )
        path = tracer.paths.get(self, type(self).__name__)
        with scope(relative_path(path, current_scope())):
            results = forward(*args, **kwargs)
        inputs = {x.value for x in (*args, *kwargs.values()) if isinstance(x, Tensor)}
        for tensor, name in _named_results(results, result_hint(path)):
            if name and tensor.value not in inputs:
                tracer.suggest(tensor.value, name)
        return results

    def children(self) -> Iterator[tuple[str, Module | Parameter]]:
        """(attribute, module or parameter), in the order of assignment."""
        for name, part in vars(self).items():
            if isinstance(part, (Module, Parameter)):
                yield name, part

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """(path, module) of this module, whose path is empty, and of all below it, each once."""
        for path, part in walk(self, prefix, set()):
            if isinstance(part, Module):
                yield path, part

    def named_parameters(self, prefix: str = "") -> Iterator[tuple[str, Parameter]]:
        """(path, parameter) of all parameters, each once, under its first path."""
        for path, part in walk(self, prefix, set()):
            if isinstance(part, Parameter):
                yield path, part

    def parameters(self) -> Iterator[Parameter]:
        """All parameters, each once."""
        return (parameter for _, parameter in self.named_parameters())


Part = TypeVar("Part", bound=Module)


class ModuleList(Module, Generic[Part]):
    """A list of modules, named by their index: `layers.0`, `layers.1`, ..."""

    def __init__(self, modules: Iterable[Part] = ()) -> None:
        self._items: list[Part] = []
        for module in modules:
            self.append(module)

    def append(self, module: Part) -> None:
        """Append a module."""
        if not isinstance(module, Module):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise Error(f"a ModuleList holds modules, not a {type(module).__name__}", loc=here())
        self._items.append(module)

    def children(self) -> Iterator[tuple[str, Module | Parameter]]:
        """(index, module)."""
        return ((str(i), module) for i, module in enumerate(self._items))

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Part]:
        return iter(self._items)

    @overload
    def __getitem__(self, index: int) -> Part: ...
    @overload
    def __getitem__(self, index: slice) -> ModuleList[Part]: ...
    def __getitem__(self, index: int | slice) -> Part | ModuleList[Part]:
        if isinstance(index, slice):
            return ModuleList(self._items[index])
        return self._items[index]


def walk(module: Module, path: str, seen: set[Any]) -> Iterator[tuple[str, Any]]:
    """(path, part) of a module and of all modules and parameters below it that are not `seen`."""
    if module in seen:
        return
    seen.add(module)
    yield path, module
    for name, part in module.children():
        inner = f"{path}.{name}" if path else name
        if isinstance(part, Module):
            yield from walk(part, inner, seen)
        elif part not in seen:
            seen.add(part)
            yield inner, part


def relative_path(path: str, outer: str) -> str:
    """`path` relative to the scope `outer`."""
    return path[len(outer) + 1 :] if outer and path.startswith(outer + ".") else path


def result_hint(path: str) -> str:
    """The name of a module's result: `layers_0` for `model.layers.0`, empty for the root."""
    last, _, name = path.rpartition(".")
    return f"{last.rpartition('.')[2]}_{name}".lstrip("_") if name.isdecimal() else name


def _named_results(results: Any, name: str) -> Iterator[tuple[Tensor, str]]:
    if isinstance(results, Tensor):
        yield results, name
    elif isinstance(results, tuple) and results and isinstance(results[0], Tensor):
        yield results[0], name
