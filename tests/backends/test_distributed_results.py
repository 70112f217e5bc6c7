"""The bytes that processes send for global results: every shard once, not once per replica."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from irc.backends.onnx import backend
from irc.backends.onnxruntime.program import OnnxRuntimeProgram
from irc.backends.ranks.communicator import CollectiveCall, Communicator
from irc.backends.ranks.threads import ThreadCommunicator, ThreadWorld
from irc.ir.verify import verify
from irc.text import parse_module
from tests.fresh import fresh

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
    module = parse_module(SHARDS)
    verify(module)
    facts = backend.emit(module, tmp_path, base=tmp_path).facts
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

    def one(communicator: Communicator) -> dict[str, np.ndarray]:
        return OnnxRuntimeProgram(tmp_path, facts, communicator, threads=1).run(inputs)

    for found in ThreadWorld(6, 100).run(one):
        for name, given in zip("wxyz", "abcd", strict=True):
            np.testing.assert_array_equal(found[name], -inputs[given])
    # shards of 20, 14, 8 and 35 elements, of which there are 2, 3, 6 and 1, to five other ranks
    assert sent == {"w": 2 * 20 * 4 * 5, "x": 3 * 14 * 4 * 5, "y": 6 * 8 * 4 * 5, "z": 35 * 4 * 5}
