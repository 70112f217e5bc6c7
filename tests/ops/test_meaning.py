"""Operations on special inputs: extremes, ties, bounds, NaN and empty tensors; norms in 16
bits, and gated feed-forwards against their formulas."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from irc.backends.reference import evaluate
from irc.errors import Error
from irc.ir.core import Op, Value
from irc.ir.declare import op_class
from irc.ir.dims import symbol
from irc.ir.types import TensorType
from irc.ops import Gather, GatherElements, ScatterElements, Slice, Topk
from tests.fresh import fresh
from tests.ops.compare import apply
from tests.ops.example import Arg, Example, module_of

S = symbol("S")
INF, NAN = math.inf, math.nan


def f32(values: Any) -> Any:
    return np.asarray(values, np.float32)


def i32(values: Any) -> Any:
    return np.asarray(values, np.int32)


def run(op: str, *arrays: Any, dtype: str = "f32", **attributes: Any) -> Any:
    """The first result of an operation, as a list; Python numbers become `dtype`, ids i32."""
    convert = f32 if dtype == "f32" else i32
    return apply(op, *map(convert, arrays), **attributes).tolist()


def outputs(example: Example, given: list[Any]) -> list[Any]:
    inputs = {f"x{i}": array for i, array in enumerate(given)}
    return list(evaluate(module_of(example), inputs).values())


@pytest.mark.parametrize("exponent", [0.5, -0.5, 2.0, -1.0])
def test_one_exponent_for_all_is_one_for_each(exponent: float) -> None:
    x = f32([-INF, -0.0, 4, -4, NAN, INF, 0])
    with np.errstate(all="ignore"):
        want = np.array([np.power(float(n), exponent, dtype=np.float64) for n in x])
        want[0] = {0.5: INF, -0.5: 0.0, 2.0: INF, -1.0: -0.0}[exponent]  # IEEE 754 and C's pow
    want[1] = {0.5: 0.0, -0.5: INF, 2.0: 0.0, -1.0: -INF}[exponent]
    np.testing.assert_allclose(apply("pow", x, f32(exponent)), want, rtol=1e-6)
    assert not exponent > 0 or not np.signbit(apply("pow", x, f32(exponent))[1])


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


def cast(values: list[float], source: str, to: str) -> Any:
    return apply("cast", f32(values) if source == "f32" else i32(values), dtype=to)


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


def test_the_first_of_equal_elements_wins() -> None:
    assert run("argmax", [3, 5, 5, 1], dim=0) == 1
    array = f32([3, 5, 1, 5, 3])
    sharded = (Arg((5,), axes=(("tp",),)),)
    for example in (
        Example("topk", (Arg((5,)),), {"k": 4}),
        Example("sharded_topk", sharded, {"k": 4, "axis": "tp"}, mesh="tp=2"),
    ):
        values, places = outputs(example, [array])
        assert values.tolist() == [5, 5, 3, 3] and places.tolist() == [1, 3, 0, 4]
    many = np.zeros((3, 100), np.float32)
    _, places = outputs(Example("topk", (Arg((3, 100)),), {"k": 100}), [many])
    assert places.tolist() == [list(range(100))] * 3


@pytest.mark.parametrize(
    ("op", "arrays", "attributes", "wanted"),
    [
        ("floor_div", ([7, -7, 7, -7], [2, 2, -2, -2]), {}, [3, -4, -4, 3]),
        ("mod", ([7, -7, 7, -7], [2, 2, -2, -2]), {}, [1, 1, -1, -1]),
        ("one_hot", ([-1, 1, 2],), {"size": 2, "dtype": "i32"}, [[0, 0], [0, 1], [0, 0]]),
        *(
            ("slot_ids", ([[1, 3, -1], [-1, 2, 3]],), {"sizes": (2, 3, 4)} | policy, wanted)
            for policy, wanted in (
                ({"outside": "zero"}, [[1, -1, -1], [-1, 4, 8]]),
                ({"outside": "error"}, [[1, -1, -1], [-1, 4, 8]]),
                ({"outside": "clamp"}, [[1, 4, 5], [0, 4, 8]]),
                ({"outside": "row", "row": 1}, [[1, 3, 6], [1, 4, 8]]),
            )
        ),
    ],
)
def test_operations_without_an_onnx_operator(
    op: str, arrays: Any, attributes: dict[str, Any], wanted: Any
) -> None:
    """Backends compose these of other operations; ONNX Runtime checks all others."""
    assert apply(op, *map(i32, arrays), **attributes).tolist() == wanted


def test_nan_counts_as_the_largest() -> None:
    values, places = outputs(Example("topk", (Arg((3,)),), {"k": 2}), [f32([1, NAN, 3])])
    assert math.isnan(values[0]) and places.tolist() == [1, 2]
    assert run("argmax", [1, NAN, 3], dim=0) == 1


def value(*shape: Any, dtype: str = "f32") -> Value:
    return Value(TensorType(dtype, shape), None, 0, "x")


@pytest.mark.parametrize("wrong", [-4, 3])
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
            Error, match=f"{op.opname}: index {wrong} is out of range of a dimension of 3"
        ):
            op.evaluate(*arrays)


def test_symbolic_bounds_are_checked_at_run_time() -> None:
    module = module_of(
        Example("slice", (Arg((S,)),), {"dim": 0, "start": 2, "stop": 6}, sizes={"S": 8})
    )
    result = evaluate(module, {"x0": np.arange(8, dtype=np.float32)})["result0"]
    assert result.tolist() == [2, 3, 4, 5]
    with pytest.raises(Error, match="slice: 2 to 6 is out of range of a dimension of 5"):
        evaluate(module, {"x0": np.zeros(5, np.float32)})
    module = module_of(Example("topk", (Arg((S,)),), {"k": 6}, sizes={"S": 8}))
    with pytest.raises(Error, match="topk: there are no 6 largest of 5 elements"):
        evaluate(module, {"x0": np.zeros(5, np.float32)})


def test_symbols_without_a_value_are_refused() -> None:
    for op in (Slice(value(S), dim=0, start=0, stop=S), Topk(value(S), k=S)):
        with pytest.raises(Error, match=f"{op.opname}: S has no value yet"):
            op.evaluate(np.zeros(3, np.float32))


# norms and gated feed-forwards

RNG = fresh(5)
X = RNG.standard_normal((3, 4, 8)).astype(np.float32) * 3 + 1
WEIGHT = RNG.standard_normal(8).astype(np.float32)


def test_sixteen_bit_norms_round_once() -> None:
    x, weight = X.astype(ml_dtypes.bfloat16), WEIGHT.astype(ml_dtypes.bfloat16)
    wide = apply("rms_norm", x.astype(np.float32), weight.astype(np.float32))
    np.testing.assert_array_equal(apply("rms_norm", x, weight), wide.astype(ml_dtypes.bfloat16))
    far = np.full((1, 8), 60000, np.float16)  # its square is no f16
    np.testing.assert_array_equal(apply("rms_norm", far, np.ones(8, np.float16)), np.ones((1, 8)))


ACTIVATIONS = {
    "silu": lambda x: x / (1 + math.exp(-x)),
    "gelu": lambda x: x * 0.5 * (1 + math.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: (
        0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    ),
    "quick_gelu": lambda x: x / (1 + math.exp(-1.702 * x)),
    "relu": lambda x: max(x, 0.0),
    "squared_relu": lambda x: max(x, 0.0) ** 2,
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
}


def quarters(*shape: int) -> np.ndarray:
    """Multiples of 1/4 up to 2, whose products f32 adds without rounding."""
    return (RNG.integers(-8, 9, shape) / 4).astype(np.float32)


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_gated_mlp(act: str) -> None:
    x, gate, up = quarters(3, 4, 8), quarters(5, 8), quarters(5, 8)
    named = {"gate_bias": quarters(5), "up_bias": quarters(5)}
    active = np.vectorize(ACTIVATIONS[act])(x.astype(np.float64) @ gate.T + named["gate_bias"])
    result = apply("gated_mlp", x, gate, up, named=named, act=act)
    wanted = active * (x @ up.T + named["up_bias"])
    # gelu adds 1 to erf, which costs below -5 all digits of a number below 1e-6
    np.testing.assert_allclose(result, wanted, rtol=1e-5, atol=3e-5)


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_a_norm_of_no_features_is_empty(op: str) -> None:
    weight = () if op == "layer_norm" else (np.zeros(0, np.float32),)
    assert apply(op, np.zeros((3, 0), np.float32), *weight).shape == (3, 0)
