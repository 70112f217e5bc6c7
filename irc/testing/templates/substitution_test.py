"""Tests of the pass my-pass."""

from pathlib import Path

import irc
from irc.pipeline import load_file
from irc.testing import check_pass

load_file(Path(__file__).with_name("my_pass.py"))

BEFORE = """\
module @m {
  func @forward(%x: f32[B, 4]) -> (f32[B, 4]) {
    %s = sigmoid %x : f32[B, 4]
    %y = mul %x, %s : f32[B, 4]
    return %y
  }
}
"""
AFTER = """\
module @m {
  func @forward(%x: f32[B, 4]) -> (f32[B, 4]) {
    %y = silu %x : f32[B, 4]
    return %y
  }
}
"""


def test_a_product_becomes_a_silu() -> None:
    module = irc.parse(BEFORE)
    irc.run_passes(module, "my-pass")
    assert str(module) == AFTER


def test_random_modules_keep_their_results() -> None:
    print(check_pass("my-pass", seeds=range(15)))
