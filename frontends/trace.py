"""`trace`: runs a model once over symbolic tensors and returns the operations as a module."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, cast

from ..argument_checks import check_kind
from ..errors import Error, did_you_mean
from ..ir import core
from ..ir.dims import Dim, checked_ranges
from ..ir.types import TensorType
from ..ops.control import Return
from ..source import Loc, here
from .module import Module, Parameter
from .shapes import as_shape
from .tensor import Tensor, kind_name
from .tracer import Tracer, begin


@dataclass(frozen=True)
class Spec:
    """dtype and shape of an input, as in `Spec("i32", ("B", "S"))`; a string is a symbol."""

    dtype: str
    shape: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        check_kind("the dtype of a Spec", self.dtype, str, 'its name, such as "f32"')
        check_kind("the shape of a Spec", self.shape, (tuple, list), 'a tuple, such as ("B", 64)')

    @property
    def type(self) -> TensorType:
        """The tensor type."""
        return TensorType(self.dtype, as_shape((tuple(self.shape),)))


def trace(
    model: Module | Callable[..., Any],
    inputs: Mapping[str, Spec],
    dims: Mapping[str, tuple[int, int, int]] | None = None,
    name: str | None = None,
    aliases: Mapping[str, str] | None = None,
) -> core.Module:
    """The module whose function @forward computes what `model` computes.

    `model` is a Module or a function. It is called with one tensor per input, by name, and returns
    a tensor, several, or a dict of them, whose keys become the names of the results. `dims` gives
    each symbol (min, typical, max). `aliases` maps a result to the argument whose memory it
    reuses, as a KV cache does. Weights are `unbound` until a checkpoint is bound.
    """
    loc = here()
    try:
        types = {arg: _input_type(arg, spec) for arg, spec in inputs.items()}
        _check_call(model, types)
        ranges = _checked_dims(dims or {}, types.values())
        paths, keys = _names(model)
    except Error as error:
        raise error.at(loc=loc) from None
    function = core.Function("forward", types.items())
    tracer = Tracer(function, paths, keys)
    # the trace in progress lives in this context only, so that it ends also after an exception
    copy_context().run(_run, model, tracer, aliases or {}, loc)
    module = core.Module(name or _name(model), dims=ranges)
    for parameter in [p for p in keys if p in tracer.weights]:
        module.add_weight(tracer.weights.pop(parameter))
    for weight in tracer.weights.values():
        module.add_weight(weight)
    module.add_function(function)
    return module


def _run(model: Callable[..., Any], tracer: Tracer, aliases: Mapping[str, str], loc: Loc) -> None:
    begin(tracer)
    function = tracer.function
    results = model(**{str(arg.name): Tensor(arg, tracer) for arg in function.args})
    try:
        named = _results(model, results)
        values = [tensor.value for _, tensor in named]
        function.results = _declared(named, values, aliases, function)
    except Error as error:
        raise error.at(loc=loc) from None
    returned = Return(values)
    returned.loc = loc
    function.append(returned)


def check_input_name(name: str) -> None:
    """An Error unless a name fits an input."""
    if not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise Error(f"expected an input name such as input_ids, found {name!r}", loc=here())


def _input_type(name: str, spec: Any) -> TensorType:
    if not isinstance(spec, Spec):
        raise Error(f'the input {name} is {spec!r}; expected irc.Spec("f32", ("B", 64))')
    check_input_name(name)
    try:
        return spec.type
    except Error as error:
        raise Error(f"the input {name}: {error.message}") from None


def _check_call(model: Any, types: Mapping[str, TensorType]) -> None:
    """Raise an Error unless the inputs are the arguments of the model."""
    function = getattr(model, "forward", None) if isinstance(model, Module) else model
    if not callable(function):
        what = f"{type(model).__name__} has no method called forward"
        raise Error(
            what if isinstance(model, Module) else f"a {type(model).__name__} is not a model"
        )
    parameters = inspect.signature(function).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    needed = [p.name for p in parameters if p.name in names and p.default is p.empty]
    for name in types:
        if name not in names and not any(p.kind is p.VAR_KEYWORD for p in parameters):
            raise Error(
                f"{_title(model)} has no argument called {name!r}{did_you_mean(name, names)}; "
                f"it takes {', '.join(names) or 'none'}"
            )
    missing = [name for name in needed if name not in types]
    if missing:
        raise Error(f"{_title(model)} needs {' and '.join(missing)}; describe it in inputs")


def _checked_dims(
    dims: Mapping[str, Any], types: Iterable[TensorType]
) -> dict[str, tuple[int, int, int]]:
    """The ranges of all symbols of the inputs; with no dims at all, none."""
    sizes = [size for type in types for size in type.shape if isinstance(size, Dim)]
    symbols = dict.fromkeys(symbol for size in sizes for symbol in size.symbols())
    ranges = checked_ranges(dims, symbols)
    for symbol in symbols if dims else ():
        if symbol not in dims:
            raise Error(f"dims has no range for {symbol}; add {symbol!r}: (min, typical, max)")
    return ranges


def _names(model: Any) -> tuple[dict[object, str], dict[Parameter, str]]:
    """The names of a model's modules and parameters; a function has none."""
    if not isinstance(model, Module):
        return {}, {}
    paths: dict[object, str] = {module: path for path, module in model.named_modules()}
    return paths, {parameter: path for path, parameter in model.named_parameters()}


def _results(model: Any, results: Any) -> list[tuple[str | None, Tensor]]:
    """(name, tensor) of everything that the model returned; a name is None outside a dict."""
    rows: list[tuple[str | None, Any]]
    if isinstance(results, Mapping):
        rows = list(cast("Mapping[str, Any]", results).items())
    elif isinstance(results, (tuple, list)):
        rows = [(None, item) for item in cast("Iterable[Any]", results)]
    else:
        rows = [(None, results)]
    for i, (name, item) in enumerate(rows):
        if name is not None and not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise Error(f"expected a result name such as logits, found {name!r}")
        if not isinstance(item, Tensor):
            which = f"result {name or i}" if len(rows) > 1 else "the result"
            raise Error(
                f"{_title(model)}: {which} is {kind_name(item)}; return a tensor, several tensors, "
                "or a dict of them"
            )
    if not rows:
        raise Error(f"{_title(model)} returns no tensors")
    return rows


def _declared(
    named: list[tuple[str | None, Tensor]],
    values: list[core.Value],
    aliases: Mapping[str, str],
    function: core.Function,
) -> tuple[core.Result, ...]:
    names = [name for name, _ in named if name is not None]
    args = {str(arg.name): arg for arg in function.args}
    for result, arg in aliases.items():
        if result not in names:
            raise Error(f"aliases: there is no result {result!r}{did_you_mean(result, names)}")
        if arg not in args:
            raise Error(f"aliases: there is no input {arg!r}{did_you_mean(arg, args)}")
        got, wanted = values[[name for name, _ in named].index(result)].type, args[arg].type
        if got is not wanted:
            raise Error(f"the result {result} is {got}, but the input {arg} it aliases is {wanted}")
    if not names:
        return ()
    return tuple(core.Result(name, aliases.get(name or "")) for name, _ in named)


def _title(model: Any) -> str:
    if isinstance(model, Module):
        return f"{type(model).__name__}.forward"
    return getattr(model, "__name__", type(model).__name__)


def _name(model: Any) -> str:
    """`TwoTower` and `two_tower` both give @two_tower."""
    title = type(model).__name__ if isinstance(model, Module) else _title(model)
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", title).lower()
    return re.sub(r"\W+", "_", words).strip("_") or "model"
