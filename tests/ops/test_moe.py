"""Mixture of experts on 1 to 4 ranks: both views, tokens split or whole, against plain loops."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from irc.backends.onnx import backend
from irc.backends.reference import evaluate, evaluate_ranks
from irc.core import Module
from irc.errors import Error
from irc.text import parse_module
from irc.verify import verify
from tests.fresh import fresh

Array = np.ndarray[Any, Any]
H, WIDTH = 6, 5  # of a token, and inside an expert


@dataclass(frozen=True)
class Case:
    """Sizes: ranks, experts, choices of a token, tokens on a rank, capacity of a queue."""

    ways: int
    experts: int
    choices: int
    tokens: int
    capacity: int = 0

    @property
    def own(self) -> int:
        """Experts on one rank, padding included."""
        return -(-self.experts // self.ways)

    @property
    def places(self) -> int:
        """Places in one queue."""
        return self.capacity or self.tokens

    @property
    def room(self) -> str:
        """The capacity as an attribute."""
        return f", capacity={self.capacity}" if self.capacity else ""

    def inputs(self, rng: np.random.Generator) -> dict[str, Array]:
        """Whole arrays by argument."""
        total, experts = self.ways * self.tokens, self.experts
        order = np.argsort(rng.random((total, experts)), axis=1)
        shapes = {
            "x": (total, H),
            "weights": (total, self.choices),
            "gate": (experts, WIDTH, H),
            "up": (experts, WIDTH, H),
            "down": (experts, H, WIDTH),
        }
        arrays = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
        return arrays | {"chosen": order[:, : self.choices].astype(np.int32)}


def draw(rng: np.random.Generator, ways: int, capacity: bool) -> Case:
    experts = int(rng.integers(3, 8))
    tokens = int(rng.integers(1, 7))
    room = int(rng.integers(1, tokens + 1)) if capacity else 0
    return Case(ways, experts, int(rng.integers(1, 4)), tokens, room)


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def by_hand(case: Case, a: dict[str, Array]) -> tuple[Array, int]:
    """(what the experts make of every token, how many pairs found their queue full)."""
    y, dropped = np.zeros_like(a["x"]), 0
    for part in range(case.ways):
        queues = [0] * case.experts
        for token in range(part * case.tokens, (part + 1) * case.tokens):
            for k, expert in enumerate(a["chosen"][token]):
                queues[expert] += 1
                if queues[expert] > case.places:
                    dropped += 1
                    continue
                gate, up = a["gate"][expert] @ a["x"][token], a["up"][expert] @ a["x"][token]
                y[token] += a["weights"][token, k] * (a["down"][expert] @ (silu(gate) * up))
    return y, dropped


def step(experts: Any, places: Any) -> str:
    """The lines between %mine and %made; sizes as they are written in types."""
    return f"""
    %gate_t = transpose %gate {{order=[0, 2, 1]}} : f32[{experts}, {H}, {WIDTH}]
    %up_t = transpose %up {{order=[0, 2, 1]}} : f32[{experts}, {H}, {WIDTH}]
    %down_t = transpose %down {{order=[0, 2, 1]}} : f32[{experts}, {WIDTH}, {H}]
    %opened = matmul %mine, %gate_t : f32[{experts}, {places}, {WIDTH}]
    %raised = matmul %mine, %up_t : f32[{experts}, {places}, {WIDTH}]
    %silu = silu %opened : f32[{experts}, {places}, {WIDTH}]
    %hidden = mul %silu, %raised : f32[{experts}, {places}, {WIDTH}]
    %made = matmul %hidden, %down_t : f32[{experts}, {places}, {H}]"""


def module(case: Case, view: str, tokens: Any, experts: Any, body: str) -> Module:
    """A module that returns the tokens' results and how many pairs were dropped, by token."""
    found = parse_module(f"""module @m {view} mesh(ep={case.ways}) {{
  func @forward(%x: f32[{tokens}, {H}], %chosen: i32[{tokens}, {case.choices}],
      %weights: f32[{tokens}, {case.choices}], %gate: f32[{experts}, {WIDTH}, {H}],
      %up: f32[{experts}, {WIDTH}, {H}], %down: f32[{experts}, {H}, {WIDTH}])
      -> (y: f32[{tokens}, {H}], dropped: i32[{tokens}]) {{
    {body}
    %none = full {{value=0, dtype="i32"}} : i32[]
    %full = lt %slots, %none : bool[{tokens}, {case.choices}]
    %each = cast %full {{dtype="i32"}} : i32[{tokens}, {case.choices}]
    %dropped = reduce_sum %each {{dims=[1]}} : i32[{tokens}]
    return %y, %dropped
  }}
}}""")
    verify(found)
    return found


