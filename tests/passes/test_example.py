"""examples/custom_pass.py, loaded as a user does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from irc.backends.reference import evaluate
from irc.pipeline import PASSES, load_file, run_pipeline
from irc.pipeline.instruments import CheckNumerics, VerifyEach
from irc.text import parse_module

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_pass.py"
TEXT = """module @m {
  func @forward(%x: f32[4]) -> (a: f32[4], b: f32[4]) {
    %two = full {value=2.0} : f32[]
    %r = relu %x : f32[4]
    %s = relu %x : f32[4]
    %a = mul %r, %s : f32[4]
    %t = relu %a : f32[4]
    %b = pow %t, %two : f32[4]
    return %a, %b
  }
}"""


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    known = dict(PASSES)
    yield
    PASSES.clear()
    PASSES.update(known)


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) <= 20


def test_the_example_fuses() -> None:
    assert load_file(EXAMPLE) == ["fuse-square"]
    module = parse_module(TEXT)
    (step,) = run_pipeline(module, "fuse-square", [VerifyEach(), CheckNumerics(evaluate)])
    assert step.stats["squared_relu"] == 2
    assert [op.opname for op in module.main] == ["squared_relu", "squared_relu", "return"]
    x = np.array([-1, 0, 1, 2], np.float32)
    assert evaluate(module, {"x": x})["b"].tolist() == [0, 0, 1, 16]
