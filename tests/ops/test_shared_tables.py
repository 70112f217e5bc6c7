"""Operations on tables that ranks share: where they may stand, and what they mean one by one."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from irc.backends.reference import evaluate
from irc.core import Value
from irc.errors import Error
from irc.ops import SlotIds
from irc.ops.lookup import Embedding
from irc.text import parse_module
from irc.types import TensorType
from irc.verify import verify
from tests.fresh import fresh

CYCLIC = """
module @m {view}mesh({mesh}) {{
  func @forward(%ids: i32[4, 3], %t: f32[{rows}@tp, 2]) -> (y: f32[4, 3{split}, 2], lost: i32[]) {{
    %y, %lost = cyclic_embedding %ids, %t {{{attributes}}} : f32[4, 3{split}, 2], i32[]
    return %y, %lost
  }}
}}"""


def cyclic(attributes: str, mesh: str = "tp=2", rows: int = 8, split: str = "") -> Any:
    text = CYCLIC.format(view="", mesh=mesh, rows=rows, split=split, attributes=attributes)
    module = parse_module(text)
    verify(module)
    return module


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ('rows=8, parts=4, axis="tp"', "has 4 parts, but the mesh .tp=2. has 2 ranks over tp"),
        ('rows=8, parts=2, axis="tp", capacity=1, queues=[2, 1]', r"ids queue in \[1, 1\]"),
        ('rows=8, parts=2, axis="xp"', "the table is f32.8@tp, 2., but its rows must be split"),
    ],
)
def test_a_cyclic_lookup_has_to_fit_the_mesh(attributes: str, message: str) -> None:
    with pytest.raises(Error, match=message):
        cyclic(attributes)


def test_a_cyclic_lookup_is_for_the_global_view() -> None:
    module = cyclic('rows=8, parts=2, axis="tp"')
    module.local = True
    op = next(iter(module.main))
    with pytest.raises(Error, match="for the global view only; localize writes what one rank does"):
        op.verify(module)


def test_rows_without_room_are_zeros_and_counted() -> None:
    module = cyclic('rows=7, parts=2, axis="tp", scatter=1, capacity=2, queues=[1, 2]', split="@tp")
    ids = np.array([[0, 2, 1], [4, 1, 3], [6, 9, 5], [-1, 0, 5]], np.int32)
    table = np.arange(1, 17, dtype=np.float32).reshape(8, 2)
    found = evaluate(module, {"ids": ids, "t": table})
    # the first rank wants columns 0 and 1: of its even ids 0, 2, 4, 6, 0 two find room
    place = [[0, 1, 4], [None, 4, 5], [None, None, None], [None, None, None]]
    want = np.zeros((4, 3, 2), np.float32)
    for i, j in product(range(4), range(3)):
        if place[i][j] is not None:
            want[i, j] = table[place[i][j]]
    assert np.array_equal(found["y"], want)
    assert found["lost"] == 5


def test_an_id_that_was_promised_to_lie_inside_and_does_not_is_an_error() -> None:
    ids, table = (
        Value(TensorType(*t), None, i) for i, t in enumerate((("i32", (2,)), ("f32", (3, 1))))
    )
    op = Embedding(ids, table, inside=True)
    rows = np.arange(3, dtype=np.float32)[:, None]
    assert op.evaluate(np.array([2, 0]), rows).tolist() == [[2], [0]]
    for wrong in (-1, 3):
        with pytest.raises(Error, match=f"embedding: index {wrong} lies outside a dimension of 3"):
            op.evaluate(np.array([0, wrong]), rows)


@pytest.mark.parametrize("outside", ["zero", "clamp", "row", "error"])
def test_slots_one_by_one(outside: Any) -> None:
    sizes, ids = (2, 5, 3), fresh(3).integers(-2, 7, (4, 3, 6)).astype(np.int32)
    ids[0, 0, :2] = (-(2**31), 2**31 - 1)
    want = np.empty_like(ids)
    for (b, slot, n), i in np.ndenumerate(ids):
        kept = {"clamp": min(max(int(i), 0), sizes[slot] - 1), "row": 1}.get(outside)
        inside = 0 <= i < sizes[slot]
        row = int(i) if inside else kept
        want[b, slot, n] = -1 if row is None else row + sum(sizes[:slot])
    op = SlotIds(Value(TensorType("i32", ids.shape), None, 0), sizes=sizes, outside=outside, row=1)
    assert np.array_equal(op.evaluate(ids), want)
