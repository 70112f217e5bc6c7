"""The graph: values, operations, functions and modules, with use-def links exact on every edit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, ClassVar, Self

from ..errors import Error
from .display import Displayed
from .mesh import Mesh
from .types import TensorType

if TYPE_CHECKING:
    import networkx

    from ..source import Loc
    from ..weights import Ref
    from .attributes import Number
    from .facts import Bound, Reads


# Where pairs of values (old, new) are added whenever one takes the place of the other.
replacements: ContextVar[list[tuple[Value, Value]] | None] = ContextVar("irc_replacements")


class Value:
    """One tensor: the result of an operation, an argument of a function, or a weight.

    `users` counts, per operation, how many of its operands are this value. `name` is a hint for
    the printer, which makes it unique; it is no identity.
    """

    __slots__ = ("index", "name", "owner", "type", "users")

    def __init__(
        self, type: TensorType, owner: Op | Function | None, index: int, name: str | None = None
    ) -> None:
        self.type = type
        self.owner = owner
        self.index = index
        self.name = name
        self.users: dict[Op, int] = {}

    def replace_by(self, new: Value) -> None:
        """Every use of this value becomes a use of `new`, which takes the name if it has none.

        A new value of the local view is part of the same global value.
        """
        if new is self:
            return
        if (log := replacements.get(None)) is not None:
            log.append((self, new))
        if new.type is not self.type and isinstance(new.owner, Op) and not new.users:
            new.type = _recorded(new.type, self.type)
        for user, count in self.users.items():
            user.operands = tuple([new if v is self else v for v in user.operands])
            new.users[user] = new.users.get(user, 0) + count
        self.users = {}
        if new.name is None:
            new.name = self.name

    @property
    def producer(self) -> Op | None:
        """The operation this value is a result of, if any."""
        return self.owner if isinstance(self.owner, Op) else None

    def __repr__(self) -> str:
        return f"%{self.name or '_'}: {self.type}"


def _recorded(new: TensorType, old: TensorType) -> TensorType:
    """The type of a new value in the place of an old one, which keeps its global type."""
    local = not new.sharded and not old.sharded and new.replicated is old.replicated
    return old if local else new


class Weight(Value):
    """A value that lives in a checkpoint; the compiler handles its reference, never its bytes."""

    __slots__ = ("ref",)
    name: str

    def __init__(self, type: TensorType, name: str, ref: Ref) -> None:
        super().__init__(type, None, 0, name)
        self.ref = ref

    def __repr__(self) -> str:
        return f"@{self.name}: {self.type}"


class Op:
    """Base of every operation; subclasses are declared with `@operation` in irc/ops.

    The class attributes below are set by the declaration. Attributes are plain Python values and
    immutable: to change one, build a new operation.
    """

    __slots__ = ("loc", "next", "operands", "parent", "present", "prev", "results")

    opname: ClassVar[str]
    operand_names: ClassVar[tuple[str, ...]]
    optional_names: ClassVar[tuple[str, ...]]
    variadic: ClassVar[bool]
    attribute_types: ClassVar[Mapping[str, Any]]
    attribute_defaults: ClassVar[Mapping[str, Any]]
    composite: ClassVar[bool]
    sharding: ClassVar[str | None]
    records: ClassVar[bool] = False  # whether `infer` gives local results their global types
    # the facts of irc/ir/facts.py, with their defaults
    sums: ClassVar[tuple[frozenset[str], ...]] = ()
    addends: ClassVar[tuple[str, ...]] = ()
    commutative: ClassVar[bool] = False
    pure: ClassVar[bool] = True
    keeps_zeros: ClassVar[bool] = False
    moves_data: ClassVar[bool] = False
    is_view: ClassVar[bool] = False
    bounded: ClassVar[Bound] = "no"
    selects: ClassVar[str] = ""
    reads: ClassVar[Reads] = ""
    cheap: ClassVar[bool] = False
    in_place: ClassVar[str] = ""
    safe_values: ClassVar[Mapping[str, int]] = {}
    # the reduction that completes what a rank computes of its shard alone, or "any" collective
    per_shard: ClassVar[str] = ""

    operands: tuple[Value, ...]
    results: tuple[Value, ...]
    present: tuple[str, ...]  # which optional operands are there, in declared order
    parent: Function | None
    prev: Op | None
    next: Op | None
    loc: Loc | None

    def __init__(self, *operands: Any, **attributes: Any) -> None:
        raise TypeError("operations are declared with @operation")

    @property
    def result(self) -> Value:
        """The only result."""
        (value,) = self.results
        return value

    @property
    def attributes(self) -> dict[str, Any]:
        """Attribute values by name, in declared order."""
        return {name: getattr(self, name) for name in self.attribute_types}

    def named_operands(self) -> Iterator[tuple[str, Value]]:
        """(declared name, value) of every operand that is there; a variadic name repeats."""
        fixed = len(self.operand_names) - self.variadic
        names = list(self.operand_names[:fixed])
        count = len(self.operands) - fixed - len(self.present)
        names += [self.operand_names[-1]] * count if self.variadic else []
        return zip([*names, *self.present], self.operands, strict=True)

    def overwrites(self) -> dict[Value, Value]:
        """The results that may overwrite an operand's memory, and these operands."""
        names = self.in_place.split()
        return {r: getattr(self, n) for r, n in zip(self.results[::-1], names[::-1], strict=False)}

    def infer(self) -> TensorType | tuple[TensorType, ...]:
        """Result types from the operands' dtypes and shapes, without sharding."""
        raise NotImplementedError(f"{self.opname} declares neither infer nor expand")

    def type_key(self) -> tuple[Any, ...]:
        """What the result types depend on: the class, the operand types and the attributes."""
        raise TypeError(f"{type(self).__name__} is not declared with @operation")

    def sharding_rule(self) -> str | None:
        """The rule of this very operation; most have one rule per class."""
        return self.sharding

    def local_rule(self) -> str | None:
        """The rule of an operation of the local view, over the global types of its operands."""
        return self.sharding_rule()

    def local_sums(self) -> tuple[frozenset[str], ...]:
        """The fact `sums` of this very operation in the local view."""
        return self.sums

    def refusal(self) -> Error | None:
        """Why an operation that `records` does not take its local operands, if it does not."""
        return None

    def repeated(self) -> Number | None:
        """The number that all elements are, of an operation without operands; else None."""
        return None

    def bound(self, result: int) -> Bound:
        """The fact `bounded` of one result of this very operation."""
        return self.bounded

    def localized(self, results: tuple[TensorType, ...]) -> dict[str, Any]:
        """The attributes of one rank's version, whose results have these (local) types."""
        return self.attributes

    def expand(self) -> Op | Value | tuple[Value, ...]:
        """The same computation in simpler operations (composite operations only)."""
        raise NotImplementedError(f"{self.opname} is not composite")

    def evaluate(self, *operands: Any, **none: Any) -> Any:
        """The meaning, in numpy: one array per declared operand, None for an absent one."""
        raise NotImplementedError(f"{self.opname} has no meaning on one rank")

    def verify(self, module: Module) -> None:
        """Rules that need the module to be checked; most operations have none."""

    def rebuilt(self, operands: Iterable[Value], **changes: Any) -> Self:
        """A new operation of this kind over `operands`, with some attributes changed."""
        values = list(operands)
        fixed = len(values) - len(self.present)
        named = dict(zip(self.present, values[fixed:], strict=True))
        plain = values[:fixed]
        if self.variadic:
            cut = len(self.operand_names) - 1
            plain = [*plain[:cut], plain[cut:]]  # type: ignore[list-item]
        return type(self)(*plain, **named, **(self.attributes | changes), loc=self.loc)

    def set_operands(self, new: tuple[Value, ...]) -> None:
        """Use other values; the count and the optional operands present stay as they are."""
        if len(new) != len(self.operands):
            raise ValueError(f"{self.opname} has {len(self.operands)} operands, not {len(new)}")
        self.drop_operands()
        self.operands = new
        for value in new:
            value.users[self] = value.users.get(self, 0) + 1

    def drop_operands(self) -> None:
        """Release every use this operation makes; it is unusable afterwards."""
        for value in self.operands:
            count = value.users[self] - 1
            if count:
                value.users[self] = count
            else:
                del value.users[self]
        self.operands = ()

    def erase(self) -> None:
        """Take the operation out of its function; its results must be unused."""
        if self.parent is None:
            raise ValueError(f"{self.opname} is in no function")
        for result in self.results:
            if result.users:
                raise Error(f"cannot erase {self.opname}: its result is still used", self)
        self.drop_operands()
        self.parent.unlink(self)

    def __str__(self) -> str:
        from ..text.printer import print_op

        return print_op(self)

    def __repr__(self) -> str:
        return f"<{self.opname} {', '.join(map(repr, self.results))}>"


