"""`merge`: the networks of all ranks as one module of irc in the local view.

The networks of the ranks of a pipeline stage are compared and joined into one function: numbers and
weights that differ become lookups by rank, or shards.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from collections.abc import Mapping as Table
from itertools import zip_longest
from typing import Any, Literal, TypeAlias, cast

import numpy as np

from ... import ops
from ...errors import Error
from ...ir.core import Function, Module, Op, Result, Value, Weight
from ...ir.dims import Dim
from ...ir.mesh import Mesh
from ...ir.types import TensorType
from ...ir.verify import verify
from ...ops import Call, Return
from ...ops.control import LARGEST_CONSTANT
from ...source import Loc
from ...weights import ConcatRef, Ref, Shard, Unsqueeze
from .arrays import Array, ArrayFile
from .context import current_session
from .mapping import Mapping
from .network import Named, Network, Transfer

Number: TypeAlias = bool | int | float
_CACHE = re.compile(r"(cross_)?(past|present)_key_value_\d+")  # [B, 2, KV heads, length, head size]


def merge(networks: Table[int, Network], mapping: Mapping, name: str = "network") -> Module:
    """One module in the local view that computes, on every rank, what its network says.

    The networks of the ranks of a pipeline stage must be the same but for numbers and arrays.
    Numbers that differ become lookups by rank, arrays become shards of their concatenation. What
    one stage sends is an input of the next. With one rank the module is in the global view.
    """
    mesh = Mesh(tuple((axis, size) for axis, size in mapping.mesh.axes if size > 1))
    missing = [str(rank) for rank in range(mesh.ranks) if rank not in networks]
    if missing:
        raise Error(
            f"expected a network for every rank of {mesh or 'one rank'}, found none for rank "
            f"{', '.join(missing)}; build every rank before the engine is used"
        )
    extra = [str(rank) for rank in networks if not 0 <= rank < mesh.ranks]
    if extra:
        raise Error(
            f"the engine has a network of rank {', '.join(extra)}, but the Mapping of its first "
            f"rank has {mesh or 'one rank'}; give all ranks of an engine one world, and other "
            "engines other names"
        )
    parallel = mesh.ranks > 1
    title = re.sub(r"\W", "_", name) or "network"
    module = Module(title, mesh, _dims(networks), local=parallel, explicit=parallel)
    arrays = ArrayFile(current_session().folder, title)
    count = mesh.ranks // mapping.pp_size
    stages = [
        Stage(module, arrays, {r: networks[r] for r in range(at * count, (at + 1) * count)}, at)
        for at in range(mapping.pp_size)
    ]
    if len(stages) == 1:
        _single(module, stages[0])
    else:
        _pipeline(module, stages)
    arrays.write(module)
    known = current_session().files
    used = {file for weight in module.weights.values() for file in weight.ref.files()}
    module.files |= {file: str(known[file]) for file in sorted(used & known.keys())}
    verify(module)
    return module


def _dims(networks: Table[int, Network]) -> dict[str, tuple[int, int, int]]:
    """The ranges of all symbols, which are the same on all ranks."""
    found: dict[str, tuple[int, int, int]] = {}
    for rank, network in networks.items():
        for name, bounds in network.dims.items():
            if found.setdefault(name, bounds) != bounds:
                raise Error(
                    f"the dimension {name!r} is {bounds} on rank {rank} and {found[name]} before; "
                    "give all ranks the same ranges"
                )
    return found


def _single(module: Module, stage: Stage) -> None:
    """The module of networks without pipeline stages."""
    for row in (*stage.transfers("sent"), *stage.transfers("received")):
        raise Error(
            "a send or recv without pipeline stages; give the Mapping a pp_size, or use allgather "
            "between the ranks of a stage",
            loc=row[0].loc,
        )
    _finish(module, stage, dict(stage.results), "forward")


def _finish(module: Module, stage: Stage, results: dict[str, Value], name: str) -> None:
    """Finish the function of a stage, with its results and layouts."""
    function, first = stage.function, stage.first
    if not results:
        raise Error(f"the network of rank {stage.ranks[0]} has no outputs; call mark_output()")
    function.name = name
    types = {str(arg.name): arg.type for arg in function.args}
    declared: list[Result] = []
    for key, value in results.items():
        state = first.outputs[key].reuses if key in first.outputs else ""
        declared.append(Result(key, state if types.get(state) is value.type else None))
    function.results = tuple(declared)
    function.append(Return(list(results.values())))
    _leave_out_unused(function)
    types = {str(arg.name): arg.type for arg in function.args}
    aliases = {result.name for result in declared if result.alias}
    values = {f"%{arg}": type for arg, type in types.items()}
    values |= {key: value.type for key, value in results.items() if key not in aliases}
    layouts = {key: _layout(module, first, key, type) for key, type in values.items()}
    function.layouts = {key: layout for key, layout in layouts.items() if layout is not None}
    module.add_function(function)


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


def _layout(module: Module, network: Network, key: str, type: TensorType) -> TensorType | None:
    """The global type of an argument or result that the ranks share; None of any other."""
    found = network.layouts.get(key)
    if found is None and _CACHE.fullmatch(key.lstrip("%")) and type.ndim == 5:
        found = 2, ("tp", "ep")  # with experts, tensor parallelism is over both
    if found is None or not module.local:
        return None
    dim, axes = found[0], tuple(axis for axis in found[1] if axis in module.mesh.names)
    if not axes:
        return None
    shape = list(type.shape)
    shape[dim] = shape[dim] * module.mesh.group_size(axes)
    over = tuple(axes if i == dim else () for i in range(type.ndim))
    return TensorType(type.dtype, tuple(shape), over)


def _pipeline(module: Module, stages: list[Stage]) -> None:
    """A function per stage, and @forward, which calls them."""
    for row in stages[0].transfers("received"):
        raise Error(
            "the first pipeline stage has a recv(), but no stage is before it; receive only where "
            "mapping.is_first_pp_rank() is false",
            loc=row[0].loc,
        )
    handed: list[dict[str, Value]] = []  # what every stage sends, by name
    for at, stage in enumerate(stages):
        sent = _sent(stages, at)
        handed.append(sent)
        results = {n: v for n, v in stage.results.items() if not _is_handed(v, sent)}
        _finish(module, stage, results | sent, f"stage{at}")
    main = Function("forward")
    known: dict[str, Value] = {}
    returned: dict[str, tuple[Value, str | None]] = {}
    for at, stage in enumerate(stages):
        function = stage.function
        operands = [known.get(str(arg.name)) or _argument(main, arg) for arg in function.args]
        call = Call(operands, callee=function, stage=at)
        main.append(call)
        known = {}
        for value, result in zip(call.results, function.results, strict=True):
            name = value.name = str(result.name)
            if name in handed[at]:
                known[name] = value
            elif name in returned:
                raise Error(f"two pipeline stages have an output called {name!r}; rename one")
            else:
                returned[name] = value, result.alias
        for key, layout in function.layouts.items():
            if key.lstrip("%") not in (h for each in handed for h in each):
                main.layouts[key] = layout
    if not returned:
        raise Error("no pipeline stage has an output; call mark_output() on the last one")
    main.append(Return([value for value, _ in returned.values()]))
    main.results = tuple(Result(name, alias) for name, (_, alias) in returned.items())
    module.add_function(main)


def _argument(main: Function, arg: Value) -> Value:
    """The argument of the main function for that of a stage."""
    for known in main.args:
        if known.name == arg.name:
            if known.type is not arg.type:
                raise Error(
                    f"the input {arg.name} is {known.type} in one pipeline stage and {arg.type} "
                    "in another; give it one shape"
                )
            return known
    return main.add_argument(str(arg.name), arg.type)


def _sent(stages: list[Stage], at: int) -> dict[str, Value]:
    """What a stage sends, by the names that the next stage takes it under, which are set here."""
    stage = stages[at]
    sent = stage.transfers("sent")
    received = stages[at + 1].transfers("received") if at + 1 < len(stages) else []
    if len(sent) != len(received):
        some = (*sent, *received)
        raise Error(
            f"pipeline stage {at} sends {len(sent)} tensors, and stage {at + 1} receives "
            f"{len(received)}; expected one recv() per send()",
            loc=some[0][0].loc,
        )
    found: dict[str, Value] = {}
    for number, (sources, targets) in enumerate(zip(sent, received, strict=True)):
        _check_ranks(stages[at], stages[at + 1], sources, targets)
        value = _joined(stage, sources, "sends")
        arg = _joined(stages[at + 1], targets, "receives")
        if value.type is not arg.type:
            raise Error(
                f"pipeline stage {at} sends {value.type}, but {arg.name}, which stage {at + 1} "
                f"receives at {targets[0].loc.where()}, is {arg.type}",
                loc=sources[0].loc,
            )
        name = f"handed_{at}" + (f"_{number}" if number else "")
        arg.name = name
        found[name] = value
    return found


def _joined(stage: Stage, row: Sequence[Transfer], verb: str) -> Value:
    what = f"what pipeline stage {stage.number} {verb}"
    return stage.joined([each.value for each in row], what, row[0].loc)


def _check_ranks(
    stage: Stage, other: Stage, sources: Sequence[Transfer], targets: Sequence[Transfer]
) -> None:
    ends = zip(stage.ranks, other.ranks, sources, targets, strict=True)
    for here, there, source, target in ends:
        if (source.rank, target.rank) != (there, here):
            raise Error(
                f"rank {here} sends to rank {source.rank}, and rank {there} receives from rank "
                f"{target.rank}; expected {there} and {here}, the same place in the next and the "
                "previous pipeline stage",
                loc=source.loc,
            )


def _is_handed(value: Value, sent: Table[str, Value]) -> bool:
    """Whether an output is what the stage sends, perhaps in another dtype."""
    maker = value.producer
    source = maker.operands[0] if maker is not None and maker.opname == "cast" else value
    return any(each is value or each is source for each in sent.values())


# -- the networks of one pipeline stage


class Stage:
    """One function that computes, on every rank, what the network of the rank says.

    `results` holds the joined outputs by name.
    """

    def __init__(
        self, module: Module, arrays: ArrayFile, networks: dict[int, Network], number: int
    ) -> None:
        self.ranks, self.networks = list(networks), list(networks.values())
        self.first, self.number = self.networks[0], number
        self.function = Function("forward")
        self._leaves = Leaves(module, self.function, arrays, networks, number)
        self._joined: list[dict[Value, Value]] = [{} for _ in self.networks]  # per rank
        self._choices: dict[tuple[Op, tuple[int, ...]], Value] = {}
        self._join_inputs()
        self._join_operations()
        self.results = self._join_outputs()

    def transfers(self, kind: Literal["sent", "received"]) -> list[tuple[Transfer, ...]]:
        """What the ranks send or receive: a row per tensor, with an entry per rank."""
        every: list[list[Transfer]] = [getattr(network, kind) for network in self.networks]
        for rank, each in zip(self.ranks, every, strict=True):
            if len(each) != len(every[0]):
                verb = {"sent": "sends", "received": "receives"}[kind]
                raise Error(
                    f"rank {self.ranks[0]} {verb} {len(every[0])} tensors, and rank {rank} "
                    f"{len(each)}; expected as many on every rank of a pipeline stage",
                    loc=(*each, *every[0])[0].loc,
                )
        return list(zip(*every, strict=True))

    def joined(self, values: Sequence[Value], what: str, loc: Loc | None) -> Value:
        """The value that is `values[i]` on rank i; an Error where no one value is."""
        if all(map(is_leaf, values)):
            return self._leaves.value(values, loc)
        first, *others = [known.get(v) for known, v in zip(self._joined, values, strict=True)]
        if first is None or any(each is not first for each in others):
            raise Error(
                f"{what} is another value on some rank; expected the result of the same operation "
                "of the network of every rank",
                loc=loc,
            )
        return first

    def _join_inputs(self) -> None:
        every = dict.fromkeys(name for network in self.networks for name in network.inputs)
        for name in every:
            types = [
                network.inputs[name].type if name in network.inputs else None
                for network in self.networks
            ]
            for rank, type in zip(self.ranks, types, strict=True):
                if type is not types[0] or type is None:
                    raise Error(
                        f"the input {name} is {types[0] or 'missing'} on rank {self.ranks[0]} and "
                        f"{type or 'missing'} on rank {rank}; expected the same on every rank"
                    )
            arg = self.function.add_argument(name, self.first.inputs[name].type)
            for known, network in zip(self._joined, self.networks, strict=True):
                known[network.function.arg(name)] = arg

    def _join_operations(self) -> None:
        lists = [
            [op for op in network.function if not isinstance(op, (ops.Constant, ops.Full))]
            for network in self.networks
        ]
        for row in zip_longest(*lists):
            self._join(list(row))

    def _join(self, row: list[Op]) -> None:
        first = row[0]
        self._check(row, [(type(op), len(op.operands), op.present) if op else None for op in row])
        operands = self._operands(row)
        if isinstance(first, ops.Slice) and _begin_elsewhere(row):
            results = (self._gathered(cast("list[ops.Slice]", row), operands[0]),)
        else:
            self._check(row, [op.attributes for op in row])
            new = first.rebuilt(operands)
            self.function.append(new)
            results = new.results
        for old, value in zip(first.results, results, strict=True):
            value.name = old.name
        for known, op in zip(self._joined, row, strict=True):
            known.update(zip(op.results, results, strict=True))

    def _operands(self, row: list[Op]) -> list[Value]:
        found: list[Value] = []
        for values in zip(*(op.operands for op in row), strict=True):
            if all(map(is_leaf, values)):
                found.append(self._leaves.value(values, row[0].loc))
                continue
            joined = [known.get(v) for known, v in zip(self._joined, values, strict=True)]
            chosen = joined[0] if len({*joined}) == 1 else self._chosen(joined, row[0].loc)
            if chosen is None:
                self._check(row, [None if v is None else id(v) for v in joined])
            found.append(cast("Value", chosen))
        return found

    def _chosen(self, values: list[Value | None], loc: Loc | None) -> Value | None:
        """A result of an operation with several, such as split, by rank; None of other values."""
        maker = values[0].producer if values[0] is not None else None
        if maker is None or any(v is None or v.producer is not maker for v in values):
            return None
        if any(result.type is not maker.results[0].type for result in maker.results):
            return None
        places = tuple(value.index for value in values if value is not None)
        if (maker, places) not in self._choices:
            stacked = self._leaves.add(ops.Stack(list(maker.results)), loc)
            place = self._leaves.start(places, loc)
            self._choices[maker, places] = self._leaves.add(ops.Gather(stacked, place, dim=0), loc)
        return self._choices[maker, places]

    def _check(self, row: list[Op], keys: Sequence[object]) -> None:
        """An Error about the first operation whose key is not that of the first rank."""
        at = next((i for i, key in enumerate(keys) if key != keys[0]), None)
        if at is None:
            return
        places = [op.loc for op in (row[0], row[at]) if op is not None]  # pyright: ignore
        there = f" at {places[0].where()}" if places[0] is not None else ""
        raise Error(
            f"rank {self.ranks[at]} has {_text(row[at])}, and rank {self.ranks[0]} has "
            f"{_text(row[0])}{there}; the ranks of one pipeline stage must build the same network "
            "but for numbers, the starts of slices, parts of a split, and arrays",
            loc=places[-1],
        )

    def _gathered(self, row: list[ops.Slice], x: Value) -> Value:
        """Slices of one size that begin elsewhere on every rank: a gather."""
        first, add, loc = row[0], self._leaves.add, row[0].loc
        places: Value = add(ops.Iota(size=first.result.type.shape[first.dim]), loc)
        if first.step != 1:
            step = add(ops.Constant(values=(first.step,), dtype="i32"), loc)
            places = add(ops.Mul(places, step), loc)
        start = self._leaves.start([cast("int", op.start) for op in row], loc)
        return add(ops.Gather(x, add(ops.Add(places, start), loc), dim=first.dim), loc)

    def _join_outputs(self) -> dict[str, Value]:
        found: dict[str, Value] = {}
        for rank, network in zip(self.ranks, self.networks, strict=True):
            for name in network.outputs.keys() ^ self.first.outputs.keys():
                raise Error(f"only one of ranks {self.ranks[0]} and {rank} marks the output {name}")
        for name in self.first.outputs:
            values = [network.outputs[name].value for network in self.networks]
            found[name] = self.joined(values, f"the output {name}", None)
        return found


def _begin_elsewhere(row: list[Op]) -> bool:
    """Whether slices are alike but for their start."""
    slices = cast("list[ops.Slice]", row)
    first = slices[0]
    starts = {op.start for op in slices}
    return len(starts) > 1 and all(
        (op.dim, op.step, op.result.type) == (first.dim, first.step, first.result.type)
        and isinstance(op.start, int)
        for op in slices
    )


def _text(op: Op | None) -> str:
    """An operation with its operands and attributes."""
    if op is None:
        return "nothing"
    makers = [
        (f"{name}=" if name in op.present else "")
        + (value.producer.opname if value.producer else f"%{value.name}")
        for name, value in op.named_operands()
    ]
    return f"{op.opname}({', '.join([*makers, *(f'{k}={v}' for k, v in op.attributes.items())])})"


# -- numbers and weights by rank


def is_leaf(value: Value) -> bool:
    """Whether a value is a weight or made of numbers alone."""
    return isinstance(value, Weight) or isinstance(value.producer, (ops.Constant, ops.Full))


class Leaves:
    """Appends the leaves of one pipeline stage to its function. `ranks` are those of the stage."""

    def __init__(
        self,
        module: Module,
        function: Function,
        arrays: ArrayFile,
        networks: dict[int, Network],
        stage: int,
    ) -> None:
        self.module, self.function, self.arrays, self.stage = module, function, arrays, stage
        self.ranks = list(networks)
        self.named = [network.weight_names() for network in networks.values()]
        self._known: dict[tuple[Value, ...], Value] = {}

    def value(self, leaves: Sequence[Value], loc: Loc | None) -> Value:
        """The value that is `leaves[i]` on rank i of the stage."""
        key = tuple(leaves)
        if key not in self._known:
            self._known[key] = self._joined(key, loc)
        return self._known[key]

    def start(self, numbers: Sequence[Number], loc: Loc | None) -> Value:
        """The i32 scalar that is `numbers[i]` on rank i of the stage."""
        return self._by_rank(numbers, "i32", loc)

    def add(self, op: Op, loc: Loc | None) -> Value:
        """Append an operation."""
        op.loc = loc
        self.function.append(op)
        return op.result

    def _joined(self, leaves: tuple[Value, ...], loc: Loc | None) -> Value:
        for rank, leaf in zip(self.ranks, leaves, strict=True):
            if leaf.type is not leaves[0].type:
                raise Error(
                    f"{self._title(leaves)} is {leaf.type} on rank {rank} and {leaves[0].type} on "
                    f"rank {self.ranks[0]}; expected one local shape",
                    loc=loc,
                )
        if any(isinstance(leaf, Weight) for leaf in leaves):
            return self._weights(leaves, loc)
        makers = [cast("Op", leaf.producer) for leaf in leaves]
        first, numbers = makers[0], [_numbers(op) for op in makers]
        if all(_equal(each, numbers[0]) for each in numbers):
            new = first.rebuilt(())
            new.result.name = leaves[0].name
            return self.add(new, loc)
        if all(len(each) == 1 for each in numbers):
            scalar = self._by_rank([each[0] for each in numbers], leaves[0].type.dtype, loc)
            shape = leaves[0].type.shape
            return self.add(ops.Expand(scalar, shape=shape), loc) if shape else scalar
        arrays = [op.evaluate() for op in makers]
        return self._weight("by_rank", leaves[0].type, self._stored("by_rank", arrays), loc)

    # -- numbers

    def _by_rank(self, numbers: Sequence[Number], dtype: str, loc: Loc | None) -> Value:
        """A scalar: a multiple of the rank number, a lookup in a constant, or a weight."""
        axes, table = self._table(numbers)
        if len(table) > LARGEST_CONSTANT:
            arrays = [np.array(number) for number in numbers]
            stored = self._stored("by_rank", arrays)
            return self._weight("by_rank", TensorType(dtype, ()), stored, loc)

        def number(value: Number) -> Value:
            return self.add(ops.Constant(values=(value,), dtype=dtype), loc)

        rank = self.add(ops.Rank(axis=".".join(axes)), loc)
        step = table[1] - table[0]
        small = dtype in ("i32", "i64") and abs(step) < 2**31
        if small and table == [table[0] + step * i for i in range(len(table))]:
            found = rank if dtype == "i32" else self.add(ops.Cast(rank, dtype=dtype), loc)
            found = found if step == 1 else self.add(ops.Mul(found, number(step)), loc)
            return found if table[0] == 0 else self.add(ops.Add(found, number(table[0])), loc)
        values = ops.Constant(values=tuple(table), shape=(len(table),), dtype=dtype)
        return self.add(ops.Gather(self.add(values, loc), rank, dim=0), loc)

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

    # -- weights

    def _weights(self, leaves: tuple[Value, ...], loc: Loc | None) -> Value:
        """One weight: the same on all ranks, or shards of a concatenation."""
        found = [names.get(leaf) for names, leaf in zip(self.named, leaves, strict=True)]
        given = [each for each in found if each is not None]
        first = next((each for each in given if each.is_given), given[0])
        for rank, each in zip(self.ranks, found, strict=True):
            if first.is_given and (each is None or each.name != first.name):
                other = each.name if each is not None else "a constant"
                raise Error(
                    f"the networks use the weight {first.name} in one place, where rank {rank} "
                    f"uses {other}; the ranks of one pipeline stage must build the same network",
                    loc=loc,
                )
        arrays = [_array(leaf, each) for leaf, each in zip(leaves, found, strict=True)]
        kept = [array for array in arrays if array is not None]
        if kept and len(kept) < len(arrays):
            raise Error(
                f"the weight {first.name} has an array on some ranks only; set it on all", loc=loc
            )
        ref = self._stored(first.name, kept) if kept else self._referred(given)
        return self._weight(first.name, leaves[0].type, ref, loc)

    def _title(self, leaves: Sequence[Value]) -> str:
        found = [names.get(leaf) for names, leaf in zip(self.named, leaves, strict=True)]
        return next((f"the weight {each.name}" for each in found if each), "a constant")

    def _weight(self, name: str, type: TensorType, ref: Ref, loc: Loc | None) -> Value:
        """A weight of the module; a scalar that differs by rank is stored as a vector of one."""
        name = self._free(name, self.module.weights)
        if type.ndim or not isinstance(ref, ConcatRef):
            return self.module.add_weight(Weight(type, name, ref))
        vector = Weight(TensorType(type.dtype, (1,)), name, ref)
        return self.add(ops.Reshape(self.module.add_weight(vector), shape=()), loc)

    def _free(self, name: str, taken: Any) -> str:
        """`name`, or one like it: two pipeline stages may count their layers alike."""
        found, count = name, 0
        while found in taken:
            found = f"stage{self.stage}.{name}" + (f"_{count}" if count else "")
            count += 1
        return found

    def _stored(self, name: str, arrays: Sequence[Array]) -> Ref:
        """The reference of an array per rank; equal ones are stored once."""
        axes, table = self._table(arrays)
        titles = [f"{name}.rank{i}" if axes else name for i in range(len(table))]
        keys = [self._free(title, self.arrays.arrays) for title in titles]
        refs = [self.arrays.add(key, array) for key, array in zip(keys, table, strict=True)]
        return _shards(refs, arrays[0].ndim, axes)

    def _referred(self, found: list[Named]) -> Ref:
        refs = [each.parameter.reference(each.name, self.module.mesh, each.value) for each in found]
        axes, table = self._table(refs)
        return _shards(table, found[0].parameter.type.ndim, axes)


def _shards(refs: Sequence[Ref], ndim: int, axes: tuple[str, ...]) -> Ref:
    """One reference per rank, as shards of their concatenation; that of all ranks as it is."""
    if not axes:
        return refs[0]
    parts = tuple(refs) if ndim else tuple(ref.then(Unsqueeze(0)) for ref in refs)
    return ConcatRef(parts, 0).then(Shard(0, axes))


def _array(leaf: Value, named: Named | None) -> Array | None:
    """The array of a leaf; None of a weight without one."""
    if named is None:
        return cast("Op", leaf.producer).evaluate()
    return named.value if isinstance(named.value, np.ndarray) else None


def _numbers(op: Op) -> tuple[Number, ...]:
    """The elements of a constant, or the one number that all of them are."""
    values = op.values if isinstance(op, ops.Constant) else (cast("ops.Full", op).value,)
    return values[:1] if all(_equal(each, values[0]) for each in values) else values


def _equal(a: Any, b: Any) -> bool:
    """Whether two numbers, references or arrays are the same, in every bit."""
    if a is b:
        return True
    if isinstance(a, tuple):
        pairs = zip(cast("tuple[Any, ...]", a), b, strict=False)
        return len(a) == len(b) and all(_equal(x, y) for x, y in pairs)  # pyright: ignore
    if not isinstance(a, np.ndarray):
        return type(a) is type(b) and (repr(a) == repr(b) if isinstance(a, float) else a == b)
    return np.array_equal(_bits(cast("Array", a)), _bits(cast("Array", b)))


def _bits(array: Array) -> Array:
    """The bytes of an array, so that NaN equals itself."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
