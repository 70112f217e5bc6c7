"""Mixture of experts on 1 to 4 ranks, tokens sharded or replicated, against plain loops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from irc.backends.reference import evaluate
from irc.errors import Error
from irc.ir.core import Module
from irc.ir.verify import verify
from irc.pipeline import run_pipeline
from irc.text import parse_module
from tests.fresh import fresh
from tests.sharded.checking import check

Array = np.ndarray[Any, Any]
H, WIDTH = 6, 5  # features in and out of an expert


@dataclass(frozen=True)
class Case:
    """Sizes: ranks, experts, choices per token, tokens per rank, capacity per expert and rank."""

    group_size: int
    experts: int
    choices: int
    tokens: int
    capacity: int = 0

    @property
    def slots(self) -> int:
        """Slots of an expert for the tokens of one rank."""
        return self.capacity or self.tokens

    def inputs(self, rng: np.random.Generator) -> dict[str, Array]:
        """Random global arrays by argument name."""
        total, experts = self.group_size * self.tokens, self.experts
        order = np.argsort(rng.random((total, experts)), axis=1)
        shapes = {"x": (total, H), "weights": (total, self.choices), "w": (experts, H, WIDTH)}
        arrays = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
        return arrays | {"chosen": order[:, : self.choices].astype(np.int32)}


def draw(rng: np.random.Generator, group_size: int, capacity: bool) -> Case:
    experts = int(rng.integers(3, 8))
    tokens = int(rng.integers(1, 7))
    slots = int(rng.integers(1, tokens + 1)) if capacity else 0
    return Case(group_size, experts, int(rng.integers(1, 4)), tokens, slots)


def by_hand(case: Case, a: dict[str, Array]) -> dict[str, Array]:
    """The combined products with the experts per token, and the number of dropped pairs."""
    y = np.zeros((len(a["x"]), WIDTH), np.float32)
    dropped = np.zeros(len(y), np.int32)
    for part in range(case.group_size):
        filled = [0] * case.experts
        for token in range(part * case.tokens, (part + 1) * case.tokens):
            for k, expert in enumerate(a["chosen"][token]):
                filled[expert] += 1
                if filled[expert] > case.slots:
                    dropped[token] += 1
                    continue
                y[token] += a["weights"][token, k] * (a["x"][token] @ a["w"][expert])
    return {"y": y, "dropped": dropped}


def module(case: Case, over: str) -> Module:
    """Experts over ep, and tokens `over` "@ep", which all_to_all sends there and back, or "", where
    every rank adds the output of its own experts."""
    n, e, k = case.group_size, case.experts, case.choices
    t, c = f"{n * case.tokens}{over}", n * case.slots
    how = f"experts={e}, parts={n}" + (f", capacity={case.capacity}" if case.capacity else "")
    combine = (
        "moe_combine %{}, %chosen, %slots, %weights " + f"{{{{parts={n}}}}} : f32[{t}, {WIDTH}]"
    )
    if over:
        mine = 'all_to_all %buffer {axis="ep", split=0, concat=1}'
        back = (
            f'%back = all_to_all %made {{axis="ep", split=1, concat=0}} : f32[{e}, {c}@ep, {WIDTH}]'
        )
        end = f"""{back}
    %y = {combine.format("back")}"""
    else:
        mine = 'shard_slice %buffer {axis="ep", dim=0}'
        end = f"""%sum = {combine.format("made")}{{sum ep}}
    %y = all_reduce %sum {{axis="ep"}} : f32[{t}, {WIDTH}]"""
    built = parse_module(f"""module @m mesh(ep={n}) {{
  func @forward(%x: f32[{t}, {H}], %chosen: i32[{t}, {k}], %weights: f32[{t}, {k}],
      %w: f32[{e}@ep, {H}, {WIDTH}]) -> (y: f32[{t}, {WIDTH}], dropped: i32[{t}]) {{
    %slots = moe_slots %chosen {{{how}}} : i32[{t}, {k}]
    %buffer = moe_dispatch %x, %chosen, %slots {{{how}}} : f32[{e}, {c}{over}, {H}]
    %mine = {mine} : f32[{e}@ep, {c}, {H}]
    %made = matmul %mine, %w : f32[{e}@ep, {c}, {WIDTH}]
    {end}
    %none = full {{value=0, dtype="i32"}} : i32[]
    %full = lt %slots, %none : bool[{t}, {k}]
    %each = cast %full {{dtype="i32"}} : i32[{t}, {k}]
    %dropped = reduce_sum %each {{dims=[1]}} : i32[{t}]
    return %y, %dropped
  }}
}}""")
    verify(built)
    return built


@pytest.mark.parametrize("capacity", [False, True])
@pytest.mark.parametrize("group_size", [1, 2, 3, 4])
def test_both_layouts_agree_in_both_views(group_size: int, capacity: bool) -> None:
    rng = fresh(31 * group_size + capacity)
    crowded = Case(group_size, experts=3, choices=3, tokens=4, capacity=int(capacity))
    total = 0
    for case in [crowded, *(draw(rng, group_size, capacity) for _ in range(11))]:
        arrays = case.inputs(rng)
        wanted = by_hand(case, arrays)
        total += int(wanted["dropped"].sum())
        for over in ("", "@ep") if group_size > 1 else ("",):
            built = module(case, over)
            check(built, arrays, wanted, "global", 1e-4)
            run_pipeline(built, "localize")
            check(built, arrays, wanted, "local", 1e-4)
    assert (total > 0) == capacity


def test_slots_fill_in_the_order_of_tokens() -> None:
    text = """module @m { func @forward(%chosen: i32[6, 2]) -> (i32[6, 2], i32[6, 2]) {
      %all = moe_slots %chosen {experts=3, parts=2} : i32[6, 2]
      %two = moe_slots %chosen {experts=3, capacity=2} : i32[6, 2]
      return %all, %two } }"""
    chosen = np.array([[0, 1], [1, 0], [2, 0], [0, 2], [7, 0], [-1, 1]], np.int32)
    apart, two = evaluate(parse_module(text), {"chosen": chosen}).values()
    assert apart.tolist() == [[0, 0], [1, 1], [0, 2], [0, 0], [-1, 1], [-1, 0]]
    assert two.tolist() == [[0, 0], [1, 1], [0, -1], [-1, 1], [-1, -1], [-1, -1]]


def test_a_slot_beyond_the_capacity_is_an_error() -> None:
    text = """module @m { func @forward(%x: f32[2, 4], %chosen: i32[2, 1], %slots: i32[2, 1])
        -> (f32[3, 2, 4]) {
      %y = moe_dispatch %x, %chosen, %slots {experts=3} : f32[3, 2, 4]
      return %y } }"""
    pairs = {"chosen": np.array([[0], [1]], np.int32), "slots": np.array([[0], [2]], np.int32)}
    with pytest.raises(Error, match="moe_dispatch: index 2 is out of range of a dimension of 2"):
        evaluate(parse_module(text), {"x": np.ones((2, 4), np.float32), **pairs})


def test_parts_are_a_multiple_of_the_ranks() -> None:
    text = """module @m mesh(ep=4) { func @forward(%chosen: i32[24@ep, 2]) -> (i32[24@ep, 2]) {
      %slots = moe_slots %chosen {experts=3, parts=6} : i32[24@ep, 2]
      return %slots } }"""
    with pytest.raises(Error, match="has 4 ranks, so parts must be a multiple of 4, not 6"):
        verify(parse_module(text))
    whole = text.replace("parts=6", "parts=1")
    with pytest.raises(Error, match="moe_slots needs dimension 't' replicated"):
        parse_module(whole)


def test_moe_combine_is_partial_over_both_axes() -> None:
    parse_module("""module @m mesh(ep=2, tp=2) {
      func @forward(%made: f32[4@ep, 6, 8]{sum tp}, %chosen: i32[6, 2], %slots: i32[6, 2],
          %weights: f32[6, 2]) -> (f32[6, 8]) {
        %y = moe_combine %made, %chosen, %slots, %weights : f32[6, 8]{sum ep tp}
        %all = all_reduce %y {axis="ep.tp"} : f32[6, 8]
        return %all } }""")
