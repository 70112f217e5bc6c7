"""Pipeline stages: one function per stage, the values they send, the errors; and the bytes that
processes send for global results."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from irc.analysis.stages import stages_of
from irc.backends.onnx import backend
from irc.backends.onnxruntime.program import OnnxRuntimeProgram
from irc.backends.ranks.communicator import CollectiveCall
from irc.backends.ranks.threads import ThreadCommunicator, ThreadWorld
from irc.backends.reference import ReferenceProgram, evaluate
from irc.errors import Error
from irc.ir.core import Module
from irc.ir.verify import verify
from irc.passes.inline import Inline
from irc.pipeline import Stats
from irc.text import parse_module
from tests.backends.checked_models import emit_checked
from tests.backends.ranks import loaded
from tests.fresh import fresh

# Three stages of two ranks. Stage 1 needs %x for the size S, which its operand [B*S, 8] does not
# determine; stage 2 has no state and no collective; two stages call @block with other caches.
TEXT = """module @m local mesh(pp=3, tp=2) dims(B=1:2:4, S=1:3:9, C=1:8:16) {
  weight @a : f32[4, 8] of f32[8@tp, 8] = random("a", 1, 0.5, [8, 8]).shard(0, tp)
  weight @b : f32[8, 4] of f32[8, 8@tp] = random("b", 1, 0.5, [8, 8]).shard(1, tp)
  weight @last : f32[3, 8] of f32[5@tp, 8] = random("last", 1, 0.5, [5, 8]).shard(0, tp)
  func @block(%x: f32[B, S, 8], %past: i32[B], %k: f32[B, 1, C, 4] of f32[B, 2@tp, C, 4])
      -> (f32[B, S, 8], f32[B, 1, C, 4] of f32[B, 2@tp, C, 4]) {
    %h = linear %x, @a : f32[B, S, 4] of f32[B, S, 8@tp]
    %u = cache_update %k, %h, %past : f32[B, 1, C, 4] of f32[B, 2@tp, C, 4]
    %t = attention %h, %u, %u, past=%past {head_dim=4, causal} : f32[B, S, 4] of f32[B, S, 8@tp]
    %y = linear %t, @b : f32[B, S, 8]{sum tp}
    %z = all_reduce %y {axis="tp", group_size=2} : f32[B, S, 8]
    return %z, %u
  }
  func @front(%x: f32[B, S, 8], %past: i32[B], %k0: f32[B, 1, C, 4] of f32[B, 2@tp, C, 4])
      -> (flat: f32[B*S, 8], k0: f32[B, 1, C, 4] of f32[B, 2@tp, C, 4] aliases %k0) {
    %y, %u = call %x, %past, %k0 {callee=@block} : f32[B, S, 8], f32[B, 1, C, 4] of f32[B, 2@tp, C, 4]
    %flat = reshape %y {shape=[B*S, 8]} : f32[B*S, 8]
    return %flat, %u
  }
  func @middle(%x: f32[B, S, 8], %past: i32[B], %k1: f32[B, 1, C, 4] of f32[B, 2@tp, C, 4], %flat: f32[B*S, 8])
      -> (y: f32[B, S, 8], k1: f32[B, 1, C, 4] of f32[B, 2@tp, C, 4] aliases %k1, flat: f32[B*S, 8]) {
    %g = reshape %flat {shape=[B, S, 8]} : f32[B, S, 8]
    %y, %u = call %g, %past, %k1 {callee=@block} : f32[B, S, 8], f32[B, 1, C, 4] of f32[B, 2@tp, C, 4]
    return %y, %u, %flat
  }
  func @back(%y: f32[B, S, 8], %flat: f32[B*S, 8]) -> (h: f32[B, S, 3] of f32[B, S, 5@tp], e: f32[B*S, 8]) {
    %h = linear %y, @last : f32[B, S, 3] of f32[B, S, 5@tp]
    %e = neg %flat : f32[B*S, 8]
    return %h, %e
  }
  func @forward(%x: f32[B, S, 8], %past: i32[B], %k0: f32[B, 1, C, 4] of f32[B, 2@tp, C, 4], %k1: f32[B, 1, C, 4] of f32[B, 2@tp, C, 4])
      -> (h: f32[B, S, 3] of f32[B, S, 5@tp], k1: f32[B, 1, C, 4] of f32[B, 2@tp, C, 4] aliases %k1, e: f32[B*S, 8],
          k0: f32[B, 1, C, 4] of f32[B, 2@tp, C, 4] aliases %k0) {
    %flat, %u = call %x, %past, %k0 {callee=@front, stage=0} : f32[B*S, 8], f32[B, 1, C, 4] of f32[B, 2@tp, C, 4]
    %y, %v, %f = call %x, %past, %k1, %flat {callee=@middle, stage=1}
      : f32[B, S, 8], f32[B, 1, C, 4] of f32[B, 2@tp, C, 4], f32[B*S, 8]
    %h, %e = call %y, %f {callee=@back, stage=2} : f32[B, S, 3] of f32[B, S, 5@tp], f32[B*S, 8]
    return %h, %v, %e, %u
  }
}"""  # noqa: E501


def module() -> Module:
    found = parse_module(TEXT)
    verify(found)
    return found


def given(tokens: int, past: int, rng: np.random.Generator) -> dict[str, Any]:
    x = rng.standard_normal((2, tokens, 8)).astype(np.float32)
    return {"x": x, "past": np.full(2, past, np.int32)}


def close(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert list(found) == list(wanted)
    for name, want in wanted.items():
        np.testing.assert_allclose(found[name], want, rtol=1e-4, atol=1e-5, err_msg=name)


def test_processes_take_global_inputs_and_return_global_outputs(tmp_path: Path) -> None:
    m, rng = module(), fresh(2)
    facts = backend.emit(m, tmp_path).facts
    whole = given(3, 1, rng)
    states = {k: rng.standard_normal((2, 2, 9, 4)).astype(np.float32) for k in ("k0", "k1")}
    steps = [given(n, past, rng) for past, n in ((0, 4), (4, 1))]
    reference = ReferenceProgram(m).open({"B": 2, "C": 16})
    wanted = [evaluate(m, whole | states), *map(reference.step, steps)]

    def one(communicator: Any) -> list[dict[str, np.ndarray]]:
        program = OnnxRuntimeProgram(tmp_path, facts, communicator, threads=1)
        stream = program.open({"B": 2, "C": 16})
        return [program.run(whole | states), *map(stream.step, steps)]

    for found in ThreadWorld(6, 100).run(one):
        for got, want in zip(found, wanted, strict=True):
            close(got, want)

    def four(communicator: Any) -> None:
        OnnxRuntimeProgram(tmp_path, facts, communicator, threads=1)

    with pytest.raises(Error, match="has 6 ranks, and 4 processes run it"):
        ThreadWorld(4, 100).run(four)


def test_a_stage_has_its_own_weights_and_values(tmp_path: Path) -> None:
    m = module()
    Inline().run(m, Stats())
    facts = emit_checked(m, tmp_path)
    front, middle, back = facts["stages"]
    assert [r["stage"] for r in facts["ranks"]] == [0, 0, 1, 1, 2, 2]
    assert front["sends"] == [{"stage": 1, "names": ["flat"]}]
    assert middle["receives"] == [{"stage": 0, "names": ["flat"]}]
    assert middle["sends"] == [{"stage": 2, "names": ["y", "flat"]}]
    assert back["receives"] == [{"stage": 1, "names": ["y", "flat"]}]
    names = [[port["name"] for port in stage["ports"]["inputs"]] for stage in facts["stages"]]
    assert names == [["x", "past"], ["x", "past", "flat"], ["y", "flat"]]
    states = [[r.get("state") for r in stage["results"]] for stage in facts["stages"]]
    assert states == [[None, "k0"], [None, "k1", None], [None, None]]
    assert [stage["grows"] for stage in facts["stages"]] == ["C", "C", None]
    weights = [
        [t.name for t in onnx.load(str(tmp_path / f"rank{r}.onnx")).graph.initializer if t.dims]
        for r in (0, 2, 4)
    ]
    assert [{"a", "b", "last"} & set(names) for names in weights] == [{"a", "b"}] * 2 + [{"last"}]
    assert [r["weights"] for r in facts["ranks"]] == [["shared.weights"]] * 4 + [
        ["rank4.weights"],
        ["rank5.weights"],
    ]


# Stage 0 gives a result that stage 2 takes too, stage 1 computes nothing, stage 3 has no result.
PASSED_ON = """module @m local mesh(pp=4) dims(B=1:2:4) {
  func @front(%x: f32[B, 3]) -> (h: f32[B, 3]) {
    %h = neg %x : f32[B, 3]
    return %h
  }
  func @middle(%h: f32[B, 3]) -> (h: f32[B, 3]) {
    return %h
  }
  func @back(%h: f32[B, 3]) -> (y: f32[B, 3]) {
    %y = abs %h : f32[B, 3]
    return %y
  }
  func @end(%y: f32[B, 3]) -> () {
    return
  }
  func @forward(%x: f32[B, 3]) -> (h: f32[B, 3], y: f32[B, 3]) {
    %a = call %x {callee=@front, stage=0} : f32[B, 3]
    %h = call %a {callee=@middle, stage=1} : f32[B, 3]
    %y = call %h {callee=@back, stage=2} : f32[B, 3]
    call %y {callee=@end, stage=3}
    return %h, %y
  }
}"""


def test_a_value_may_be_a_result_and_the_input_of_a_stage(tmp_path: Path) -> None:
    m, inputs = parse_module(PASSED_ON), {"x": fresh(3).standard_normal((2, 3), np.float32)}
    close(loaded(m, tmp_path).run(inputs), evaluate(m, inputs))
    facts = backend.emit(m, tmp_path).facts

    def one(communicator: Any) -> dict[str, np.ndarray]:
        return OnnxRuntimeProgram(tmp_path, facts, communicator, threads=1).run(inputs)

    for found in ThreadWorld(4, 100).run(one):
        close(found, evaluate(m, inputs))


# what is changed, into what; the error
NO_STAGES = [
    ("stage=2}", "stage=1}", r"calls stages 0, 1, 1, but the mesh is \(pp=3, tp=2\)"),
    (
        "(flat: f32[B*S, 8], k0: f32[B, 1, C, 4] of f32[B, 2@tp, C, 4] aliases %k0)",
        "(flat: f32[B*S, 8], k0: f32[B, 1, C, 4] of f32[B, 2@tp, C, 4])",
        "stage 0 takes the state k0, but does not return it; expected every state in one",
    ),
    ("-> (y: f32", "-> (t: f32", "stage 2 takes t as y; expected one name"),
    (
        "-> (h: f32[B, S, 3] of f32[B, S, 5@tp], e",
        "-> (t: f32[B, S, 3] of f32[B, S, 5@tp], e",
        "@forward returns t as h; expected",
    ),
    (
        "    return %h, %v, %e, %u",
        "    %n = neg %h : f32[B, S, 3] of f32[B, S, 5@tp]\n    return %n, %v, %e, %u",
        "neg is between the calls of stages, and no stage runs it",
    ),
]


@pytest.mark.parametrize(("old", "new", "message"), NO_STAGES)
def test_calls_that_are_no_stages_are_refused(
    old: str, new: str, message: str, tmp_path: Path
) -> None:
    assert old in TEXT
    with pytest.raises(Error, match=message):
        backend.emit(parse_module(TEXT.replace(old, new)), tmp_path)


def test_a_function_without_stages_is_itself() -> None:
    m = parse_module("module @m {\n  func @f(%x: f32[2]) -> (f32[2]) {\n    return %x\n  }\n}")
    assert [(stage.function, stage.ranks) for stage in stages_of(m)] == [(m.main, [0])]


# -- results

SHARDS = """module @m local mesh(dp=2, tp=3) {
  func @forward(%a: f32[4, 5] of f32[7@dp, 5], %b: f32[7, 2] of f32[7, 5@tp], %c: f32[4, 2] of f32[7@dp, 5@tp], %d: f32[7, 5]) -> (w: f32[4, 5] of f32[7@dp, 5], x: f32[7, 2] of f32[7, 5@tp], y: f32[4, 2] of f32[7@dp, 5@tp], z: f32[7, 5]) {
    %w = neg %a : f32[4, 5] of f32[7@dp, 5]
    %x = neg %b : f32[7, 2] of f32[7, 5@tp]
    %y = neg %c : f32[4, 2] of f32[7@dp, 5@tp]
    %z = neg %d : f32[7, 5]
    return %w, %x, %y, %z
  }
}"""  # fmt: skip  # noqa: E501


def test_every_shard_is_sent_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    m = parse_module(SHARDS)
    verify(m)
    facts = backend.emit(m, tmp_path).facts
    inputs = {name: fresh(3).standard_normal((7, 5)).astype(np.float32) for name in "abcd"}
    sent: Counter[str] = Counter()
    real = ThreadCommunicator.collective

    def counted(
        self: ThreadCommunicator, what: CollectiveCall, operand: np.ndarray, result: np.ndarray
    ) -> None:
        if self.rank == what.group[what.root]:
            sent[what.place[-1]] += result.nbytes * (len(what.group) - 1)
        real(self, what, operand, result)

    monkeypatch.setattr(ThreadCommunicator, "collective", counted)

    def one(communicator: Any) -> dict[str, np.ndarray]:
        return OnnxRuntimeProgram(tmp_path, facts, communicator, threads=1).run(inputs)

    for found in ThreadWorld(6, 100).run(one):
        for name, given in zip("wxyz", "abcd", strict=True):
            np.testing.assert_array_equal(found[name], -inputs[given])
    # shards of 20, 14, 8 and 35 elements, of which there are 2, 3, 6 and 1, to five other ranks
    assert sent == {"w": 2 * 20 * 4 * 5, "x": 3 * 14 * 4 * 5, "y": 6 * 8 * 4 * 5, "z": 35 * 4 * 5}
