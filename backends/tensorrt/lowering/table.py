"""Which nodes every operation becomes for TensorRT, by flavour, version and GPU architecture.

A Choice holds for the flavours, versions and architectures that it names; of several that fit, the
first wins, and those of users' files come before ours. What no choice speaks of is written as for
ONNX Runtime, unless a dtype forbids it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Required, TypeAlias, TypedDict, Unpack

from irc.backends.lowering import STRUCTURE, Alone, Lowering, Refusal
from irc.backends.onnx.emitter import TABLE, Lowered, Rule
from irc.backends.tensorrt.target import Flavour, Target
from irc.core import Op
from irc.declare import REGISTRY
from irc.user_files import homes_of, is_users, watch

Writes: TypeAlias = Callable[[Any, Any], Lowered]  # a rule, with whichever emitter it needs

IMPORTERS = "onnx/onnx-tensorrt 5ab48c5c, onnxOpImporters.cpp"
BUILDER = "layer dump of the TensorRT-RTX 1.7.1.116 builder on CPU"


@dataclass(frozen=True)
class Row:
    """What an operation becomes, why, and where that is known from."""

    op: str
    choice: str
    reason: str
    source: str


@dataclass(frozen=True)
class Choice:
    """One way to write a class of operations, and where it holds.

    `rule` is None where the operation has no nodes of its own: its expansion is used, or it is
    refused. `since` and `before` bound the version; `architectures`, if any, are those for which it
    is needed: one of them in the target is enough. `takes` are dtypes that it may meet although
    TensorRT does not compute with them. `unless` and `alone` are those of Lowering.lower. Words
    has the same fields.
    """

    rule: Writes | None
    choice: str
    reason: str
    source: str
    flavour: Flavour | None = None
    since: tuple[int, int] = (0, 0)
    before: tuple[int, int] = (1 << 30, 0)
    architectures: tuple[int, ...] = ()
    unless: Refusal | None = None
    takes: tuple[str, ...] = ()
    alone: Alone | None = None

    def fits(self, target: Target) -> bool:
        """Whether it holds for a target."""
        if self.flavour not in (None, target.flavour):
            return False
        if not self.since <= target.version < self.before:
            return False
        return not self.architectures or bool({*self.architectures} & {*target.architectures})


class Words(TypedDict, total=False):
    """What is said of a choice, besides its rule."""

    choice: Required[str]
    reason: Required[str]
    source: Required[str]
    flavour: Flavour | None
    since: tuple[int, int]
    before: tuple[int, int]
    architectures: tuple[int, ...]
    unless: Refusal | None
    takes: tuple[str, ...]
    alone: Alone | None


@dataclass
class Choices:
    """All choices, by operation in the order in which they were made.

    `users` has those of users' files, by the operation's name: it may be declared later, or not at
    all in a process that only runs plugins. A number tells several of one name apart.
    """

    table: dict[type[Op], list[Choice]] = field(default_factory=dict[type[Op], list[Choice]])
    users: dict[tuple[str, int], Choice] = field(default_factory=dict[tuple[str, int], Choice])

    def lower(
        self, *operations: type[Op] | str, **words: Unpack[Words]
    ) -> Callable[[Writes], Writes]:
        """Register a rule for operations, classes or names; the words are those of Choice."""

        def register(rule: Writes) -> Writes:
            made = Choice(rule, **words)
            for each in operations:
                if isinstance(each, str) or is_users(homes_of(rule)):
                    name = each if isinstance(each, str) else each.opname
                    self.users[name, 1 + max((n for _, n in self.users), default=0)] = made
                else:
                    self.table.setdefault(each, []).append(made)
            return rule

        return register

    def of(self, cls: type[Op]) -> Iterator[Choice]:
        """The choices for a class, the first to be asked first."""
        yield from (made for (name, _), made in self.users.items() if name == cls.opname)
        yield from self.table.get(cls, ())

    def refuse(self, *classes: type[Op], reason: str, source: str) -> None:
        """These have no nodes: what has an expansion is written by that."""
        for cls in classes:
            self.table.setdefault(cls, []).append(Choice(None, "none", reason, source))


def _homes(choice: Choice) -> set[str]:
    return homes_of(choice.rule) if choice.rule is not None else set()


CHOICES = Choices()
watch("lowering", CHOICES.users, _homes)

_UNKNOWN = {
    "f64": "is in f64, which TensorRT makes f32 without a word",
    "i16": "is in i16, which TensorRT does not have",
    "u8": "is in u8, which TensorRT does not have between operations",
    "i4": "is in i4, which TensorRT has in constants only",
    "u4": "is in u4, which TensorRT does not have",
    "f8e5m2": "is in f8e5m2, which TensorRT does not have",
    "f8e4m3": "is in f8e4m3, which TensorRT takes from quantization and constants only",
}


def unknown_dtypes(target: Target, takes: tuple[str, ...] = ()) -> dict[str, str]:
    """The dtypes that a target does not compute with, and why; an operation may meet `takes`."""
    unknown = {name: why for name, why in _UNKNOWN.items() if name not in takes}
    for name in ("bf16", *takes):
        lacking = target.lacks(name)
        if lacking is not None:
            floor, weakest = lacking
            instead = "compile with --dtype f16, or " if name == "bf16" else ""
            why = f"is in {name}, which needs sm_{floor}; {instead}leave sm_{weakest} out"
            unknown[name] = why
    return unknown


def dtype_refusal(target: Target, takes: tuple[str, ...] = ()) -> Refusal:
    """Tells which dtype of an operation a target does not compute with; it may meet `takes`."""
    unknown = unknown_dtypes(target, takes)

    def refuse(op: Op) -> str | None:
        for value in (*op.operands, *op.results):
            if value.type.dtype in unknown:
                return unknown[value.type.dtype]
        return None

    return refuse


def lowerings(target: Target) -> Lowering[Rule]:
    """The lowerings for a target, those that users' files have brought so far among them."""
    users = ((REGISTRY.get(name), made) for (name, _), made in CHOICES.users.items())
    return _lowerings(target, tuple((cls, made) for cls, made in users if cls is not None))


