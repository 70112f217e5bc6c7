"""Examples of reductions, lookups, matrix products, constants and calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from irc.ir.core import Function, Module
from irc.ir.dims import symbol
from irc.ir.types import TensorType
from irc.ops import Neg, Return
from tests.ops.example import FLOATS, Arg, Bad, Example

B, S = symbol("B"), symbol("S")
NUMBERS = (*FLOATS, "i32")
X = (Arg((4, 6)),)
BOOLS = Bad("takes numbers", (Arg((4, 6), "bool"),), {"dims": (0,)})
INTEGERS = Bad("floating-point", (Arg((4, 6), "i32"),), {"dims": (0,)})


def _reductions() -> list[Example]:
    bad = (
        Bad("names no dimension", X, {"dims": ()}),
        Bad("no dimension 2", X, {"dims": (2,)}),
        Bad("twice", X, {"dims": (1, -1)}),
    )
    examples: list[Example] = []
    for op in ("reduce_sum", "reduce_mean", "reduce_max", "reduce_min", "reduce_prod"):
        dtypes, kind = (FLOATS, INTEGERS) if op == "reduce_mean" else (NUMBERS, BOOLS)
        # integer products that overflow wrap in numpy and saturate in ONNX Runtime
        many = Arg((12, 24), "T", -1, 2) if op == "reduce_prod" else Arg((12, 24))
        examples += [
            Example(op, (many,), {"dims": (1,)}, (*bad, kind), dtypes),
            Example(
                op,
                (replace(many, shape=(B, 7, 12)),),
                {"dims": (-1, 0), "keep": True},
                (),
                dtypes,
                {"B": 6},
            ),
            Example(op, (replace(many, shape=(5, 12)),), {"dims": (0,)}, (), dtypes),
            Example(op, (Arg((5,)),), {"dims": (0,)}, (), dtypes),
        ]
    for op in ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod"):
        examples.append(Example(op, (Arg((12, 0)),), {"dims": (1,)}, (), NUMBERS))
    return examples


def _along() -> list[Example]:
    no_dim = Bad("no dimension 2", X, {"dim": 2})
    no_bool = Bad("takes numbers", (Arg((4, 6), "bool"),))
    no_integers = Bad("floating-point", (Arg((4, 6), "i32"),))
    examples: list[Example] = [
        Example("argmax", (Arg((12, 9)),), {}, (no_dim, no_bool), NUMBERS),
        Example("argmax", (Arg((B, 5, 24), "i32"),), {"dim": 1, "keep": True}, sizes={"B": 12}),
        Example("argmax", (Arg((5,)),), {}, (Bad("empty", (Arg((0,)),)),)),
        Example("cumsum", (Arg((12, 9)),), {}, (no_dim, no_bool), NUMBERS),
        Example("cumsum", (Arg((B, 4, 24)),), {"dim": 1, "exclusive": True}, sizes={"B": 12}),
        Example("cumsum", (Arg((0, 12)),), {"dim": 0, "exclusive": True}),
    ]
    for op in ("softmax", "log_softmax"):
        examples += [
            Example(op, (Arg((12, 9)),), {}, (no_dim, no_integers)),
            Example(op, (Arg((B, 5, 24)),), {"dim": 1}, sizes={"B": 12}),
        ]
    topk = (
        Bad("beyond", X, {"k": 7}),
        Bad("beyond", X, {"k": 0}),
        Bad("no dimension 2", X, {"k": 1, "dim": 2}),
        Bad("takes numbers", (Arg((4, 6), "bool"),), {"k": 1}),
    )
    return [
        *examples,
        Example("topk", (Arg((12, 9)),), {"k": 4}, topk, NUMBERS),
        Example("topk", (Arg((B, 5, 24)),), {"k": 5, "dim": 1}, sizes={"B": 12}),
    ]


def rows(rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
    """A permutation along dimension 0, so that no two updates meet in one element."""
    return np.argsort(rng.random(shape), axis=0)


def _lookups() -> list[Example]:
    def ids(*shape: Any, high: int = 5, dtype: str = "i32") -> Arg:
        return Arg(shape, dtype, 0, high)

    table, float_ids = Arg((12, 24)), Arg((3,))
    wrong = Bad("i32 or i64", (*X, float_ids), {"dim": 0})
    no_dim = Bad("no dimension 2", (*X, ids(3)), {"dim": 2})
    elements = (
        wrong,
        Bad("differ in dimension 1 only", (*X, ids(3, 6)), {"dim": 1}),
        Bad("no dimension", (*X, ids(4, 6)), {"dim": 2}),
    )
    scatter = (
        Bad("i32 or i64", (*X, Arg((4, 6)), *X), {"dim": 0}),
        Bad("cast one", (*X, ids(4, 6), Arg((4, 6), "i32")), {"dim": 0}),
        Bad("updates [4, 5]", (*X, ids(4, 6), Arg((4, 5))), {"dim": 0}),
        Bad("differ in dimension 0 only", (*X, ids(4, 5), Arg((4, 5))), {"dim": 0}),
        Bad("none, add", (*X, ids(4, 6), *X), {"dim": 0, "reduction": "sum"}),
    )
    return [
        Example(
            "embedding",
            (Arg((B, 12), "i32", -2, 15), table),
            bad=(Bad("i32 or i64", (float_ids, table)), Bad("[rows, width]", (ids(3), Arg((5,))))),
            sizes={"B": 12},
        ),
        Example("embedding", (ids(dtype="i64"), table)),
        Example("embedding", (ids(B, 12, high=12), table), {"inside": True}, sizes={"B": 12}),
        Example("embedding", (Arg((12,), "i64", -2, 15), table), {"sentinel": True}),
        Example("gather", (Arg((5, 12)), ids(12, 3)), {}, (wrong, no_dim), NUMBERS),
        Example("gather", (Arg((12, 5, 24)), ids(B)), {"dim": -2}, sizes={"B": 12}),
        Example("gather", (Arg((5,)), ids())),
        Example("gather_elements", (Arg((5, 12)), ids(24, 12)), {"dim": 0}, elements, NUMBERS),
        Example("gather_elements", (Arg((B, 5)), ids(B, 12)), {"dim": -1}, sizes={"B": 12}),
        Example(
            "scatter_elements",
            (Arg((9, 12)), Arg((9, 12), "i32", draw=rows), Arg((9, 12))),
            {"dim": 0},
            scatter,
        ),
        *(
            Example(
                "scatter_elements",
                (Arg((B, 5)), ids(B, 7), Arg((B, 7))),
                {"dim": 1, "reduction": reduction},
                sizes={"B": 12},
            )
            for reduction in ("add", "mul", "max", "min")
        ),
        Example(
            "one_hot",
            (Arg((B, 3), "i32", -1, 7),),
            {"size": 6},
            (Bad("i32 or i64", X, {"size": 4}), Bad("f23", (ids(3),), {"size": 4, "dtype": "f23"})),
            ("f32",),
            {"B": 12},
        ),
        Example("one_hot", (ids(12, dtype="i64"),), {"size": 4, "dtype": "i32"}, dtypes=("f32",)),
    ]


def _products() -> list[Example]:
    matmul = (
        Bad("sums over 6 against 5", (*X, Arg((5, 4)))),
        Bad("two dimensions", (*X, Arg((6,)))),
        Bad("cast one", (*X, Arg((6, 4), "i32"))),
        Bad("do not broadcast", (Arg((2, 4, 6)), Arg((3, 6, 4)))),
        Bad("takes numbers", (Arg((4, 6), "bool"), Arg((6, 4), "bool"))),
    )
    weight, bias = Arg((24, 12)), Arg((24,), name="bias")
    linear = (
        Bad("[out, in]", (*X, Arg((6,)))),
        Bad("takes 5 inputs", (*X, Arg((3, 5)))),
        Bad("takes 6 inputs", (Arg(()), Arg((3, 6)))),
        Bad("gives 3 outputs", (*X, Arg((3, 6)), Arg((6,), name="bias"))),
        Bad("cast one", (*X, Arg((3, 6)), Arg((3,), "f16", name="bias"))),
        Bad("floating-point", (Arg((4, 6), "i32"), Arg((3, 6), "i32"))),
    )
    return [
        Example("matmul", (Arg((12, 24)), Arg((24, 12))), {}, matmul, NUMBERS),
        Example("matmul", (Arg((B, 3, 12, 8)), Arg((3, 8, 5))), sizes={"B": 12}),
        Example("matmul", (Arg((2, 1, 4, 6)), Arg((12, 6, 4)))),
        Example("linear", (Arg((5, 12)), weight, bias), {}, linear),
        Example("linear", (Arg((B, S, 12)), weight), sizes={"B": 12, "S": 6}),
        Example("linear", (Arg((12,)), weight, bias)),
    ]


def _callee(module: Module, dtype: str) -> dict[str, Any]:
    """A function that gives back its arguments in reverse order, one of them negated."""
    function = Function("swap", [(n, TensorType(dtype, (B, 4))) for n in ("a", "b")])
    a, b = function.args
    function.append(Return([function.append(Neg(b)).result, a]))
    return {"callee": module.add_function(function)}


def _control() -> list[Example]:
    constant = (
        Bad("3 values for the 4", (), {"values": (1, 2, 3), "shape": (2, 2)}),
        Bad("at most 16", (), {"values": (0,) * 17, "shape": (17,)}),
        Bad("not an integer", (), {"values": (0.5,), "dtype": "i32"}),
        Bad("did you mean", (), {"values": (1,), "dtype": "f31"}),
        Bad("a number", (), {"values": ("one",)}),
    )
    full = (
        Bad("not an integer", (), {"value": 300, "dtype": "u8"}),
        Bad("not an integer", (), {"value": float("nan"), "dtype": "i32"}),
        Bad("no dtype", (), {"value": 0, "dtype": "x"}),
        Bad("negative", (), {"value": 0, "shape": (-1,)}),
    )
    iota = (
        Bad("not in bool", (), {"size": 4, "dtype": "bool"}),
        Bad("negative", (), {"size": -1}),
        Bad("an integer", (), {"size": 2.5}),
    )
    once = ("f32",)
    call = Bad("callee", X, {"callee": "swap"})
    return [
        Example("constant", (), {"values": (1, 2.5, -3, 0), "shape": (2, 2)}, constant, once),
        Example("constant", (), {"values": (7,), "dtype": "i64"}, dtypes=once),
        Example("constant", (), {"values": (), "shape": (0,), "dtype": "bf16"}, dtypes=once),
        Example("constant", (), {"values": (True, False), "shape": (2,), "dtype": "bool"}),
        Example("full", (), {"value": 1.5, "shape": (2, 3), "dtype": "f16"}, full, once),
        Example("full", (), {"value": float("-inf")}, dtypes=once),
        Example("full", (), {"value": True, "shape": (3,), "dtype": "bool"}, dtypes=once),
        Example("iota", (), {"size": 5}, iota, once),
        Example("iota", (), {"size": 7, "dtype": "f32"}, dtypes=once),
        Example("call", (Arg((B, 4)), Arg((B, 4))), {}, (call,), sizes={"B": 3}, prepare=_callee),
        Example("return", (Arg((B, 4)), Arg((), "i32")), sizes={"B": 3}),
        Example("return"),
    ]


EXAMPLES = [*_reductions(), *_along(), *_lookups(), *_products(), *_control()]
