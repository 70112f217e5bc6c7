"""The kernel of `sample`: the tokens of the reference, for any settings."""

from __future__ import annotations

import numpy as np
import pytest

from irc.backends.cuda.plan import Template
from irc.backends.cuda.plan.prepare import load_tables
from irc.backends.cuda.plan.template import KERNELS
from irc.backends.reference import evaluate
from irc.ir.dtypes import numpy_dtype
from irc.ops import Sample
from irc.text import parse_module
from tests.cuda.emulate import run_templates
from tests.cuda.regimes import regime_of
from tests.ops.examples_sample import settings, sprinkled

load_tables()
TEXT = """module @m dims(B=0:2:64) {{
  func @main(%x: {dtype}[B, {size}], %t: f32[B], %k: i32[B], %p: f32[B], %m: f32[B], %s: i64[B],
             %n: i32[B]) -> (i32[B]) {{
    %y = sample %x, %t, %k, %p, %m, %s, %n : i32[B]
    return %y }} }}"""


@pytest.mark.parametrize(
    ("size", "dtype", "rows"),
    [(1, "f32", 3), (40, "bf16", 9), (1001, "f16", 9), (9000, "f64", 5), (40001, "f32", 2)],
)
def test_equal_to_the_reference(size: int, dtype: str, rows: int, rng: np.random.Generator) -> None:
    module = parse_module(TEXT.format(size=size, dtype=dtype))
    op = module.main.returned[0].producer
    (template,) = KERNELS[Sample](op, regime_of(stored=module.main.args))
    assert isinstance(template, Template)
    assert template.grid({"B": rows}) == (8 if size > 16384 else 1, rows, 1)
    logits = sprinkled(rng.normal(0, 4, (rows, size)), rng).astype(numpy_dtype(dtype))
    inputs = dict(zip("xtkpmsn", [logits, *settings(rows, size, rng)], strict=True))
    drawn = dict(zip(module.main.args, inputs.values(), strict=True))
    found = run_templates([template], drawn, {"B": rows}, True)[module.main.returned[0]]
    np.testing.assert_array_equal(found, evaluate(module, inputs)["result0"])
