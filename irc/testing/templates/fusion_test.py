"""Tests of the pass my-pass."""

from pathlib import Path

import irc
from irc.pipeline import load_file
from irc.pipeline.instruments import WhyNot
from irc.testing import check_pass

load_file(Path(__file__).with_name("my_pass.py"))

BEFORE = """\
module @m {
  weight @gate : f32[8, 4] = random("gate", 1, 0.4)
  weight @up : f32[8, 4] = random("up", 1, 0.4)
  func @forward(%x: f32[B, 4], %z: f32[B, 4]) -> (f32[B, 8]) {
    %a = linear %x, @gate : f32[B, 8]
    %b = silu %a : f32[B, 8]
    %c = linear %x, @up : f32[B, 8]
    %y = mul %b, %c : f32[B, 8]
    return %y
  }
}
"""


def test_gate_and_up_become_one_operation() -> None:
    module = irc.parse(BEFORE)
    irc.run_passes(module, "my-pass")
    assert "%y = gated_mlp %x, @gate, @up : f32[B, 8]" in str(module)
    assert "linear" not in str(module)


def test_it_says_why_not() -> None:
    why = WhyNot("my-pass")
    module = irc.parse(BEFORE.replace("linear %x, @up", "linear %z, @up"))
    irc.run_passes(module, "my-pass", [why])
    assert "gate and up read different values" in str(why)


def test_random_modules_keep_their_results() -> None:
    print(check_pass("my-pass", seeds=range(15)))
