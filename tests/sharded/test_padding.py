"""Padding of unevenly sharded dimensions is masked where it affects a result, and only there.

Inputs hold NaN and infinities, which may only reach results that they reach unsharded.
"""

from __future__ import annotations

import numpy as np
import pytest

import irc
from irc.backends.reference import evaluate, evaluate_ranks
from irc.ir.core import Module
from irc.pipeline import run_pipeline
from tests.fresh import fresh
from tests.sharded.checking import check

TEXT = """module @m mesh(dp=2, tp=2) dims(B=1:2:4) {
  weight @u : f32[5@tp, 4] = random("u", 1, 0.5)
  weight @u2 : f32[5@tp, 4] = random("u2", 1, 0.5)
  weight @b : f32[5@tp] = random("b", 1, 0.5)
  weight @d : f32[4, 5@tp] = random("d", 1, 0.5)
  weight @m : f32[4, 5@tp] = random("m", 1, 0.5)
  weight @t : f32[7, 5@tp] = random("t", 1, 0.5)
  weight @k : f32[5, 6@tp] = random("k", 1, 0.5)
  weight @n : f32[4] = random("n", 1, 0.5)
  weight @g : f32[] = random("g", 1, 0.5)
  func @forward(%x: f32[B, 4], %h: f32[B, 5@tp], %ids: i32[B], %w: f32[B, 6@tp], %i: i32[B, 5@tp], %st: f32[B, 5@tp]) -> (r: f32[OUT], st: f32[B, 5@tp] aliases %st) {
    %norm = rms_norm %x, @n : f32[B, 4]
    %lin = linear %norm, @u : f32[B, 5@tp]
    %raw = linear %x, @u : f32[B, 5@tp]
    OPS
    %r = all_reduce %sum {axis="tp"} : f32[OUT]
    return %r, %st
  }
}"""  # noqa: E501
ROWS = "%sum = reduce_sum %v {dims=[1]} : f32[B]{sum tp}"
DOWN = "%sum = linear %v, @d : f32[B, 4]{sum tp}"
V = ": f32[B, 5@tp]"


def module_of(ops: str) -> Module:
    """The module of some operations that make %sum."""
    out = ops.rsplit("f32[", 1)[1].split("]")[0]
    return irc.parse(TEXT.replace("OPS", ops.replace("; ", "\n")).replace("OUT", out))


def inputs() -> dict[str, np.ndarray]:
    """Four rows; the first has a NaN, the next two infinities."""
    rng = fresh(31)
    x = rng.standard_normal((4, 4), np.float32)
    x[:3, 1] = np.nan, np.inf, -np.inf
    return {
        "x": x,
        "h": rng.standard_normal((4, 5), np.float32),
        "ids": rng.integers(0, 9, 4).astype(np.int32),
        "w": rng.standard_normal((4, 6), np.float32),
        "i": rng.integers(-3, 4, (4, 5)).astype(np.int32),
        "st": rng.standard_normal((4, 5), np.float32),
    }


def masks(ops: str, state_padding: float = 0) -> int:
    """The number of masks that localize inserts; every rank must agree with the global module."""
    module, given = module_of(ops), inputs()
    wanted = evaluate(module, given)
    run_pipeline(module, "localize, dce")
    if state_padding:
        own = [evaluate_parts(given["st"], rank, state_padding) for rank in range(4)]
        for rank in evaluate_ranks(module, given | {"st": own}):
            np.testing.assert_allclose(rank["r"], wanted["r"], rtol=1e-5, atol=1e-5)
    else:
        check(module, given, wanted, ops)
    return sum(op.opname == "where" for op in module.ops())


def evaluate_parts(whole: np.ndarray, rank: int, padding: float) -> np.ndarray:
    """One rank's shard of a state, with `padding` in its padding."""
    padded = np.pad(whole, [(0, 0), (0, 1)], constant_values=padding)
    return padded[:, 3 * (rank % 2) : 3 * (rank % 2) + 3].astype(np.float32)


