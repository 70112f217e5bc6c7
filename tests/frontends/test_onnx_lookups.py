"""GatherND by indices that count through dimensions, as masks of transformers are exported."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import helper

from tests.frontends.onnx_models import compared, model, saved

node = helper.make_node


@pytest.mark.parametrize(
    ("columns", "rest", "is_joined"),
    [
        (["rows", "columns"], (), True),
        (["rows", "columns"], (3,), True),
        (["columns", "columns"], (), False),  # a diagonal
        (["back", "columns"], (), False),  # rows in the opposite order
    ],
    ids=["all", "slices", "diagonal", "backwards"],
)
def test_indices_that_count(
    columns: list[str],
    rest: tuple[int, ...],
    is_joined: bool,
    rng: np.random.Generator,
    tmp_path: Path,
) -> None:
    """Those in order need no arithmetic on indices; others are what they are."""
    nodes = [
        node("Shape", ["x"], ["sizes"]),
        node("Gather", ["sizes", "zero"], ["height"]),
        node("Gather", ["sizes", "one"], ["width"]),
        node("Range", ["zero", "height", "one"], ["all_rows"]),
        node("Range", ["zero", "width", "one"], ["all_columns"]),
        node("Unsqueeze", ["all_rows", "behind"], ["rows4"]),
        node("Unsqueeze", ["all_columns", "before"], ["columns4"]),
        node("Max", ["rows4", "columns4"], ["both"]),
        node("Shape", ["both"], ["wide"]),
        node("Expand", ["rows4", "wide"], ["rows"]),
        node("Expand", ["columns4", "wide"], ["columns"]),
        node("Sub", ["one", "rows"], ["turned"]),
        node("Sub", ["turned", "two"], ["back"]),  # -1 - row
        *(node("Unsqueeze", [name, "last"], [f"part{i}"]) for i, name in enumerate(columns)),
        node("Concat", ["part0", "part1"], ["index"], axis=-1),
        node("GatherND", ["x", "index"], ["out"]),
    ]
    numbers = {"zero": 0, "one": 1, "two": 2, "behind": [1, 2], "before": [0, 1], "last": [-1]}
    initial = {name: np.array(value, np.int64) for name, value in numbers.items()}
    shape = ("n", "n") if columns == ["columns", "columns"] else ("n", "m")
    made = model(nodes, {"x": ("f32", (*shape, *rest))}, ["out"], initial)
    sizes = (4, 4) if shape[0] == shape[1] else (3, 4)
    x = rng.standard_normal((*sizes, *rest)).astype(np.float32)
    module = compared(saved(made, tmp_path), {"x": x})
    assert ("lt" not in [op.opname for op in module.main]) == is_joined
