"""The lowering table: the nodes of every operation by flavour, version and GPU architecture.

The first Choice whose Scope includes the target is used, users' choices before irc's own. An
operation without a choice is written as for ONNX Runtime, unless its dtypes are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any, TypeAlias

from irc.backends.lowering import STRUCTURE, Alone, Lowering, Refusal
from irc.backends.onnx.emitter import TABLE, Lowered, Rule
from irc.backends.tensorrt.nodes import COLLECTIVE_PLUGIN
from irc.backends.tensorrt.target import Scope, Target
from irc.extensions.user_files import defining_modules, is_users, watch
from irc.ir.core import Op
from irc.ir.declare import REGISTRY
from irc.ops.collective import Exchange

Writes: TypeAlias = Callable[[Any, Any], Lowered]  # (emitter, operation) -> its results

IMPORTERS = "onnx/onnx-tensorrt 5ab48c5c, onnxOpImporters.cpp"
_BY_NCCL = "TensorRT's own reach all ranks of an engine only, and do nothing in some versions"


@dataclass(frozen=True)
class Row:
    """What an operation becomes, why, and the source of that knowledge."""

    op: str
    choice: str
    reason: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Choice(Scope):
    """One way to write a class of operations, for the targets of its Scope.

    `takes` are dtypes that the operation may have although TensorRT does not compute with them.
    `unless` and `alone` are those of Lowering.lower.
    """

    rule: Writes
    choice: str
    reason: str
    source: str
    unless: Refusal | None = None
    takes: tuple[str, ...] = ()
    alone: Alone | None = None


@dataclass
class Choices:
    """All choices, by operation in the order of registration.

    `users` has those of users' files by the operation's name, which may be declared later, or never
    in a process that only runs plugins; a number distinguishes several of one name.
    """

    table: dict[type[Op], list[Choice]] = field(default_factory=dict[type[Op], list[Choice]])
    users: dict[tuple[str, int], Choice] = field(default_factory=dict[tuple[str, int], Choice])

    def lower(self, *operations: type[Op] | str, **fields: Any) -> Callable[[Writes], Writes]:
        """Register a rule for operations, classes or names; `fields` are those of Choice."""

        def register(rule: Writes) -> Writes:
            choice = Choice(rule=rule, **fields)
            for op in operations:
                if isinstance(op, str) or is_users(defining_modules(rule)):
                    name = op if isinstance(op, str) else op.opname
                    self.users[name, 1 + max((n for _, n in self.users), default=0)] = choice
                else:
                    self.table.setdefault(op, []).append(choice)
            return rule

        return register

    def find(self, cls: type[Op], target: Target) -> Choice | None:
        """The choice for a class of operations and a target, if there is one."""
        users = (choice for (name, _), choice in self.users.items() if name == cls.opname)
        choices = (*users, *self.table.get(cls, ()))
        return next((choice for choice in choices if choice.includes(target)), None)


CHOICES = Choices()
watch("lowering", CHOICES.users, lambda choice: defining_modules(choice.rule))

_UNKNOWN = {
    "f64": "is in f64, which TensorRT silently computes in f32",
    "i16": "is in i16, which TensorRT does not have; use i32",
    "u64": "is in u64, which TensorRT does not have; use i64",
    "u32": "is in u32, which TensorRT does not have; use i64",
    "u16": "is in u16, which TensorRT does not have; use i32",
    "u8": "is in u8, which TensorRT does not have between operations",
    "i4": "is in i4, which TensorRT has in constants only",
    "u4": "is in u4, which TensorRT does not have, for want of zero points; take symmetric codes, "
    "as --quantize w4a16 makes of the original weights, or another backend",
    "f8e5m2": "is in f8e5m2, which TensorRT does not have",
    "f8e4m3": "is in f8e4m3, which TensorRT takes from quantization and constants only",
    "f4e2m1": "is in f4e2m1, which TensorRT takes from quantization and constants only",
    "f8e8m0": "is in f8e8m0, which TensorRT takes as scales only",
}


def unknown_dtypes(target: Target, takes: tuple[str, ...] = ()) -> dict[str, str]:
    """The dtypes that a target does not compute with, and why, except those in `takes`."""
    unknown = {name: why for name, why in _UNKNOWN.items() if name not in takes}
    for name in ("bf16", *takes):
        if (lacking := target.lacks(name)) is not None:
            floor, newer = lacking
            instead = "compile with --dtype f16, or " if name == "bf16" else ""
            why = f"is in {name}, which needs sm_{floor}; {instead}give --target {newer}"
            unknown[name] = why
    return unknown


def _refusal_of(target: Target, takes: tuple[str, ...], unless: Refusal | None) -> Refusal:
    """Refuses operations with unknown dtypes, and what `unless` refuses."""
    unknown = unknown_dtypes(target, takes)

    def refuse(op: Op) -> str | None:
        for value in (*op.operands, *op.results):
            if value.type.dtype in unknown:
                return unknown[value.type.dtype]
        return unless(op) if unless is not None else None

    return refuse


def lowerings(target: Target) -> Lowering[Rule]:
    """The lowerings for a target, including those of users' files loaded so far."""
    for name in ("attention", "quantized", "simple"):  # fill CHOICES
        import_module(f"irc.backends.tensorrt.lowering.lower_{name}")
    users = ((REGISTRY.get(name), choice) for (name, _), choice in CHOICES.users.items())
    return _lowerings(target, tuple((cls, choice) for cls, choice in users if cls is not None))


@cache
def _lowerings(target: Target, users: tuple[tuple[type[Op], Choice], ...]) -> Lowering[Rule]:
    lowering: Lowering[Rule] = Lowering("tensorrt")
    base = TABLE.entries()
    for cls in dict.fromkeys((*base, *CHOICES.table, *(cls for cls, _ in users))):
        chosen = CHOICES.find(cls, target)
        if chosen is not None:
            unless = _refusal_of(target, chosen.takes, chosen.unless)
            lowering.lower(cls, unless=unless, alone=chosen.alone)(chosen.rule)
        elif cls in base:
            rule, unless = base[cls]
            lowering.lower(cls, unless=_refusal_of(target, (), unless))(rule)
    return lowering


def rows(target: Target) -> list[Row]:
    """The table for a target, sorted by operation."""
    lowering = lowerings(target)
    return [
        _row(name, cls, CHOICES.find(cls, target), lowering.covers(cls))
        for name, cls in sorted(REGISTRY.items())
    ]


def _row(name: str, cls: type[Op], chosen: Choice | None, is_covered: bool) -> Row:
    if chosen is not None:
        return Row(name, chosen.choice, chosen.reason, chosen.source)
    if issubclass(cls, Exchange):
        return Row(name, COLLECTIVE_PLUGIN, _BY_NCCL, "pytorch/TensorRT #4380, #4381, #4388")
    if is_covered:
        return Row(name, "as ONNX", "the importer gives it the same meaning", IMPORTERS)
    if name in STRUCTURE:
        return Row(name, "structure", "it has no nodes", "irc/ops")
    if cls.composite:
        return Row(name, "expansion", "it consists of simpler operations", "irc/ops")
    return Row(name, "none", "no node computes it", IMPORTERS)