def placeholder(op: Op, operands: tuple[Value, ...]) -> Op:
    """`op` over other values, without links or results: for expand() and evaluate()."""
    copy = object.__new__(type(op))
    copy.operands, copy.present, copy.results = operands, op.present, ()
    copy.loc, copy.parent, copy.prev, copy.next = op.loc, None, None, None
    for name in op.attribute_types:
        setattr(copy, name, getattr(op, name))
    return copy


class Result:
    """A declared result of a function: its name for callers, and the argument it overwrites.

    One that `varies` may differ between ranks, as its author wants it.
    """

    __slots__ = ("alias", "name", "varies")

    def __init__(
        self, name: str | None = None, alias: str | None = None, varies: bool = False
    ) -> None:
        self.name, self.alias, self.varies = name, alias, varies


class Function(Displayed):
    """A named, ordered list of operations ending in `return`.

    Order is kept because collectives must run in the same order on every rank. `results` says,
    per returned value, under which name callers get it and which argument's memory it may reuse.
    """

    def __init__(self, name: str, args: Iterable[tuple[str, TensorType]] = ()) -> None:
        self.name = name
        self.args = tuple(Value(t, self, i, n) for i, (n, t) in enumerate(args))
        self.results: tuple[Result, ...] = ()
        self.first: Op | None = None
        self.last: Op | None = None

    def __iter__(self) -> Iterator[Op]:
        """Live operations in order; erasing or inserting while iterating is safe."""
        op = self.first
        while op is not None:
            if op.parent is self:
                yield op
            op = op.next

    def __reversed__(self) -> Iterator[Op]:
        op = self.last
        while op is not None:
            before = op.prev
            yield op
            op = before

    def add_argument(self, name: str, type: TensorType) -> Value:
        """A new argument, the last one; nothing calls the function yet."""
        self.args += (Value(type, self, len(self.args), name),)
        return self.args[-1]

    def arg(self, name: str) -> Value:
        """The argument called `name`."""
        for arg in self.args:
            if arg.name == name:
                return arg
        raise Error(f"@{self.name} has no argument %{name}")

    @property
    def returned(self) -> tuple[Value, ...]:
        """The returned values, empty until there is a `return`."""
        if self.last is None or self.last.opname != "return":
            return ()
        return self.last.operands

    def result_names(self) -> tuple[str, ...]:
        """The name of every result: the declared one, or `result0`, `result1`, ..."""
        declared = self.results or (Result(),) * len(self.returned)
        return tuple(r.name or f"result{i}" for i, r in enumerate(declared))

    def aliases(self) -> dict[int, int]:
        """Result index to the index of the argument whose memory it reuses."""
        names = {arg.name: arg.index for arg in self.args}
        return {i: names[r.alias] for i, r in enumerate(self.results) if r.alias is not None}

    def append(self, op: Op) -> Op:
        """Put `op` at the end."""
        op.parent, op.prev, op.next = self, self.last, None
        if self.last is None:
            self.first = op
        else:
            self.last.next = op
        self.last = op
        return op

    def insert(self, op: Op, before: Op | None) -> Op:
        """Put `op` before another operation of this function, or at the end."""
        prev = self.last if before is None else before.prev
        op.parent, op.prev, op.next = self, prev, before
        if prev is None:
            self.first = op
        else:
            prev.next = op
        if before is None:
            self.last = op
        else:
            before.prev = op
        return op

    def unlink(self, op: Op) -> None:
        """Take `op` out of the list; `op.next` stays, so that a running iteration walks on."""
        if op.prev is None:
            self.first = op.next
        else:
            op.prev.next = op.next
        if op.next is None:
            self.last = op.prev
        else:
            op.next.prev = op.prev
        op.parent = None

    def __str__(self) -> str:
        from ..text.printer import print_function

        return print_function(self)

    def __repr__(self) -> str:
        return f"<function @{self.name}, operations: {sum(1 for _ in self)}>"


