"""Streams on ONNX Runtime: caches in place, growth, wrong inputs, memory."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest

from irc.backends.base import Program
from irc.backends.onnx import backend
from irc.backends.onnx.growth import growing, writes_of
from irc.backends.onnxruntime import OnnxRuntimeProgram, OnnxRuntimeStream, session
from irc.backends.onnxruntime.stream import SMALLEST
from irc.backends.reference import ReferenceProgram
from irc.errors import Error
from irc.ir.core import Module
from irc.ir.dtypes import dtype_of
from irc.ir.verify import verify
from irc.text import parse_module
from tests.backends.decoder import Shape, build, call, save
from tests.backends.ranks import loaded, session_of
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


def decoders(
    folder: Path, ranks: int = 1, shape: Shape = SMALL, **options: Any
) -> tuple[OnnxRuntimeProgram, ReferenceProgram, Module]:
    """(the decoder on `ranks` ranks, unsharded in numpy in f32, the local module).

    The reference computes in f32 as ONNX Runtime does: rounded to bf16 after every step, its
    results may be far from these.
    """
    files = save(shape, folder, files=2)
    module = build(shape, files, ranks)
    verify(module)
    reference = ReferenceProgram(build(replace(shape, dtype="f32"), files), folder)
    return loaded(module, folder, **options), reference, module


def ids_of(batch: int, tokens: int, shape: Shape = SMALL) -> np.ndarray:
    return fresh(5).integers(0, shape.vocab, (batch, tokens))


def close(got: np.ndarray, want: np.ndarray) -> None:
    """Compare results, rounded once at the end, with those in f32."""
    assert want.dtype == np.float32 and got.shape == want.shape
    limit = {"float32": 1e-5, "float16": 2.0**-11, "bfloat16": 2.0**-8}[got.dtype.name]
    assert np.linalg.norm(got.astype(np.float32) - want) <= limit * np.linalg.norm(want)


def caches_of(stream: OnnxRuntimeStream) -> list[dict[str, np.ndarray]]:
    """The caches of every rank, by name."""
    return [dict(each._memory) for each in stream.ranks.values()]


@pytest.mark.parametrize(
    ("name", "batch", "ranks"),
    [
        *((name, batch, 1) for name in SHAPES for batch in (1, 3)),
        *((name, 2, 2) for name in ("gqa", "bf16", "f16")),
    ],
)
def test_prefill_and_decode_agree_with_the_reference(
    name: str, batch: int, ranks: int, tmp_path: Path
) -> None:
    shape = SHAPES[name]
    program, reference, _ = decoders(tmp_path, ranks, shape)
    ids = ids_of(batch, 14, shape)
    streams = [each.open({"B": batch, "C": 16}) for each in (program, reference)]
    at = 0
    for tokens in (6, 1, 1, 4, 1, 1):  # also several tokens behind a filled cache
        given = call(ids[:, at : at + tokens], np.full(batch, at))
        got, want = (stream.step(given)["logits"] for stream in streams)
        assert dtype_of(got) == shape.dtype
        close(got, want)
        at += tokens


def test_rows_may_hold_different_numbers_of_tokens(tmp_path: Path) -> None:
    program, reference, _ = decoders(tmp_path)
    lengths = np.array([3, 7])
    ids = ids_of(2, 7)
    streams = [each.open({"B": 2, "C": 12}) for each in (program, reference)]
    close(*(stream.step(call(ids, np.zeros(2, int)))["logits"] for stream in streams))
    for i in range(3):  # row 0 overwrites the padding of its prompt
        given = call(ids[:, i : i + 1], lengths + i)
        close(*(stream.step(given)["logits"] for stream in streams))


@pytest.mark.parametrize("ranks", [1, 2])
def test_run_takes_and_returns_global_caches_and_keeps_nothing(ranks: int, tmp_path: Path) -> None:
    program, reference, _ = decoders(tmp_path, ranks)
    given = call(ids_of(2, 5), np.array([4, 2]))
    rng = fresh(6)
    for port in program.ports.states:
        given[port.name] = rng.standard_normal((2, 2, 11, 8)).astype(np.float32)
    before = given["k0"].copy()
    first, second = (program.run(given) for _ in range(2))
    wanted = reference.run(given)
    assert list(first) == list(wanted)
    for name, want in wanted.items():
        close(first[name], want)
        np.testing.assert_array_equal(first[name], second[name])
    np.testing.assert_array_equal(given["k0"], before)


def test_narrow_caches_are_f32_in_memory_only(tmp_path: Path) -> None:
    program, _, _ = decoders(tmp_path, shape=SHAPES["bf16"])
    checked: Program = program
    assert [(p.name, p.dtype, p.state) for p in checked.ports.states] == [
        (f"{kind}{i}", "bf16", True) for i in range(2) for kind in "kv"
    ]
    assert [str(d) for d in program.ports.states[0].shape] == ["B", "2", "C", "8"]
    assert [p.name for p in program.ports.outputs] == ["logits"]
    given = call(ids_of(1, 5), np.zeros(1, int))
    caches = {p.name: np.zeros((1, 2, 9, 8), ml_dtypes.bfloat16) for p in program.ports.states}
    assert program.run(given | caches)["k0"].dtype == ml_dtypes.bfloat16
    stream = program.open({"B": 1, "C": 9})
    stream.step(given)
    held = caches_of(stream)
    assert {array.dtype for each in held for array in each.values()} == {np.dtype(np.float32)}


# -- memory


@pytest.mark.parametrize("ranks", [1, 2])
def test_caches_are_never_copied_while_they_fit(ranks: int, tmp_path: Path) -> None:
    program, _, _ = decoders(tmp_path, ranks)
    stream = program.open({"B": 1, "C": 200})
    ids = ids_of(1, SMALLEST)
    first = stream.step(call(ids[:, :9], np.zeros(1, int)))["logits"]
    memory, kept = caches_of(stream), first.copy()
    assert all(each["k0"][:, :, :9].any() and not each["k0"][:, :, 9:].any() for each in memory)
    for i in range(9, SMALLEST):
        stream.step(call(ids[:, i : i + 1], np.array([i])))
    for now, before in zip(caches_of(stream), memory, strict=True):
        assert all(now[name] is array for name, array in before.items())
        assert before["v1"][:, :, SMALLEST - 1].any()
    np.testing.assert_array_equal(first, kept)  # later steps leave results alone


def test_caches_grow_as_they_fill(tmp_path: Path) -> None:
    program, reference, _ = decoders(tmp_path)
    streams = [each.open({"B": 1, "C": 300}) for each in (program, reference)]
    ids, own = ids_of(1, 300), cast("Any", streams[0]).ranks[0]
    capacities: list[int] = []
    at = 0
    for tokens in (1, 62, 1, 1, 70, 1, 163, 1):
        given = call(ids[:, at : at + tokens], np.array([at]))
        close(*(stream.step(given)["logits"] for stream in streams))
        at += tokens
        capacities.append(own.capacity)
    assert capacities == [64, 64, 64, 128, 192, 192, 300, 300] and at == 300
    assert own.held("k0").shape == (1, 2, 300, 8)
    with pytest.raises(Error, match=r"up to position 301, but they have room for 300.*larger C"):
        streams[0].step(call(ids[:, :1], np.array([300])))


def test_low_memory_computes_the_same(tmp_path: Path) -> None:
    lean, reference, _ = decoders(tmp_path, low_memory=True)
    given = call(ids_of(1, 6), np.zeros(1, int))
    close(*(p.open({"B": 1, "C": 8}).step(given)["logits"] for p in (lean, reference)))
    options = session_of(lean).get_session_options()
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


@pytest.mark.parametrize("ranks", [1, 2])
def test_wrong_inputs_are_named_and_change_nothing(ranks: int, tmp_path: Path) -> None:
    program, reference, _ = decoders(tmp_path, ranks)
    stream, oracle = (each.open({"B": 1, "C": 20}) for each in (program, reference))
    given = call(ids_of(1, 3), np.zeros(1, int))
    ids = given["input_ids"]
    wrong: list[tuple[dict[str, np.ndarray], str]] = [
        ({"k0": np.zeros(1)}, "k0 is a state that the stream keeps"),
        ({"past_length": np.zeros(1)}, "'past_length'; did you mean 'past_lengths'"),
        ({"input_ids": ids.astype(np.int64)}, "input_ids is i64, but it must be i32"),
        ({"positions": np.zeros((1, 4), np.int32)}, "positions has the shape"),
        ({"past_lengths": np.array([19], np.int32)}, "up to position 22, but they have room for"),
        (call(ids_of(2, 3), np.zeros(2, int)), "opened for B=1, but these inputs have B=2"),
    ]
    for more, message in wrong:
        with pytest.raises(Error, match=message):
            stream.step(given | more)
    with pytest.raises(
        Error, match="the inputs lack positions; @forward takes input_ids, positions"
    ):
        stream.step({name: array for name, array in given.items() if name != "positions"})
    close(*(each.step(given)["logits"] for each in (stream, oracle)))
    with pytest.raises(Error, match="C has no size"):
        program.open({"B": 1})
    with pytest.raises(Error, match=r"k0 has the shape \[1, 1, 9, 8\], but it must be f32\[B, 2"):
        caches = {p.name: np.zeros((1, 1, 9, 8), np.float32) for p in program.ports.states}
        program.run(given | caches)


def test_a_failing_run_is_an_error(tmp_path: Path) -> None:
    stream = decoders(tmp_path)[0].open({"B": 1, "C": 20})
    with pytest.raises(Error, match=r"ONNX Runtime failed: .*GatherElements"):
        stream.step(call(ids_of(1, 3), np.zeros(1, int), wanted=7))


@pytest.mark.parametrize(("ranks", "weights"), [(1, "part-0.safetensors"), (2, "rank1.weights")])
def test_missing_and_damaged_files_are_named(ranks: int, weights: str, tmp_path: Path) -> None:
    _, _, module = decoders(tmp_path, ranks)
    out = tmp_path / "out"
    facts = backend.emit(module, out, base=tmp_path).facts
    path = (tmp_path if ranks == 1 else out) / weights
    path.rename(tmp_path / "gone")
    with pytest.raises(Error, match=f"{weights} is missing"):
        backend.load(out, facts)
    (tmp_path / "gone").rename(path)
    model = out / f"rank{ranks - 1}.onnx"
    model.write_bytes(model.read_bytes()[:300])
    rank = "on rank 1 of 2" if ranks == 2 else ""
    with pytest.raises(Error, match=rf"(?s)ONNX Runtime cannot load .*{model.name}.*{rank}"):
        backend.load(out, facts)


# -- threads


def test_only_physical_cores_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 6}, raising=False)
    monkeypatch.setattr(session, "_core", lambda cpu: ("0", str(cpu // 2)))
    monkeypatch.setattr(session, "_is_virtual", lambda: False)
    assert session.usable_cores() == 3
    monkeypatch.setattr(session, "_is_virtual", lambda: True)
    assert session.usable_cores() == 5
