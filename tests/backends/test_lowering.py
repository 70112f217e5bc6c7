"""Tables of lowerings: duplicates, refusals, other packages, unsupported operations."""

from __future__ import annotations

from typing import Any

import pytest

from irc.backends.base import Unsupported, report
from irc.backends.lowering import Lowering, expansion
from irc.ir.core import Op
from irc.ir.declare import REGISTRY
from irc.ops import Add, Full, GatedMlp, Linear, Mul, Sigmoid, Silu
from irc.text import parse_module
from tests.backends.text import FakeEntry, module

MODULE = module(
    "%x: f32[2, 4], %w: f32[3, 4]",
    "f32[2, 3], f32[2, 4]",
    """
    %gated = gated_mlp %x, %w, %w : f32[2, 3] loc("a.py":3 "mlp")
    %relu = gated_mlp %x, %w, %w {act="relu"} : f32[2, 3] loc("a.py":4 "mlp")
    %y = neg %x : f32[2, 4] loc("a.py":5)
    return %gated, %y
    """,
)


def lower(*_: object) -> None:
    """A lowering that does nothing."""


def test_a_composite_without_lowering_needs_its_expansion_covered() -> None:
    table: Lowering[Any] = Lowering("none")
    table.lower(Linear, Mul, Sigmoid)(lower)
    unsupported = table.unsupported(MODULE)
    assert [(each.op.opname, each.reason) for each in unsupported] == [
        ("gated_mlp", "has no lowering, and its expansion needs relu, which has no lowering"),
        ("neg", "has no lowering"),
    ]
    told = str(report(unsupported, "none"))
    assert "a.py:4 in mlp: gated_mlp: has no lowering" in told and "a.py:5: neg" in told


def test_a_lowering_may_refuse_an_instance() -> None:
    table: Lowering[Any] = Lowering("none")

    def only_relu(op: Op) -> str | None:
        return None if op.attributes["act"] == "relu" else "does relu only"

    table.lower(GatedMlp, unless=only_relu)(lower)
    table.lower(REGISTRY["neg"])(lower)
    first, second, third, _ = MODULE.main
    assert table.find(first) is None and table.find(second) is lower and table.find(third) is lower
    (each,) = table.unsupported(MODULE)
    assert each == Unsupported(
        first, "does relu only, and its expansion needs linear, which has no lowering"
    )
    table.lower(Linear, Mul, Silu)(lower)
    assert table.unsupported(MODULE) == []


def test_only_functions_called_from_the_main_function_count() -> None:
    """Each once, in the module's list of functions or not."""
    text = """module @m {
      func @alone(%x: f32[2]) -> (f32[2]) { %y = relu %x : f32[2] return %y }
      func @inner(%x: f32[2]) -> (f32[2]) { %y = neg %x : f32[2] return %y }
      func @outer(%x: f32[2]) -> (f32[2]) { %y = call %x {callee=@inner} : f32[2] return %y }
      func @forward(%x: f32[2]) -> (f32[2]) {
        %y = call %x {callee=@outer} : f32[2]
        %z = call %y {callee=@inner} : f32[2]
        %e = exp %z : f32[2]
        return %e
      } }"""
    table: Lowering[Any] = Lowering("none")
    found = parse_module(text)
    assert [each.op.opname for each in table.unsupported(found)] == ["neg", "exp"]
    found.functions = {"forward": found.main}
    assert [each.op.opname for each in table.unsupported(found)] == ["neg", "exp"]


def test_tables_refuse_duplicates_and_load_those_of_packages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table: Lowering[Any] = Lowering("none")
    table.lower(Add)(lower)
    with pytest.raises(ValueError, match="none has two lowerings of add"):
        table.lower(Add)(lower)

    def theirs(other: Lowering[Any]) -> None:
        other.lower(Full)(lower)

    def found(group: str) -> list[FakeEntry]:
        assert group == "irc.lowerings"
        return [FakeEntry("none", theirs), FakeEntry("another", None)]

    monkeypatch.setattr("irc.backends.lowering.installed", found)
    assert table.covers(Full) and not table.covers(Mul)


def test_an_expansion_keeps_the_operation_and_its_place() -> None:
    op = next(iter(MODULE.main))
    users = [len(value.users) for value in op.operands]
    expanded = expansion(op)
    assert [len(value.users) for value in op.operands] == users
    assert [part.opname for part in expanded.ops] == ["linear", "silu", "linear", "mul"]
    assert {part.loc for part in expanded.ops} == {op.loc}