ZERO_FUNCTIONS = [
    *("abs", "ceil", "erf", "floor", "gelu", "neg", "quick_gelu", "relu", "round", "sign"),
    *("silu", "sin", "squared_relu", "tanh"),
]
ZERO = {
    "linear": f"%v = neg %lin {V}; {ROWS}",
    "linear with a bias": f"%v = linear %norm, @u, bias=@b {V}; {ROWS}",
    "gated_mlp": f'%v = gated_mlp %norm, @u, @u2 {{act="sigmoid"}} {V}; {ROWS}',
    "matmul": f"%v = matmul %norm, @m {V}; {ROWS}",
    "embedding": f"%v = embedding %ids, @t {V}; {ROWS}",
    "the larger": f"%a = neg %lin {V}; %v = maximum %a, %lin {V}; {ROWS}",
    "times something finite": f"%a = cos %lin {V}; %v = mul %a, %lin {V}; {ROWS}",
    "times a broadcast number": "%a = reduce_sum %norm {dims=[1], keep} : f32[B, 1]; "
    f"%c = tanh %a : f32[B, 1]; %v = mul %lin, %c {V}; {ROWS}",
    "a sum over another dimension": "%v = reduce_sum %lin {dims=[0]} : f32[5@tp]; "
    "%sum = reduce_sum %v {dims=[0]} : f32[]{sum tp}",
    "shard_slice": "%a = exp %norm : f32[B, 4]; %c = concat %a, %norm {dim=1} : f32[B, 8]; "
    "%e = slice %c {dim=1, start=1, stop=6} : f32[B, 5]; "
    f'%v = shard_slice %e {{axis="tp", dim=1}} {V}; {ROWS}',
    "reduce_scatter": "%a = linear %w, @k : f32[B, 5]{sum tp}; "
    f'%v = reduce_scatter %a {{axis="tp", dim=1}} {V}; {ROWS}',
    "a collective beside": "%a = transpose @u {order=[1, 0]} : f32[4, 5@tp]; "
    '%c = shard_slice %a {axis="dp", dim=0} : f32[4@dp, 5@tp]; '
    '%v = all_gather %c {axis="dp", dim=0} : f32[4, 5@tp]; '
    "%sum = reduce_sum %v {dims=[1]} : f32[4]{sum tp}",
    **{name: f"%v = {name} %lin {V}; {ROWS}" for name in ZERO_FUNCTIONS},
}
FINITE = {
    **{name: f"%v = {name} %lin {V}" for name in ("cos", "sigmoid", "softplus")},
    "a computed table": "%a = cos @t : f32[7, 5@tp]; " + f"%v = embedding %ids, %a {V}",
    "tanh of cos": f"%a = cos %lin {V}; %v = tanh %a {V}",
}
UNKNOWN = {
    "linear of an input": f"%v = neg %raw {V}",
    "exp, which may overflow": f"%v = exp %lin {V}",
    "a sum, which may overflow": f"%c = constant {{values=[3.0]}} : f32[]; %v = add %lin, %c {V}",
    "times what is infinite": f"%a = slice %x {{dim=1, start=1, stop=2}} : f32[B, 1]; "
    f"%v = mul %lin, %a {V}",
    "a computed weight": "%a = exp @u : f32[5@tp, 4]; " + f"%v = linear %norm, %a {V}",
    "a computed bias": "%a = exp @b : f32[5@tp]; " + f"%v = linear %norm, @u, bias=%a {V}",
    "a choice": f"%a = lt %lin, %h : bool[B, 5@tp]; %v = where %a, %lin, %h {V}",
    "integers of floats": f'%a = cast %lin {{dtype="i32"}} : i32[B, 5@tp]; '
    f'%c = cast %a {{dtype="f32"}} {V}; %v = mul %c, %c {V}',
    "a quotient": f"%v = div %lin, %lin {V}",
    "no epsilon": f"%a = rms_norm %x, @n {{eps=0.0}} : f32[B, 4]; %v = linear %a, @u {V}",
}


TURNED = "%c = transpose %a {order=[1, 0]} : f32[5@tp, B]; "
PRODUCT = f"{TURNED}%sum = matmul %v, %c : f32[B, B]{{sum tp}}"
MASKS = [
    *((ops, 0) for ops in ZERO.values()),
    *((f"{ops}; {ROWS}", 1) for ops in FINITE.values()),
    *((f"{ops}; {DOWN}", 0) for ops in FINITE.values()),  # multiplied by zeros
    *((f"{ops}; {sums}", 1) for ops in UNKNOWN.values() for sums in (ROWS, DOWN)),
    (f"%a = cos %lin {V}; %v = sigmoid %lin {V}; {PRODUCT}", 1),  # of two finite factors one
    (f"%a = exp %raw {V}; %v = log %raw {V}; {PRODUCT}", 2),
]


@pytest.mark.parametrize(("ops", "count"), MASKS)
def test_padding_is_masked_where_it_matters(ops: str, count: int) -> None:
    assert masks(ops) == count + ops.count("= where")


def test_the_padding_of_a_state_may_hold_anything() -> None:
    for padding in (0, 7, np.nan):
        assert masks(f"%v = neg %st {V}; {ROWS}", padding) == 1


def test_one_mask_serves_all_operations() -> None:
    ops = f"%a = exp %lin {V}; %v = cos %lin {V}; %c = add %a, %v {V}; "
    module = module_of(
        ops
        + f"%s1 = reduce_sum %a {{dims=[1]}} : f32[B]{{sum tp}}; {ROWS.replace('%sum', '%s2')}; "
        "%sum = add %s1, %s2 : f32[B]{sum tp}"
    )
    run_pipeline(module, "localize")
    names = [op.opname for op in module.ops()]
    assert (names.count("iota"), names.count("lt"), names.count("where")) == (1, 1, 2)