@cache
def _lowerings(target: Target, users: tuple[tuple[type[Op], Choice], ...]) -> Lowering[Rule]:
    from irc.backends.tensorrt.lowering import rules  # noqa: F401  (fills CHOICES)

    made: Lowering[Rule] = Lowering("tensorrt")
    by_dtype = dtype_refusal(target)
    base = TABLE.entries()
    for cls in dict.fromkeys((*base, *CHOICES.table, *(cls for cls, _ in users))):
        chosen = _chosen(cls, target)
        if chosen is None and cls in base:
            made.lower(cls, unless=_either(by_dtype, base[cls][1]))(base[cls][0])
        elif chosen is not None and chosen.rule is not None:
            takes = dtype_refusal(target, chosen.takes) if chosen.takes else by_dtype
            unless = _either(takes, chosen.unless)
            made.lower(cls, unless=unless, alone=chosen.alone)(chosen.rule)
    return made


def _chosen(cls: type[Op], target: Target) -> Choice | None:
    return next((each for each in CHOICES.of(cls) if each.fits(target)), None)


def _either(first: Refusal, second: Refusal | None) -> Refusal:
    return lambda op: first(op) or (second(op) if second is not None else None)


def refusal(op: Op, target: Target) -> str | None:
    """The reason that the table gives against an operation, if any."""
    chosen = _chosen(type(op), target)
    return chosen.reason if chosen is not None and chosen.rule is None else None


def rows(target: Target) -> list[Row]:
    """The table for a target, sorted by operation."""
    from irc.backends.tensorrt.lowering.collectives import native_rows

    found = {row.op: row for row in native_rows(target)}
    for name, cls in REGISTRY.items():
        if name not in found:
            found[name] = _row(name, cls, target)
    return sorted(found.values(), key=lambda row: row.op)


def _row(name: str, cls: type[Op], target: Target) -> Row:
    chosen = _chosen(cls, target)
    if chosen is not None and (chosen.rule is not None or not cls.composite):
        return Row(name, chosen.choice, chosen.reason, chosen.source)
    if lowerings(target).covers(cls):
        return Row(name, "as ONNX", "the importer gives it the same meaning", IMPORTERS)
    if name in STRUCTURE:
        return Row(name, "structure", "it is walked, and has no nodes", "irc/ops")
    if not cls.composite:
        return Row(name, "none", "nothing is known to compute it", IMPORTERS)
    why = chosen.reason if chosen is not None else "it consists of simpler operations"
    return Row(name, "expansion", why, "irc/ops")
