"""Printing and parsing are inverses, on random modules and on the constructs one by one."""

from __future__ import annotations

import random

import pytest

from irc.errors import TextError
from irc.text import parse_module, print_module
from irc.verify import verify
from tests.random_modules import random_module

COUNT = 2000


def test_random_modules_print_parse_and_print_to_the_same_bytes() -> None:
    start = random.randrange(10**9)
    lines = 0
    for seed in range(start, start + COUNT):
        module = random_module(seed)
        verify(module)
        for locs in (False, True):
            text = print_module(module, locs=locs)
            again = parse_module(text)
            verify(again)
            assert print_module(again, locs=locs) == text, f"seed {seed}"
            lines += text.count("\n")
    assert lines > 10 * COUNT


def test_every_dtype_mesh_and_step_in_one_text() -> None:
    text = """module @m local mesh(dp=2, tp=3) dims(B=1:2:4) {
  file @ckpt = "a \\"b\\" \\\\ c.safetensors"
  weight @w.0 : i4[8, 4] = @ckpt["w"][0:8, :].transpose(1, 0).shard(0, dp.tp).cast(i4)
  weight @v : u8[2] = concat(@ckpt["a"], random("b", 3, 0.02).cast(u8); 0)[0:2]
  weight @u : f64[] = unbound("u")
  func @forward(%x: f8e4m3[B, 2*B + 1], %n: bool[]) -> (y: f8e4m3[B, 2*B + 1] aliases %x, bool[]) {
    return %x, %n
  }
}
"""
    assert print_module(parse_module(text)) == text


def test_comments_and_layout_do_not_matter() -> None:
    text = "module @m {// a {comment}\n\n func @f (%x : f32[ 2,S ]) ->"
    text += "(f32[2, S]){ return %x }\n}// end"
    assert str(parse_module(text)) == (
        "module @m {\n  func @f(%x: f32[2, S]) -> (f32[2, S]) {\n    return %x\n  }\n}\n"
    )


def test_name_hints_survive_and_become_unique() -> None:
    text = """module @m {
  func @f(%x: f32[2]) -> (f32[2]) {
    %a = neg %x : f32[2]
    %a.1 = neg %a : f32[2]
    %0 = neg %a.1 : f32[2]
    return %0
  }
}
"""
    module = parse_module(text)
    assert [op.result.name for op in module.main if op.results] == ["a", "a", None]
    assert str(module) == text


@pytest.mark.parametrize("seed", range(5))
def test_text_cut_anywhere_is_an_error_with_a_place(seed: int) -> None:
    text = print_module(random_module(random.randrange(10**9)), locs=True).rstrip()
    for cut in range(len(text)):
        with pytest.raises(TextError, match=r"^<text>:\d+:\d+: error: "):
            parse_module(text[:cut])
