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
from irc.ir.core import Module, Op
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


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, F32)


X, Y = ones(1, 2), ones(1, 3)
FLAT = module("%x: f32[B*S]", "f32[B, S]", "%y = reshape %x {shape=[B, S]} : f32[B, S]\nreturn %y")
ODD = module("%x: f32[2*S + 1]", "f32[S]", "%y = full {value=1, shape=[S]} : f32[S]\nreturn %y")
LOOSE = module("", "f32[S]", "%y = full {value=1, shape=[S]} : f32[S]\nreturn %y")
EVEN = module(
    "%x: f32[4*B_dp], %y: f32[4*B_dp]", "f32[4*B_dp]", "%a = add %x, %y : f32[4*B_dp]\nreturn %a"
)
SHARED = parse_module("""module @m local mesh(tp=2) {
  func @forward(%x: f32[B, 2] of f32[B, 3@tp], %y: f32[1, 2*S] of f32[1, 4*S@tp])
      -> (x: f32[B, 2] of f32[B, 3@tp], y: f32[1, 2*S] of f32[1, 4*S@tp]) {
    %a = neg %x : f32[B, 2] of f32[B, 3@tp]
    %b = neg %y : f32[1, 2*S] of f32[1, 4*S@tp]
    return %a, %b
  }
}""")
WRONG: list[tuple[Module, dict[str, Any], str]] = [
    (DOUBLE, {"x": X}, "the inputs lack y; @forward takes x, y"),
    (DOUBLE, {"xx": 1, "x": X, "y": Y}, "has no argument 'xx'; did you mean 'x'"),
    (DOUBLE, {"x": X, "y": np.ones((1, 3))}, "the input y is f64, but it must be f32; convert it"),
    (DOUBLE, {"x": np.ones((1, 2), complex), "y": Y}, "arrays of complex128"),
    (DOUBLE, {"x": ones(2), "y": Y}, r"x has the shape \[2\], but it must be f32\[B, 2\*S\]"),
    (DOUBLE, {"x": X, "y": ones(1, 4)}, r"y has the shape \[1, 4\], but it must be f32\[S, 3\]"),
    (
        DOUBLE,
        {"x": ones(1, 6), "y": ones(4, 3)},
        r"y has the shape \[4, 3\], but S is 3 in x, so dimension 0 \(S\) must be 3",
    ),
    (
        DOUBLE,
        {"x": ones(1, 5), "y": ones(3, 3)},
        r"x has the shape \[1, 5\], but S is 3 in y, so dimension 1 \(2\*S\) must be 6",
    ),
    (ODD, {"x": ones(6)}, r"does not fit f32\[2\*S \+ 1\]: dimension 0"),
    (ODD, {"x": ones(0)}, "does not fit"),
    (FLAT, {"x": ones(6)}, r"f32\[B\*S\]: .*the sizes of B and S are not determined"),
    (LOOSE, {}, r"S has no value[^\n]*\n    %y = full"),
    (EVEN, {"x": ones(6), "y": ones(6)}, r"dimension 0 must be a multiple of 4; pad it"),
    (EVEN, {"x": ones(4), "y": ones(8)}, r"y .* dimension 0 must be 4, to go with x$"),
    (SHARED, {"x": ones(2, 4), "y": ones(1, 4)}, r"x .*\[2, 4\], but it must be f32\[B, 3\]"),
    (SHARED, {"x": ones(2, 2), "y": ones(1, 4)}, r"x .*\[2, 2\], but it must be f32\[B, 3\]"),
    (SHARED, {"x": ones(3), "y": ones(1, 4)}, r"x .*\[3\], but it must be f32\[B, 3\]"),
    (SHARED, {"x": ones(2, 3), "y": ones(1, 6)}, r"dimension 1 must be a multiple of 4"),
    (SHARED, {"x": ones(2, 3), "y": ones(2, 4)}, r"y .*\[2, 4\], but it must be f32\[1, 4\*S\]"),
]


@pytest.mark.parametrize(("program", "inputs", "message"), WRONG)
def test_a_wrong_input_is_named(program: Module, inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(Error, match=message):
        evaluate(program, inputs)


def test_symbols_follow_from_sums_products_and_sizes() -> None:
    assert evaluate(ODD, {"x": ones(7)})["result0"].shape == (3,)
    assert evaluate(FLAT, {"x": ones(6)}, sizes={"B": 2})["result0"].shape == (2, 3)
    with pytest.raises(Error, match="B is 2 in sizes, S is 2 in sizes, so dimension 0"):
        evaluate(FLAT, {"x": ones(6)}, sizes={"B": 2, "S": 2})
    whole = evaluate(SHARED, {"x": ones(2, 3), "y": ones(1, 4)})
    assert {name: array.shape for name, array in whole.items()} == {"x": (2, 3), "y": (1, 4)}


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


def test_ranks_of_a_group_hold_equal_shapes() -> None:
    loose = module(
        "%x: f32[S]{varies tp}",
        "f32[S]",
        '%y = all_reduce %x {axis="tp", group_size=2} : f32[S]\nreturn %y',
        head="local mesh(tp=2)",
    )
    with pytest.raises(Error, match=r"the ranks of one group hold \[1\] and \[3\]"):
        evaluate_ranks(loose, {"x": [np.ones(3, F32), np.ones(1, F32)]})
