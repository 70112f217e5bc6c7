"""Pipeline stages: one function per stage, the values they send, the errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from irc.backends.onnx import backend
from irc.backends.onnx.stages import stages_of
from irc.backends.onnxruntime.program import OnnxRuntimeProgram
from irc.backends.ranks.threads import ThreadWorld
from irc.backends.reference import ReferenceProgram, evaluate
from irc.errors import Error
from irc.ir.core import Module
from irc.ir.verify import verify
from irc.text import parse_module
from tests.backends.checked_models import emit_checked
from tests.backends.ranks import loaded
from tests.fresh import fresh

# Three stages of two ranks. Stage 1 needs B and S, which its operand [B*S, 8] does not tell apart;
# stage 2 has no state and no collective; @block is called in two stages with other caches.
TEXT = """module @m local mesh(pp=3, tp=2) dims(B=1:2:4, S=1:3:9, C=1:8:16) {
  weight @a : f32[4, 8] = random("a", 1, 0.5, [8, 8]).shard(0, tp)
  weight @b : f32[8, 4] = random("b", 1, 0.5, [8, 8]).shard(1, tp)
  weight @last : f32[3, 8] = random("last", 1, 0.5, [5, 8]).shard(0, tp)
  func @block(%x: f32[B, S, 8], %past: i32[B], %k: f32[B, 1, C, 4])
      -> (f32[B, S, 8], f32[B, 1, C, 4]) {
    %h = linear %x, @a : f32[B, S, 4]
    %u = cache_update %k, %h, %past : f32[B, 1, C, 4]
    %t = attention %h, %u, %u, past=%past {head_dim=4, causal} : f32[B, S, 4]
    %y = linear %t, @b : f32[B, S, 8]
    %z = all_reduce %y {axis="tp", group_size=2} : f32[B, S, 8]
    return %z, %u
  }
  func @front(%x: f32[B, S, 8], %past: i32[B], %k: f32[B, 1, C, 4])
      -> (f32[B*S, 8], f32[B, 1, C, 4]) {
    %y, %u = call %x, %past, %k {callee=@block} : f32[B, S, 8], f32[B, 1, C, 4]
    %flat = reshape %y {shape=[B*S, 8]} : f32[B*S, 8]
    return %flat, %u
  }
  func @middle(%f: f32[B*S, 8], %past: i32[B], %k: f32[B, 1, C, 4])
      -> (f32[B, S, 8], f32[B, 1, C, 4], f32[B*S, 8]) {
    %x = reshape %f {shape=[B, S, 8]} : f32[B, S, 8]
    %y, %u = call %x, %past, %k {callee=@block} : f32[B, S, 8], f32[B, 1, C, 4]
    return %y, %u, %f
  }
  func @back(%x: f32[B, S, 8], %f: f32[B*S, 8]) -> (f32[B, S, 3], f32[B*S, 8]) {
    %h = linear %x, @last : f32[B, S, 3]
    %e = neg %f : f32[B*S, 8]
    return %h, %e
  }
  func @forward(%x: f32[B, S, 8], %past: i32[B], %k0: f32[B, 1, C, 4], %k1: f32[B, 1, C, 4])
      -> (h: f32[B, S, 3], k1: f32[B, 1, C, 4] aliases %k1, e: f32[B*S, 8],
          k0: f32[B, 1, C, 4] aliases %k0)
      layouts(h: f32[B, S, 5@tp], %k0: f32[B, 2@tp, C, 4], %k1: f32[B, 2@tp, C, 4]) {
    %x.1, %u = call %x, %past, %k0 {callee=@front, stage=0} : f32[B*S, 8], f32[B, 1, C, 4]
    %y, %v, %f = call %x.1, %past, %k1 {callee=@middle, stage=1}
      : f32[B, S, 8], f32[B, 1, C, 4], f32[B*S, 8]
    %h, %e = call %y, %f {callee=@back, stage=2} : f32[B, S, 3], f32[B*S, 8]
    return %h, %v, %e, %u
  }
}"""


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


def test_stages_compute_the_model(tmp_path: Path) -> None:
    m, rng = module(), fresh(1)
    program = loaded(m, tmp_path)
    streams = [p.open({"B": 2, "C": 16}) for p in (program, ReferenceProgram(m))]
    past = 0
    for tokens in (3, 1, 1, 4):
        inputs = given(tokens, past, rng)
        close(*(stream.step(inputs) for stream in streams))
        past += tokens
    inputs = given(3, 2, rng)
    for name in ("k0", "k1"):
        inputs[name] = rng.standard_normal((2, 2, 9, 4)).astype(np.float32)
    close(program.run(inputs), evaluate(m, inputs))


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
    before = str(m)
    facts = emit_checked(m, tmp_path)
    verify(m)  # the weights have lost the copies that were made of their users
    assert str(m) == before
    front, middle, back = facts["stages"]
    assert [r["stage"] for r in facts["ranks"]] == [0, 0, 1, 1, 2, 2]
    assert front["sends"] == [{"stage": 1, "names": ["stage0_x"]}]
    assert middle["receives"] == [{"stage": 0, "names": ["stage0_x"]}]
    assert middle["sends"] == [{"stage": 2, "names": ["stage1_y", "stage1_f"]}]
    assert back["receives"] == [{"stage": 1, "names": ["stage1_y", "stage1_f"]}]
    names = [[port["name"] for port in stage["ports"]["inputs"]] for stage in facts["stages"]]
    assert names == [["x", "past"], ["x", "past", "stage0_x"], ["stage1_y", "stage1_f"]]
    states = [[r.get("state") for r in stage["results"]] for stage in facts["stages"]]
    assert states == [["k0", None], ["k1", None, None], [None, None]]
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


def test_a_value_may_skip_a_stage(tmp_path: Path) -> None:
    """Stage 0 sends to stage 2 directly here; the pass sends through stage 1."""
    text = """module @m local mesh(pp=3) dims(S=1:3:9) {
      func @f(%x: f32[S]) -> (f32[S]) { %y = neg %x : f32[S]; return %y }
      func @g(%x: f32[S], %y: f32[S]) -> (f32[S]) { %z = mul %x, %y : f32[S]; return %z }
      func @forward(%x: f32[S]) -> (f32[S], f32[S], f32[S]) {
        %a = call %x {callee=@f, stage=0} : f32[S]
        %b = call %a {callee=@f, stage=1} : f32[S]
        %c = call %b, %a {callee=@g, stage=2} : f32[S]
        %d = call %c, %c {callee=@g, stage=2} : f32[S]
        return %a, %d, %x
      }
    }"""
    m = parse_module(text.replace("; ", "\n").replace("{ %", "{\n%").replace(" }\n", "\n}\n"))
    x = fresh(3).standard_normal(5).astype(np.float32)
    close(loaded(m, tmp_path).run({"x": x}), {"result0": -x, "result1": x**4, "result2": x})


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("stage=2}", "stage=1}", r"calls stages 0, 1, but the mesh is \(pp=3, tp=2\)"),
        (
            "%k1 {callee=@middle, stage=1}",
            "%k0 {callee=@middle, stage=1}",
            "the state k0 is used by the stages 0 and 1; expected one",
        ),
        (
            "    return %h, %v, %e, %u",
            "    %n = neg %h : f32[B, S, 3]\n    return %n, %v, %e, %u",
            "neg is between the calls of stages, and no stage runs it",
        ),
    ],
)
def test_calls_that_are_no_stages_are_refused(
    old: str, new: str, message: str, tmp_path: Path
) -> None:
    assert old in TEXT
    with pytest.raises(Error, match=message):
        backend.emit(parse_module(TEXT.replace(old, new)), tmp_path)


def test_stages_run_in_order(tmp_path: Path) -> None:
    text = TEXT.replace("callee=@front, stage=0", "callee=@front, stage=1")
    m = parse_module(text.replace("callee=@middle, stage=1", "callee=@middle, stage=0"))
    with pytest.raises(Error, match="stage 0 needs a value of stage 1, which runs after it"):
        backend.emit(m, tmp_path)


def test_a_function_without_stages_is_itself() -> None:
    m = parse_module("module @m {\n  func @f(%x: f32[2]) -> (f32[2]) {\n    return %x\n  }\n}")
    with stages_of(m) as stages:
        assert [(stage.function, stage.ranks) for stage in stages] == [(m.main, [0])]
