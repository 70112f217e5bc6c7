"""Programs of several ranks on ONNX Runtime: a decoder in parts, its caches, what goes wrong."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from irc.backends.base import Program, ports_of
from irc.backends.communicator import Communicator, PeerError
from irc.backends.onnx import backend
from irc.backends.onnxruntime import ParallelProgram, parallel
from irc.backends.onnxruntime.distributed import DistributedProgram
from irc.backends.onnxruntime.execution import Execution
from irc.backends.onnxruntime.parallel import threads_per_rank
from irc.backends.onnxruntime.threads import ThreadWorld
from irc.backends.reference import ReferenceProgram
from irc.core import Module
from irc.errors import Error
from irc.text import parse_module
from irc.verify import verify
from tests.backends.decoder import Shape, build, call, save
from tests.backends.ranks import loaded
from tests.fresh import fresh

# No size but that of the heads is a multiple of the ranks.
SHAPE = Shape(layers=2, hidden=30, heads=12, kv_heads=12, head_dim=4, ffn=47, vocab=61)


def decoders(
    folder: Path, ways: int, shape: Shape = SHAPE, **options: Any
) -> tuple[ParallelProgram, ReferenceProgram, Module]:
    """(the decoder on `ways` ranks, whole on one in numpy in f32, one rank's view)."""
    files = save(shape, folder, files=2)
    module = build(shape, files, ways)
    verify(module)
    reference = ReferenceProgram(build(replace(shape, dtype="f32"), files), folder)
    return loaded(module, folder, **options), reference, module


def ids_of(batch: int, tokens: int) -> np.ndarray:
    return fresh(5).integers(0, SHAPE.vocab, (batch, tokens))


def close(got: np.ndarray, want: np.ndarray) -> None:
    assert got.dtype == want.dtype == np.float32 and got.shape == want.shape
    assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want)


