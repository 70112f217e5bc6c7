"""The numerics check: comparison of results, sizes and inputs, lost results."""

from collections.abc import Mapping

import ml_dtypes
import numpy as np
import pytest

import irc.passes
from irc.errors import Error
from irc.ir.core import Module
from irc.pipeline import run_pipeline
from irc.pipeline.instruments import CheckNumerics, random_inputs, small_sizes
from irc.pipeline.instruments.numerics import compare
from irc.text import parse_module
from tests.irc.instrumented import TEXT

assert irc.passes


def test_numerics_notice_a_lost_result() -> None:
    results = iter([{"a": np.zeros(1)}, {"b": np.zeros(1)}])
    check = CheckNumerics(lambda module, inputs: next(results))
    with pytest.raises(Error, match="the pass dce changes the results from a to b"):
        run_pipeline(parse_module(TEXT), "dce", [check])


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


@pytest.mark.parametrize(
    ("before", "after", "difference"),
    [
        (f32(1, 2), f32(1, 2.0001), None),
        (f32(1, 2), f32(1, 2.001), "1 of 2 elements differ, first at [1]: 2.0 becomes 2.00"),
        (f32(1e-6, 2), f32(2e-6, 2), None),  # small beside the largest
        (f32(np.nan, np.inf), f32(np.nan, np.inf), None),
        (f32(np.nan), f32(0), "first at [0]: nan becomes 0.0"),
        (f32(0), f32(np.nan), "first at [0]: 0.0 becomes nan"),
        (f32(1), f32(np.inf), "1.0 becomes inf"),
        (f32(np.inf), f32(-np.inf), "inf becomes -inf"),
        (f32(1), f32(1)[None], "float32[1] becomes float32[1, 1]"),
        (f32(1), np.array([1], np.float16), "float32[1] becomes float16[1]"),
        (np.array([1000000], np.int32), np.array([1000001], np.int32), "1000000 becomes 1000001"),
        (np.array([7], ml_dtypes.int4), np.array([6], ml_dtypes.int4), "7 becomes 6"),
        (np.array([True], np.bool_), np.array([False], np.bool_), "True becomes False"),
        (f32(), f32(), None),
    ],
)
def test_comparison(before: np.ndarray, after: np.ndarray, difference: str | None) -> None:
    found = compare(before, after, 1e-4)
    assert (found is None) if difference is None else (found is not None and difference in found)


def test_sizes_and_inputs() -> None:
    module = parse_module("""module @m dims(B=4:4:8, S=1:1:2, Q=0:9:9) {
      func @f(%ids: i32[B, S], %m: bool[Q], %h: bf16[2*B]) -> (i32[B, S]) { return %ids } }""")
    sizes = small_sizes(module)
    assert sizes == {"B": 4, "S": 2, "Q": 4}
    inputs = random_inputs(module, sizes)
    assert {n: (str(a.dtype), a.shape) for n, a in inputs.items()} == {
        "ids": ("int32", (4, 2)),
        "m": ("bool", (4,)),
        "h": ("bfloat16", (8,)),
    }
    assert np.array_equal(inputs["ids"], random_inputs(module, sizes)["ids"])
    with pytest.raises(Error, match="has no size"):
        random_inputs(module, {"B": 1})


def test_given_sizes_and_inputs_are_used() -> None:
    seen: list[dict[str, np.ndarray]] = []

    def note(module: Module, inputs: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        seen.append(dict(inputs))
        return {}

    ones = np.ones((4, 4), np.float32)
    run_pipeline(parse_module(TEXT), "cse", [CheckNumerics(note, {"B": 4}, {"y": ones})])
    assert len(seen) == 2 and seen[0]["x"].shape == (4, 4) and seen[1]["y"] is ones
