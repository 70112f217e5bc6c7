"""`merge`: the networks of all ranks as one module of irc in the local view.

The networks of the ranks of a pipeline stage are compared and joined into one function: numbers and
weights that differ become lookups by rank, or shards.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from collections.abc import Mapping as Table
from itertools import count, pairwise, zip_longest
from typing import Any, TypeAlias, cast

import numpy as np

from ... import ops
from ...errors import Error
from ...ir.core import Function, Module, Op, Result, Value, Weight
from ...ir.declare import types_of
from ...ir.dims import Dim
from ...ir.mesh import Mesh
from ...ir.types import TensorType
from ...ir.verify import verify
from ...ir.weight_parts import weight_part
from ...ops import Call, Return
from ...source import Loc
from ...weights import ConcatRef, Ref, Shard, Unsqueeze
from ..arrays import Array, ArrayFile
from .context import current_session
from .mapping import Mapping
from .network import Network

Number: TypeAlias = bool | int | float
_CACHE = re.compile(r"%?(cross_)?(past|present)_key_value_\d+")  # [B, 2, KV heads, length, size]


def merge(networks: Table[int, Network], mapping: Mapping, name: str = "network") -> Module:
    """One module in the local view that computes, on every rank, what its network says.

    The networks of the ranks of a pipeline stage must be the same but for numbers and arrays.
    Numbers that differ become lookups by rank, arrays become shards of their concatenation. What
    one stage sends is an input of the next. With one rank the module is in the global view.
    """
    mesh = Mesh(tuple((axis, size) for axis, size in mapping.mesh.axes if size > 1))
    if sorted(networks) != list(range(mesh.ranks)):
        ranks = ", ".join(map(str, sorted(networks)))
        raise Error(
            f"expected networks of {mesh.ranks} ranks, found those of rank {ranks}; build every "
            "rank before the engine is used, and give an engine of another world another name"
        )
    parallel = mesh.ranks > 1
    title = re.sub(r"\W", "_", name) or "network"
    module = Module(title, mesh, _dims(networks), local=parallel)
    arrays = ArrayFile(current_session().folder, title)
    size = mesh.ranks // mapping.pp_size
    _check_transfers(networks, size)
    stages = [
        Stage(module, arrays, {rank: networks[rank] for rank in range(first, first + size)})
        for first in range(0, mesh.ranks, size)
    ]
    if len(stages) == 1:
        module.add_function(stages[0].finish("forward", {}))
    else:
        handed = _handed(stages)
        for number, (stage, sent) in enumerate(zip(stages, handed, strict=True)):
            module.add_function(stage.finish(f"stage{number}", sent))
            for key, value in sent.items():
                stages[number + 1].function.arg(key).type = value.type
        module.add_function(_pipeline(stages, handed))
    arrays.write(module)
    files = current_session().files
    used = {file for weight in module.weights.values() for file in weight.ref.files()}
    module.files |= {file: str(files[file]) for file in sorted(used & files.keys())}
    verify(module)
    return module


def _same(
    what: str,
    values: Table[int, Any],
    loc: Loc | None = None,
    shown: Table[int, object] | None = None,
) -> Any:
    """The value that all ranks have; an Error that shows those of two ranks if it differs."""
    texts = shown or values
    (first, expected), *others = values.items()
    for rank, value in others:
        if value != expected:
            raise Error(
                f"{what} differs by rank: {texts[first]} on rank {first}, {texts[rank]} on rank "
                f"{rank}; the ranks of one pipeline stage must build the same network but for "
                "numbers, the starts of slices, parts of a split, and arrays",
                loc=loc,
            )
    return expected


def _dims(networks: Table[int, Network]) -> dict[str, tuple[int, int, int]]:
    """The ranges of all symbols, which are the same on all ranks that have them."""
    symbols = dict.fromkeys(symbol for network in networks.values() for symbol in network.dims)
    return {
        symbol: _same(
            f"the range of the dimension {symbol!r}",
            {rank: n.dims[symbol] for rank, n in networks.items() if symbol in n.dims},
        )
        for symbol in symbols
    }


class Stage:
    """One function that computes, on every rank, what the network of the rank says.

    `results` holds the joined outputs by name.
    """

    def __init__(self, module: Module, arrays: ArrayFile, networks: dict[int, Network]) -> None:
        self.ranks, self.networks = list(networks), list(networks.values())
        self.module, self.arrays, self.function = module, arrays, Function("forward")
        self._names = [network.weight_names() for network in self.networks]
        self._values: dict[tuple[Value, ...], Value] = {}  # by the values of all ranks
        self._join_inputs()
        operations = [
            [op for op in network.function if not isinstance(op, (ops.Constant, ops.Full))]
            for network in self.networks
        ]
        for row in zip_longest(*operations):
            self._join_operations(row)
        outputs = [network.outputs for network in self.networks]
        self._same("the set of outputs", [sorted(own) for own in outputs])
        self.results = {
            name: self.value([own[name].value for own in outputs], f"the output {name}", None)
            for name in outputs[0]
        }

    def value(self, values: Sequence[Value], what: str, loc: Loc | None) -> Value:
        """The value that is `values[i]` on rank i; an Error where no one value is."""
        key = tuple(values)
        if key not in self._values:
            join = self._leaf if all(map(_is_leaf, key)) else self._selected
            self._values[key] = join(key, what, loc)
        return self._values[key]

    def finish(self, name: str, sent: Table[str, Value]) -> Function:
        """The function, with its results, what it sends, and their global types."""
        function, outputs = self.function, self.networks[0].outputs
        results = {n: value for n, value in self.results.items() if not _is_sent(value, sent)}
        results |= sent
        if not results:
            raise Error(f"the network of rank {self.ranks[0]} has no outputs; call mark_output()")
        function.name = name
        function.append(Return(list(results.values())))
        types = {str(arg.name): arg.type for arg in function.args}
        for key, value in results.items():
            reused = outputs[key].tensor.reuses if key in outputs else ""
            held = types.get(reused)
            alias = reused if held and held.replicated is value.type.replicated else None
            function.results += (Result(key, alias),)
            if key not in sent:
                value.type = held if held and alias else self._part(key, value.type)
        _leave_out_unused(function)
        _retype(function)
        for result, value in zip(function.results, function.returned, strict=True):
            axes = value.type.global_type.varying
            if axes and result.name not in sent:
                result.varies = True
                note = f"the output {result.name} differs between the ranks of {'.'.join(axes)}"
                current_session().note(note)
        return function

    def _part(self, key: str, type: TensorType) -> TensorType:
        """The type of an input or output, with the global type where the ranks hold shards."""
        is_cache = _CACHE.fullmatch(key) and type.ndim == 5
        tensor_parallel = ("tp", "ep")  # with experts, tensor parallelism is over both
        dim, over = self.networks[0].layouts.get(key, (2, tensor_parallel if is_cache else ()))
        mesh = self.module.mesh
        axes = tuple(axis for axis in over if axis in mesh.names)
        if axes:
            shape = list(type.shape)
            shape[dim] = shape[dim] * mesh.group_size(axes)
            sharding = tuple(axes if i == dim else () for i in range(type.ndim))
            return type.part_of(TensorType(type.dtype, tuple(shape), sharding))
        return type

    def _same(
        self, what: str, values: Sequence[Any], loc: Loc | None = None, shown: Sequence[Any] = ()
    ) -> None:
        texts = dict(zip(self.ranks, shown or values, strict=True))
        _same(what, dict(zip(self.ranks, values, strict=True)), loc, texts)

    def _add(self, op: Op, loc: Loc | None) -> Value:
        """Append an operation."""
        op.loc = loc
        self.function.append(op)
        return op.result

    # -- inputs and operations

    def _join_inputs(self) -> None:
        for name in dict.fromkeys(name for network in self.networks for name in network.inputs):
            inputs = [network.inputs.get(name) for network in self.networks]
            types = ["missing" if tensor is None else tensor.type for tensor in inputs]
            self._same(f"the input {name}", types)
            type = self._part(f"%{name}", cast("TensorType", types[0]))
            arg = self.function.add_argument(name, type)
            self._values[tuple(network.function.arg(name) for network in self.networks)] = arg

    def _join_operations(self, row: Sequence[Any]) -> None:
        """Append the operation that is `row[i]` on rank i."""
        first, loc = row[0], next(op.loc for op in reversed(row) if op)
        self._same("an operation", [_signature(op) for op in row], loc, [_text(op) for op in row])
        operands = [
            self.value(values, f"an operand of {first.opname}", first.loc)
            for values in zip(*(op.operands for op in row), strict=True)
        ]
        if isinstance(first, ops.Slice) and len({op.start for op in row}) > 1:
            starts = [op.start for op in row]
            results = (self._gathered(first, starts, operands[0]),)
        else:
            new = first.rebuilt(operands)
            self.function.append(new)
            results = new.results
        for values, value in zip(
            zip(*(op.results for op in row), strict=True), results, strict=True
        ):
            value.name = values[0].name
            self._values[values] = value

    def _gathered(self, first: ops.Slice, starts: Sequence[int], x: Value) -> Value:
        """Slices of one size that begin elsewhere on every rank: a gather."""
        loc = first.loc
        places = self._add(ops.Iota(size=first.result.type.shape[first.dim]), loc)
        if first.step != 1:
            step = self._add(ops.Constant(values=(first.step,), dtype="i32"), loc)
            places = self._add(ops.Mul(places, step), loc)
        places = self._add(ops.Add(places, self._number(starts, "i32", loc)), loc)
        return self._add(ops.Gather(x, places, dim=first.dim), loc)

    def _selected(self, values: tuple[Value, ...], what: str, loc: Loc | None) -> Value:
        """A result of an operation with several, such as split: on each rank another one."""
        every = [value.producer.results if value.producer else () for value in values]
        parts = [self._values.get(results) for results in zip(*every, strict=False)]
        types = {part.type if part else None for part in parts}
        if len(types) != 1 or None in types:
            rows = [next((k for k in self._values if k[i] is x), x) for i, x in enumerate(values)]
            self._same(what, rows, loc, [_text(value.producer) for value in values])
        stacked = self._add(ops.Stack(cast("list[Value]", parts)), loc)
        place = self._number([value.index for value in values], "i32", loc)
        return self._add(ops.Gather(stacked, place, dim=0), loc)

    # -- numbers and weights by rank

    def _leaf(self, leaves: tuple[Value, ...], what: str, loc: Loc | None) -> Value:
        """The constant or weight that is `leaves[i]` on rank i."""
        used = [names.get(leaf) for names, leaf in zip(self._names, leaves, strict=True)]
        weights = [named for named in used if named is not None]
        weight = next(
            (named for named in weights if named.is_given), weights[0] if weights else None
        )
        name = f"the weight {weight.name}" if weight else "a constant"
        self._same(name, [leaf.type for leaf in leaves], loc)
        if weight is None:
            return self._constant([cast("Op", leaf.producer) for leaf in leaves], loc)
        if weight.is_given:
            self._same("a weight", [named.name if named else "a constant" for named in used], loc)
        values: list[Any] = [
            named.value if named else cast("Op", leaf.producer).evaluate()
            for leaf, named in zip(leaves, used, strict=True)
        ]
        kinds = ["an array" if isinstance(value, np.ndarray) else "no array" for value in values]
        self._same(name, kinds, loc)
        if kinds[0] == "no array":
            mesh = self.module.mesh
            values = [named.parameter.reference(named.name, mesh, named.value) for named in weights]
        return self._weight(weight.name, leaves[0].type, values, loc)

    def _constant(self, makers: Sequence[Op], loc: Loc | None) -> Value:
        """The constant that `makers[i]` makes on rank i."""
        first, numbers = makers[0], [_numbers(op) for op in makers]
        type = first.result.type
        if all(_equal(elements, numbers[0]) for elements in numbers):
            constant = self._add(first.rebuilt(()), loc)
            constant.name = first.result.name
            return constant
        if all(len(elements) == 1 for elements in numbers):
            number = self._number([elements[0] for elements in numbers], type.dtype, loc)
            return self._add(ops.Expand(number, shape=type.shape), loc) if type.ndim else number
        return self._weight("by_rank", type, [op.evaluate() for op in makers], loc)

    def _number(self, numbers: Sequence[Number], dtype: str, loc: Loc | None) -> Value:
        """The scalar that is `numbers[i]` on rank i: a multiple of the rank, or from a table."""
        axes, table = self._table(numbers)

        def constant(*values: Number, **shape: Any) -> Value:
            return self._add(ops.Constant(values=values, dtype=dtype, **shape), loc)

        rank = self._add(ops.Rank(axis=".".join(axes)), loc)
        first, step = table[0], table[1] - table[0]
        is_small = dtype in ("i32", "i64") and abs(step) < 2**31
        if not is_small or table != [first + step * i for i in range(len(table))]:
            values = constant(*table, shape=(len(table),))
            return self._add(ops.Gather(values, rank, dim=0), loc)
        number = rank if dtype == "i32" else self._add(ops.Cast(rank, dtype=dtype), loc)
        number = number if step == 1 else self._add(ops.Mul(number, constant(step)), loc)
        return number if first == 0 else self._add(ops.Add(number, constant(first)), loc)

    def _table(self, items: Sequence[Any]) -> tuple[tuple[str, ...], list[Any]]:
        """The fewest axes by whose position the items can be looked up, and the items by it."""
        mesh = self.module.mesh
        inner = [axis for axis in mesh.names if axis != "pp"]
        for axes in [(), *((axis,) for axis in reversed(inner)), tuple(inner)]:
            table: dict[int, Any] = {}
            places = [mesh.index(rank, axes) for rank in self.ranks]
            if all(
                _equal(table.setdefault(place, item), item)
                for place, item in zip(places, items, strict=True)
            ):
                return axes, [table[i] for i in range(len(table))]
        raise AssertionError("the ranks of a stage are those of all its axes")

    def _weight(
        self, name: str, type: TensorType, values: Sequence[Array | Ref], loc: Loc | None
    ) -> Value:
        """The weight that is `values[i]` on rank i: shards of a concatenation, if they differ.

        A scalar that differs is stored as a vector.
        """
        title, copies = name, count(1)
        while name in self.module.weights:  # two stages may count their layers alike
            name = f"{title}_{next(copies)}"
        axes, table = self._table(values)
        refs = [
            value
            if isinstance(value, Ref)
            else self.arrays.add(f"{name}/{place}" if axes else name, value)
            for place, value in enumerate(table)
        ]
        if not axes:
            own = weight_part(refs[0], type, self.module.mesh)
            return self.module.add_weight(Weight(own, name, refs[0]))
        parts = tuple(refs) if type.ndim else tuple(ref.then(Unsqueeze(0)) for ref in refs)
        ref = ConcatRef(parts, 0).then(Shard(0, axes))
        own = TensorType(type.dtype, type.shape or (1,))
        weight = Weight(own.part_of(own.replace(varying=axes)), name, ref)
        value = self.module.add_weight(weight)
        return value if type.ndim else self._add(ops.Reshape(value, shape=()), loc)


def _signature(op: Op | None) -> Any:
    """What is the same of an operation on all ranks of a stage."""
    if op is None:
        return None
    if isinstance(op, ops.Slice) and isinstance(op.start, int):
        return type(op), op.dim, op.step, op.result.type
    return type(op), len(op.operands), op.present, op.attributes


def _text(op: Op | None) -> str:
    """An operation with its operands and attributes."""
    if op is None:
        return "nothing"
    words = [
        (f"{name}=" if name in op.present else "")
        + (value.producer.opname if value.producer else f"%{value.name}")
        for name, value in op.named_operands()
    ]
    words += [f"{name}={value}" for name, value in op.attributes.items()]
    place = f" at {op.loc.where()}" if op.loc is not None else ""
    return f"{op.opname}({', '.join(words)}){place}"


def _is_leaf(value: Value) -> bool:
    """Whether a value is a weight or made of numbers alone."""
    return isinstance(value, Weight) or isinstance(value.producer, (ops.Constant, ops.Full))


def _numbers(op: Op) -> tuple[Number, ...]:
    """The elements of a constant, or the one number that all of them are."""
    values = op.values if isinstance(op, ops.Constant) else (cast("ops.Full", op).value,)
    return values[:1] if all(_equal(value, values[0]) for value in values) else values


def _equal(a: Any, b: Any) -> bool:
    """Whether two numbers, references or arrays are the same, in every bit."""
    if a is b:
        return True
    if isinstance(a, np.ndarray):  # as bytes, so that NaN equals itself
        x, y = (np.ascontiguousarray(array).reshape(-1) for array in cast("list[Array]", [a, b]))
        return np.array_equal(x.view(np.uint8), y.view(np.uint8))
    return a == b if isinstance(a, Ref) else repr(a) == repr(b)  # 0.0 is not -0.0 or False


# -- pipeline stages


def _check_transfers(networks: Table[int, Network], size: int) -> None:
    """An Error unless each stage, of `size` ranks, receives what the one before sends."""
    sends = Counter((rank, to.rank) for rank, n in networks.items() for to in n.sent)
    receives = Counter((of.rank, rank) for rank, n in networks.items() for of in n.received)
    pairs = [(rank, rank + size) for rank in networks if rank + size in networks]
    expected = Counter({pair: len(networks[pair[0] // size * size].sent) for pair in pairs})
    for pair in sorted({*sends, *receives, *pairs}):
        if not sends[pair] == receives[pair] == expected[pair]:
            own = [transfer for n in networks.values() for transfer in (*n.sent, *n.received)]
            raise Error(
                f"rank {pair[0]} sends {sends[pair]} tensors to rank {pair[1]}, which receives "
                f"{receives[pair]} from it; expected {expected[pair]}: send and recv join the same "
                f"places of consecutive pipeline stages (pp_size is {len(networks) // size}), "
                "with as many tensors on every rank of a stage",
                loc=next(transfer.loc for transfer in own if transfer.rank in pair),
            )


def _handed(stages: Sequence[Stage]) -> list[dict[str, Value]]:
    """What every stage sends, by the names of the inputs of the next, which are set here."""
    handed: list[dict[str, Value]] = [{} for _ in stages]
    for number, (stage, following) in enumerate(pairwise(stages)):
        sent = zip(*(network.sent for network in stage.networks), strict=True)
        received = zip(*(network.received for network in following.networks), strict=True)
        for index, (sources, targets) in enumerate(zip(sent, received, strict=True)):
            what = f"tensor {index} from pipeline stage {number} to {number + 1}"
            value = stage.value([source.value for source in sources], what, sources[0].loc)
            arg = following.value([target.value for target in targets], what, targets[0].loc)
            if value.type.replicated != arg.type.replicated:
                raise Error(
                    f"{what} is sent as {value.type} and received as {arg.type}, at "
                    f"{targets[0].loc.where()}; expected one type",
                    loc=sources[0].loc,
                )
            arg.name = f"handed_{number}" + (f"_{index}" if index else "")
            handed[number][arg.name] = value
    return handed


def _pipeline(stages: Sequence[Stage], handed: Sequence[dict[str, Value]]) -> Function:
    """@forward, which calls the functions of the stages."""
    main = Function("forward")
    inputs: dict[str, Value] = {}
    results: dict[str, tuple[Value, Result]] = {}
    between: dict[str, Value] = {}  # what the stage before has sent
    for number, (stage, sent) in enumerate(zip(stages, handed, strict=True)):
        function = stage.function
        for name, type in ((str(arg.name), arg.type) for arg in function.args):
            if name not in inputs and name not in between:
                inputs[name] = main.add_argument(name, type)
        values = inputs | between
        call = Call([values[str(arg.name)] for arg in function.args], callee=function, stage=number)
        main.append(call)
        between = {}
        for value, result in zip(call.results, function.results, strict=True):
            value.name = str(result.name)
            if value.name in sent:
                between[value.name] = value
            elif value.name in results:
                raise Error(f"two pipeline stages have an output called {value.name!r}; rename one")
            else:
                results[value.name] = value, result
    main.append(Return([value for value, _ in results.values()]))
    main.results = tuple(Result(name, old.alias, old.varies) for name, (_, old) in results.items())
    return main


def _is_sent(value: Value, sent: Table[str, Value]) -> bool:
    """Whether an output is what the stage sends, perhaps in another dtype."""
    maker = value.producer
    source = maker.operands[0] if maker is not None and maker.opname == "cast" else value
    return any(other is value or other is source for other in sent.values())


def _retype(function: Function) -> None:
    """Derive the global types of all values anew, but those of outputs.

    What is appended to a cache counts as each rank's own where the rules do not take it for shards
    of the same dimension: ranks may share a head, and one head of a rank may be any dimension.
    """
    _derive(function, {})
    own: dict[Value, tuple[str, ...]] = {}
    for op in function:
        caches = [value.type.global_type.axes for value in op.operands if value.producer is None]
        if isinstance(op, ops.Concat) and len(caches) == 1:
            places = {axis: dim for dim, axes in enumerate(caches[0]) for axis in axes}
            new = [value for value in op.operands if value.producer is not None]
            own |= {v: (*places,) for v in new if not _is_placed(v.type.global_type, places)}
    if own:
        _derive(function, own)


def _is_placed(type: TensorType, places: Table[str, int]) -> bool:
    """Whether a value is sharded over these axes, each in its dimension, or varies over them."""
    return all(axis in (*type.axes[dim], *type.varying) for axis, dim in places.items())


def _derive(function: Function, own: Table[Value, tuple[str, ...]]) -> None:
    """Set the global types that operations give; values in `own` vary, over these axes too."""
    given = {*function.returned}
    for op in function:
        for result, type in zip(op.results, types_of(op), strict=True):
            if result in own:
                axes = dict.fromkeys((*type.global_type.spread, *own[result]))
                type = type.part_of(type.replicated.replace(varying=tuple(axes)))
            result.type = result.type if result in given else type


def _leave_out_unused(function: Function) -> None:
    """Remove the inputs that no result needs, which TensorRT refuses, and note their names."""
    for op in reversed(function):
        if op.pure and op.opname != "return" and not any(result.users for result in op.results):
            op.erase()
    used = [arg for arg in function.args if arg.users]
    needed = _symbols(result for op in function for result in op.results) - _symbols(used)
    for arg in function.args:
        if not arg.users and _symbols([arg]) & needed:  # operations use its sizes
            used.append(arg)
            needed -= _symbols([arg])
    unused = [arg for arg in function.args if arg not in used]
    function.args = tuple(arg for arg in function.args if arg in used)
    for index, arg in enumerate(function.args):
        arg.index = index
    for arg in unused:
        current_session().note(f"the input {arg.name} is left out, because no output needs it")


def _symbols(values: Iterable[Value]) -> set[str]:
    """The symbols in the shapes of values."""
    sizes = [size for value in values for size in value.type.shape if isinstance(size, Dim)]
    return {symbol for size in sizes for symbol in size.symbols()}
