"""Operations on sharded tables: errors, and results against loops."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from irc.backends.reference import evaluate
from irc.errors import Error
from irc.ir.core import Value
from irc.ir.types import TensorType
from irc.ir.verify import verify
from irc.ops.lookup import Embedding
from irc.text import parse_module

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
        ('rows=8, parts=2, axis="tp", capacity=1, queues=[2, 1]', r"ids have the shards \[1, 1\]"),
        ('rows=8, parts=2, axis="xp"', "the table is f32.8@tp, 2., but its rows must be sharded"),
    ],
)
def test_a_cyclic_lookup_must_fit_the_mesh(attributes: str, message: str) -> None:
    with pytest.raises(Error, match=message):
        cyclic(attributes)


def test_a_cyclic_lookup_is_for_the_global_view() -> None:
    module = cyclic('rows=8, parts=2, axis="tp"')
    module.local = True
    op = next(iter(module.main))
    with pytest.raises(Error, match="for the global view only; localize lowers it"):
        op.verify(module)


def test_ids_beyond_the_capacity_give_zeros_and_are_counted() -> None:
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


def test_an_out_of_range_id_with_inside_is_an_error() -> None:
    ids, table = (
        Value(TensorType(*t), None, i) for i, t in enumerate((("i32", (2,)), ("f32", (3, 1))))
    )
    op = Embedding(ids, table, inside=True)
    rows = np.arange(3, dtype=np.float32)[:, None]
    assert op.evaluate(np.array([2, 0]), rows).tolist() == [[2], [0]]
    for wrong in (-1, 3):
        with pytest.raises(
            Error, match=f"embedding: index {wrong} is out of range of a dimension of 3"
        ):
            op.evaluate(np.array([0, wrong]), rows)
