"""What operations mean where a random input seldom goes: extremes, ties, bounds, signs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from irc.backends.reference import evaluate
from irc.core import Op, Value
from irc.declare import op_class
from irc.dims import symbol
from irc.errors import Error
from irc.ops import Gather, GatherElements, ScatterElements, Slice, Topk
from irc.types import TensorType
from tests.ops.example import Arg, Example, module_of

S = symbol("S")
INF, NAN = math.inf, math.nan


def f32(values: Any) -> Any:
    return np.asarray(values, np.float32)


def i32(values: Any) -> Any:
    return np.asarray(values, np.int32)


def run(op: str, *arrays: Any, dtype: str = "f32", **attributes: Any) -> Any:
    """The first result of an operation, as a list; Python numbers become `dtype`, ids i32."""
    given = [f32(a) if dtype == "f32" else i32(a) for a in arrays]
    args = tuple(Arg(a.shape, dtype) for a in given)
    return outputs(Example(op, args, attributes), given)[0].tolist()


def outputs(example: Example, given: list[Any]) -> list[Any]:
    inputs = {f"x{i}": array for i, array in enumerate(given)}
    return list(evaluate(module_of(example), inputs).values())


def test_integer_division_rounds_down() -> None:
    assert run("floor_div", [7, -7, 7, -7], [2, 2, -2, -2], dtype="i32") == [3, -4, -4, 3]
    assert run("mod", [7, -7, 7, -7], [2, 2, -2, -2], dtype="i32") == [1, 1, -1, -1]
    assert run("mod", [7.5, -7.5], [2, 2]) == [1.5, 0.5]


def test_integers_wrap_around() -> None:
    assert run("add", [2**31 - 1], [1], dtype="i32") == [-(2**31)]
    assert run("reduce_sum", [2**31 - 1, 1], dims=(0,), dtype="i32") == -(2**31)


@pytest.mark.parametrize(
    ("op", "want"),
    [
        ("sigmoid", [0, 0.5, 1]),
        ("silu", [0, 0, 1000]),
        ("softplus", [0, math.log(2), 1000]),
        ("quick_gelu", [0, 0, 1000]),
        ("gelu", [0, 0, 1000]),
        ("tanh", [-1, 0, 1]),
        ("relu", [0, 0, 1000]),
        ("squared_relu", [0, 0, 1e6]),
        ("exp", [0, 1, INF]),
        ("erf", [-1, 0, 1]),
    ],
)
def test_large_inputs_overflow_nowhere_in_between(op: str, want: list[float]) -> None:
    x = f32([-1000, 0, 1000])
    assert np.allclose(run(op, x), want, rtol=1e-6)
    if op != "exp":
        with np.errstate(over="raise", invalid="raise", divide="raise"):
            op_class(op)(Value(TensorType("f32", (3,)), None, 0)).evaluate(x)


def test_known_values() -> None:
    assert np.allclose(run("gelu", [1, -2]), [0.8413447, -0.0455003], atol=1e-6)
    tanh = run("gelu", [1, -2], approximate="tanh")
    assert np.allclose(tanh, [0.8411920, -0.0454023], atol=1e-6)
    assert np.allclose(run("erf", [0.5, -1.5]), [0.5204999, -0.9661051], atol=1e-6)
    assert np.allclose(run("softplus", [1]), [1.3132617], atol=1e-6)


def test_infinity_and_nan_follow_ieee() -> None:
    assert run("div", [1, -1], [0, 0]) == [INF, -INF]
    assert math.isnan(run("div", [0], [0])[0])
    assert run("rsqrt", [0]) == [INF] and run("log", [0]) == [-INF]
    assert math.isnan(run("sqrt", [-1])[0])
    assert math.isnan(run("maximum", [NAN], [1])[0]) and math.isnan(run("relu", [NAN])[0])
    assert math.isnan(run("clip", [NAN], low=0)[0])
    assert run("eq", [NAN], [NAN]) == [False] and run("ne", [NAN], [NAN]) == [True]


def test_halves_round_to_even() -> None:
    assert run("round", [0.5, 1.5, 2.5, -0.5, -1.5]) == [0, 2, 2, 0, -2]


def cast(values: list[float], source: str, to: str) -> Any:
    array = f32(values) if source == "f32" else i32(values)
    return outputs(Example("cast", (Arg(array.shape, source),), {"dtype": to}), [array])[0]


def test_casts() -> None:
    assert cast([1.9, -1.9], "f32", "i32").tolist() == [1, -1]
    assert cast([0.5, 0, NAN], "f32", "bool").tolist() == [True, False, True]
    assert cast([300, -1], "i32", "u8").tolist() == [44, 255]
    assert cast([1e9], "f32", "f16").tolist() == [INF]
    # 1 + 2^-8 lies halfway between two bf16 numbers, and 1 is the even one
    assert cast([1 + 2**-8, 1 + 3 * 2**-8], "f32", "bf16").tolist() == [1, 1 + 2**-6]


def test_softmax_of_extremes() -> None:
    assert run("softmax", [1e4, -1e4, -INF]) == [1, 0, 0]
    assert all(map(math.isnan, run("softmax", [-INF, -INF])))
    assert run("log_softmax", [1e4, -1e4]) == [0, -2e4]


def test_reductions_over_nothing_give_the_neutral_element() -> None:
    empty = np.zeros((2, 0))
    wanted = {"sum": 0, "prod": 1, "max": -INF, "min": INF}
    for kind, value in wanted.items():
        assert run(f"reduce_{kind}", empty, dims=(1,)) == [value] * 2
    assert run("reduce_max", empty, dims=(1,), dtype="i32") == [-(2**31)] * 2


def test_ties_go_to_the_front() -> None:
    assert run("argmax", [3, 5, 5, 1], dim=0) == 1
    array = f32([3, 5, 1, 5, 3])
    values, places = outputs(Example("topk", (Arg((5,)),), {"k": 4}), [array])
    assert values.tolist() == [5, 5, 3, 3] and places.tolist() == [1, 3, 0, 4]
    many = np.zeros((3, 100), np.float32)
    _, places = outputs(Example("topk", (Arg((3, 100)),), {"k": 100}), [many])
    assert places.tolist() == [list(range(100))] * 3


def test_nan_counts_as_the_largest() -> None:
    values, places = outputs(Example("topk", (Arg((3,)),), {"k": 2}), [f32([1, NAN, 3])])
    assert math.isnan(values[0]) and places.tolist() == [1, 2]
    assert run("argmax", [1, NAN, 3], dim=0) == 1


def test_running_sums() -> None:
    assert run("cumsum", [1, 2, 3]) == [1, 3, 6]
    assert run("cumsum", [1, 2, 3], exclusive=True) == [0, 1, 3]


def test_rows_for_ids_outside_the_table_are_zero() -> None:
    table = f32([[1, 2], [3, 4]])
    example = Example("embedding", (Arg((4,), "i32"), Arg((2, 2))))
    rows = outputs(example, [i32([-1, 0, 1, 2]), table])[0]
    assert rows.tolist() == [[0, 0], [1, 2], [3, 4], [0, 0]]


def test_layout() -> None:
    assert run("repeat", [1, 2], dim=0, count=2) == [1, 1, 2, 2]
    assert run("pad", [1, 2], before=(1,), after=(2,), value=9) == [9, 1, 2, 9, 9]
    assert run("slice", list(range(7)), dim=0, start=1, stop=7, step=3) == [1, 4]


def value(*shape: Any, dtype: str = "f32") -> Value:
    return Value(TensorType(dtype, shape), None, 0, "x")


@pytest.mark.parametrize("wrong", [-1, 3])
def test_indices_outside_a_dimension_are_errors(wrong: int) -> None:
    x, ids = np.zeros((3, 2), np.float32), i32([[0, wrong]])
    ops: list[tuple[Op, list[Any]]] = [
        (Gather(value(3, 2), value(1, 2, dtype="i32")), [x, ids]),
        (GatherElements(value(3, 2), value(1, 2, dtype="i32"), dim=0), [x, ids]),
        (
            ScatterElements(value(3, 2), value(1, 2, dtype="i32"), value(1, 2), dim=0),
            [x, ids, x[:1]],
        ),
    ]
    for op, arrays in ops:
        with pytest.raises(
            Error, match=f"{op.opname}: index {wrong} lies outside a dimension of 3"
        ):
            op.evaluate(*arrays)


def test_what_symbols_leave_open_is_checked_at_run_time() -> None:
    module = module_of(
        Example("slice", (Arg((S,)),), {"dim": 0, "start": 2, "stop": 6}, sizes={"S": 8})
    )
    assert evaluate(module, {"x0": np.arange(8, dtype=np.float32)})["result0"].tolist() == [
        2,
        3,
        4,
        5,
    ]
    with pytest.raises(Error, match="slice: 2 to 6 lies outside a dimension of 5"):
        evaluate(module, {"x0": np.zeros(5, np.float32)})
    module = module_of(Example("topk", (Arg((S,)),), {"k": 6}, sizes={"S": 8}))
    with pytest.raises(Error, match="topk: there are no 6 largest of 5 elements"):
        evaluate(module, {"x0": np.zeros(5, np.float32)})


def test_symbols_without_a_value_are_refused() -> None:
    for op in (Slice(value(S), dim=0, start=0, stop=S), Topk(value(S), k=S)):
        with pytest.raises(Error, match=f"{op.opname}: S has no value yet"):
            op.evaluate(np.zeros(3, np.float32))
