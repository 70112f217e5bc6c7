"""argmax and topk of long rows by several blocks per row: equal to the reference."""

from __future__ import annotations

import numpy as np
import pytest

from irc.backends.cuda.codegen.split_select import split_select
from irc.backends.cuda.execute.compile import compile_kernel
from irc.backends.cuda.plan import Fused, Template
from irc.backends.cuda.plan.prepare import load_tables
from irc.backends.reference import evaluate
from irc.ir.core import Module
from irc.ir.dtypes import numpy_dtype
from irc.ops import Argmax, Topk
from irc.text import parse_module
from tests.cuda.emulate import run_templates
from tests.cuda.run_plan import HostProgram
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
    found = split_select(op, {"B": 2})
    assert isinstance(found, Fused)
    (template,) = found.templates
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
    assert template.grid({"B": 2}) == (size // 2048, 2, 1)
    got = run_templates([template], {module.main.args[0]: x}, {"B": 2}, threaded)
    for value, want in zip(template.writes, evaluate(module, {"x": x}).values(), strict=True):
        assert got[value].dtype == want.dtype
        # as f64, since numpy does not know NaN of small floats; it holds all numbers drawn here
        np.testing.assert_array_equal(got[value].astype(np.float64), want.astype(np.float64))


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120"])
def test_kernels_compile_for_every_gpu(architecture: str) -> None:
    name = fresh().choice(list(CASES))
    assert compile_kernel(launch(module_of(name)).kernel, architecture)


@pytest.mark.parametrize(("size", "batch"), [(1000, 1), (17000, 200), (17000, 0)])
def test_rows_are_shared_only_if_there_are_few_long_ones(size: int, batch: int) -> None:
    text = f"func @main(%x: f32[B, {size}]) -> (i32[B]) {{ {ARGMAX} }}"
    module = parse_module(f"module @m dims(B=0:2:200) {{ {text} }}")
    (op,) = (op for op in module.main if isinstance(op, Argmax))
    assert split_select(op, {"B": batch}) is None


TOP_P = """module @m dims(B=1:2:9) {
  func @main(%x: f32[B, 20000], %p: f32[], %random: f32[B, 1]) -> (i32[B, 1]) {
    %v, %t = topk %x {k=16} : f32[B, 16], i32[B, 16]
    %chances = softmax %v : f32[B, 16]
    %before = cumsum %chances {dim=1, exclusive} : f32[B, 16]
    %few = lt %before, %p : bool[B, 16]
    %none = constant {values=[0.0]} : f32[]
    %kept = where %few, %chances, %none : f32[B, 16]
    %until = cumsum %kept {dim=1} : f32[B, 16]
    %all = reduce_sum %kept {dims=[1], keep} : f32[B, 1]
    %drawn = mul %all, %random : f32[B, 1]
    %over = gt %until, %drawn : bool[B, 16]
    %first = cast %over {dtype="i32"} : i32[B, 16]
    %at = argmax %first : i32[B]
    %place = unsqueeze %at {dims=[1]} : i32[B, 1]
    %y = gather_elements %t, %place {dim=1} : i32[B, 1]
    return %y
  }
}"""


def test_top_p_is_made_of_operations() -> None:
    """Of the 16 largest logits, those whose chances reach p; one of them is drawn."""
    module, random = parse_module(TOP_P), fresh()
    x = random.normal(0, 3, (2, 20000)).astype(np.float32)
    p = np.float32(random.uniform(0.3, 0.9))
    inputs = {"x": x, "p": p, "random": random.random((2, 1)).astype(np.float32)}
    (found,) = HostProgram(module, fused=True).run(inputs).values()
    for row, token in enumerate(found[:, 0]):
        order = np.argsort(-x[row], kind="stable")[:16]
        chances = np.exp(x[row][order].astype(np.float64) - x[row].max())
        chances /= chances.sum()
        kept = np.where(np.cumsum(chances) - chances < p, chances, 0)
        place, drawn = list(order).index(token), kept.sum() * inputs["random"][row, 0]
        assert np.cumsum(kept)[place] >= drawn - 1e-5
        assert np.cumsum(kept)[place] - kept[place] <= drawn + 1e-5
