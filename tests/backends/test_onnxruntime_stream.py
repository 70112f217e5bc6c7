"""Programs on ONNX Runtime: caches in place, growth, what is fed wrongly, memory."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from irc.backends.base import Program
from irc.backends.onnx import backend
from irc.backends.onnx.growth import growing, writes_of
from irc.backends.onnxruntime import OnnxRuntimeProgram, OnnxRuntimeStream, session
from irc.backends.onnxruntime.stream import SMALLEST
from irc.backends.reference import ReferenceProgram
from irc.core import Module
from irc.errors import Error
from irc.text import parse_module
from tests.backends.decoder import Shape, build, call, save
from tests.fresh import fresh

SMALL = Shape()
SHAPES = {
    "gqa": SMALL,
    "mha": replace(SMALL, kv_heads=4),
    "mqa": replace(SMALL, kv_heads=1, vocab=33),
    "window": replace(SMALL, window=5),
    "bf16": replace(SMALL, dtype="bf16", stored="bf16"),
    "f16": replace(SMALL, dtype="f16", stored="f16"),
    "f32 of bf16": replace(SMALL, stored="bf16"),
}


def loaded(shape: Shape, folder: Path, **options: Any) -> tuple[OnnxRuntimeProgram, Module]:
    module = build(shape, save(shape, folder, files=2))
    out = folder / "out"
    out.mkdir()
    facts = backend.emit(module, out, {"base": folder, "check": True})
    return OnnxRuntimeProgram(out, facts, threads=1, **options), module


def ids_of(shape: Shape, batch: int, tokens: int) -> np.ndarray:
    return fresh(5).integers(0, shape.vocab, (batch, tokens))


def in_f32(shape: Shape, folder: Path) -> ReferenceProgram:
    """The model of the files in a folder as ONNX Runtime computes it, whatever they hold: in f32.

    Rounded after every step, as the reference does it in bf16, results may be far from these.
    """
    files = sorted(path.name for path in folder.glob("part-*.safetensors"))
    return ReferenceProgram(build(replace(shape, dtype="f32"), files), folder)


def close(got: np.ndarray, want: np.ndarray) -> None:
    assert got.dtype == want.dtype == np.float32 and got.shape == want.shape
    assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("batch", [1, 3])
def test_prefill_and_decode_agree_with_the_reference(name: str, batch: int, tmp_path: Path) -> None:
    shape = SHAPES[name]
    program, _ = loaded(shape, tmp_path)
    ids = ids_of(shape, batch, 14)
    ours = program.open({"B": batch, "C": 16})
    oracle = in_f32(shape, tmp_path).open({"B": batch, "C": 16})
    at = 0
    for tokens in (6, 1, 1, 4, 1, 1):  # also several tokens behind a filled cache
        given = call(ids[:, at : at + tokens], np.full(batch, at))
        close(ours.step(given)["logits"], oracle.step(given)["logits"])
        at += tokens


def test_decoding_gives_what_one_prefill_gives(tmp_path: Path) -> None:
    program, _ = loaded(SMALL, tmp_path)
    ids = ids_of(SMALL, 2, 12)
    whole = program.open({"B": 2, "C": 12}).step(call(ids, np.zeros(2, int)))["logits"]
    stream = program.open({"B": 2, "C": 12})
    for i in range(12):
        one = stream.step(call(ids[:, i : i + 1], np.full(2, i)))["logits"]
        np.testing.assert_allclose(one[:, 0], whole[:, i], rtol=1e-4, atol=1e-5)


def test_rows_may_hold_different_numbers_of_tokens(tmp_path: Path) -> None:
    program, module = loaded(SMALL, tmp_path)
    lengths = np.array([3, 7])
    ids = ids_of(SMALL, 2, 7)
    streams = [p.open({"B": 2, "C": 12}) for p in (program, ReferenceProgram(module, tmp_path))]
    prompt = [s.step(call(ids, np.zeros(2, int)))["logits"] for s in streams]
    close(prompt[0], prompt[1])
    for i in range(3):  # row 0 overwrites the padding of its prompt
        given = call(ids[:, i : i + 1], lengths + i)
        found = [s.step(given)["logits"] for s in streams]
        close(found[0], found[1])


def test_run_keeps_nothing(tmp_path: Path) -> None:
    program, module = loaded(SMALL, tmp_path)
    given = call(ids_of(SMALL, 1, 5), np.zeros(1, int))
    caches = {p.name: np.zeros((1, 2, 9, 8), np.float32) for p in program.ports.states}
    first, second = (program.run(given | caches) for _ in range(2))
    wanted = ReferenceProgram(module, tmp_path).run(given | caches)
    assert list(first) == list(wanted)
    for name, want in wanted.items():
        np.testing.assert_allclose(first[name], want, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(first[name], second[name])
    assert not caches["k0"].any()


def test_ports_tell_what_is_fed(tmp_path: Path) -> None:
    shape = SHAPES["bf16"]
    program, _ = loaded(shape, tmp_path)
    checked: Program = program
    assert [(p.name, p.dtype, p.state) for p in checked.ports.states] == [
        (f"{kind}{i}", "f32", True) for i in range(2) for kind in "kv"
    ]
    assert [str(d) for d in program.ports.states[0].shape] == ["B", "2", "C", "8"]
    assert [p.name for p in program.ports.outputs] == ["logits"]
    given = call(ids_of(shape, 1, 5), np.zeros(1, int))
    caches = {p.name: np.zeros((1, 2, 9, 8), ml_dtypes.bfloat16) for p in program.ports.states}
    assert program.run(given | caches)["k0"].dtype == np.float32


# -- memory


def test_caches_are_never_copied_while_they_fit(tmp_path: Path) -> None:
    program, _ = loaded(SMALL, tmp_path)
    stream = program.open({"B": 1, "C": 200})
    ids = ids_of(SMALL, 1, 200)
    stream.step(call(ids[:, :9], np.zeros(1, int)))
    memory = dict(stream._memory)
    assert memory["k0"][:, :, :9].any() and not memory["k0"][:, :, 9:].any()
    for i in range(9, SMALLEST):
        stream.step(call(ids[:, i : i + 1], np.array([i])))
        assert all(stream._memory[name] is array for name, array in memory.items())
        assert memory["v1"][:, :, i].any()


def test_caches_grow_as_they_fill(tmp_path: Path) -> None:
    program, module = loaded(SMALL, tmp_path)
    stream = program.open({"B": 1, "C": 300})
    oracle = ReferenceProgram(module, tmp_path).open({"B": 1, "C": 300})
    ids = ids_of(SMALL, 1, 300)
    capacities: list[int] = []
    at = 0
    for tokens in (1, 62, 1, 1, 70, 1, 163, 1):
        given = call(ids[:, at : at + tokens], np.array([at]))
        close(stream.step(given)["logits"], oracle.step(given)["logits"])
        at += tokens
        capacities.append(stream.capacity)
    assert capacities == [64, 64, 64, 128, 192, 192, 300, 300] and at == 300
    assert stream._memory["k0"].shape == (1, 2, 300, 8)
    with pytest.raises(Error, match=r"up to position 301, but they have room for 300.*larger C"):
        stream.step(call(ids[:, :1], np.array([300])))


def test_results_belong_to_the_caller(tmp_path: Path) -> None:
    program, _ = loaded(SMALL, tmp_path)
    stream = program.open({"B": 1, "C": 10})
    ids = ids_of(SMALL, 1, 2)
    first = stream.step(call(ids[:, :1], np.array([0])))["logits"]
    kept = first.copy()
    stream.step(call(ids[:, 1:], np.array([1])))
    np.testing.assert_array_equal(first, kept)


def test_low_memory_computes_the_same(tmp_path: Path) -> None:
    program, _ = loaded(SMALL, tmp_path)
    facts = backend.emit(
        build(SMALL, ["part-0.safetensors", "part-1.safetensors"]),
        tmp_path / "out",
        {"base": tmp_path},
    )
    lean = OnnxRuntimeProgram(tmp_path / "out", facts, threads=1, low_memory=True)
    given = call(ids_of(SMALL, 1, 6), np.zeros(1, int))
    results = [p.open({"B": 1, "C": 8}).step(given)["logits"] for p in (program, lean)]
    np.testing.assert_allclose(results[0], results[1], rtol=1e-4, atol=1e-5)
    options = lean.session.get_session_options()
    assert options.get_session_config_entry("session.disable_prepacking") == "1"


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
        # without past the last query stands at the last position, which is C - 1
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
def test_what_may_grow(body: str, more: str, grows: bool, tmp_path: Path) -> None:
    module = cached(body, more)
    assert (growing(module.main) is not None) == grows
    assert writes_of(module.main) == [{"past": "past", "step": "S", "capacity": "C"}]
    if more:
        return
    ours = OnnxRuntimeProgram(tmp_path, backend.emit(module, tmp_path, {}), threads=1)
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
    facts = backend.emit(module, tmp_path, {})
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


def stream_of(folder: Path) -> OnnxRuntimeStream:
    return loaded(SMALL, folder)[0].open({"B": 1, "C": 20})


def test_wrong_inputs_are_named(tmp_path: Path) -> None:
    stream = stream_of(tmp_path)
    given = call(ids_of(SMALL, 1, 3), np.zeros(1, int))
    wrong: list[tuple[dict[str, np.ndarray], str]] = [
        ({"k0": np.zeros(1)}, "k0 is a state that the stream keeps"),
        ({"past_length": np.zeros(1)}, "'past_length'; did you mean 'past_lengths'"),
        (
            {"input_ids": given["input_ids"].astype(np.int64)},
            "input_ids is i64, but it must be i32",
        ),
        ({"positions": np.zeros((1, 4), np.int32)}, "positions has the shape"),
    ]
    for more, message in wrong:
        with pytest.raises(Error, match=message):
            stream.step(given | more)
    del given["positions"]
    with pytest.raises(Error, match="the input positions of @forward is missing"):
        stream.step(given)
    with pytest.raises(Error, match="opened for B=1, but these inputs have B=2"):
        stream.step(call(ids_of(SMALL, 2, 3), np.zeros(2, int)))


def test_a_state_needs_its_sizes(tmp_path: Path) -> None:
    program, _ = loaded(SMALL, tmp_path)
    with pytest.raises(Error, match="C has no size"):
        program.open({"B": 1})


def test_a_failing_run_is_an_error(tmp_path: Path) -> None:
    stream = stream_of(tmp_path)
    given = call(ids_of(SMALL, 1, 3), np.zeros(1, int), wanted=7)
    with pytest.raises(Error, match=r"ONNX Runtime failed: .*GatherElements"):
        stream.step(given)


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    module = build(SMALL, save(SMALL, tmp_path))
    out = tmp_path / "out"
    out.mkdir()
    facts = backend.emit(module, out, {"base": tmp_path})
    (tmp_path / "part-0.safetensors").rename(tmp_path / "gone")
    with pytest.raises(Error, match=r"part-0\.safetensors is missing"):
        backend.load(out, facts)
    (tmp_path / "gone").rename(tmp_path / "part-0.safetensors")
    model = out / "rank0.onnx"
    model.write_bytes(model.read_bytes()[:1000])
    with pytest.raises(Error, match=r"ONNX Runtime cannot load .*rank0\.onnx"):
        backend.load(out, facts)


# -- threads


def test_cores_are_counted_where_they_are_real(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 6}, raising=False)
    monkeypatch.setattr(session, "_core", lambda cpu: ("0", str(cpu // 2)))
    monkeypatch.setattr(session, "_is_virtual", lambda: False)
    assert session.usable_cores() == 3
    monkeypatch.setattr(session, "_is_virtual", lambda: True)
    assert session.usable_cores() == 5


def test_threads_are_those_asked_for(tmp_path: Path) -> None:
    program, _ = loaded(SMALL, tmp_path)
    assert program.session.get_session_options().intra_op_num_threads == 1