def split_global(case: Case) -> Module:
    """Tokens are split, and go to the ranks of their experts and back."""
    n, e, k = case.ways, case.experts, case.choices
    t, c, how = n * case.tokens, n * case.places, f"experts={e}, parts={n}{case.room}"
    body = f"""
    %slots = moe_slots %chosen {{{how}}} : i32[{t}@ep, {k}]
    %buffer = moe_dispatch %x, %chosen, %slots {{{how}}} : f32[{e}, {c}@ep, {H}]
    %mine = all_to_all %buffer {{axis="ep", split=0, concat=1}} : f32[{e}@ep, {c}, {H}]
    {step(f"{e}@ep", c)}
    %back = all_to_all %made {{axis="ep", split=1, concat=0}} : f32[{e}, {c}@ep, {H}]
    %y = moe_combine %back, %chosen, %slots, %weights {{parts={n}}} : f32[{t}@ep, {H}]"""
    return module(case, "", f"{t}@ep", f"{e}@ep", body)


def split_local(case: Case) -> Module:
    n, e, k, t, c, own = *_sizes(case), case.own
    even, total, how = own * n, n * c, f"experts={e}{case.room}"
    body = f"""
    %slots = moe_slots %chosen {{{how}}} : i32[{t}, {k}]
    %buffer = moe_dispatch %x, %chosen, %slots {{{how}}} : f32[{e}, {c}, {H}]
    %even = pad %buffer {{before=[0, 0, 0], after=[{even - e}, 0, 0]}} : f32[{even}, {c}, {H}]
    %mine = all_to_all %even {{axis="ep", split=0, concat=1, ways={n}}} : f32[{own}, {total}, {H}]
    {step(own, total)}
    %back = all_to_all %made {{axis="ep", split=1, concat=0, ways={n}}} : f32[{even}, {c}, {H}]
    %y = moe_combine %back, %chosen, %slots, %weights : f32[{t}, {H}]"""
    return module(case, "local", t, own, body)


def whole_global(case: Case) -> Module:
    """Every rank has all tokens, and adds what its own experts make of them."""
    n, e, k = case.ways, case.experts, case.choices
    t, c, how = n * case.tokens, n * case.places, f"experts={e}, parts={n}{case.room}"
    body = f"""
    %slots = moe_slots %chosen {{{how}}} : i32[{t}, {k}]
    %buffer = moe_dispatch %x, %chosen, %slots {{{how}}} : f32[{e}, {c}, {H}]
    %mine = shard_slice %buffer {{axis="ep", dim=0}} : f32[{e}@ep, {c}, {H}]
    {step(f"{e}@ep", c)}
    %sum = moe_combine %made, %chosen, %slots, %weights {{parts={n}}} : f32[{t}, {H}]{{sum ep}}
    %y = all_reduce %sum {{axis="ep"}} : f32[{t}, {H}]"""
    return module(case, "", t, f"{e}@ep", body)


def whole_local(case: Case) -> Module:
    n, e, k, own = case.ways, case.experts, case.choices, case.own
    t, c, how = n * case.tokens, n * case.places, f"experts={e}, parts={n}{case.room}"
    mine = f"experts={own}, parts={n}{case.room}"
    body = f"""
    %rank = rank {{axis="ep"}} : i32[]
    %own = full {{value={own}, dtype="i32"}} : i32[]
    %first = mul %rank, %own : i32[]
    %slots = moe_slots %chosen {{{how}}} : i32[{t}, {k}]
    %mine = moe_dispatch %x, %chosen, %slots, first=%first {{{mine}}} : f32[{own}, {c}, {H}]
    {step(own, c)}
    %sum = moe_combine %made, %chosen, %slots, %weights, first=%first {{parts={n}}} : f32[{t}, {H}]
    %y = all_reduce %sum {{axis="ep", ways={n}}} : f32[{t}, {H}]"""
    return module(case, "local", t, own, body)


def _sizes(case: Case) -> tuple[int, int, int, int, int]:
    return case.ways, case.experts, case.choices, case.tokens, case.places


def per_rank(case: Case, arrays: dict[str, Array], tokens: bool) -> dict[str, list[Array]]:
    """Every rank's experts, padded with zeros, and its tokens or all of them."""
    given: dict[str, list[Array]] = {}
    for name, array in arrays.items():
        if name in ("gate", "up", "down"):
            more = case.own * case.ways - case.experts
            array = np.concatenate([array, np.zeros((more, *array.shape[1:]), np.float32)])
            given[name] = np.split(array, case.ways)
        else:
            given[name] = np.split(array, case.ways) if tokens else [array] * case.ways
    return given


