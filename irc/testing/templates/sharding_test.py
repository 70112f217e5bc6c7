"""Tests of the pass my-pass."""

from pathlib import Path

import irc
from irc.pipeline import load_file
from irc.testing import check_pass

load_file(Path(__file__).with_name("my_pass.py"))

# 5 features on 2, 3 or 4 ranks: what does not divide is padded.
MODULE = """\
module @m mesh(tp=2) {
  weight @v : f32[6, 5@tp] = random("v", 1, 0.4)
  weight @w : f32[6, 5@tp] = random("w", 1, 0.4)
  func @forward(%x: f32[B, 5@tp]) -> (f32[B, 6]) {
    %a = linear %x, @v : f32[B, 6]{sum tp}
    %b = linear %x, @w : f32[B, 6]{sum tp}
    %full_a = all_reduce %a {axis="tp"} : f32[B, 6]
    %full_b = all_reduce %b {axis="tp"} : f32[B, 6]
    %y = add %full_a, %full_b : f32[B, 6]
    return %y
  }
}
"""


def test_one_sum_is_left() -> None:
    module = irc.parse(MODULE)
    irc.run_passes(module, "my-pass")
    assert str(module).count("all_reduce") == 1
    assert "add %a, %b : f32[B, 6]{sum tp}" in str(module)


def test_modules_keep_their_results_on_every_rank() -> None:
    # Random modules have few sums over ranks, so these are given.
    modules = [MODULE.replace("tp=2", f"tp={ranks}") for ranks in (2, 3, 4)]
    print(check_pass("my-pass", modules=modules, seeds=range(5)))
