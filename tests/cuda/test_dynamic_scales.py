"""Rows that are quantized when the model runs: one launch, equal to the reference."""

from __future__ import annotations

import numpy as np
import pytest

from irc.backends.reference import evaluate
from irc.text import parse_module
from tests.cuda.run_plan import HostProgram
from tests.fresh import fresh

# (K, dtype of codes, rms_norm in front, results that are read)
CASES = [
    (96, "f8e4m3", True, ["y"]),
    (96, "f8e4m3", True, ["y", "s"]),
    (9000, "i8", False, ["y"]),
    (9000, "i8", True, ["c", "s"]),
    (64, "f8e5m2", False, ["c", "s", "y"]),
    (64, "i4", False, ["c"]),  # two codes a byte
]


@pytest.mark.parametrize("batch", [2, 20])
@pytest.mark.parametrize(("k", "dtype", "norm", "wanted"), CASES)
def test_quantized_rows(k: int, dtype: str, norm: bool, wanted: list[str], batch: int) -> None:
    kinds = {"c": f"{dtype}[B, {k}]", "s": "f32[B, 1]", "y": f"bf16[B, {k}]"}
    gain = ", weight=%gain" if norm else ""
    module, random = (
        parse_module(f"""module @m dims(B=1:2:64) {{
      func @main(%x: bf16[B, {k}], %gain: bf16[{k}])
          -> ({", ".join(f"{name}: {kinds[name]}" for name in wanted)}) {{
        %c, %s, %y = quantize_rows %x{gain} {{codes="{dtype}", dtype="bf16", eps=0.01, offset=1.0}}
          : {", ".join(kinds.values())}
        return {", ".join(f"%{name}" for name in wanted)} }} }}"""),
        fresh(),
    )
    drawn = {"x": random.normal(0, 3, (batch, k)), "gain": random.normal(0, 0.2, k)}
    inputs = {name: array.astype("bfloat16") for name, array in drawn.items()}
    program = HostProgram(module, fused=True)
    assert batch > 16 or len(program.planners[0].plan({"B": batch}).steps) == 1
    results = program.run(inputs)
    for name, want in evaluate(module, inputs).items():
        got, want = results[name].astype(np.float64), want.astype(np.float64)
        # sums in another order may round to another neighbour
        close = 0.13 * np.abs(want) + np.abs(want).max() / 50 if norm else 0
        assert np.all(np.abs(got - want) <= close), name
