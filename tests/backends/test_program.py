"""Backends by name, their programs and streams, tested with the reference backend; and tables of
lowerings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irc.backends
from irc.backends.base import Backend, Unsupported, ports_of, report
from irc.backends.lowering import Lowering, expansion
from irc.backends.reference import ReferenceProgram, backend
from irc.errors import Error
from irc.ir.core import Op
from irc.ir.declare import REGISTRY, Operand, operation
from irc.ir.types import TensorType
from irc.ops import Add, Full, GatedMlp, Linear, Mul, Sigmoid, Silu
from irc.text import parse_module
from tests.backends.text import module

F32 = np.float32


class FakeEntry:
    """An entry point of another package."""

    def __init__(self, name: str, loaded: object) -> None:
        self.name, self.loaded = name, loaded

    def load(self) -> object:
        return self.loaded


COUNTER = module(
    "%x: f32[B], %total: f32[B, C]",
    "f32[B, C], total: f32[B, C] aliases %total",
    """
    %column = reshape %x {shape=[B, 1]} : f32[B, 1]
    %new = add %total, %column : f32[B, C]
    %twice = add %new, %new : f32[B, C]
    return %twice, %new
    """,
)


def test_a_stream_keeps_the_state_and_a_run_keeps_nothing() -> None:
    program = ReferenceProgram(COUNTER)
    ports = program.ports
    assert [p.name for p in ports.inputs] == ["x"]
    assert [(p.name, p.state) for p in ports.states] == [("total", True)]
    assert [p.name for p in ports.outputs] == ["result0"]
    stream, other = program.open({"B": 2, "C": 3}), program.open({"B": 2, "C": 1})
    for step in (1, 2, 3):
        found = stream.step({"x": np.array([1, 2], F32)})
        assert list(found) == ["result0"]
        np.testing.assert_array_equal(found["result0"], [[2 * step] * 3, [4 * step] * 3])
    np.testing.assert_array_equal(other.states["total"], [np.zeros((2, 1))])
    whole = program.run({"x": np.ones(2, F32), "total": np.ones((2, 3), F32)})
    np.testing.assert_array_equal(whole["total"], np.full((2, 3), 2))


def test_every_rank_keeps_its_own_state() -> None:
    counter = module(
        "%x: f32[], %total: f32[]{varies tp}",
        "f32[], total: f32[]{varies tp} aliases %total",
        """
        %rank = rank {axis="tp"} : i32[]{varies tp}
        %step = cast %rank {dtype="f32"} : f32[]{varies tp}
        %more = add %total, %step : f32[]{varies tp}
        %new = add %more, %x : f32[]{varies tp}
        %sum = all_reduce %new {axis="tp", group_size=3} : f32[]
        return %sum, %new
        """,
        head="local mesh(tp=3)",
    )
    stream = ReferenceProgram(counter).open({})
    for step in (1, 2, 3):
        (found,) = stream.step({"x": np.array(1, F32)}).values()
        assert float(found) == 6 * step  # ranks 0, 1 and 2 hold 1, 2 and 3 times the steps


def test_errors_of_streams() -> None:
    program = ReferenceProgram(COUNTER)
    with pytest.raises(Error, match="state total has a dimension C, but C has no size"):
        program.open({"B": 2})
    with pytest.raises(Error, match="total is a state that the stream keeps"):
        program.open({"B": 1, "C": 1}).step({"x": np.ones(1, F32), "total": np.ones((1, 1), F32)})
    with pytest.raises(Error, match="the inputs lack x; @forward takes x"):
        program.open({"B": 1, "C": 1}).step({})


def test_the_reference_backend_writes_and_loads_text(tmp_path: Path) -> None:
    assert irc.backends.get("reference") is backend
    assert isinstance(backend, Backend) and backend.unsupported(COUNTER) == []
    manifest = backend.emit(COUNTER, tmp_path, base=tmp_path).facts
    program = backend.load(tmp_path, manifest)
    assert program.ports == ports_of(COUNTER.main)
    found = program.run({"x": np.ones(1, F32), "total": np.ones((1, 1), F32)})
    np.testing.assert_array_equal(found["result0"], [[4]])


def test_an_unknown_backend_names_the_nearest() -> None:
    with pytest.raises(Error, match="no backend called 'referense'; did you mean 'reference'"):
        irc.backends.get("referense")


def test_backends_of_other_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = object()
    entries = [FakeEntry("other", theirs)]

    def found(group: str) -> list[FakeEntry]:
        assert group == "irc.backends"
        return entries

    monkeypatch.setattr("irc.backends.installed", found)
    assert irc.backends.get("other") is theirs
    assert irc.backends.names()[-1] == "other"
    entries.append(FakeEntry("other", None))
    with pytest.raises(Error, match="two installed packages bring a backend called 'other'"):
        irc.backends.get("other")


def test_an_operation_without_meaning_is_unsupported() -> None:
    @operation("mute")
    class Mute(Op):
        """An operation without evaluate and expand."""

        x: Operand

        def infer(self) -> TensorType:
            return self.x.type

    try:
        silent = module("%x: f32[2]", "f32[2]", "%y = mute %x : f32[2]\nreturn %y")
        (each,) = backend.unsupported(silent)
        assert each.op.opname == "mute" and "neither evaluate nor expand" in each.reason
        assert not backend.covers(Mute) and backend.covers(Add)
    finally:
        del REGISTRY["mute"]


# -- tables of lowerings

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
