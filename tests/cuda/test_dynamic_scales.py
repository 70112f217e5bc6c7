"""Rows that are quantized when the model runs: one launch, equal to the reference."""

from __future__ import annotations

import numpy as np
import pytest

from irc.backends.cuda.plan import Launch
from irc.backends.reference import evaluate
from irc.text import parse_module
from tests.cuda.run_plan import HostProgram
from tests.fresh import fresh

NORM = "%n = rms_norm %x, %gain {{eps=0.01, offset=1.0}} : bf16[B, {k}]"
# (K, dtype of codes, rms_norm in front, results, launches)
CASES = [
    (96, "f8e4m3", True, ["y"], 1),
    (96, "f8e4m3", True, ["y", "s"], 1),
    (9000, "i8", False, ["y"], 1),
    (9000, "i8", True, ["c", "s"], 1),
    (64, "f8e5m2", False, ["c", "s", "y"], 1),
    (64, "i8", True, ["n", "y"], 2),  # the norm is read elsewhere
    (64, "i4", False, ["c"], 2),  # two codes a byte
]


@pytest.mark.parametrize("batch", [2, 20])
@pytest.mark.parametrize(("k", "dtype", "norm", "wanted", "launches"), CASES)
def test_quantized_rows(
    k: int, dtype: str, norm: bool, wanted: list[str], launches: int, batch: int
) -> None:
    kinds = {"n": f"bf16[B, {k}]", "y": f"bf16[B, {k}]", "c": f"{dtype}[B, {k}]", "s": "f32[B, 1]"}
    results = ", ".join(f"{name}: {kinds[name]}" for name in wanted)
    x = "%n" if norm else "%x"
    text = f"""module @m dims(B=1:2:64) {{
      func @main(%x: bf16[B, {k}], %gain: bf16[{k}]) -> ({results}) {{
        {NORM.format(k=k) if norm else ""}
        %s = dynamic_scale {x} {{dtype="{dtype}"}} : f32[B, 1]
        %c = quantize {x}, %s {{dtype="{dtype}"}} : {dtype}[B, {k}]
        %y = dequantize %c, %s {{dtype="bf16"}} : bf16[B, {k}]
        return {", ".join(f"%{name}" for name in wanted)}
      }}
    }}"""
    module, random = parse_module(text), fresh()
    bf16 = {"x": random.normal(0, 3, (batch, k)), "gain": random.normal(0, 0.2, k)}
    inputs = {name: array.astype("bfloat16") for name, array in bf16.items()}
    program = HostProgram(module, fused=True)
    steps = program.planners[0].plan({"B": batch}).steps
    assert batch > 16 or len([step for step in steps if isinstance(step, Launch)]) == launches
    found, reference = program.run(inputs), evaluate(module, inputs)
    for name, want in reference.items():
        got = found[name].astype(np.float64)
        # sums in another order may round to another neighbour
        step = 0.13 * np.abs(want.astype(np.float64)) + np.abs(want).astype(np.float64).max() / 50
        assert np.all(np.abs(got - want.astype(np.float64)) <= (step if norm else 0)), name


@pytest.mark.parametrize(
    ("other", "kind"), [('quantize %w, %s {dtype="i8"}', "i8"), ("dequantize %z, %s", "f32")]
)
def test_a_scale_that_others_use(other: str, kind: str) -> None:
    """Values of another width have launches of their own."""
    text = f"""module @m dims(B=1:2:64) {{
      func @main(%x: f32[B, 64], %w: f32[B, 9], %z: i8[B, 9])
          -> (a: i8[B, 64], b: {kind}[B, 9]) {{
        %s = dynamic_scale %x {{dtype="i8"}} : f32[B, 1]
        %a = quantize %x, %s {{dtype="i8"}} : i8[B, 64]
        %b = {other} : {kind}[B, 9]
        return %a, %b
      }}
    }}"""
    module, random = parse_module(text), fresh()
    arrays = {"x": random.normal(size=(3, 64)), "w": random.normal(size=(3, 9))}
    inputs = {name: array.astype("f4") for name, array in arrays.items()}
    inputs["z"] = random.integers(-9, 9, (3, 9)).astype("i1")
    found = HostProgram(module, fused=True).run(inputs)
    for name, want in evaluate(module, inputs).items():
        np.testing.assert_allclose(found[name], want, rtol=1e-6)
