"""Facts that a declaration states about an operation, so that passes need no lists of names.

The generic tests check every fact of every operation against numpy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, TypedDict, get_args

from .core import Op
from .sharding import parse_sums

Bound: TypeAlias = Literal["no", "operands", "always"]
Reads: TypeAlias = Literal["", "once", "many"]


class Facts(TypedDict, total=False):
    """The keyword arguments of `@operation` that state facts.

    * `sums`: the operands in which the operation is additive, so that a partial sum passes through:
      `"x y"` means in both together (x + y), `"x | y"` in either alone (x * y).
    * `addends`: the operands that are added to a contraction, such as a bias.
    * `commutative`: two operands may be exchanged.
    * `pure`: an operation without uses may be erased.
    * `keeps_zeros`: where all operands that have a dimension of the result are zero, so is the
      result, whatever finite numbers the others hold. Follows from `sums` in an additive operation.
    * `moves_data`: no arithmetic; every element of the results is one of an operand, a fixed
      number of the declaration or zero, converted to the dtype of the result.
    * `is_view`: the result is the first operand's memory, in the same order.
    * `bounded`: `"operands"`: finite operands give finite results; `"always"`: no operands give an
      infinity, though they may give NaN. An operation that moves data is bounded by its operands.
    * `selects`: the operand of which only the elements that the others choose are read.
    * `reads`: how often an element of the operands is read: `"once"` at most, or `"many"` times.
    * `cheap`: computing the result again, where it is used, costs less than storing it.
    * `in_place`: the operands whose memory the last results may overwrite, in their order.
    * `safe_values`: operands of which some numbers are errors or give NaN, and a number that never
      does: indices and divisors.
    """

    sums: str
    addends: str
    commutative: bool
    pure: bool
    keeps_zeros: bool
    moves_data: bool
    is_view: bool
    bounded: Bound
    selects: str
    reads: Reads
    cheap: bool
    in_place: str
    safe_values: Mapping[str, int]


def set_facts(cls: type[Op], declared: Facts) -> None:
    """Check facts against the operands of a class, and make them its class attributes."""
    facts: dict[str, Any] = {name: getattr(Op, name) for name in Facts.__annotations__} | declared
    facts["sums"] = parse_sums(declared.get("sums", ""))
    facts["addends"] = tuple(declared.get("addends", "").split())
    if facts["bounded"] not in get_args(Bound):
        raise ValueError(f"{cls.opname}: bounded is one of {get_args(Bound)}")
    if facts["reads"] not in get_args(Reads):
        raise ValueError(f"{cls.opname}: reads is one of {get_args(Reads)}")
    if facts["is_view"] and not facts["moves_data"]:
        raise ValueError(f"{cls.opname}: a view moves data; state moves_data as well")
    operands = {*cls.operand_names, *cls.optional_names}
    named = {*facts["addends"], *facts["safe_values"], *facts["in_place"].split()}
    named |= {facts["selects"], ""}
    for name in sorted(named.union(*facts["sums"]) - operands - {""}):
        raise ValueError(f"{cls.opname} has no operand {name!r}, which its facts name")
    if facts["moves_data"] and facts["bounded"] == "no":
        facts["bounded"] = "operands"
    facts["keeps_zeros"] |= any(group >= operands for group in facts["sums"])
    for name, value in facts.items():
        setattr(cls, name, value)


def facts_text(cls: type[Op]) -> str:
    """The facts that hold of an operation, for people: `keeps_zeros, bounded="operands"`."""
    facts: list[str] = []
    for name in Facts.__annotations__:
        value = getattr(cls, name)
        if value == getattr(Op, name):
            continue
        if name == "sums":
            value = " | ".join(" ".join(sorted(group)) for group in value)
        if name == "addends":
            value = " ".join(value)
        if value is True:
            facts.append(name)
        else:
            facts.append(f'{name}="{value}"' if isinstance(value, str) else f"{name}={value}")
    return ", ".join(facts)
