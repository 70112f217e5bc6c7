"""`@operation`: turns an annotated class into an operation with a typed, fast constructor."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Iterable
from functools import cache
from types import CodeType
from typing import (
    Any,
    Generic,
    Self,
    TypeAlias,
    TypeVar,
    Unpack,
    cast,
    dataclass_transform,
    overload,
)

from ..errors import Error, did_you_mean
from ..extensions.entry_points import load_installed
from ..extensions.user_files import watch
from . import attributes
from .core import Op, Value
from .core import placeholder as placeholder
from .facts import Facts, set_facts
from .recorded import local_types
from .sharding import result_types
from .types import TensorType

REGISTRY: dict[str, type[Op]] = {}
watch("operation", REGISTRY)
_BASES: set[type[Op]] = set()  # classes whose annotations subclasses inherit
GROUP = "irc.operations"  # entry points of packages that declare more of them

OpClass = TypeVar("OpClass", bound=type[Op])
Read = TypeVar("Read", covariant=True)
Given = TypeVar("Given", contravariant=True)


class _Annotation(Generic[Read, Given]):
    """Annotation of operands: the constructor takes `Given`, the attribute reads as `Read`."""

    @overload
    def __get__(self, instance: None, owner: Any) -> Self: ...
    @overload
    def __get__(self, instance: Op, owner: Any) -> Read: ...
    def __get__(self, instance: Any, owner: Any) -> Any:
        raise TypeError("annotations only")

    def __set__(self, instance: Op, value: Given) -> None:
        raise TypeError("annotations only")


Operand: TypeAlias = _Annotation[Value, Value | Op]  # a value, or an operation of one result
OptionalOperand: TypeAlias = _Annotation[Value | None, Value | Op | None]  # written `name=%value`
Operands: TypeAlias = _Annotation[tuple[Value, ...], Iterable[Value | Op]]  # any number, the last


def optional() -> Any:
    """The default of an OptionalOperand: absent."""
    return None


# Result types by type key. Types are interned, so the 126th layer costs no inference.
_MEMO: dict[tuple[Any, ...], tuple[TensorType, ...]] = {}
_MOST_KEYS = 1 << 16


def inferred(op: Op) -> tuple[TensorType, ...]:
    """Result types computed afresh, with attributes checked."""
    attributes.check_choices(op)
    try:
        types = op.infer() if infers(op) else _expansion_types(op)
    except Error as error:
        raise _naming(error, op) from None
    outs = types if isinstance(types, tuple) else (types,)
    if any(value.type.of is not None for value in op.operands):
        return local_types(op, outs)
    return result_types(op, outs)


def _naming(error: Error, op: Op) -> Error:
    """The error, pointing at `op` (no stand-in of an expansion), with its name in the message."""
    if not re.search(rf"\b{op.opname}\b", error.message):
        error.message = f"{op.opname}: {error.message}"
    error.op = op
    return error


def types_of(op: Op) -> tuple[TensorType, ...]:
    """Result types of an operation as it is, from the memo where known."""
    key = op.type_key()
    if key[0] is op:  # declared with memo=False
        return inferred(op)
    types = _MEMO.get(key)
    if types is None:
        if len(_MEMO) >= _MOST_KEYS:
            _MEMO.clear()
        types = _MEMO[key] = inferred(op)
    return types


def _expansion_types(op: Op) -> tuple[TensorType, ...]:
    stand_ins = tuple(Value(v.type.replicated, None, i) for i, v in enumerate(op.operands))
    return tuple(r.type for r in expanded_results(placeholder(op, stand_ins).expand()))


def infers(op: Op) -> bool:
    """Whether the operation types its results itself, rather than by its expansion."""
    return not op.composite or type(op).infer is not Op.infer


def expanded_results(expanded: Op | Value | tuple[Value, ...]) -> tuple[Value, ...]:
    """The values that an expansion gives for the results."""
    if isinstance(expanded, Op):
        return expanded.results
    return expanded if isinstance(expanded, tuple) else (expanded,)


@dataclass_transform(frozen_default=True)
def operation_base(cls: OpClass) -> OpClass:
    """Let subclasses inherit the operands and attributes that a base annotates, in its order."""
    _BASES.add(cls)
    return cls


@dataclass_transform(frozen_default=True)
def operation(
    name: str, *, sharding: str | None = None, memo: bool = True, **declared: Unpack[Facts]
) -> Callable[[OpClass], OpClass]:
    """Declare an operation. Annotations tell operands from attributes.

    `sharding` is the rule of irc/ir/sharding.py, that of the base class where it is left out;
    `declared` are the facts of irc/ir/facts.py. `memo=False` infers the types of every instance
    afresh.
    """

    def wrap(cls: OpClass) -> OpClass:
        if not (name.isidentifier() and name.isascii()):
            raise ValueError(f"operation {name!r}: a name is letters, digits and underscores")
        if name in REGISTRY:
            raise ValueError(f"operation {name!r} is declared twice")
        new = _build(cls, name, memo)
        new.opname = name
        new.sharding = getattr(cls, "sharding", None) if sharding is None else sharding
        new.composite = "expand" in cls.__dict__
        set_facts(new, declared)
        REGISTRY[name] = new
        return new  # type: ignore[return-value]

    return wrap


def op_class(name: str, otherwise: str = "") -> type[Op]:
    """The operation called `name`; an Error suggests the nearest one, or `otherwise`."""
    if name not in REGISTRY:
        load_installed_operations()
    cls = REGISTRY.get(name)
    if cls is None:
        raise Error(f"no operation called {name[:64]!r}{did_you_mean(name, REGISTRY, otherwise)}")
    return cls


@cache
def load_installed_operations() -> None:
    """Import, once, the operations that installed packages declare."""
    load_installed(GROUP)


def _annotations(cls: type[Op]) -> dict[str, Any]:
    """Operands and attributes with their annotations: those of `operation_base`s, then its own.

    A name that the class annotates again has its position in the class.
    """
    kinds: dict[str, Any] = {}
    for base_class in reversed([base for base in cls.__mro__ if base is cls or base in _BASES]):
        hints = inspect.get_annotations(base_class, eval_str=True)
        for name, kind in hints.items():
            if typing.ClassVar not in (kind, typing.get_origin(kind)):
                kinds.pop(name, None)
                kinds[name] = kind
    return kinds


def _build(cls: type[Op], name: str, memo: bool) -> type[Op]:
    kinds = _annotations(cls)
    own = list(kinds)
    plain = [n for n in own if kinds[n] is Operand]
    maybe = tuple(n for n in own if kinds[n] is OptionalOperand)
    rest = [n for n in own if kinds[n] is Operands]
    attrs = {n: k for n, k in kinds.items() if k not in (Operand, OptionalOperand, Operands)}
    defaults = {n: getattr(cls, n) for n in attrs if hasattr(cls, n)}
    if rest and maybe:
        raise ValueError(f"{name}: variadic and optional operands do not go together")

    hidden = {*own, "__dict__", "__weakref__", "__slots__"}
    body: dict[str, Any] = {k: v for k, v in cls.__dict__.items() if k not in hidden}
    body["__slots__"] = tuple(attrs)
    for i, operand in enumerate(plain):
        body[operand] = property(_positional(i))
    for operand in maybe:
        body[operand] = property(_present(operand, len(plain)))
    for operand in rest:
        body[operand] = property(_remaining(len(plain)))
    body |= _generate(name, plain, rest, maybe, attrs, defaults, memo)
    new = cast("type[Op]", type(cls.__name__, cls.__bases__, body))
    new.operand_names, new.optional_names = (*plain, *rest), maybe
    new.variadic = bool(rest)
    new.attribute_types, new.attribute_defaults = attrs, defaults
    return new


@cache
def _code(source: str) -> CodeType:
    """Compiled once for the many operations whose operands and attributes have the same names."""
    return compile(source, "<operation>", "exec")


def _positional(i: int) -> Callable[[Op], Value]:
    return lambda op: op.operands[i]


def _present(name: str, first: int) -> Callable[[Op], Value | None]:
    def read(op: Op) -> Value | None:
        present = op.present
        return op.operands[first + present.index(name)] if name in present else None

    return read


def _remaining(first: int) -> Callable[[Op], tuple[Value, ...]]:
    return lambda op: op.operands[first:]


def as_value(x: Any) -> Value:
    """A Value, or the only result of an Op; anything else is a TypeError."""
    if isinstance(x, Value):
        return x
    if isinstance(x, Op):
        return x.result
    raise TypeError(f"an operand must be a value or a one-result operation, not {x!r}")


def _generate(
    name: str,
    plain: list[str],
    rest: list[str],
    maybe: tuple[str, ...],
    attrs: dict[str, Any],
    defaults: dict[str, Any],
    memo: bool,
) -> dict[str, Any]:
    """`__init__` and `type_key`, written out per class: construction is the hot path of a trace."""

    def key(types: list[str], others: str, prefix: str) -> str:
        """What the result types depend on; `others` are the operands that vary in number."""
        parts = [f"{type}.type, " for type in types]
        parts += [f"{prefix}present, "] * bool(maybe)
        parts += [f"*[x.type for x in {others}], "] * bool(maybe or rest)
        parts += [attributes.key_text(prefix + a, kind) for a, kind in attrs.items()]
        return f"(self.__class__, {''.join(parts)})" if memo else "(self,)"

    keyword = [f"{o}=None" for o in maybe]
    keyword += [f"{a}=default_{a}" if a in defaults else a for a in attrs]
    init = [f"def __init__(self, {''.join(f'{p}, ' for p in plain + rest)}"]
    init[0] += f"*, {''.join(f'{k}, ' for k in keyword)}loc=None):"
    init += [f" if {p}.__class__ is not Value: {p} = as_value({p})" for p in plain]
    operands = f"({''.join(f'{p}, ' for p in plain)})"
    others = "extra" if maybe else "".join(rest)
    if rest:
        init.append(f" {others} = tuple([as_value(x) for x in {others}])")
    if maybe:
        init.append(" present = (); extra = ()")
        for o in maybe:
            init.append(f" if {o} is not None: present += ({o!r},); extra += (as_value({o}),)")
    init.append(f" self.operands = {operands}{f' + {others}' if others else ''}")
    init.append(f" self.present = {'present' if maybe else '()'}")
    for a, kind in attrs.items():
        init.append(attributes.checking_line(name, a, kind))
        init.append(f" self.{a} = {a}")
    init.append(" self.loc = loc; self.parent = self.prev = self.next = None")
    lookup = f"memo.get({key(plain, others, '')})" if memo else "None"
    init.append(f" types = {lookup}")
    init.append(" if types is None: self.results = (); types = types_of(self)")
    init.append(" if len(types) == 1: self.results = (Value(types[0], self, 0),)")
    init.append(" else: self.results = tuple([Value(t, self, i) for i, t in enumerate(types)])")
    count = "users = {0}.users; users[self] = users[self] + 1 if self in users else 1"
    init += [f" {count.format(p)}" for p in plain]
    init += [f" for x in {others}: {count.format('x')}"] * bool(others)

    stored = [f"o[{i}]" for i in range(len(plain))]
    returned = key(stored, f"o[{len(plain)}:]", "self.")
    type_key = ["def type_key(self):", " o = self.operands", f" return {returned}"]

    scope: dict[str, Any] = {
        "Value": Value,
        "as_value": as_value,
        "types_of": types_of,
        "memo": _MEMO,
        **attributes.CHECKERS,
        **{f"default_{a}": value for a, value in defaults.items()},
    }
    exec(_code("\n".join(init + type_key)), scope)
    scope["__init__"].__qualname__ = f"{name}.__init__"
    return {"__init__": scope["__init__"], "type_key": scope["type_key"]}
