"""argmax and topk, of long rows by several blocks each: equal to the reference."""

from __future__ import annotations

import numpy as np
import pytest

from irc.backends.cuda.plan import Template
from irc.backends.cuda.plan.prepare import load_tables
from irc.backends.cuda.plan.template import KERNELS
from irc.backends.reference import evaluate
from irc.ir.core import Module
from irc.ir.dtypes import numpy_dtype
from irc.ops import Argmax, Topk
from irc.text import parse_module
from tests.cuda.emulate import run_templates
from tests.cuda.regimes import regime_of
from tests.fresh import fresh

load_tables()

LOGITS = "%x: {dtype}[B, {size}]"
ARGMAX = "%y = argmax %x : i32[B]\n return %y"
TOPK = "%v, %y = topk %x {{k={k}}} : {dtype}[B, {k}], i32[B, {k}]\n return %v, %y"
HIDDEN = """%n = iota {{size={size}}} : i32[{size}]
%limit = constant {{values=[20000], dtype="i32"}} : i32[]
%real = lt %n, %limit : bool[{size}]
%least = constant {{values=[-inf]}} : f32[]
%wide = cast %x {{dtype="f32"}} : f32[B, {size}]
%z = where %real, %wide, %least : f32[B, {size}]
%v, %y = topk %z {{k={k}}} : f32[B, {k}], i32[B, {k}]
return %v, %y"""
TWO = "{kind}[B, {k}], i32[B, {k}]"
CASES = {
    "argmax": (ARGMAX, "i32[B]", "f32", 17001, 1),
    "argmax of integers": (ARGMAX, "i32[B]", "i64", 20000, 1),
    "topk": (TOPK, TWO, "f32", 33333, 7),
    "topk of equals": (TOPK, TWO, "f8e4m3", 16384, 64),
    "many of integers": (TOPK, TWO, "i32", 16500, 700),
    "topk of f64": (TOPK, TWO, "f64", 16500, 9),
    "computed logits": (HIDDEN, TWO, "bf16", 20011, 5),
}


def module_of(name: str) -> Module:
    text, results, dtype, size, k = CASES[name]
    kind = "f32" if text is HIDDEN else dtype
    words = {"dtype": dtype, "size": size, "k": k, "kind": kind}
    head = f"func @main({LOGITS}) -> ({results})".format(**words)
    body = text.format(**words)
    return parse_module(f"module @m dims(B=1:2:9) {{ {head} {{\n{body}\n}} }}")


def launch(module: Module) -> Template:
    """The launch of the only argmax or topk."""
    (op,) = (op for op in module.main if isinstance(op, Argmax | Topk))
    (template,) = KERNELS[type(op)](op, regime_of(stored=module.main.args))
    assert isinstance(template, Template)
    return template


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_equal_to_the_reference(name: str, threaded: bool) -> None:
    _, _, dtype, size, _ = CASES[name]
    module = module_of(name)
    x = fresh().normal(0, 100, (2, size)).astype(numpy_dtype(dtype))
    if np.issubdtype(x.dtype, np.floating):
        x[1, fresh().integers(0, size, 3)] = np.nan
    template = launch(module)
    assert template.grid({"B": 2}) == (size // 2048 * 2, 1, 1)
    got = run_templates([template], {module.main.args[0]: x}, {"B": 2}, threaded)
    for value, want in zip(template.writes, evaluate(module, {"x": x}).values(), strict=True):
        assert got[value].dtype == want.dtype
        # as f64, since numpy does not know NaN of small floats; it holds all numbers drawn here
        np.testing.assert_array_equal(got[value].astype(np.float64), want.astype(np.float64))


@pytest.mark.parametrize(
    ("size", "batch", "parts"), [(1000, 1, 1), (16383, 2, 1), (17000, 200, 1), (17000, 132, 2)]
)
def test_rows_are_shared_only_if_there_are_few_long_ones(size: int, batch: int, parts: int) -> None:
    text = f"func @main(%x: f32[B, {size}]) -> (i32[B]) {{ {ARGMAX} }}"
    module = parse_module(f"module @m dims(B=0:2:900) {{ {text} }}")
    assert launch(module).grid({"B": batch}) == (batch * parts, 1, 1)