@pytest.mark.parametrize("capacity", [False, True])
@pytest.mark.parametrize("ways", [1, 2, 3, 4])
def test_both_views_and_both_ways_to_split_agree(ways: int, capacity: bool) -> None:
    rng = fresh(31 * ways + capacity)
    crowded = Case(ways, experts=3, choices=3, tokens=4, capacity=int(capacity))
    lost = 0
    for case in [crowded, *(draw(rng, ways, capacity) for _ in range(11))]:
        arrays = case.inputs(rng)
        wanted, dropped = by_hand(case, arrays)
        lost += dropped
        check(evaluate(whole_global(case), arrays), wanted, dropped)
        if ways > 1:  # without parts there is nothing to split
            check(evaluate(split_global(case), arrays), wanted, dropped)
        ranks = evaluate_ranks(split_local(case), per_rank(case, arrays, True))
        joined = {name: np.concatenate([rank[name] for rank in ranks]) for name in ranks[0]}
        check(joined, wanted, dropped)
        for rank in evaluate_ranks(whole_local(case), per_rank(case, arrays, False)):
            check(rank, wanted, dropped)
    assert (lost > 0) == capacity


def check(found: dict[str, Array], wanted: Array, dropped: int) -> None:
    np.testing.assert_allclose(found["y"], wanted, rtol=1e-4, atol=1e-4)
    assert int(found["dropped"].sum()) == dropped


def test_queues_fill_in_the_order_of_tokens() -> None:
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
    with pytest.raises(Error, match="moe_dispatch: index 2 lies outside a dimension of 2"):
        evaluate(parse_module(text), {"x": np.ones((2, 4), np.float32), **pairs})


def test_ranks_get_whole_parts() -> None:
    text = """module @m mesh(ep=4) { func @forward(%chosen: i32[24@ep, 2]) -> (i32[24@ep, 2]) {
      %slots = moe_slots %chosen {experts=3, parts=6} : i32[24@ep, 2]
      return %slots } }"""
    with pytest.raises(Error, match="has 4 ranks, so parts must be a multiple of 4, not 6"):
        verify(parse_module(text))
    whole = text.replace("parts=6", "parts=1")
    with pytest.raises(Error, match="moe_slots needs dimension 't' whole"):
        parse_module(whole)


def test_sums_over_the_width_of_experts_and_over_experts_are_one() -> None:
    parse_module("""module @m mesh(ep=2, tp=2) {
      func @forward(%made: f32[4@ep, 6, 8]{sum tp}, %chosen: i32[6, 2], %slots: i32[6, 2],
          %weights: f32[6, 2]) -> (f32[6, 8]) {
        %y = moe_combine %made, %chosen, %slots, %weights : f32[6, 8]{sum ep tp}
        %all = all_reduce %y {axis="ep.tp"} : f32[6, 8]
        return %all } }""")


SYMBOLIC = """module @m dims(B=1:4:8) {
  func @forward(%x: f32[2*B, 6], %chosen: i32[2*B, 2], %weights: f32[2*B, 2], %free: f32[B])
      -> (y: f32[2*B, 6], slots: i32[2*B, 2]) {
    %slots = moe_slots %chosen {experts=5, parts=2} : i32[2*B, 2]
    %buffer = moe_dispatch %x, %chosen, %slots {experts=5, parts=2} : f32[5, 2*B, 6]
    %y = moe_combine %buffer, %chosen, %slots, %weights {parts=2} : f32[2*B, 6]
    return %y, %slots
  }
}"""


def test_onnx_with_any_number_of_tokens(tmp_path: Path) -> None:
    rng = fresh(77)
    found = parse_module(SYMBOLIC)
    facts = backend.emit(found, tmp_path, {"check": True})
    program = backend.load(tmp_path, facts, threads=1)
    for half in (1, 4, 7):
        tokens = 2 * half
        inputs = {
            "x": rng.standard_normal((tokens, 6)).astype(np.float32),
            "chosen": np.argsort(rng.random((tokens, 5)), axis=1)[:, :2].astype(np.int32),
            "weights": rng.random((tokens, 2)).astype(np.float32),
            "free": np.zeros(half, np.float32),
        }
        got, wanted = program.run(inputs), evaluate(found, inputs)
        assert np.array_equal(got["slots"], wanted["slots"])
        np.testing.assert_allclose(got["y"], wanted["y"], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(
            got["y"], inputs["x"] * inputs["weights"].sum(1, keepdims=True), rtol=1e-4, atol=1e-5
        )
