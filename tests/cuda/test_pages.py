"""Pages of a pool on the host: the bits of caches of one capacity, and one graph for all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from irc.backends.cuda.codegen.attention import prefill_attention
from irc.backends.cuda.codegen.rope_and_cache import rope_and_cache
from irc.backends.reference import ReferenceProgram
from irc.ir.dtypes import numpy_dtype
from irc.pipeline import run_pipeline
from irc.text import parse_module
from tests.cuda.decode_cases import made_by, operations_of
from tests.cuda.emulate import run_templates
from tests.cuda.fake_cuda import World
from tests.cuda.regimes import regime_of
from tests.cuda.test_program import compiled
from tests.fresh import fresh
from tests.passes.test_page_caches import PAGE
from tests.tensorrt.test_runtime import step_of

CONVERSATIONS, CAPACITY, PAGES = 9, 32, 32 // PAGE
TEXT = """module @m dims(B=1:1:8, S=1:1:64) {{
  func @f(%x: bf16[B, S, 64], %y: bf16[B, S, 32], %z: bf16[B, S, 32], %past: i32[B],
          %positions: i32[B, S], %k0: {cache}, %v0: {cache}, %pages: i32[B, 4])
      -> (mixed: bf16[B, S, 64], k0: {cache} aliases %k0, v0: {cache} aliases %v0) {{
    %mixed, %k1, %v1 = fused_attention %x, %y, %z, %k0, %v0, %past,
      positions=%positions{pages} {{head_dim=16, causal}} : bf16[B, S, 64], {cache}, {cache}
    return %mixed, %k1, %v1
  }}
}}"""


def results(paged: bool, inputs: dict[str, Any], tokens: int) -> list[np.ndarray]:
    """What attention gives, and the caches, on tensor cores."""
    rows, size = ("P", 16) if paged else ("B", 64)
    text = TEXT.format(cache=f"bf16[{rows}, 2, {size}, 16]", pages=", pages=%pages" * paged)
    module = parse_module(text.replace("dims(", "dims(P=1:1:99, "))
    run_pipeline(module, "expand{ops=[fused_attention]}")
    made, sizes = [], {"B": 3, "S": tokens, "P": len(inputs["k0"])}
    for op in operations_of(module):
        if op.opname != "gather_pages":
            maker: Any = rope_and_cache if op.opname == "rope_and_cache" else prefill_attention
            made += made_by(maker, op, regime_of(sizes))
    arrays = {arg: inputs[str(arg.name)] for arg in module.main.args}
    found = run_templates(made, arrays, sizes)
    return [found[value] for value in module.main.returned]


@pytest.mark.parametrize("tokens", [1, 19])
def test_kernels_give_the_same_bits(tokens: int) -> None:
    rng = fresh(tokens)
    past = rng.integers(0, 65 - tokens, 3).astype(np.int32)
    pages = rng.permutation(17)[:12].reshape(3, 4).astype(np.int32)

    def drawn(*shape: int) -> np.ndarray:
        return rng.uniform(-1, 1, shape).astype(numpy_dtype("bf16"))

    inputs = {
        "x": drawn(3, tokens, 64),
        **{name: drawn(3, tokens, 32) for name in "yz"},
        "past": past,
        "positions": past[:, None] + np.arange(tokens, dtype=np.int32),
        **{name: drawn(17, 2, 16, 16) for name in ("k0", "v0")},
        "pages": pages,
    }

    def whole(pool: np.ndarray) -> np.ndarray:
        return pool[pages].swapaxes(1, 2).reshape(3, 2, 64, 16)

    got = results(True, inputs, tokens)
    caches = {name: whole(inputs[name]) for name in ("k0", "v0")}
    wanted = results(False, inputs | caches, tokens)
    assert got[0].tobytes() == wanted[0].tobytes()
    for pool, cache, old in zip(got[1:], wanted[1:], (inputs["k0"], inputs["v0"]), strict=True):
        assert whole(pool).tobytes() == cache.tobytes()
        others = np.setdiff1d(np.arange(17), pages)
        assert pool[others].tobytes() == old[others].tobytes()


def test_conversations_share_a_graph(tmp_path: Path) -> None:
    """Nine conversations in turn, each over pages of its own, as one stream."""
    world = World(compiled("gqa", "", f"inline, page-caches{{page={PAGE}}}"), tmp_path)
    (program,), driver = world.programs, world.gpus[0].driver
    pool = program.open({"P": CONVERSATIONS * PAGES})
    reference = ReferenceProgram(compiled("gqa", ""))
    alone = [reference.open({"B": 1, "C": CAPACITY}) for _ in range(CONVERSATIONS)]
    table = fresh().permutation(CONVERSATIONS * PAGES).astype(np.int32).reshape(-1, 1, PAGES)
    for turn in range(3):
        for conversation in range(CONVERSATIONS):
            step = step_of(1, turn, 3 + conversation)
            got = pool.step(step | {"pages": table[conversation]})["logits"]
            wanted = alone[conversation].step(step)["logits"]
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)
        assert sum(call[0] == "capture" for call in driver.calls) == 1
    world.close()
