"""Programs of several ranks on ONNX Runtime: a sharded decoder, its caches, failures."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from irc.backends.base import Program, ports_of
from irc.backends.onnx import backend
from irc.backends.onnxruntime.program import threads_per_rank
from irc.backends.ranks.communicator import PeerError
from irc.errors import Error
from irc.text import parse_module
from tests.backends.decoder import Shape, call
from tests.backends.ranks import loaded
from tests.backends.test_onnxruntime_stream import close, decoders, ids_of
from tests.fresh import fresh

# No size but that of the heads is a multiple of the ranks.
SHAPE = Shape(layers=2, hidden=30, heads=12, kv_heads=12, head_dim=4, ffn=47, vocab=61)


@pytest.mark.parametrize("group_size", [2, 3, 4])
def test_ranks_compute_the_unsharded_model(group_size: int, tmp_path: Path) -> None:
    program, whole, module = decoders(tmp_path, group_size, SHAPE)
    checked: Program = program
    assert checked.ports == whole.ports == ports_of(module.main)
    ids, at = ids_of(2, 80), 0
    ours, oracle = program.open({"B": 2, "C": 80}), whole.open({"B": 2, "C": 80})
    for tokens in (6, 1, 1, 57, 1, 14):  # the caches grow twice on the way
        given = call(ids[:, at : at + tokens], np.full(2, at))
        close(ours.step(given)["logits"], oracle.step(given)["logits"])
        at += tokens
    held = [stream.held("k0") for stream in ours.ranks.values()]
    assert [array.shape for array in held] == [(2, 12 // group_size, 80, 4)] * group_size
    assert not np.array_equal(held[0], held[1])


def test_streams_may_run_at_the_same_time(tmp_path: Path) -> None:
    program, whole, _ = decoders(tmp_path, 2, SHAPE)
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


def test_cores_are_divided_among_the_ranks_that_run_together() -> None:
    assert [threads_per_rank(8, 2, cores) for cores in (1, 4, 11, 16)] == [1, 1, 2, 4]


# -- errors


def test_options_are_checked(tmp_path: Path) -> None:
    module = decoders(tmp_path, 2)[2]
    facts = backend.emit(module, tmp_path / "out", base=tmp_path).facts
    with pytest.raises(Error, match="no option timout; did you mean 'timeout'"):
        backend.load(tmp_path / "out", facts, timout=3)
    one = parse_module("module @m {\n  func @f(%x: f32[2]) -> (f32[2]) {\n    return %x\n  }\n}")
    facts = backend.emit(one, tmp_path / "out").facts
    with pytest.raises(Error, match="of 1 rank on ONNX Runtime has no option timeout; it has thr"):
        backend.load(tmp_path / "out", facts, timeout=3)


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
