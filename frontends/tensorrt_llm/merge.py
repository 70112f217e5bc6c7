"""`merge`: the networks of all ranks as one module of irc in the local view."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from collections.abc import Mapping as Table

from ...errors import Error
from ...ir.core import Function, Module, Result, Value
from ...ir.dims import Dim
from ...ir.mesh import Mesh
from ...ir.types import TensorType
from ...ir.verify import verify
from ...ops import Call, Return
from .arrays import ArrayFile
from .context import current_session
from .mapping import Mapping
from .network import Network, Transfer
from .same_stage import Stage

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
