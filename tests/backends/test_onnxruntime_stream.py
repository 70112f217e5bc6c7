"""Streams on ONNX Runtime, of one rank and of several: caches in place, growth, wrong inputs,
failures, memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import pytest

from irc.backends.base import ports_of
from irc.backends.onnx import backend
from irc.backends.onnx.growth import growing, writes_of
from irc.backends.onnxruntime import OnnxRuntimeProgram, OnnxRuntimeStream, session
from irc.backends.onnxruntime.program import threads_per_rank
from irc.backends.onnxruntime.stream import SMALLEST
from irc.backends.ranks.communicator import PeerError
from irc.backends.reference import ReferenceProgram
from irc.errors import Error
from irc.ir.core import Module
from irc.text import parse_module
from tests.backends.decoder import DTYPES, SHAPES, Decoder, build, call, close, ids_of
from tests.backends.ranks import loaded, session_of
from tests.fresh import fresh

Decoders: TypeAlias = Callable[..., Decoder]


def caches_of(stream: OnnxRuntimeStream) -> list[dict[str, np.ndarray]]:
    """The caches of every rank, by name."""
    return [dict(each.memory) for each in stream.ranks.values()]


@pytest.mark.parametrize(
    ("name", "rows", "mesh"),
    [
        *((name, rows, "") for name in SHAPES for rows in (1, 3)),
        *((name, 2, "tp=2") for name in ("gqa", "bf16", "f16")),
        *(("odd", 2, f"tp={ranks}") for ranks in (2, 3, 4)),
    ],
)
def test_prefill_and_decode_agree_with_the_reference(
    name: str, rows: int, mesh: str, decoder: Decoders
) -> None:
    made = decoder(name, mesh)
    assert made.program.ports == ports_of(made.module.main)
    ids, streams, at = ids_of(rows, 80), made.open(rows, 80), 0
    for tokens in (6, 1, 1, 57, 1, 14):  # the caches grow twice on the way
        given = call(ids[:, at : at + tokens], np.full(rows, at))
        got, want = (stream.step(given)["logits"] for stream in streams)
        close(got, want, DTYPES.get(name, ("f32", ""))[0])
        at += tokens


def test_rows_may_hold_different_numbers_of_tokens(decoder: Decoders) -> None:
    lengths, ids, streams = np.array([3, 7]), ids_of(2, 7), decoder().open(2, 12)
    close(*(stream.step(call(ids, np.zeros(2, int)))["logits"] for stream in streams))
    for i in range(3):  # row 0 overwrites the padding of its prompt
        given = call(ids[:, i : i + 1], lengths + i)
        close(*(stream.step(given)["logits"] for stream in streams))


@pytest.mark.parametrize("mesh", ["", "tp=2"])
def test_run_takes_and_returns_global_caches_and_keeps_nothing(
    mesh: str, decoder: Decoders
) -> None:
    made = decoder("gqa", mesh)
    given = call(ids_of(2, 5), np.array([4, 2]))
    rng = fresh(6)
    for port in made.program.ports.states:
        given[port.name] = rng.standard_normal((2, 2, 11, 8)).astype(np.float32)
    before = given["k0"].copy()
    first, second = (made.program.run(given) for _ in range(2))
    wanted = made.reference.run(given)
    assert list(first) == list(wanted)
    for name, want in wanted.items():
        close(first[name], want)
        np.testing.assert_array_equal(first[name], second[name])
    np.testing.assert_array_equal(given["k0"], before)


def test_narrow_caches_are_f32_in_memory_only(decoder: Decoders) -> None:
    program = decoder("bf16").program
    assert [(p.name, p.dtype, p.state) for p in program.ports.states] == [
        (f"{kind}{i}", "bf16", True) for i in range(2) for kind in "kv"
    ]
    assert [str(d) for d in program.ports.states[0].shape] == ["B", "2", "C", "8"]
    assert [p.name for p in program.ports.outputs] == ["logits"]
    given = call(ids_of(1, 5), np.zeros(1, int))
    caches = {p.name: np.zeros((1, 2, 9, 8), ml_dtypes.bfloat16) for p in program.ports.states}
    assert program.run(given | caches)["k0"].dtype == ml_dtypes.bfloat16
    stream: Any = program.open({"B": 1, "C": 9})
    stream.step(given)
    held = caches_of(stream)
    assert {array.dtype for each in held for array in each.values()} == {np.dtype(np.float32)}


def test_streams_may_run_at_the_same_time(decoder: Decoders) -> None:
    made = decoder("gqa", "tp=2")
    given = [call(fresh(i).integers(0, 61, (1, 7)), np.zeros(1, int)) for i in range(3)]
    results: dict[int, np.ndarray] = {}

    def one(i: int) -> None:
        results[i] = made.open(1, 16)[0].step(given[i])["logits"]

    every = [threading.Thread(target=one, args=(i,)) for i in range(3)]
    for thread in every:
        thread.start()
    for thread in every:
        thread.join()
    for i in range(3):
        close(results[i], made.open(1, 16)[1].step(given[i])["logits"])


# -- memory


@pytest.mark.parametrize("mesh", ["", "tp=2"])
def test_caches_are_never_copied_while_they_fit(mesh: str, decoder: Decoders) -> None:
    stream, ids = decoder("gqa", mesh).open(1, 200)[0], ids_of(1, SMALLEST)
    first = stream.step(call(ids[:, :9], np.zeros(1, int)))["logits"]
    memory, kept = caches_of(stream), first.copy()
    assert all(each["k0"][:, :, :9].any() and not each["k0"][:, :, 9:].any() for each in memory)
    for i in range(9, SMALLEST):
        stream.step(call(ids[:, i : i + 1], np.array([i])))
    for now, before in zip(caches_of(stream), memory, strict=True):
        assert all(now[name] is array for name, array in before.items())
        assert before["v1"][:, :, SMALLEST - 1].any()
    np.testing.assert_array_equal(first, kept)  # later steps leave results alone


def test_caches_grow_as_they_fill(decoder: Decoders) -> None:
    streams = decoder().open(1, 300)
    ids, own = ids_of(1, 300), streams[0].ranks[0]
    capacities: list[int] = []
    at = 0
    for tokens in (1, 62, 1, 1, 70, 1, 163, 1):
        given = call(ids[:, at : at + tokens], np.array([at]))
        close(*(stream.step(given)["logits"] for stream in streams))
        at += tokens
        capacities.append(own.capacity)
    assert capacities == [64, 64, 64, 128, 192, 192, 300, 300] and at == 300
    assert own.memory["k0"].shape == (1, 2, 300, 8)
    with pytest.raises(Error, match=r"up to position 301, but they have room for 300.*larger C"):
        streams[0].step(call(ids[:, :1], np.array([300])))


def test_low_memory_computes_the_same(decoder: Decoders) -> None:
    lean = decoder(low_memory=True)
    given = call(ids_of(1, 6), np.zeros(1, int))
    close(*(stream.step(given)["logits"] for stream in lean.open(1, 8)))
    options = session_of(lean.program).get_session_options()
    assert options.get_session_config_entry("session.disable_prepacking") == "1"
    assert options.intra_op_num_threads == 1  # as asked for


# -- which caches may grow

CACHED = """module @m dims(B=1:1:4, S=1:1:64, C=1:64:512, P=1:64:512) {
  func @forward(%q: f32[B, S, 8], %past: i32[B], %k: f32[B, 1, C, 8]MORE)
      -> (f32[B, S, 8], k: f32[B, 1, C, 8] aliases %k) {
    %u = cache_update %k, %q, %past : f32[B, 1, C, 8]
    BODY
    return %y, %u
  }
}"""


def cached(body: str, more: str = "") -> Module:
    lines = "\n    ".join(body.split("; "))
    return parse_module(CACHED.replace("BODY", lines).replace("MORE", more))


ATTEND = "%y = attention %q, %u, %u, "


@pytest.mark.parametrize(
    ("body", "more", "grows"),
    [
        (ATTEND + "past=%past {head_dim=8, causal} : f32[B, S, 8]", "", True),
        (ATTEND + "past=%past {head_dim=8, causal, window=4} : f32[B, S, 8]", "", True),
        (ATTEND + "lengths=%past {head_dim=8} : f32[B, S, 8]", "", True),
        (ATTEND + "past=%past, lengths=%past {head_dim=8, causal} : f32[B, S, 8]", "", True),
        # without past the position of the last query is C - 1
        ("%y = attention %q, %u, %u {head_dim=8, causal} : f32[B, S, 8]", "", False),
        (ATTEND + "lengths=%past {head_dim=8, window=3} : f32[B, S, 8]", "", False),
        # every position is read, filled or not
        ("%y = attention %q, %u, %u {head_dim=8} : f32[B, S, 8]", "", False),
        (ATTEND + "past=%past {head_dim=8} : f32[B, S, 8]", "", False),
        # C is the size of something else too
        (
            ATTEND + "mask=%m, past=%past {head_dim=8, causal} : f32[B, S, 8]",
            ", %m: bool[1, 1, 1, C]",
            False,
        ),
        (
            ATTEND + "past=%past {head_dim=8, causal} : f32[B, S, 8]; "
            "%z = slice %m {dim=0, start=C, stop=C + 1} : f32[1]",
            ", %m: f32[P]",
            False,
        ),
        (
            "%z = reduce_sum %u {dims=[2]} : f32[B, 1, 8]; %s = reduce_sum %z {dims=[0, 1, 2]} "
            ": f32[]; %y = add %q, %s : f32[B, S, 8]",
            "",
            False,
        ),
        (
            '%i = iota {size=C, dtype="f32"} : f32[C]; %s = reduce_sum %i {dims=[0]} : f32[]; '
            "%y = add %q, %s : f32[B, S, 8]",
            "",
            False,
        ),
    ],
)
def test_which_caches_may_grow(body: str, more: str, grows: bool, tmp_path: Path) -> None:
    module = cached(body, more)
    assert (growing(module.main) is not None) == grows
    assert writes_of(module.main) == [{"past": "past", "step": "S", "capacity": "C"}]
    if more:
        return
    ours = OnnxRuntimeProgram(tmp_path, backend.emit(module, tmp_path).facts, threads=1)
    streams = [p.open({"B": 2, "C": 9}) for p in (ours, ReferenceProgram(module))]
    rng = fresh(2)
    for past, tokens in ((0, 4), (4, 1), (5, 3)):
        q = rng.standard_normal((2, tokens, 8)).astype(np.float32)
        given = {"q": q, "past": np.array([past, past], np.int32)}
        got, want = (s.step(given)["result0"] for s in streams)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_a_fixed_capacity_is_kept(tmp_path: Path) -> None:
    text = str(cached(ATTEND + "past=%past {head_dim=8, causal} : f32[B, S, 8]"))
    module = parse_module(text.replace("1, C, 8", "1, 6, 8"))
    facts = backend.emit(module, tmp_path).facts
    assert facts["stages"][0]["grows"] is None
    program = OnnxRuntimeProgram(tmp_path, facts, threads=1)
    given = {"q": np.ones((1, 4, 8), np.float32), "past": np.array([3], np.int32)}
    with pytest.raises(Error, match="up to position 7, but they have room for 6"):
        program.open({"B": 1}).step(given)
    with pytest.raises(Error, match="up to position 7, but they have room for 6"):
        program.run(given | {"k": np.zeros((1, 1, 6, 8), np.float32)})
    with pytest.raises(Error, match="the input past counts tokens, but it has -1"):
        program.open({"B": 1}).step(given | {"past": np.array([-1], np.int32)})


# -- errors


@pytest.mark.parametrize("mesh", ["", "tp=2"])
def test_wrong_inputs_are_named_and_change_nothing(mesh: str, decoder: Decoders) -> None:
    made = decoder("gqa", mesh)
    stream, oracle = made.open(1, 20)
    given = call(ids_of(1, 3), np.zeros(1, int))
    wrong: list[tuple[dict[str, np.ndarray], str]] = [
        ({"k0": np.zeros(1)}, "k0 is a state that the stream keeps"),
        ({"past_length": np.zeros(1)}, "'past_length'; did you mean 'past_lengths'"),
        ({"input_ids": given["input_ids"].astype("i8")}, "input_ids is i64, but it must be i32"),
        ({"positions": np.zeros((1, 4), np.int32)}, "positions has the shape"),
        ({"past_lengths": np.array([19], np.int32)}, "up to position 22, but they have room for"),
        (call(ids_of(2, 3), np.zeros(2, int)), "opened for B=1, but these inputs have B=2"),
    ]
    for more, message in wrong:
        with pytest.raises(Error, match=message):
            stream.step(given | more)
    with pytest.raises(Error, match="the inputs lack positions; @forward takes input_ids"):
        stream.step({name: array for name, array in given.items() if name != "positions"})
    close(*(each.step(given)["logits"] for each in (stream, oracle)))
    with pytest.raises(Error, match="C has no size"):
        made.program.open({"B": 1})
    with pytest.raises(Error, match=r"k0 has the shape \[1, 1, 9, 8\], but it must be f32\[B, 2"):
        caches = {p.name: np.zeros((1, 1, 9, 8), "f4") for p in made.program.ports.states}
        made.program.run(given | caches)


@pytest.mark.parametrize("mesh", ["", "tp=2"])
def test_missing_and_damaged_files_are_named(mesh: str, tmp_path: Path) -> None:
    facts = backend.emit(build("gqa", mesh), tmp_path).facts
    rank = 1 if mesh else 0
    path, model = tmp_path / f"rank{rank}.weights", tmp_path / f"rank{rank}.onnx"
    path.rename(tmp_path / "gone")
    with pytest.raises(Error, match=f"{path.name} is missing"):
        backend.load(tmp_path, facts)
    (tmp_path / "gone").rename(path)
    model.write_bytes(model.read_bytes()[:300])
    where = "on rank 1 of 2" if mesh else ""
    with pytest.raises(Error, match=rf"(?s)ONNX Runtime cannot load .*{model.name}.*{where}"):
        backend.load(tmp_path, facts)


def test_options_are_checked(tmp_path: Path) -> None:
    facts = backend.emit(build("gqa", "tp=2"), tmp_path).facts
    with pytest.raises(Error, match="no option timout; did you mean 'timeout'"):
        backend.load(tmp_path, facts, timout=3)
    facts = backend.emit(build(), tmp_path).facts
    with pytest.raises(Error, match="of 1 rank on ONNX Runtime has no option timeout; it has thr"):
        backend.load(tmp_path, facts, timeout=3)


FAILING = """module @m local mesh(tp=3) dims(S=1:3:9) {
  func @forward(%x: f32[S, 4]{varies tp}, %i: i32[S]) -> (f32[S, 4], n: f32[S, 4]) {
    %a = all_reduce %x {axis="tp", group_size=3} : f32[S, 4]
    %r = rank {axis="tp"} : i32[]{varies tp}
    %j = mul %i, %r : i32[S]{varies tp}
    %b = gather %a, %j {dim=0} : f32[S, 4]{varies tp}
    %c = all_reduce %b {axis="tp", group_size=3} : f32[S, 4]
    %d = all_gather %c {axis="tp", dim=0, group_size=3} : f32[3*S, 4]
    %e = slice %d {dim=0, start=0, stop=S} : f32[S, 4]
    return %e, %c
  }
}"""


def test_a_rank_that_fails_in_the_middle_stops_the_run(tmp_path: Path) -> None:
    program = loaded(parse_module(FAILING), tmp_path, timeout=1e6)
    x = fresh(7).standard_normal((4, 4)).astype(np.float32)
    bad = np.array([0, 1, 2, 2], np.int32)  # row 4 on rank 2, which is not there
    with pytest.raises(Error, match=r"(?s)ONNX Runtime failed: .*Gather.*on rank 2 of 3"):
        program.run({"x": x, "i": bad})
    stream = program.open({})
    with pytest.raises(Error, match=r"(?s)ONNX Runtime failed: .*on rank 2 of 3"):
        stream.step({"x": x, "i": bad})
    with pytest.raises(PeerError, match="rank 2 failed: ONNX Runtime failed"):
        stream.step({"x": x, "i": bad * 0})
    found = program.run({"x": x, "i": bad * 0})  # a run keeps nothing, not even a failure
    np.testing.assert_allclose(found["n"], 9 * x[[0] * 4], rtol=1e-5)


# -- threads


def test_only_physical_cores_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 6}, raising=False)
    monkeypatch.setattr(session, "_core", lambda cpu: ("0", str(cpu // 2)))
    monkeypatch.setattr(session, "_is_virtual", lambda: False)
    assert session.usable_cores() == 3
    monkeypatch.setattr(session, "_is_virtual", lambda: True)
    assert session.usable_cores() == 5


def test_cores_are_divided_among_the_ranks_that_run_together() -> None:
    assert [threads_per_rank(8, 2, cores) for cores in (1, 4, 11, 16)] == [1, 1, 2, 4]


def test_a_fixed_state_is_read_after_its_new_value_is_known(tmp_path: Path) -> None:
    module = parse_module("""module @m dims(B=1:2:4) {
      func @forward(%x: f32[B, 4], %s: f32[B, 4]) -> (y: f32[B, 4], s: f32[B, 4] aliases %s) {
        %new = add %s, %x : f32[B, 4]
        %size = exp %new : f32[B, 4]
        %y = sub %s, %size : f32[B, 4]
        return %y, %new
      } }""")
    program = loaded(module, tmp_path)
    assert [port.fixed for port in program.ports.states] == [True]
    stream, state = program.open({"B": 2}), np.zeros((2, 4), np.float32)
    for step in range(4):
        x = fresh(step).standard_normal((2, 4)).astype(np.float32)
        wanted = state - np.exp(state + x)
        np.testing.assert_allclose(stream.step({"x": x})["y"], wanted, rtol=1e-5, atol=1e-5)
        state = state + x
