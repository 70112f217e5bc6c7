"""The ONNX graph of a function by the lowering tables, once for all ranks.

On CPU every float narrower than f64 is computed in f32: ONNX Runtime has no bf16 arithmetic there
and runs f16 through f32 anyway. Narrow weights stay narrow in their file and are cast once. The
operations of the module that convert or make numbers round them to their dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from onnx.onnx_ml_pb2 import TensorProto

from irc.backends.lowering import Lowering, expansion
from irc.backends.onnx.graph import COLLECTIVE, DOMAIN, DTYPES, Graph, tensor, value_info
from irc.backends.onnx.kernels import MISSING
from irc.backends.onnx.storage import Form, Storage
from irc.backends.onnx.values import Flat as Flat
from irc.backends.onnx.values import Later as Later
from irc.backends.onnx.values import Place
from irc.errors import Error
from irc.ir.core import Function, Module, Op, Value, Weight
from irc.ir.dims import Dim, DimLike, Shape, linear, product
from irc.ir.dtypes import dtype as dtype_called
from irc.ir.dtypes import numpy_dtype
from irc.ops.collective import Exchange
from irc.text.printer import names_of
from irc.weights import Ref, UnboundRef

Lowered: TypeAlias = str | Flat | Later | Sequence[str | Flat]
Rule: TypeAlias = Callable[["Emitter", Any], Lowered]
_KINDS = ("attention", "collective", "elementwise", "matrix", "quantized", "reduce", "shape")
TABLE: Lowering[Rule] = Lowering("onnx", [f"irc.backends.onnx.lower_{kind}" for kind in _KINDS])


class Emitter:
    """The graph of `function` under construction, with what lowerings need to add to it.

    `get` and `flat` give the name of a value, `node` and `add` of the graph add nodes, `shape` and
    `dim` give sizes that are known at run time only. `ranks` are those that run the function; their
    graphs differ in weights, positions and groups only.
    """

    compute = "f32"
    table: Lowering[Rule] = TABLE
    missing: Mapping[str, tuple[str, ...]] = MISSING  # by node, the dtypes that are computed in i32
    reduces_nan = False  # whether ReduceMax, ReduceMin and ArgMax find NaN; ONNX Runtime's do not

    def __init__(
        self, module: Module, function: Function, storage: Storage, ranks: Sequence[int]
    ) -> None:
        self.module, self.function, self.storage, self.ranks = module, function, storage, ranks
        self.graph = Graph()
        self.add = self.graph.add
        self.forms: dict[str, Form] = {}  # by initializer
        self.other_forms: dict[Weight, Ref] = {}  # converted weights, from their initializers
        self._places: dict[Value, Place] = {}
        self._later: dict[Value, Callable[[], str]] = {}
        self._same: dict[Value, Value] = {}
        self._outer: dict[Value, Value] = {}
        self._fixed: set[str] = set()  # names of inputs, weights and outputs
        self._named: set[str] = set()  # names of values as printed
        self._stored: dict[Weight, tuple[str, str]] = {}
        self._cache: dict[object, Any] = {}
        self._names: dict[Value, str] = {}
        self.expanding = 0  # the expansions around the operation that is lowered

    def dtype(self, value: Value | str) -> str:
        """The dtype in which a value (or values of an IR dtype) are computed."""
        kind = value if isinstance(value, str) else value.type.dtype
        wider = dtype_called(kind).wider
        return self.compute if wider == "f32" else wider or kind

    def emit(self) -> None:
        """Add the function: inputs, operations, outputs."""
        function, graph = self.function, self.graph
        results = self._output_names()
        graph.taken |= dict.fromkeys([*(str(a.name) for a in function.args), *results], 0)
        self._names = {value: name[1:] for value, name in names_of(function).items()}
        for arg in function.args:
            name = str(arg.name)
            graph.inputs.append(value_info(name, self.dtype(arg), arg.type.shape))
            self._places[arg] = Place(name)
            self._fixed.add(name)
        self._body(function)
        graph.prefix, graph.node_name, graph.where = "return", "return", ""
        for name, value in zip(results, function.returned, strict=True):
            output = graph.now(self.get(value))
            if output in self._fixed or output in graph.initializers:
                output = self.add("Identity", output)
            graph.rename(output, name)
            self._fixed.add(name)
            graph.outputs.append(value_info(name, self.dtype(value), value.type.shape))

    def _output_names(self) -> list[str]:
        """The result's own name, or `name.out` where an argument is called so."""
        args = {str(a.name) for a in self.function.args}
        return [f"{n}.out" if n in args else n for n in self.function.result_names()]

    def results(self) -> list[dict[str, str]]:
        """Every result {result, output}: its name and the model's; `state` is an input that is the
        same memory."""
        aliases, args = self.function.aliases(), self.function.args
        names = zip(self.function.result_names(), self._output_names(), strict=True)
        return [
            {"result": result, "output": output}
            | ({"state": str(args[aliases[i]].name)} if i in aliases else {})
            for i, (result, output) in enumerate(names)
        ]

    def _body(self, function: Function) -> None:
        for op in function:
            if op.opname != "return":
                self.lower(op)

    def lower(self, op: Op) -> None:
        """Add the nodes of one operation, by its lowering, else by its expansion."""
        if op.opname == "call":
            return self._call(op)
        rule = self.table.find(op)
        if rule is None:
            return self.expand(op)
        self._locate(op)
        try:
            lowered = rule(self, op)
        except Error as error:
            raise error.at(op) from error.__cause__
        if isinstance(lowered, Later):
            self._later[op.result] = lowered.make
            return None
        outs = [lowered] if isinstance(lowered, (str, Flat)) else list(lowered)
        for value, out in zip(op.results, outs, strict=True):
            self.bind(value, out)
        return None

    def _locate(self, op: Op) -> None:
        """What the nodes of this operation are called after."""
        graph, loc = self.graph, op.loc
        first = op.results[0] if op.results else None
        graph.prefix = self._names.get(first, graph.prefix) if first is not None else op.opname
        graph.node_name = f"{loc.scope}/{op.opname}" if loc is not None and loc.scope else op.opname
        graph.where = f"{loc.file}:{loc.line}" if loc is not None else graph.where

    def bind(self, value: Value, out: str | Flat) -> None:
        """Note that `out` holds `value`; it gets the printed name of the value if it has none."""
        name = out.name if isinstance(out, Flat) else out
        flat = isinstance(out, Flat) and value.type.ndim != 2
        place = self._places.setdefault(value, Place())
        place.flat, place.shaped = (name, place.shaped) if flat else (place.flat, name)
        graph, wanted = self.graph, self._names.get(value)
        final = graph.now(name)
        if wanted is None or final in self._fixed | self._named or final in graph.initializers:
            return
        wanted = graph.fresh(wanted)
        graph.rename(name, wanted)
        self._named.add(wanted)
        shape = value.type.shape
        shape = (product(shape[:-1]), shape[-1]) if flat else shape
        graph.values[name] = value_info(name, self.dtype(value), shape)

    def _call(self, op: Op) -> None:
        callee: Function = op.attributes["callee"]
        for arg, value in zip(callee.args, op.operands, strict=True):
            self._same[arg] = value
        before = dict(self._cache)
        self._body(callee)
        for result, value in zip(op.results, callee.returned, strict=True):
            self._places[result] = self._place(value)
        for inner in callee:  # the next call gives these values other places
            for value in inner.results:
                self._places.pop(value, None)
        self._cache = before

    def expand(self, op: Op) -> None:
        """Add the nodes of what an operation consists of."""
        self._locate(op)
        inside = expansion(op)
        self._same |= zip(inside.operands, op.operands, strict=True)
        results = dict(zip(inside.results, op.results, strict=True))
        self._outer |= results
        self.expanding += 1
        for part in inside.ops:
            part.loc = part.loc or op.loc
            for value in part.results:
                if value in results and results[value] in self._names:
                    self._names[value] = self._names[results[value]]
            self.lower(part)
        self.expanding -= 1
        for value, result in results.items():
            self._places[result] = self._place(value)

    def root(self, value: Value) -> Value:
        """The value that a placeholder or a callee's argument represents."""
        while value in self._same:
            value = self._same[value]
        return value

    def outermost(self, value: Value) -> Value:
        """The result of the function's operation that a result within its expansion is."""
        while value in self._outer:
            value = self._outer[value]
        return value

    def _place(self, value: Value) -> Place:
        value = self.root(value)
        if isinstance(value, Weight) and value not in self._places:
            self._places[value] = Place(self._widened(value))
        if value not in self._places:
            self.bind(value, self._later[value]())
        return self._places[value]

    def get(self, value: Value) -> str:
        """The name of a value in its own shape."""
        place = self._place(value)
        if place.shaped is None:
            assert place.flat is not None
            place.shaped = self.reshape(place.flat, value.type.shape)
            # ONNX Runtime infers wrong shapes of Attention from operands of unknown shape
            shown = value_info(place.shaped, self.dtype(value), value.type.shape)
            self.graph.values[place.shaped] = shown
        return place.shaped

    def flat(self, value: Value) -> str:
        """The name of a value as a matrix of its last dimension."""
        place = self._place(value)
        if value.type.ndim == 2:
            return self.get(value) if place.flat is None else place.flat
        if place.flat is None:
            rows, width = value.type.shape[:-1], value.type.shape[-1]
            if isinstance(width, Dim) or width == 0:
                place.flat = self.reshape(self.get(value), (product(rows), width))
            else:
                place.flat = self.add("Reshape", self.get(value), self.ints(-1, width))
        return place.flat

    def is_flat(self, value: Value) -> bool:
        """Whether the value has a flattened name already."""
        return value.type.ndim > 2 and self._place(value).flat is not None

    def stored(self, weight: Weight) -> tuple[str, str]:
        """(the initializer of a weight as it is stored, its dtype)."""
        if weight not in self._stored:
            name = self.graph.fresh(weight.name)
            form = self.forms[name] = self.storage.form(weight, self.compute)
            self.graph.initializers[name] = TensorProto(name=name)  # per_rank.py fills it in
            self._stored[weight] = name, form.dtype
        return self._stored[weight]

    def held(self, weight: Weight) -> Ref:
        """How the text of the module refers to the initializer (or input) of a weight."""
        if weight in self.other_forms and weight not in self._stored:
            return self.other_forms[weight]
        return UnboundRef(self.stored(weight)[0])

    def _widened(self, weight: Weight) -> str:
        name, kind = self.stored(weight)
        return self.cast(name, self.dtype(weight)) if kind != self.dtype(weight) else name

    def weight(self, value: Value) -> Weight | None:
        """The weight that a value is, if it is one."""
        root = self.root(value)
        return root if isinstance(root, Weight) else None

    def cached(self, key: object, make: Callable[[], Any]) -> Any:
        """What `make` gave the first time for this key."""
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]

    def cast(self, name: str, dtype: str) -> str:
        """A value of the graph converted, once."""
        return self.cached(("cast", name, dtype), lambda: self.add("Cast", name, to=DTYPES[dtype]))

    @np.errstate(over="ignore")
    def number(self, value: float | bool, dtype: str) -> str:
        """A scalar constant of an IR dtype, infinite where that has no such number."""
        return self.graph.constant(np.asarray(value).astype(self.numpy(dtype)))

    def collective(self, op: Exchange, operation: str, group_size: int, x: str) -> str:
        """A node that exchanges `x` along dimension 0; per_rank.py writes the ranks into it."""
        self.graph.groups.append(op.axes)
        return self.add(
            f"{DOMAIN}::{COLLECTIVE}",
            x,
            collective_operation=operation,
            reduce_op=getattr(op, "op", "none"),
            root=getattr(op, "root", -1),
            group_size=group_size,
            groups=(),
            nb_rank=group_size,
        )

    def cast64(self, value: Value) -> str:
        """Integers as i64, which some operators insist on."""
        return self.get(value) if value.type.dtype == "i64" else self.cast(self.get(value), "i64")

    def numpy(self, dtype: str) -> np.dtype[np.generic]:
        """The numpy dtype in which values of an IR dtype are computed."""
        return numpy_dtype(self.dtype(dtype))

    def rounds_to(self, dtype: str) -> bool:
        """Whether numbers are rounded where the module converts them to a dtype.

        Not to f16 and bf16 inside of an expansion, where no user wrote the conversion.
        """
        if self.dtype(dtype) == dtype:
            return False
        return not self.expanding or dtype not in ("f16", "bf16")

    @np.errstate(over="ignore")
    def rounded(self, values: Any, dtype: str) -> np.ndarray:
        """Constants of the module as they are computed."""
        array = np.asarray(values)
        array = array.astype(numpy_dtype(dtype)) if self.rounds_to(dtype) else array
        return array.astype(self.numpy(dtype))

    def iota(self, size: DimLike) -> str:
        """0, 1, ... size - 1, as i64."""
        zero, one = self.number(0, "i64"), self.number(1, "i64")

        def make() -> str:
            end = self.number(size, "i64") if not isinstance(size, Dim) else self._scalar(size)
            return self.add("Range", zero, end, one)

        return self.cached(("iota", size), make)

    def _scalar(self, dim: Dim) -> str:
        return self.cached(("scalar", dim), lambda: self.add("Squeeze", self.dim(dim)))

    def ints(self, *values: int) -> str:
        """A constant list of i64."""
        return self.graph.constant(np.array(values, np.int64))

    def dim(self, dim: DimLike) -> str:
        """One size, as i64[1]."""
        if not isinstance(dim, Dim):
            return self.ints(dim)
        return self.cached(("dim", dim), lambda: self._dim(dim))

    def _dim(self, dim: Dim) -> str:
        total: str | None = None
        for monomial, factor in dim.terms:
            term = None if factor == 1 and monomial else self.ints(factor)
            for name in monomial:
                size = self.cached(("symbol", name), lambda name=name: self._symbol(name))
                term = size if term is None else self.add("Mul", term, size)
            assert term is not None
            total = term if total is None else self.add("Add", total, term)
        assert total is not None
        return total

    def _symbol(self, name: str) -> str:
        """The size of a symbol, read off an argument; plain inputs before states."""
        states = set(self.function.aliases().values())
        args = sorted(self.function.args, key=lambda a: a.index in states)
        for arg in args:
            for at, dim in enumerate(arg.type.shape):
                symbol, factor, rest = linear(dim) or ("", 0, 0)
                if symbol == name:
                    size = self.add("Shape", str(arg.name), start=at, end=at + 1)
                    size = self.add("Sub", size, self.ints(rest)) if rest else size
                    return self.add("Div", size, self.ints(factor)) if factor != 1 else size
        raise Error(f"no argument of @{self.function.name} has the dimension {name}")

    def sizes(self, shape: Shape) -> str:
        """A shape as i64[ndim], every entry its true size."""
        if not any(isinstance(d, Dim) for d in shape):
            return self.ints(*(d for d in shape if not isinstance(d, Dim)))
        return self.cached(("sizes", shape), lambda: self._joined([*shape]))

    def shape(self, shape: Shape) -> str:
        """A shape for Reshape, with a -1 in place of its last symbolic dimension."""
        symbolic = [i for i, d in enumerate(shape) if isinstance(d, Dim)]
        if not symbolic or self._may_be_empty(shape):
            return self.sizes(shape)
        entries = [-1 if i == symbolic[-1] else d for i, d in enumerate(shape)]
        if len(symbolic) == 1:
            return self.ints(*(d for d in entries if not isinstance(d, Dim)))
        return self.cached(("shape", shape), lambda: self._joined(entries))

    def _joined(self, entries: list[DimLike]) -> str:
        parts: list[str] = []
        run: list[int] = []
        for entry in [*entries, None]:
            if entry is not None and not isinstance(entry, Dim):
                run.append(entry)
                continue
            parts += [self.ints(*run)] if run else []
            parts += [self.dim(entry)] if entry is not None else []
            run = []
        return parts[0] if len(parts) == 1 else self.add("Concat", *parts, axis=0)

    def reshape(self, name: str, shape: Shape) -> str:
        """A value of the graph in another shape."""
        zero = {"allowzero": 1} if self._may_be_empty(shape) else {}
        return self.add("Reshape", name, self.shape(shape), **zero)

    def _may_be_empty(self, shape: Shape) -> bool:
        """Whether a -1 may stand beside a 0, where it has no meaning."""
        symbolic = [dim for dim in shape if isinstance(dim, Dim)]
        names = {name for dim in symbolic for name in dim.symbols()}
        lowest = min((self.module.dims.get(name, (0,))[0] for name in names), default=1)
        return 0 in shape or (len(symbolic) > 1 and lowest < 1)

    def filled(self, value: float, shape: Shape, dtype: str) -> str:
        """A tensor of one number, infinite where the dtype has no such number."""
        one = tensor(self.rounded([value], dtype))
        return self.add("ConstantOfShape", self.sizes(shape), value=one)
