"""Whole-module checks. Passes may assume a module that passes these, and must leave one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from ..errors import Error
from ..weights.sources import stated
from .core import Function, Module, Op, Value, Weight
from .declare import types_of
from .dims import Dim
from .layouts import local_type
from .recorded import origin, recorded_refusal
from .types import TensorType
from .weight_parts import weight_part

_SYMBOL = re.compile(r"\w[\w.]*")
_MOST_OPERANDS = 10_000
_DEEPEST = 100  # calls inside each other: less than Python's limit of recursion
_MOST_CALLED = 250_000  # operations that the calls of a function run; inlining them takes seconds


def verify(module: Module) -> None:
    """Raise an Error about the first thing that is not as it must be; see each `_check`."""
    _check_header(module)
    checked: set[object] = set()
    for name, weight in module.weights.items():
        _check_weight(module, name, weight, checked)
    sizes: dict[Function, tuple[int, int]] = {}
    for name, function in module.functions.items():
        check_calls(function, sizes)
        if function.name != name:
            raise Error(f"function @{function.name} is filed under the name {name!r}")
        _check_function(module, function, checked)
    _check_users(module)
    if module.local:
        called = {op.attributes["callee"] for op in module.ops() if op.opname == "call"}
        for function in module.functions.values():
            if function not in called:
                _check_same(function)


def check_calls(function: Function, sizes: dict[Function, tuple[int, int]]) -> None:
    """The calls of a function go to those in `sizes`, not too deep, and run few enough operations.

    The function is added to `sizes`: how deep its calls are, and how many operations it runs.
    """
    depth = ops = called = 0
    for op in function:
        ops += 1
        if op.opname != "call":
            continue
        callee: Function = op.attributes["callee"]
        if callee not in sizes:
            raise Error(
                f"@{function.name} calls @{callee.name}, which is not defined before it", op
            )
        depth = max(depth, sizes[callee][0] + 1)
        called += sizes[callee][1]
    if depth > _DEEPEST:
        raise Error(f"@{function.name} has calls nested {depth} deep; at most {_DEEPEST}")
    if called > _MOST_CALLED:
        raise Error(
            f"the calls of @{function.name} run {called} operations; at most {_MOST_CALLED}"
        )
    sizes[function] = depth, ops + called


def _check_header(module: Module) -> None:
    """The header of a module prints to text that parses."""
    for kind, names in (
        ("the module", [module.name]),
        ("a file", module.files),
        ("a weight", module.weights),
        ("a function", module.functions),
    ):
        for name in names:
            if not _SYMBOL.fullmatch(name):
                raise Error(
                    f"{name!r} is not a valid name for {kind}; use letters, digits, _ and dots"
                )
    for name, (low, typical, high) in module.dims.items():
        if not name.isidentifier():
            raise Error(f"{name!r} is not a valid name for a dim; use letters, digits, _")
        if not 0 <= low <= typical <= high:
            raise Error(
                f"the range of {name} is min:typical:max in increasing order, "
                f"not {low}:{typical}:{high}"
            )


def _check_weight(module: Module, name: str, weight: Weight, checked: set[object]) -> None:
    """`checked` has the types that were checked, and what references of one source say."""
    if weight.name != name:
        raise Error(f"weight @{weight.name} is filed under the name {name!r}")
    for file in weight.ref.files():
        if file not in module.files:
            raise Error(f"weight @{name} refers to the file @{file}, which is not declared")
    if weight.type.global_type.partial:
        raise Error(f"weight @{name} is {weight.type}, but stored bytes are never a partial sum")
    if weight.type not in checked:
        _check_type(module, weight.type, None, f"weight @{name}")
        checked.add(weight.type)
    ref = weight.ref
    like = None if ref.inputs else (weight.type, ref.steps, stated(ref))
    if like is None or like not in checked:
        if module.local:
            _check_part(module, weight)
        _check_reference(module, weight)
        checked.add(like)


def _check_part(module: Module, weight: Weight) -> None:
    """The shard steps of a reference give the part that the type says, or one that varies."""
    part = weight_part(weight.ref, weight.type, module.mesh)
    own, derived = weight.type.global_type, part.global_type
    if own is not derived and not {*derived.spread} <= {*own.spread} == {*own.varying}:
        raise Error(f"weight @{weight.name} is {weight.type}, but {weight.ref} gives {part}")


def _check_reference(module: Module, weight: Weight) -> None:
    """The type of a reference, without reading its files, is that of the weight."""
    try:
        weight.ref.check(weight.type, module.mesh)
    except Error as error:
        raise Error(f"weight @{weight.name}: {error.message}") from None


def _check_function(module: Module, function: Function, checked: set[object]) -> None:
    defined: set[Value] = set()
    for i, arg in enumerate(function.args):
        if arg.owner is not function or arg.index != i:
            raise Error(f"argument {i} of @{function.name} belongs to another function")
        _check_boundary(arg.name, f"an argument of @{function.name}")
        _check_type(module, arg.type, None, f"%{arg.name}")
        defined.add(arg)
    for name in _duplicates(arg.name for arg in function.args):
        raise Error(f"@{function.name} has two arguments called %{name}")
    weights = module.weights
    op = None
    for op in function:
        if len(op.operands) > _MOST_OPERANDS:
            raise Error(
                f"{op.opname} has {len(op.operands)} operands; at most {_MOST_OPERANDS}", op
            )
        for value in op.operands:
            if value not in defined and (
                value.name is None or weights.get(value.name) is not value
            ):
                raise Error(_undefined(value, function), op)
        types = types_of(op)
        results = op.results
        if len(types) != len(results):
            raise Error(f"{op.opname} has {len(results)} results, but it makes {len(types)}", op)
        for result, derived in zip(results, types, strict=True):
            own = result.type
            if own is not derived:
                _check_recorded(op, result, derived)
            if own not in checked:
                _check_type(module, own, op, op.opname)
                checked.add(own)
            if result.owner is not op:
                raise Error(f"a result of {op.opname} belongs to another operation", op)
            defined.add(result)
        try:
            op.verify(module)
        except Error as error:
            raise error.at(op) from None
        if op.opname == "return" and op.next is not None:
            raise Error("operations follow return", op)
    if op is None or op.opname != "return":
        raise Error(f"@{function.name} does not end in return", op)
    _check_results(function)


def _check_recorded(op: Op, result: Value, derived: TensorType) -> None:
    """A result whose type is not the derived one may be recorded as it is."""
    refusal = recorded_refusal(op, result.index, derived, result.type)
    if refusal is not None:
        reason = refusal or f"it makes {derived}"
        raise Error(f"the result of {op.opname} is {result.type}, but {reason}", op)


def _undefined(value: Value, function: Function) -> str:
    if isinstance(value, Weight):
        return f"@{value.name} is not a weight of this module"
    return f"%{value.name} is used before it is defined in @{function.name}"


def _check_users(module: Module) -> None:
    """Every value counts exactly the operations that use it, as often as they do."""
    values: list[Value] = [*module.weights.values()]
    uses: dict[Value, dict[Op, int]] = {}
    for function in module.functions.values():
        values += function.args
        for op in function:
            values += op.results
            for value in op.operands:
                counts = uses.setdefault(value, {})
                counts[op] = counts.get(op, 0) + 1
    for value in values:
        counts = uses.get(value, {})
        for user in {**counts, **value.users} if value.users != counts else ():
            recorded, counted = value.users.get(user, 0), counts.get(user, 0)
            if recorded != counted:
                raise Error(f"{value!r} records {recorded} uses by {user!r}, not {counted}", user)


def _check_results(function: Function) -> None:
    returned = function.returned
    if function.results and len(function.results) != len(returned):
        raise Error(
            f"@{function.name} declares {len(function.results)} results and returns {len(returned)}"
        )
    names = function.result_names()
    for name in _duplicates(names):
        raise Error(f"@{function.name} has two results called {name}")
    for name in names:
        _check_boundary(name, f"a result of @{function.name}")
    args = {arg.name: arg for arg in function.args}
    taken: set[str] = set()
    for result, value in zip(function.results, returned, strict=False):
        if result.alias is None:
            continue
        arg = args.get(result.alias)
        if arg is None:
            raise Error(
                f"a result of @{function.name} aliases %{result.alias}, which is not an argument"
            )
        if arg.type is not value.type:
            raise Error(
                f"a result of @{function.name} is {value.type} and aliases "
                f"%{arg.name}, which is {arg.type}; both must be the same"
            )
        if result.alias in taken:
            raise Error(f"two results of @{function.name} alias %{result.alias}")
        taken.add(result.alias)


def _check_same(function: Function) -> None:
    """What callers get of a function is the same on all ranks, or shards of one global value."""
    names = function.result_names()
    free = {name for name, result in zip(names, function.results, strict=False) if result.varies}
    for name, value in zip(names, function.returned, strict=True):
        type = value.type.global_type
        for axis in (*type.partial, *(() if name in free else type.varying)):
            op, reason = origin(value, axis)
            kind = "varies" if axis in type.varying else "is a partial sum"
            raise Error(
                f"the result {name} of @{function.name} {kind} over {axis}, so that ranks return "
                f"different values: {reason}",
                op or function.last,
            )


def _duplicates(names: Iterable[str | None]) -> list[str | None]:
    """The names that occur more than once."""
    return [name for name, count in Counter(names).items() if count > 1]


def _check_boundary(name: str | None, what: str) -> None:
    """A name that callers use: any text that prints, but for the sign of arguments in layouts."""
    if not name or not name.isprintable() or name[0] == "%":
        raise Error(
            f"{name!r} is not a valid name for {what}; use printable characters, the first not %"
        )


def _check_type(module: Module, type: TensorType, op: Op | None, what: str) -> None:
    """The axes are those of the mesh, and every symbol has a range where any has one."""
    _check_axes(module, type.global_type, op, what)
    if module.local and type.sharded:
        raise Error(f"{what} is {type}, but in a local module shapes are one rank's", op)
    if not module.local and (type.of is not None or type.varying):
        raise Error(f"{what} is {type}, one rank's type, but the module is in the global view", op)
    if type.of is not None and local_type(type.of, module.mesh) is not type.replicated:
        raise Error(
            f"{what} is {type}, but one rank's shard of {type.of} is "
            f"{local_type(type.of, module.mesh)}",
            op,
        )
    for dim in type.shape:
        for symbol in dim.symbols() if isinstance(dim, Dim) else ():
            if not symbol.isidentifier():  # so it is one in C++ as well
                raise Error(f"{what} is {type}, but {symbol!r} is not a valid name for a dim", op)
            if module.dims and symbol not in module.dims:
                raise Error(f"{what} is {type}, but dims() gives no range for {symbol}", op)


def _check_axes(module: Module, type: TensorType, op: Op | None, what: str) -> None:
    for axis in type.spread:
        if axis not in module.mesh.names:
            raise Error(f"{what} is {type}, but the mesh ({module.mesh}) has no axis {axis!r}", op)
