"""The stages of pipelines: what they may communicate."""

from __future__ import annotations

import pytest

from irc.analysis.stages import check_stages
from irc.errors import Error
from irc.ir.core import Module
from irc.ir.verify import verify
from irc.text import parse_module

STAGES = """
module @m {view}mesh(pp=2, tp=2) {
  func @inner(%x: f32[4]) -> (f32[4]) {
    %a = neg %x : f32[4] loc("s.py":1)
    return %a
  }
  func @stage0(%x: f32[4]) -> (f32[4]) {
    %a = call %x {callee=@inner} : f32[4] loc("s.py":2)
    return %a
  }
  func @forward(%x: f32[4]) -> (y: f32[4]) {
    %a = call %x {callee=@stage0, stage=0} : f32[4] loc("s.py":3)
    %b = call %a {callee=@inner, stage=1} : f32[4] loc("s.py":4)
    return %b
  }
}
"""
SUMMED = '%a = all_reduce %x {axis="AXIS", op="max", group_size=SIZE} : f32[4]'
NEG = "%a = neg %x : f32[4]"
STAGED: dict[str, tuple[tuple[str, str], str]] = {
    "communication between stages": (
        (NEG, SUMMED.replace("AXIS", "pp.tp").replace("SIZE", "4")),
        r"the all_reduce at s\.py:1 communicates over pp\.tp, but only the ranks of stage 0 run "
        "@stage0, and the other ranks never take part; leave pp out",
    ),
    "stages in a stage": (
        ("{callee=@inner} :", "{callee=@inner, stage=0} :"),
        r"the call at s\.py:2 has a stage of its own, but stage 0 runs it, in @stage0",
    ),
    "beside the stages": (
        ("return %b", '%c = exp %b : f32[4] loc("s.py":5)\n    return %c'),
        r"the exp at s\.py:5 runs on every rank, but only those of stage 1 have %b",
    ),
}


def staged(view: str, change: tuple[str, str] = ("", "")) -> Module:
    module = parse_module(STAGES.replace("{view}", view).replace(*change, 1))
    verify(module)
    return module


def test_stages_may_communicate_among_themselves() -> None:
    for view in ("", "local "):
        check_stages(staged(view))
    check_stages(staged("local ", (NEG, SUMMED.replace("AXIS", "tp").replace("SIZE", "2"))))


@pytest.mark.parametrize("name", STAGED)
def test_invalid_stages_are_refused(name: str) -> None:
    change, words = STAGED[name]
    with pytest.raises(Error, match=words):
        check_stages(staged("local ", change))


def test_a_value_of_one_stage_is_the_same_on_its_ranks() -> None:
    """The index over pp is the same number on all ranks of one stage."""
    rank = '%r = rank {axis="pp"} : i32[]{varies pp}\n    '
    rank += '%f = cast %r {dtype="f32"} : f32[]{varies pp}\n    '
    own, plain = "f32[4]{varies pp}", "f32[4]"
    text = STAGES.replace("{view}", "local ").replace(NEG, f"{rank}%a = mul %x, %f : {own}", 1)
    text = text.replace(f"@inner(%x: {plain}) -> ({plain})", f"@inner(%x: {plain}) -> ({own})")
    text = text.replace(
        f"%a = call %x {{callee=@inner}} : {plain}", f"%a = call %x {{callee=@inner}} : {own}"
    )
    text = text.replace(f"@stage0(%x: {plain}) -> ({plain})", f"@stage0(%x: {plain}) -> ({own})")
    verify(parse_module(text))