@pytest.mark.parametrize(
    ("ops", "result"),
    [
        ("%r = gather %x, %n {dim=0} : f32[5@tp, 4]", "f32[5@tp, 4]"),
        ("%r = embedding %n, %x {inside} : f32[5@tp, 4]", "f32[5@tp, 4]"),
        ("%r = gather_elements %y, %nn {dim=1} : f32[5@tp, 4]", "f32[5@tp, 4]"),
        ("%r = scatter_elements %y, %nn, %y {dim=1} : f32[5@tp, 4]", "f32[5@tp, 4]"),
        ("%r = floor_div %n, %n : i32[5@tp]", "i32[5@tp]"),
        ("%r = mod %n, %n : i32[5@tp]", "i32[5@tp]"),
        ("%r = cache_update %c, %z, %n : f32[5@tp, 1, 4, 4]", "f32[5@tp, 1, 4, 4]"),
        ("%r = attention %z, %c, %c, past=%n {head_dim=4} : f32[5@tp, 1, 4]", "f32[5@tp, 1, 4]"),
    ],
)
def test_padding_is_neither_looked_up_nor_divided_by(ops: str, result: str) -> None:
    """The reference refuses an out-of-range index; other backends would read any memory."""
    text = """module @m mesh(tp=2) {
      func @forward(%x: f32[4, 4], %y: f32[5@tp, 4], %i: i32[5@tp], %z: f32[5@tp, 1, 4], %c: f32[5@tp, 1, 4, 4]) -> (RESULT) {
        %one = constant {values=[9], dtype="i32"} : i32[]
        %n = sub %one, %i : i32[5@tp]
        %u = reshape %n {shape=[5, 1]} : i32[5@tp, 1]
        %nn = expand %u {shape=[5, 4]} : i32[5@tp, 4]
        OPS
        return %r
      } }"""  # noqa: E501
    module = irc.parse(text.replace("RESULT", result).replace("OPS", ops))
    rng = fresh(32)
    given = {
        "x": rng.standard_normal((4, 4), np.float32),
        "y": rng.standard_normal((5, 4), np.float32),
        "i": np.array([6, 7, 8, 6, 7], np.int32),
        "z": rng.standard_normal((5, 1, 4), np.float32),
        "c": rng.standard_normal((5, 1, 4, 4), np.float32),
    }
    wanted = evaluate(module, given)
    run_pipeline(module, "localize, dce")
    assert any(op.opname == "where" for op in module.ops())
    check(module, given, wanted, ops)


@pytest.mark.parametrize(
    ("ops", "axes"),
    [
        ('%v = shard_slice %e {axis="tp", dim=1} : f32[B, 7@dp.tp]', "dp tp"),
        (
            '%p = shard_slice %e {axis="tp", dim=1} : f32[B, 7@dp.tp]; '
            '%v = all_gather %p {axis="tp", dim=1} : f32[B, 7@dp]',
            "dp",
        ),
    ],
)
def test_padding_of_an_outer_axis_stays_unknown(ops: str, axes: str) -> None:
    text = """module @m mesh(dp=2, tp=2) {
      weight @u : f32[7@dp, 4] = random("u", 1, 0.5)
      func @forward(%x: f32[B, 4]) -> (f32[B]) {
        %a = linear %x, @u : f32[B, 7@dp]
        %e = exp %a : f32[B, 7@dp]
        OPS
        %sum = reduce_sum %v {dims=[1]} : f32[B]{sum AXES}
        %r = all_reduce %sum {axis="JOINED"} : f32[B]
        return %r
      } }"""
    text = text.replace("OPS", ops.replace("; ", "\n")).replace("JOINED", axes.replace(" ", "."))
    module = irc.parse(text.replace("AXES", axes))
    given = {"x": fresh(34).standard_normal((3, 4), np.float32)}
    wanted = evaluate(module, given)
    run_pipeline(module, "localize")
    assert any(op.opname == "where" for op in module.ops())
    check(module, given, wanted, ops)


def test_a_sharded_weight_is_returned() -> None:
    module = irc.parse("""module @m mesh(tp=3) {
      weight @a : f32[4, 7@tp] = random("a", 1, 0.5)
      func @forward(%x: f32[2]) -> (y: f32[4, 7@tp], f32[2]) {
        return @a, %x
      } }""")
    given = {"x": fresh(33).standard_normal(2, np.float32)}
    wanted = irc.evaluate(module, given)
    irc.run_passes(module, "localize")
    check(module, given, wanted, "over tp=3")
