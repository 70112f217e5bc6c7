"""fuse-attention: the same bits as the operations of the expansion, on every rank and backend."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import irc.passes
from irc.analysis.cost import cost_of, operations, total
from irc.analysis.memory import memory
from irc.analysis.sizes import LocalSizes, typical_sizes
from irc.backends.onnx.growth import growing
from irc.backends.reference import evaluate
from irc.ir.core import Module
from irc.pipeline import run_pipeline
from irc.pipeline.instruments import CheckNumerics, VerifyEach, WhyNot
from irc.text import parse_module
from irc.text.printer import print_module
from tests.backends.decoder import build, call, ids_of
from tests.backends.ranks import loaded
from tests.cuda.decode_cases import Case, arrays_of
from tests.fresh import fresh
from tests.sharded.models import MODELS
from tests.tensorrt.runtime_world import write

assert irc.passes
LLAMA3 = ', theta=500000.0, kind="llama3", factor=8.0, original_positions=64'
ROPES = (None, "", ", rotary_dim=2", ", interleaved", LLAMA3)
OPTIONS = (
    *("", ", causal", ", causal, window=2", ", causal, softcap=2.0, scale=0.2"),
    ", causal, window=3, softcap=0.5",
)


def drawn(rng: np.random.Generator) -> Case:
    """A random attention over caches with what may be in front of it."""
    choice: Any = rng.choice
    key_heads, batch, tokens = (int(rng.integers(*limits)) for limits in ((1, 4), (0, 4), (1, 5)))
    capacity = tokens + int(rng.integers(0, 9))
    past = tuple(int(n) for n in rng.integers(0, capacity - tokens + 1, max(batch, 1)))
    lengths = tuple(int(n) for n in rng.integers(0, capacity + 1, max(batch, 1)))
    return Case(
        key_heads * int(rng.integers(1, 4)),
        key_heads,
        2 * int(rng.integers(1, 5)),
        batch,
        capacity,
        past,
        form=choice(["joined", "apart"]),
        dtype=choice(["f32", "bf16", "f16"]),
        rope=ROPES[rng.integers(len(ROPES))],
        options=choice(OPTIONS),
        lengths=lengths if rng.random() < 0.5 else (),
        sinks=choice(["", "f32", "bf16"]),
        index=choice(["i32", "i64"]),
        norm=(None, "", ", offset=1.0")[rng.integers(3)],
        tokens=tokens,
    )


def outcome(case: Case, module: Module) -> dict[str, bytes]:
    """The bits of all results, for inputs with NaN in the rows of caches that nothing reads."""
    inputs = {str(v.name): a for v, a in arrays_of(case, module, np.random.default_rng(5)).items()}
    return {name: array.tobytes() for name, array in evaluate(module, inputs).items()}


@pytest.mark.parametrize("seed", range(60))
def test_drawn_attentions_keep_every_bit(seed: int) -> None:
    case = drawn(fresh(seed))
    module = parse_module(case.text())
    run_pipeline(module, "expand")
    expected, before = outcome(case, module), Counter(op.opname for op in module.main)
    assert before["cache_update"] == 2 and before["rope"] == 2 * (case.rope is not None)
    run_pipeline(module, "fuse-attention, dce", [VerifyEach()])
    assert {op.opname for op in module.main} <= {"split", "fused_attention", "return"}
    module = parse_module(print_module(module))
    assert outcome(case, module) == expected
    run_pipeline(module, "expand, dce", [VerifyEach()])
    assert Counter(op.opname for op in module.main) == before
    assert outcome(case, module) == expected


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["gqa", "gqa_8_2", "mqa", "mha_7", "qkv_bias"])
def test_every_rank_of_a_model_is_fused(name: str, ranks: int) -> None:
    module = MODELS[name]()
    before = f'inline, canonicalize, shard{{mesh="tp={ranks}"}}, localize, cse' * (ranks > 1)
    run_pipeline(module, before or "inline, canonicalize, cse")
    text = "fuse-attention, dce, expand{ops=[fused_attention, rope_and_cache]}, dce"
    check = CheckNumerics(evaluate, tolerance=1e-6)
    steps = run_pipeline(module, text, [VerifyEach(), check])
    assert dict(steps[0].stats.counts) == {"fused_attention": 3}


def decoder(mesh: str = "", fuse: bool = True, **sizes: Any) -> Module:
    module = build("window", mesh, **sizes)
    run_pipeline(module, "fuse-attention, dce" if fuse else "dce")
    assert any(op.opname == "fused_attention" for op in module.ops()) == fuse
    return module


@pytest.mark.parametrize("mesh", ["", "tp=2"])
def test_forecasts_do_not_grow(mesh: str) -> None:
    costs = []
    for fuse in (False, True):
        module = decoder(mesh, fuse)
        sizes = LocalSizes(module.mesh, typical_sizes(module))
        work = total(cost_of(op, sizes) for op in operations(module.main))
        costs.append((memory([module.main], sizes), work))
    (apart, work), (fused, less) = costs
    assert (fused.weights, fused.states) == (apart.weights, apart.states)
    assert fused.activations <= apart.activations
    assert less.flops == pytest.approx(work.flops)
    assert work.bytes / 2 < less.bytes < work.bytes and less.kernels < work.kernels


TEXT = """module @m {
  func @f(%q: f32[B, S, 8], %k: f32[B, S, 4], %v: f32[B, S, 4], %past: i32[B], %other: i32[B],
          %few: f32[B, 1, 8], %c0: CACHE, %d0: CACHE)
      -> (y: Y, c: CACHE, d: CACHE, z: Z) {
    %c = cache_update %c0, %k, %past : CACHE
    %d = cache_update %d0, %v, %past : CACHE
    %z = neg %q : Z
    %y = attention %q, %c, %d, past=%past {head_dim=2, causal} : Y
    return %y, %c, %d, %z
  }
}"""


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("attention %q, %c, %d,", "attention %q, %c0, %d0,", "that no cache_update in front"),
        ("attention %q, %c, %d,", "attention %q, %c, %c,", "keys and values are one cache"),
        ("%d0, %v, %past", "%d0, %v, %other", "`past` differs"),
        ("%d, past=%past", "%d", "`past` differs"),
        ("neg %q", "neg %c0", "a cache is read before its update, too"),
        ("neg %q", "neg %d", "is used in front of the attention"),
        ("attention %q,", "attention %few,", "the caches get other tokens than q has"),
    ],
)
def test_why_not(old: str, new: str, reason: str) -> None:
    types = {"CACHE": "f32[B, 2, C, 2]", "Y": "f32[B, 1, 8]" if "few" in new else "f32[B, S, 8]"}
    types["Z"] = types["CACHE"] if "neg" in old else "f32[B, S, 8]"
    text = TEXT.replace(old, new)
    for word, type in types.items():
        text = re.sub(rf"\b{word}\b", type, text)
    module = parse_module(text)
    before, why = str(module), WhyNot("fuse-attention")
    run_pipeline(module, "fuse-attention", [VerifyEach(), why])
    assert reason in str(why) and str(module) == before


@pytest.mark.parametrize("mesh", ["", "tp=2"])
@pytest.mark.parametrize("expanded", ["", "fused_attention"])
def test_a_fused_model_runs_on_onnxruntime(mesh: str, expanded: str, tmp_path: Path) -> None:
    modules = [decoder(mesh, fuse) for fuse in (False, True)]
    if expanded:
        run_pipeline(modules[1], f"expand{{ops=[{expanded}]}}")
    assert [growing(module.main) for module in modules] == ["C", "C"]
    streams = []
    for name, module in zip("ab", modules, strict=True):
        (tmp_path / name).mkdir()
        streams.append(loaded(module, tmp_path / name).open({"B": 2, "C": 12}))
    past = np.array([0, 0])
    for tokens in (3, 1, 2):
        given = call(ids_of(2, tokens), past)
        apart, fused = (stream.step(given)["logits"] for stream in streams)
        np.testing.assert_allclose(fused, apart, rtol=1e-5, atol=1e-6)
        past = past + tokens


def test_tensorrt_updates_the_caches_of_a_fused_model_in_place(tmp_path: Path) -> None:
    found = []
    for first in ("", "inline, fuse-attention"):
        folder = tmp_path / first
        facts = write(folder, MODELS["gqa_8_2"](), first=first)
        model = onnx.load(folder / facts["ranks"][0]["model"], load_external_data=False)
        kinds = Counter(node.op_type for node in model.graph.node)
        found.append((facts["stages"][0]["copied"], facts["stages"][0]["profiles"], kinds))
    assert found[0] == found[1]
    assert found[1][0] == [] and found[1][2]["TensorScatter"] == 6