@pytest.mark.parametrize("ways", [2, 3, 4])
def test_ranks_together_are_the_whole_model(ways: int, tmp_path: Path) -> None:
    program, whole, module = decoders(tmp_path, ways)
    checked: Program = program
    assert checked.ports == whole.ports == ports_of(module.main)
    ids, at = ids_of(2, 80), 0
    ours, oracle = program.open({"B": 2, "C": 80}), whole.open({"B": 2, "C": 80})
    for tokens in (6, 1, 1, 57, 1, 14):  # the caches grow twice on the way
        given = call(ids[:, at : at + tokens], np.full(2, at))
        close(ours.step(given)["logits"], oracle.step(given)["logits"])
        at += tokens
        for stream in ours._streams:
            assert stream._execution._sizes == {"B": 2, "S": tokens, "T": tokens} | {
                "C": stream.capacity
            }
    held = [stream.held("k0") for stream in ours._streams]
    assert [array.shape for array in held] == [(2, 12 // ways, 80, 4)] * ways
    assert not np.array_equal(held[0], held[1])


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_narrow_weights(kind: str, tmp_path: Path) -> None:
    program, whole, _ = decoders(tmp_path, 2, replace(SHAPE, dtype=kind, stored=kind))
    given = call(ids_of(1, 9), np.zeros(1, int))
    ours, oracle = (p.open({"B": 1, "C": 16}).step(given)["logits"] for p in (program, whole))
    close(ours, oracle)


def test_run_takes_and_gives_whole_caches(tmp_path: Path) -> None:
    program, whole, _ = decoders(tmp_path, 3)
    given = call(ids_of(2, 5), np.array([4, 2]))
    rng = fresh(6)
    for port in program.ports.states:
        given[port.name] = rng.standard_normal((2, 12, 11, 4)).astype(np.float32)
    before = given["k0"].copy()
    found, wanted = program.run(given), whole.run(given)
    assert list(found) == list(wanted)
    for name, want in wanted.items():
        close(found[name], want)
    np.testing.assert_array_equal(given["k0"], before)


def test_caches_are_never_copied_while_they_fit(tmp_path: Path) -> None:
    program, _, _ = decoders(tmp_path, 2)
    stream = program.open({"B": 1, "C": 200})
    ids = ids_of(1, 64)
    stream.step(call(ids[:, :9], np.zeros(1, int)))
    memory = [dict(each._memory) for each in stream._streams]
    for i in range(9, 64):
        stream.step(call(ids[:, i : i + 1], np.array([i])))
    for each, arrays in zip(stream._streams, memory, strict=True):
        assert all(each.held(name) is array for name, array in arrays.items())
        assert arrays["k1"][:, :, 63].any()


def test_nothing_is_bound_anew_while_sizes_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, _, _ = decoders(tmp_path, 2)
    stream = program.open({"B": 1, "C": 64})
    ids = ids_of(1, 8)
    bound: list[str] = []
    bind = Execution.bind

    def counted(self: Execution, name: str, array: np.ndarray) -> None:
        bound.append(name)
        bind(self, name, array)

    for i in range(2):
        stream.step(call(ids[:, i : i + 1], np.array([i])))
    monkeypatch.setattr(Execution, "bind", counted)
    stream.step(call(ids[:, 2:3], np.array([2])))
    assert bound == ["logits"] * 2


def test_results_belong_to_the_caller(tmp_path: Path) -> None:
    program, _, _ = decoders(tmp_path, 2)
    stream = program.open({"B": 1, "C": 10})
    ids = ids_of(1, 2)
    first = stream.step(call(ids[:, :1], np.array([0])))["logits"]
    kept = first.copy()
    stream.step(call(ids[:, 1:], np.array([1])))
    np.testing.assert_array_equal(first, kept)


def test_streams_may_run_at_the_same_time(tmp_path: Path) -> None:
    program, whole, _ = decoders(tmp_path, 2)
    given = [call(fresh(i).integers(0, 61, (1, 7)), np.zeros(1, int)) for i in range(3)]
    found: dict[int, np.ndarray] = {}

    def one(i: int) -> None:
        found[i] = program.open({"B": 1, "C": 16}).step(given[i])["logits"]

    every = [threading.Thread(target=one, args=(i,)) for i in range(3)]
    for thread in every:
        thread.start()
    for thread in every:
        thread.join()
    for i in range(3):
        close(found[i], whole.open({"B": 1, "C": 16}).step(given[i])["logits"])


def test_processes_would_compute_the_same(tmp_path: Path) -> None:
    program, _, module = decoders(tmp_path, 3)
    facts = backend.emit(module, tmp_path / "out", {"base": tmp_path})
    given = call(ids_of(1, 5), np.zeros(1, int))
    states = {p.name: np.zeros((1, 12, 9, 4), np.float32) for p in program.ports.states}
    wanted = program.run(given | states)

    def one(communicator: Communicator) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        own = DistributedProgram(tmp_path / "out", facts, communicator, threads=1)
        assert own.ports == program.ports
        return own.run(given | states), own.open({"B": 1, "C": 9}).step(given)

    for run, step in ThreadWorld(3, 100).run(one):
        assert list(run) == list(wanted) and list(step) == ["logits"]
        for name, want in wanted.items():
            np.testing.assert_array_equal(run[name], want)
        close(step["logits"], wanted["logits"])


# -- threads


def test_cores_are_divided_among_the_ranks_that_run_together() -> None:
    facts = {"ranks": [{}] * 8, "stages": [{}, {}]}
    assert [threads_per_rank(facts, cores) for cores in (1, 4, 11, 16)] == [1, 1, 2, 4]


# -- errors


def test_wrong_inputs_are_named_and_change_nothing(tmp_path: Path) -> None:
    program, whole, _ = decoders(tmp_path, 2)
    stream, oracle = (p.open({"B": 1, "C": 20}) for p in (program, whole))
    given = call(ids_of(1, 3), np.zeros(1, int))
    wrong: list[tuple[dict[str, np.ndarray], str]] = [
        ({"k0": np.zeros(1)}, "k0 is a state that the stream keeps"),
        ({"positions": np.zeros((1, 4), np.int32)}, "positions has the shape"),
        ({"past_lengths": np.array([19], np.int32)}, "up to position 22, but they have room for"),
        (call(ids_of(2, 3), np.zeros(2, int)), "opened for B=1, but these inputs have B=2"),
    ]
    for more, message in wrong:
        with pytest.raises(Error, match=message):
            stream.step(given | more)
    close(stream.step(given)["logits"], oracle.step(given)["logits"])
    with pytest.raises(Error, match="C has no size"):
        program.open({"B": 1})
    with pytest.raises(Error, match=r"k0 has the shape \[1, 6, 9, 4\], but it must be f32\[B, 12"):
        caches = {p.name: np.zeros((1, 6, 9, 4), np.float32) for p in program.ports.states}
        program.run(given | caches)


def test_options_are_checked(tmp_path: Path) -> None:
    module = build(SHAPE, save(SHAPE, tmp_path), 2)
    (tmp_path / "out").mkdir()
    facts = backend.emit(module, tmp_path / "out", {"base": tmp_path})
    with pytest.raises(Error, match="no option timout; did you mean 'timeout'"):
        backend.load(tmp_path / "out", facts, timout=3)
    one = parse_module("module @m {\n  func @f(%x: f32[2]) -> (f32[2]) {\n    return %x\n  }\n}")
    facts = backend.emit(one, tmp_path / "out", {})
    with pytest.raises(Error, match="of 1 rank on ONNX Runtime has no option timeout; it has thr"):
        backend.load(tmp_path / "out", facts, timeout=3)


FAILING = """module @m local mesh(tp=3) dims(S=1:3:9) {
  func @forward(%x: f32[S, 4], %i: i32[S]) -> (f32[S, 4], n: f32[S, 4]) {
    %a = all_reduce %x {axis="tp", ways=3} : f32[S, 4]
    %r = rank {axis="tp"} : i32[]
    %j = mul %i, %r : i32[S]
    %b = gather %a, %j {dim=0} : f32[S, 4]
    %c = all_reduce %b {axis="tp", ways=3} : f32[S, 4]
    %d = all_gather %c {axis="tp", dim=0, ways=3} : f32[3*S, 4]
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


def test_a_rank_with_another_program_is_named(tmp_path: Path) -> None:
    program = loaded(parse_module(FAILING), tmp_path)
    text = FAILING.replace('%c = all_reduce %b {axis="tp", ways=3}', "%c = add %b, %b")
    other = loaded(parse_module(text), tmp_path)
    program.models[1] = other.models[1]
    given = {"x": np.ones((4, 4), np.float32), "i": np.zeros(4, np.int32)}
    with pytest.raises(PeerError, match="the ranks do not do the same") as caught:
        program.run(given)
    assert "all_reduce (sum) of float32[4, 4] in all_reduce/DistCollective.n" in str(caught.value)
    assert "all_gather of float32[4, 4] in all_gather/DistCollective.d" in str(caught.value)


def wait_for(ready: Callable[[], bool]) -> None:
    end = time.monotonic() + 100
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_a_rank_that_stalls_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = loaded(parse_module(FAILING), tmp_path, timeout=1e6)
    run, worlds = Execution._run, list[ThreadWorld]()

    def kept(ranks: int, timeout: float) -> ThreadWorld:
        worlds.append(ThreadWorld(ranks, timeout))
        return worlds[-1]

    def slow(self: Execution, segment: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            (world,) = worlds
            wait_for(lambda: len(world._waits) == 2 or world._failed is not None)
            world.timeout = 0.3
            wait_for(lambda: world._failed is not None)
        run(self, segment)

    monkeypatch.setattr(parallel, "ThreadWorld", kept)
    monkeypatch.setattr(Execution, "_run", slow)
    given = {"x": np.ones((4, 4), np.float32), "i": np.zeros(4, np.int32)}
    with pytest.raises(PeerError, match=r"rank 0 did not come to all_reduce .* for 0\.3 s"):
        program.run(given)