def reached(function: Function, seen: set[Function]) -> Iterator[Op]:
    """The operations that a call of a function runs, in order; a call before its callee's.

    Every function once, and none of those `seen` before; `seen` is added to.
    """
    if function in seen:
        return
    seen.add(function)
    for op in function:
        yield op
        if op.opname == "call":
            yield from reached(op.attributes["callee"], seen)


class Module(Displayed):
    """Functions over shared weights, with the mesh and the ranges of the symbolic dims.

    `dims` maps a symbol to (min, typical, max). `files` maps a short name to the path of a
    checkpoint file; the `foreign` ones are read, but not copied (decision 0019). In the global view
    types carry axes; in the `local` view shapes are those of one rank.
    """

    def __init__(
        self,
        name: str,
        mesh: Mesh | None = None,
        dims: Mapping[str, tuple[int, int, int]] | None = None,
        local: bool = False,
    ) -> None:
        self.name, self.mesh, self.local = name, mesh or Mesh(), local
        self.dims: dict[str, tuple[int, int, int]] = dict(dims or {})
        self.files: dict[str, str] = {}
        self.foreign: frozenset[str] = frozenset()
        self.weights: dict[str, Weight] = {}
        self.functions: dict[str, Function] = {}

    def add_function(self, function: Function) -> Function:
        """Add a function; its name must be new."""
        if function.name in self.functions:
            raise Error(f"the module has two functions called @{function.name}")
        self.functions[function.name] = function
        return function

    def add_weight(self, weight: Weight) -> Weight:
        """Add a weight; its name must be new."""
        if weight.name in self.weights:
            raise Error(f"the module has two weights called @{weight.name}")
        self.weights[weight.name] = weight
        return weight

    def own(self, type: TensorType) -> TensorType:
        """The type of a value of which each rank has its own in the local view: it varies over all
        axes of the mesh. In the global view `type` itself."""
        return type.part_of(type.replace(varying=self.mesh.names)) if self.local else type

    @property
    def main(self) -> Function:
        """The function callers run: the one called `forward`, else the last."""
        if not self.functions:
            raise Error(f"module @{self.name} has no function")
        return self.functions.get("forward") or next(reversed(self.functions.values()))

    def ops(self) -> Iterator[Op]:
        """Every operation of every function, in order."""
        for function in self.functions.values():
            yield from function

    def to_networkx(self) -> networkx.DiGraph[Any]:
        """The directed graph along which data flows, from operands to operations to results.

        Its nodes are the Op and Value objects; their attributes are `kind` (operation, value,
        argument or weight), `name`, `function` and `stage` (of the pipeline, -1 for all ranks), of
        operations also `attributes`, `scope` and `source`, of values `dtype`, `shape` and `type`.
        An edge to an operation has the names of its `operands`.
        """
        from ..analysis.graph import to_networkx

        return to_networkx(self)

    def _drawing(self) -> str:
        from ..page.notebook import drawing

        return drawing(self) if self.functions else ""

    def __str__(self) -> str:
        from ..text.printer import print_module

        return print_module(self)

    def __repr__(self) -> str:
        counts = f"functions: {len(self.functions)}, weights: {len(self.weights)}"
        return f"<module @{self.name}, {counts}, operations: {sum(1 for _ in self.ops())}>"
