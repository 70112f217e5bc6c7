"""The reference backend: inputs, symbols, dtypes, weights, memory and calls."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from irc.backends.reference import evaluate, evaluate_ranks
from irc.errors import Error
from irc.ir.core import Op
from irc.ir.declare import REGISTRY, Operand, operation
from irc.ir.types import TensorType
from irc.text import parse_module
from tests.backends.text import module

F32, BF16 = np.float32, ml_dtypes.bfloat16


DOUBLE = module(
    "%x: f32[B, 2*S], %y: f32[S, 3]",
    "sum: f32[B, 2*S], f32[S, 3]",
    """
    %sum = add %x, %x : f32[B, 2*S]
    %more = add %y, %y : f32[S, 3]
    return %sum, %more
    """,
)


@pytest.mark.parametrize(
    ("message", "inputs"),
    [
        ("the inputs lack y; @forward takes x, y", {"x": np.ones((1, 2), F32)}),
        (
            "has no argument 'xx'; did you mean 'x'",
            {"xx": 1, "x": np.ones((1, 2), F32), "y": np.ones((1, 3), F32)},
        ),
        (
            "the input y is f64, but it must be f32; convert it",
            {"x": np.ones((1, 2), F32), "y": np.ones((1, 3))},
        ),
        ("arrays of complex128", {"x": np.ones((1, 2), complex), "y": np.ones((1, 3), F32)}),
        (
            r"the input x has the shape \[2\], but it must be f32\[B, 2\*S\]",
            {"x": np.ones(2, F32), "y": np.ones((1, 3), F32)},
        ),
        (
            r"the input y has the shape \[1, 4\], but it must be f32\[S, 3\]",
            {"x": np.ones((1, 2), F32), "y": np.ones((1, 4), F32)},
        ),
        (
            r"y has the shape \[4, 3\], but S is 3 in x, so dimension 0 \(S\) must be 3",
            {"x": np.ones((1, 6), F32), "y": np.ones((4, 3), F32)},
        ),
        (
            r"x has the shape \[1, 5\], but S is 3 in y, so dimension 1 \(2\*S\) must be 6",
            {"x": np.ones((1, 5), F32), "y": np.ones((3, 3), F32)},
        ),
    ],
)
def test_a_wrong_input_is_named(message: str, inputs: dict[str, Any]) -> None:
    with pytest.raises(Error, match=message):
        evaluate(DOUBLE, inputs)


def test_symbols_follow_from_sums_and_products() -> None:
    found = module(
        "%x: f32[2*S + 1]", "f32[S]", "%y = full {value=1, shape=[S]} : f32[S]\nreturn %y"
    )
    assert evaluate(found, {"x": np.ones(7, F32)})["result0"].shape == (3,)
    with pytest.raises(Error, match=r"does not fit f32\[2\*S \+ 1\]: dimension 0"):
        evaluate(found, {"x": np.ones(6, F32)})
    with pytest.raises(Error, match="does not fit"):
        evaluate(found, {"x": np.ones(0, F32)})


def test_sizes_determine_symbols_of_a_product() -> None:
    body = "%y = reshape %x {shape=[B, S]} : f32[B, S]\nreturn %y"
    flat = module("%x: f32[B*S]", "f32[B, S]", body)
    x = np.ones(6, F32)
    with pytest.raises(Error, match=r"f32\[B\*S\]: .*the sizes of B and S are not determined"):
        evaluate(flat, {"x": x})
    assert evaluate(flat, {"x": x}, sizes={"B": 2})["result0"].shape == (2, 3)
    with pytest.raises(Error, match="B is 2 in sizes, S is 2 in sizes, so dimension 0"):
        evaluate(flat, {"x": x}, sizes={"B": 2, "S": 2})


def test_a_symbol_that_no_input_has_is_an_error_at_the_operation() -> None:
    loose = module("", "f32[S]", "%y = full {value=1, shape=[S]} : f32[S]\nreturn %y")
    with pytest.raises(Error, match=r"S has no value[^\n]*\n    %y = full"):
        evaluate(loose, {})


def test_a_result_of_another_shape_is_an_error(watching: list[int]) -> None:
    wrong = module("%x: f32[3]", "f32[3]", "%y = watched %x {skip=1} : f32[3]\nreturn %y")
    with pytest.raises(Error, match=r"watched gave the shape \[2\] for f32\[3\]"):
        evaluate(wrong, {"x": np.ones(3, F32)})


def test_narrow_floats_are_computed_wide_and_rounded_after_each_operation() -> None:
    chain = module(
        "%x: bf16[2], %y: f16[1]",
        "bf16[2], f16[1]",
        """
        %sum = add %x, %x : bf16[2]
        %product = mul %sum, %x : bf16[2]
        %large = mul %y, %y : f16[1]
        return %product, %large
        """,
    )
    x = np.array([1.0078125, 3.140625], BF16)
    found = evaluate(chain, {"x": x, "y": np.array([1000], np.float16)})
    wide = x.astype(F32)
    rounded = ((wide + wide).astype(BF16).astype(F32) * wide).astype(BF16)
    np.testing.assert_array_equal(found["result0"], rounded)
    assert found["result0"].dtype == BF16
    assert np.isinf(found["result1"])  # without a warning


def test_an_unknown_function_is_an_error() -> None:
    with pytest.raises(Error, match="no function @thrice"):
        evaluate(DOUBLE, {}, function="thrice")


@pytest.fixture
def watching() -> Iterator[list[int]]:
    """An operation `watched` that copies x, and how many of its results were alive when it ran."""
    alive: list[int] = []
    made: list[weakref.ref[Any]] = []

    @operation("watched")
    class Watched(Op):
        """A copy of x without its first `skip` numbers."""

        x: Operand
        skip: int = 0

        def infer(self) -> TensorType:
            return self.x.type

        def evaluate(self, x: Any) -> Any:
            gc.collect()
            alive.append(sum(ref() is not None for ref in made))
            copy = x[self.skip :].copy()
            made.append(weakref.ref(copy))
            return copy

    yield alive
    assert REGISTRY.pop("watched") is Watched


def test_memory_does_not_grow_with_the_length_of_a_chain(watching: list[int]) -> None:
    lines = ["%x0 = watched %x : f32[8]"]
    lines += [f"%x{i + 1} = watched %x{i} : f32[8]" for i in range(30)]
    chain = module("%x: f32[8]", "f32[8]", "\n".join([*lines, "return %x30"]))
    evaluate(chain, {"x": np.ones(8, F32)})
    assert len(watching) == 31 and max(watching) == 1


WEIGHTS = module(
    "%x: f32[2]",
    "f32[2]",
    """
    %a = add %x, @random : f32[2]
    %b = add %a, @unbound : f32[2]
    return %b
    """,
    top='  weight @random : f32[2] = random("a.b", 3, 0.5)\n'
    '  weight @unbound : f32[2] = concat(unbound("c"), unbound("d"); 0)',
)


def test_a_weight_without_data_names_the_options() -> None:
    x = np.zeros(2, F32)
    with pytest.raises(Error, match="'c' has no values; compile the model with --checkpoint"):
        evaluate(WEIGHTS, {"x": x})
    given = {"unbound": np.ones(2, F32)}
    found = evaluate(WEIGHTS, {"x": x}, weights=given)["result0"]
    again = evaluate(WEIGHTS, {"x": x}, weights=given)["result0"]
    np.testing.assert_array_equal(found, again)
    assert (found != 1).all()


@pytest.mark.parametrize(
    ("message", "weights"),
    [
        ("no weight @random_; did you mean 'random'", {"random_": np.ones(2, F32)}),
        (r"@random is f32\[2\], but its data is f32\[3\]", {"random": np.ones(3, F32)}),
        (r"@random is f32\[2\], but its data is f16\[2\]", {"random": np.ones(2, np.float16)}),
    ],
)
def test_given_weights_are_checked(message: str, weights: dict[str, np.ndarray]) -> None:
    with pytest.raises(Error, match=message):
        evaluate(WEIGHTS, {"x": np.zeros(2, F32)}, weights={"unbound": np.ones(2, F32), **weights})


SHARDED = module(
    "%x: f32[2]{varies tp}",
    "f32[2], i32[]{varies tp}",
    """
    %part = mul %x, @w : f32[2]{varies tp}
    %sum = all_reduce %part {axis="tp", group_size=2} : f32[2]
    %rank = rank {axis="tp"} : i32[]{varies tp}
    return %sum, %rank
    """,
    head="local mesh(tp=2)",
    top='  weight @w : f32[2]{varies tp} = unbound("w").shard(0, tp)',
)


def test_every_rank_has_its_inputs_and_weights() -> None:
    weights = {"w": [np.array([1, 2], F32), np.array([10, 20], F32)]}
    x = [np.array([1, 1], F32), np.array([2, 3], F32)]
    a, b = evaluate_ranks(SHARDED, {"x": x}, weights=weights)
    np.testing.assert_array_equal(a["result0"], [21, 62])
    np.testing.assert_array_equal(b["result0"], [21, 62])
    assert (int(a["result1"]), int(b["result1"])) == (0, 1)
    same = evaluate(SHARDED, {"x": x[0]}, weights=weights)
    np.testing.assert_array_equal(same["result0"], [11, 22])
    assert int(same["result1"]) == 0


def test_ranks_need_a_local_module_and_one_input_each() -> None:
    with pytest.raises(Error, match="is in the global view; localize it"):
        evaluate_ranks(DOUBLE, {})
    with pytest.raises(Error, match="the input x has 3 arrays, one per rank, for 2 ranks"):
        evaluate_ranks(SHARDED, {"x": [np.ones(2, F32)] * 3})


SHARED = """module @m local mesh(tp=2) {
  func @forward(%x: f32[B, 2] of f32[B, 3@tp], %y: f32[1, 2*S] of f32[1, 4*S@tp])
      -> (x: f32[B, 2] of f32[B, 3@tp], y: f32[1, 2*S] of f32[1, 4*S@tp]) {
    %a = neg %x : f32[B, 2] of f32[B, 3@tp]
    %b = neg %y : f32[1, 2*S] of f32[1, 4*S@tp]
    return %a, %b
  }
}"""


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        ((2, 4), (1, 4), r"x has the shape \[2, 4\], but it must be f32\[B, 3\]"),
        ((2, 2), (1, 4), r"x has the shape \[2, 2\], but it must be f32\[B, 3\]"),
        ((3,), (1, 4), r"x has the shape \[3\], but it must be f32\[B, 3\]"),
        ((2, 3), (1, 6), r"y has the shape \[1, 6\], but dimension 1 must be a multiple of 4"),
        ((2, 3), (2, 4), r"y has the shape \[2, 4\], but it must be f32\[1, 4\*S\]"),
    ],
)
def test_global_inputs_have_the_global_shape(
    x: tuple[int, ...], y: tuple[int, ...], message: str
) -> None:
    module = parse_module(SHARED)
    whole = evaluate(module, {"x": np.ones((2, 3), "f4"), "y": np.ones((1, 4), "f4")})
    assert {name: array.shape for name, array in whole.items()} == {"x": (2, 3), "y": (1, 4)}
    with pytest.raises(Error, match=message):
        evaluate(module, {"x": np.ones(x, "f4"), "y": np.ones(y, "f4")})


def test_a_dimension_of_ranks_is_a_multiple() -> None:
    text = """module @m dims(B_dp=1:2:4) {
      func @forward(%x: f32[4*B_dp], %y: f32[4*B_dp]) -> (f32[4*B_dp]) {
        %a = add %x, %y : f32[4*B_dp]
        return %a
      } }"""
    ones = {n: np.ones(n, "f4") for n in (4, 6, 8)}
    with pytest.raises(
        Error, match=r"x has the shape .6., but dimension 0 must be a multiple of 4; pad it"
    ):
        evaluate(parse_module(text), {"x": ones[6], "y": ones[6]})
    with pytest.raises(
        Error, match=r"y has the shape .8., but dimension 0 must be 4, to go with x$"
    ):
        evaluate(parse_module(text), {"x": ones[4], "y": ones[8]})


def test_ranks_of_a_group_hold_equal_shapes() -> None:
    loose = module(
        "%x: f32[S]{varies tp}",
        "f32[S]",
        '%y = all_reduce %x {axis="tp", group_size=2} : f32[S]\nreturn %y',
        head="local mesh(tp=2)",
    )
    with pytest.raises(Error, match=r"the ranks of one group hold \[1\] and \[3\]"):
        evaluate_ranks(loose, {"x": [np.ones(3, F32), np.ones(1, F32)]})
