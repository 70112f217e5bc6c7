"""`Network`: the graph of one rank that a script builds, with its inputs, outputs and ranges."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar, cast
from weakref import WeakSet

from ...ir.core import Function, Op, Value, Weight
from ...ir.dims import Dim, DimLike, bind, symbol
from ...ir.types import TensorType
from ...ops import Where
from ...ops.control import LARGEST_CONSTANT
from ...ops.elementwise import Binary
from ...source import Loc, here
from .. import module as base
from ..onnx.builder import Builder as GraphBuilder
from ..onnx.builder import ImportedValue
from ..onnx.builder import sizes as contents
from ..trace import check_input_name
from ..tracer import Tracer, tracing
from .api import api, register
from .context import building, current_network
from .dtypes import irc_dtype
from .errors import ScriptError
from .settings import PluginConfig
from .tensor import Tensor

if TYPE_CHECKING:
    from ...weights import Ref
    from ..arrays import Array
    from .module import Module, Parameter


class Output(NamedTuple):
    """A marked output: its value, which may have another dtype than its tensor."""

    value: Value
    tensor: Tensor


class Layer:
    """One operation of a network, for scripts that draw it; number `index` in program order."""

    def __init__(self, op: Op, index: int, network: Network) -> None:
        self.type, self.name = op.opname, f"{op.opname}_{index}"
        self._op, self._network = op, network
        self.num_inputs, self.num_outputs = len(op.operands), len(op.results)

    def get_input(self, index: int) -> Tensor:
        """An operand."""
        return self._network.tensor_of(self._op.operands[index])

    def get_output(self, index: int) -> Tensor:
        """A result."""
        return self._network.tensor_of(self._op.results[index])


class Transfer(NamedTuple):
    """A value sent to, or an argument received from, another rank."""

    value: Value
    rank: int
    loc: Loc


class Named(NamedTuple):
    """A parameter, its value, and the name of its weight, which may differ by rank unless it
    `is_given`."""

    name: str
    parameter: Parameter
    value: Array | Ref | None
    is_given: bool


class NetworkTracer(Tracer):
    """The tracer of a network, in which sizes without a name are those that they meet, and weights
    are named at the end."""

    def __init__(self, network: Network) -> None:
        super().__init__(network.function, {}, {})
        self.network = network

    def prepare(self, op: type[Op], operands: Sequence[Value]) -> None:
        """Let operands broadcast."""
        if issubclass(op, (Binary, Where)):
            self.network.agree(*operands)

    def weight(self, parameter: base.Parameter) -> Weight:
        """The weight of a parameter."""
        cast("dict[Any, str]", self.keys).setdefault(parameter, f"parameter_{len(self.keys)}")
        return super().weight(parameter)


class NetworkBuilder(GraphBuilder):
    """Appends what rules of the ONNX reader make to a network, at the line of the script."""

    def __init__(self, tracer: Tracer) -> None:
        absent = cast("Any", None)  # no module and no files: weights are parameters
        super().__init__(absent, tracer.function, absent)
        self.tracer = tracer

    def add(self, op: Op) -> Op:
        """Append an operation, behind those of its operands."""
        for value in op.operands:
            if value.producer is not None and value.producer.parent is None:
                self.add(value.producer)
        op.loc = here()
        self.tracer.append(op)
        return op

    def _materialized(self, operand: ImportedValue) -> Value:
        # constants that differ by rank have one form, also where one counts from 0
        if operand.content is not None and operand.content.size <= LARGEST_CONSTANT:
            return self.constant(operand.content, operand.dtype, operand.shape)
        return super()._materialized(operand)


@api("network.Network")
class Network:
    """The graph of one rank: a function of irc in progress.

    `inputs` and `outputs` are in order. `layouts` says of an input (`%name`) or output which
    dimension the ranks share, and over which axes. `sent` and `received` are the ends of this
    pipeline stage.
    """

    def __init__(self) -> None:
        self.name = "network"
        self.function = Function("forward")
        self.tracer = NetworkTracer(self)
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Output] = {}
        self.layouts: dict[str, tuple[int, tuple[str, ...]]] = {}
        self.sent: list[Transfer] = []
        self.received: list[Transfer] = []
        self.dims: dict[str, tuple[int, int, int]] = {}
        self.plugin_config = PluginConfig()
        self.mapping: Any = None  # of the ranks of its engine, once it is built
        self.unnamed: set[str] = set()  # symbols of inputs without dim_range
        self.builder = NetworkBuilder(self.tracer)
        self.entries: WeakSet[ImportedValue] = WeakSet()  # of tensors
        self.strongly_typed = True
        self._ranges: dict[str, tuple[Ranges, str]] = {}
        self._paths: dict[Any, str] = {}
        self._values: dict[Any, Any] = {}  # of parameters, when the network was finished
        self._names: dict[Any, str] = {}  # of parameters, which the script or their path gives

    # -- inputs and outputs

    def add_input(
        self, name: str, dtype: str, shape: Sequence[Any], dim_range: Any = None
    ) -> Value:
        """A new argument; -1 in `shape` is a symbol with the name and ranges of `dim_range`.

        Without `dim_range` its name is made of those of the input and the dimension, and
        `add_profiles` gives the ranges. A shape may also have sizes of other inputs.
        """
        if name in self.inputs:
            raise ScriptError(f"the network has two inputs called {name!r}; rename one")
        check_input_name(name)
        if any(isinstance(size, Dim) for size in shape):
            sizes = tuple(shape)
        else:
            sizes = self._sizes_of(name, [int(size) for size in shape], dim_range)
        value = self.function.add_argument(name, TensorType(dtype, sizes))
        self.tracer.named.add(value)
        return value

    def _sizes_of(self, name: str, shape: list[int], dim_range: Any) -> tuple[DimLike, ...]:
        rows = ranges_of(name, shape, dim_range)
        sizes: list[DimLike] = []
        for i, (size, row) in enumerate(zip(shape, rows, strict=True)):
            if row is not None:
                self._check_range(row, f"{name}: shape {shape}")
            if size >= 0:
                sizes.append(size)
            elif row is not None and row.merged[0] == row.merged[2]:
                sizes.append(row.merged[0])  # of one size in all profiles
            elif row is None:
                self.unnamed.add(f"{name}_{i}")
                sizes.append(symbol(f"{name}_{i}"))
            else:
                self.dims[row.name] = row.merged
                sizes.append(symbol(row.name))
        return tuple(sizes)

    def add_profiles(self, profiles: Sequence[OptimizationProfile]) -> None:
        """Take the ranges of the inputs that have none from optimization profiles."""
        for name, tensor in self.inputs.items():
            rows = [ranges for profile in profiles if (ranges := profile.ranges(name)) is not None]
            for size, *ranges in zip(tensor.type.shape, *rows, strict=True) if rows else ():
                if isinstance(size, Dim) and str(size) in self.unnamed:
                    low, best, high = Range(str(size), tuple(ranges)).merged
                    before = self.dims.get(str(size), (low, best, high))
                    low, high = max(low, before[0]), min(high, before[2])
                    self.dims[str(size)] = low, max(low, min(best, high)), high

    def agree(self, *operands: Tensor | Value, but: Sequence[int] = ()) -> None:
        """Take sizes of operands in the same dimension, counted from the end, for one size where
        the script gave them no names; not in the dimensions `but`."""
        for place in range(-max(x.type.ndim for x in operands), 0) if self.unnamed else ():
            aligned = [x for x in operands if x.type.ndim >= -place and place not in but]
            for x, y in pairwise(aligned):
                if x.type.shape[place] != y.type.shape[place]:
                    self.unify(x.type.shape[place], y.type.shape[place])

    def unify(self, left: DimLike, right: DimLike, named: bool = False) -> bool:
        """Take two sizes for one, where one of them is a symbol that the script did not name, or
        `named` allows those that it did.

        TensorRT compares sizes when it runs; so does irc then, by the symbol of the inputs.
        """
        for size, other in ((right, left), (left, right)):
            is_free = isinstance(size, Dim) and (named or str(size) in self.unnamed)
            is_inside = isinstance(other, Dim) and str(size) in other.symbols()
            if is_free and not is_inside and other != 1:
                self._substitute({str(size): other})
                return True
        return False

    def _substitute(self, sizes: dict[str, DimLike]) -> None:
        """Write other sizes for symbols, everywhere in the network."""
        for arg in self.function.args:
            arg.type = _bound(arg.type, sizes)
        for op in self.function:
            for name in op.attribute_types:
                setattr(op, name, _bound(getattr(op, name), sizes))
            for result in op.results:
                result.type = _bound(result.type, sizes)
        for entry in self.entries:
            entry.shape = _bound(entry.shape, sizes)
            if entry.content is not None:
                elements = [_bound(element, sizes) for element in entry.content.flat]
                entry.content = contents(*elements).reshape(entry.content.shape)
        self.unnamed -= sizes.keys()

    def _check_range(self, row: Range, what: str) -> None:
        """An Error where another input gives a dimension of this name other ranges."""
        profiles, other = self._ranges.setdefault(row.name, (row.profiles, what))
        if profiles == row.profiles:
            return
        raise ScriptError(
            f"the dimension {row.name!r} has different ranges (min, opt, max):\n"
            f"  {other}, {row.name} in {', '.join(map(str, profiles))}\n"
            f"  {what}, {row.name} in {', '.join(map(str, row.profiles))}\n"
            "give sizes that are equal one range, and others another name"
        )

    def mark_output(self, tensor: Tensor, name: str | None = None, dtype: Any = None) -> None:
        """Make a tensor an output, converted to `dtype`."""
        chosen = re.sub(r"\W", "_", name or tensor.name or f"output_{len(self.outputs)}")
        if chosen in self.outputs:
            raise ScriptError(f"the network has two outputs called {chosen!r}; rename one")
        value = tensor.ir if dtype is None else self._cast(tensor.ir, irc_dtype(dtype))
        self.outputs[chosen] = Output(value, tensor)
        self.suggest(tensor, chosen)

    def rename(self, tensor: Tensor, name: str) -> None:
        """Give an input or an output another name; any other tensor one in dumps."""
        name, old = re.sub(r"\W", "_", name), tensor.name
        marked = self._output_of(tensor)
        if self.inputs.get(old) is tensor and name != old:
            check_input_name(name)
            self.inputs = _renamed(self.inputs, old, name)
            tensor.ir.name = name
        elif marked is not None:
            self.outputs = _renamed(self.outputs, marked, name)
        value = tensor.entry.value
        if value is not None and value.producer is not None:
            value.name = name
            self.tracer.named.add(value)

    def change_dtype(self, tensor: Tensor, dtype: str) -> None:
        """Convert an output, change the dtype of an input that is not used, or convert a tensor."""
        if tensor.type.dtype == dtype:
            return
        marked = self._output_of(tensor)
        if marked is not None:
            value = self._cast(self.outputs[marked].value, dtype)
            self.outputs[marked] = self.outputs[marked]._replace(value=value)
        elif not self.is_input(tensor):
            tensor.convert(dtype)
        elif tensor.ir.users:
            raise ScriptError(
                f"the input {tensor.name} is {tensor.type} and in use; set its dtype before, or "
                "cast it"
            )
        else:
            tensor.ir.type, tensor.entry.dtype = TensorType(dtype, tensor.ir.type.shape), dtype

    def _output_of(self, tensor: Tensor) -> str | None:
        """The name under which a tensor is an output."""
        return next((n for n, output in self.outputs.items() if output.tensor is tensor), None)

    def _cast(self, value: Value, dtype: str) -> Value:
        return self.builder.get(self.builder.cast(self.builder.imported(value), dtype))

    def share(self, name: str, dim: int, axes: Sequence[str] = ("tp",)) -> None:
        """The ranks over `axes` hold parts of an input (`%name`) or output along `dim`."""
        self.layouts[name] = dim, tuple(axes)

    _mark_output = mark_output

    def get_layers(self) -> list[Layer]:
        """Every operation, in order."""
        return [Layer(op, i, self) for i, op in enumerate(self.function)]

    @property
    def trt_network(self) -> Network:
        """Itself: there is no TensorRT below."""
        return self

    def __getattr__(self, name: str) -> Any:
        verb, _, what = name.partition("_")  # TensorRT counts and gets inputs, outputs, layers
        if verb == "num" and what in _PARTS:
            return len(_PARTS[what](self))
        if verb == "get" and f"{what}s" in _PARTS:
            return _PARTS[f"{what}s"](self).__getitem__
        if verb != "add":
            raise AttributeError(f"Network has no attribute called {name!r}")
        raise ScriptError(
            f"{name} of TensorRT's network does not exist in irc; write the operation with "
            "tensorrt_llm.functional"
        )

    def get_inputs(self) -> list[Tensor]:
        """Every input."""
        return list(self.inputs.values())

    def get_outputs(self) -> list[Tensor]:
        """Every output."""
        return [
            out.tensor if out.tensor.ir is out.value else self.tensor_of(out.value, name)
            for name, out in self.outputs.items()
        ]

    def tensor_of(self, value: Value, name: str = "") -> Tensor:
        """A tensor of a value in the graph, which has some name."""
        name = name or value.name or f"value_{id(value)}"
        return Tensor.of(self.builder.imported(value), self, name)

    def is_input(self, tensor: Tensor) -> bool:
        """Whether a tensor is an input."""
        return tensor.ir.owner is self.function

    # -- pipeline stages

    def send(self, tensor: Tensor, rank: int) -> Tensor:
        """Hand a tensor to another rank; returns it."""
        self.sent.append(Transfer(tensor.ir, rank, here()))
        return tensor

    def receive(self, tensor: Tensor, rank: int) -> Tensor:
        """The input `tensor`, which is received from another rank."""
        value = tensor.ir
        if value.owner is not self.function or any(other.value is value for other in self.received):
            raise ScriptError(
                "expected recv() of an input of the network, which gives the shape and dtype, and "
                f"of another one each time; found {tensor.name or tensor}"
            )
        self.received.append(Transfer(value, rank, here()))
        return tensor

    # -- names

    def set_named_parameters(self, named_parameters: Iterable[tuple[str, Parameter]]) -> None:
        """Name the weights; a parameter that is not named gets the path of its attribute."""
        for name, parameter in named_parameters:
            self._names[parameter] = parameter.name = name

    def path_of(self, module: Module) -> str:
        """The path of a module below the one that the script called."""
        if module not in self._paths:
            for path, part in module.named_modules():
                self._paths.setdefault(part, path)
            for path, parameter in module.named_parameters():
                self._names.setdefault(parameter, path)
        return self._paths[module]

    def suggest(self, tensor: Tensor, name: str) -> None:
        """Name a tensor in dumps, unless it has no operations yet or the user named it."""
        if name and tensor.entry.value is not None:
            self.tracer.suggest(tensor.ir, name)

    def weight_names(self) -> dict[Value, Named]:
        """The name and the parameter of every weight that operations use."""
        names: dict[Value, Named] = {}
        counts = Counter[str]()
        for inner, weight in self.tracer.weights.items():
            parameter: Parameter = cast("Any", inner).owner
            name = re.sub(r"[^\w.]", "_", self._names.get(parameter, "constant"))
            counts[name] += 1
            unique = f"{name}_{counts[name] - 1}" if counts[name] > 1 else name
            value = self._values.get(parameter, parameter.bound)
            names[weight] = Named(unique, parameter, value, parameter in self._names)
        return names

    def finish(self) -> None:
        """Keep the values of the parameters: the script may set others for another network."""
        used = [cast("Any", inner).owner for inner in self.tracer.weights]
        self._values = {owner: owner.bound for owner in used if owner.bound is not None}

    def __repr__(self) -> str:
        return f"<network of {', '.join(self.inputs)}, operations: {sum(1 for _ in self.function)}>"


_PARTS: dict[str, Callable[[Network], list[Any]]] = {
    "inputs": Network.get_inputs,
    "outputs": Network.get_outputs,
    "layers": Network.get_layers,
}


def _bound(value: Any, sizes: Mapping[str, DimLike]) -> Any:
    """A type, a size, or a tuple of sizes, with other sizes for symbols."""
    if isinstance(value, TensorType):
        return value.replace(shape=_bound(value.shape, sizes))
    if isinstance(value, tuple):
        return tuple(_bound(part, sizes) for part in cast("tuple[Any, ...]", value))
    if isinstance(value, Dim) and not sizes.keys().isdisjoint(value.symbols()):
        return bind(value, sizes)
    return value


Kept = TypeVar("Kept")


def _renamed(table: dict[str, Kept], old: str, new: str) -> dict[str, Kept]:
    """A table with another key, in the same place."""
    if new != old and new in table:
        raise ScriptError(f"the network has two inputs or outputs called {new!r}; rename one")
    return {new if key == old else key: entry for key, entry in table.items()}


@api("network.net_guard")
@contextmanager
def net_guard(network: Network) -> Generator[Network]:
    """Build into a network for the block."""
    with building(network), tracing(network.tracer):
        yield network


default_net = default_trtnet = current_network
register("_common.default_net", default_net)
register("_common.default_trtnet", default_trtnet)


# -- names and ranges of sizes


Ranges: TypeAlias = tuple[tuple[int, int, int], ...]  # (min, opt, max) per profile


class Range(NamedTuple):
    """One dimension: its symbol, and its range in every profile."""

    name: str
    profiles: Ranges

    @property
    def merged(self) -> tuple[int, int, int]:
        """(min, opt, max) over all profiles; opt is that of the largest profile."""
        largest = max(self.profiles, key=lambda sizes: (sizes[2], sizes[1]))
        return min(low for low, _, _ in self.profiles), largest[1], largest[2]


def ranges_of(name: str, shape: Sequence[int], dim_range: Any) -> list[Range | None]:
    """The range of every dimension of an input; None where it is static, or a profile has it.

    `dim_range` has, by the names of the dimensions, a number or (min, opt, max) per profile.
    """
    if dim_range is None:
        return [None] * len(shape)
    try:
        rows = [Range(_symbol(key), tuple(map(_range, row))) for key, row in dim_range.items()]
        counts = {len(row.profiles) for row in rows}
        static = [{*row.profiles} == {(n,) * 3} for row, n in zip(rows, shape, strict=True)]
        if len(counts) != 1 or 0 in counts or static != [size >= 0 for size in shape]:
            raise ValueError
    except (AttributeError, TypeError, ValueError):
        raise ScriptError(
            f"the input {name} of shape {list(shape)}: expected a dim_range such as "
            "OrderedDict(batch=[(1, 4, 8)], hidden=[64]), with a size or (min, opt, max) in rising "
            f"order per dimension and profile, found {dim_range}"
        ) from None
    return [row if size < 0 else None for row, size in zip(rows, shape, strict=True)]


def _symbol(key: str) -> str:
    symbol = re.sub(r"\W", "_", key)
    return symbol if re.match(r"[A-Za-z_]", symbol) else f"d{symbol}"


def _range(row: Any) -> tuple[int, int, int]:
    sizes: Any = [*row] if isinstance(row, (list, tuple)) else [row]
    low, best, high = (int(size) for size in (sizes * 3 if len(sizes) == 1 else sizes))
    if not 0 <= low <= best <= high:
        raise ValueError
    return low, best, high


class OptimizationProfile:
    """The ranges of the shapes of inputs, as scripts state them to TensorRT's builder."""

    def __init__(self) -> None:
        self._shapes: dict[str, list[Sequence[int]]] = {}

    def set_shape(
        self, input: str, min: Sequence[int], opt: Sequence[int], max: Sequence[int]
    ) -> None:
        """The smallest, most frequent and largest shape of an input."""
        self._shapes[input] = [tuple(min), tuple(opt), tuple(max)]

    def set_shape_input(self, input: str, min: Any, opt: Any, max: Any) -> None:
        """Accepted: irc has no inputs whose elements are sizes, and refuses them where used."""

    def ranges(self, input: str) -> list[tuple[int, int, int]] | None:
        """(min, opt, max) of every dimension of an input; None if they are not set."""
        rows = self._shapes.get(input)
        return None if rows is None else [_range(row) for row in zip(*rows, strict=True)]
