"""Factors of inputs change no result, wherever their inverse goes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import irc
from irc.backends.reference import evaluate
from irc.ir.verify import verify
from irc.passes.quantize.algorithms import Context, rescale
from irc.passes.quantize.assignment import Assignment
from irc.pipeline import Stats
from irc.quantization.schemes import scheme_called
from irc.quantization.sites import by_input, find_sites
from tests.calibration.statistics_folder import write_folder
from tests.fresh import fresh

NORM = "%h = rms_norm %x, @norm : f32[B, 6]"
TWO = "%a = linear %h, @a.weight : f32[B, 6]\n %b = linear %h, @b.weight : f32[B, 6]"
SUM = "%y = add %a, %b : f32[B, 6]"
ONE = "%y = linear %h, @a.weight : f32[B, 6]"

# operations, how often the inverse goes into weights, and how often into a mul
CASES = {
    "norm": ([NORM, TWO, SUM], 1, 0),
    "norm with an offset": ([NORM.replace(" :", " {offset=1.0} :"), TWO, SUM], 0, 1),
    "norm with another user": ([NORM, TWO, "%c = add %a, %b : f32[B, 6]",
                                "%y = add %c, %h : f32[B, 6]"], 0, 1),
    "norm whose weight has another user": (
        ["%g = rms_norm %x, @norm : f32[B, 6]", "%h = rms_norm %g, @norm : f32[B, 6]", ONE], 0, 1),
    "layer norm": (["%h = layer_norm %x, weight=@norm, bias=@bias : f32[B, 6]", ONE], 1, 0),
    "layer norm without a weight": (["%h = layer_norm %x, bias=@bias : f32[B, 6]", ONE], 0, 1),
    "linear": (["%h = linear %x, @c.weight, bias=@bias : f32[B, 6]", ONE], 1, 1),
    "gated": (["%g = linear %x, @b.weight : f32[B, 6]", "%u = linear %x, @c.weight : f32[B, 6]",
               "%s = silu %g : f32[B, 6]", "%h = mul %s, %u : f32[B, 6]", ONE], 1, 1),
    "a product with itself": (
        ["%u = linear %x, @c.weight : f32[B, 6]", "%h = mul %u, %u : f32[B, 6]", ONE], 0, 2),
    "an argument": (["%h = add %x, %x : f32[B, 6]", ONE], 0, 1),
    "a transposed weight": (
        [NORM, "%t = transpose @a.weight {order=[1, 0]} : f32[6, 6]",
         "%y = matmul %h, %t : f32[B, 6]"], 1, 0),
    "weights with other users": (
        [NORM, "%a = linear %h, @a.weight : f32[B, 6]", "%y = matmul %a, @a.weight : f32[B, 6]"],
        0, 0),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_results_stay(case: str, tmp_path: Path) -> None:
    lines, folded, multiplied = CASES[case]
    weights = "\n".join(
        f'weight @{name} : f32[{sizes}] = random("{name}", 3, 1.0)'
        for name, sizes in {"norm": "6", "bias": "6"}.items()
        | dict.fromkeys(("a.weight", "b.weight", "c.weight"), "6, 6").items()
    )
    module = irc.parse(f"""module @m dims(B=1:2:9) {{
      {weights}
      func @forward(%x: f32[B, 6]) -> (y: f32[B, 6]) {{
        {chr(10).join(lines)}
        return %y
      }}
    }}""")
    rng = fresh(len(case))
    x = {"x": rng.standard_normal((5, 6)).astype(np.float32)}
    wanted = evaluate(module, x)["y"]
    sites = find_sites(module)
    write_folder(tmp_path, {site.name: x["x"] for site in sites})
    context = Context(module, Stats(), str(tmp_path))
    scheme = scheme_called("w4a16_awq")
    for group in by_input(sites):
        factors = rng.uniform(0.1, 10, 6).astype(np.float32)
        assigned = [Assignment(site, scheme, (1, 0)) for site in group]
        found = rescale(assigned, context, "test", lambda factors=factors: factors)
        assert found is None or np.allclose(found, factors, rtol=1e-6)
    verify(module)
    counts = context.stats.counts
    assert counts.get("inverse folded", 0) == folded
    assert counts.get("inverse multiplied", 0) == multiplied
    after = evaluate(module, x)["y"]
    np.testing.assert_allclose(after, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())
