"""Numbers of heads that the ranks do not divide: layouts, weights, and unsupported forms."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest

import irc
from irc.passes.shard.pad_heads import HeadAssignment, assign_heads
from irc.pipeline import run_pipeline
from tests.fresh import fresh
from tests.sharded.checking import collectives, drawn, plan_file, sharded, spread
from tests.sharded.layers import LAYERS
from tests.sharded.models import MODELS

COUNTS = [
    (kv * group, kv, group_size)
    for kv, group, group_size in product((1, 2, 3, 4, 5, 7, 8), (1, 2, 3, 4, 5, 7, 8), range(1, 10))
]


def fewest(heads: int, kv: int, group_size: int) -> int:
    """The least number of heads over all numbers of queries per key-value head."""
    group = heads // kv
    found: list[int] = []
    for share in range(1, group + 1):
        keys = kv * -(-group // share)
        keys += -keys % group_size
        found.append(keys * (1 + share))
    return min(found)


def test_all_layouts() -> None:
    for heads, kv, group_size in COUNTS:
        check_layout(assign_heads(heads, kv, group_size), heads, kv, group_size)


def check_layout(layout: HeadAssignment, heads: int, kv: int, group_size: int) -> None:
    """Every query head once, beside its own key-value head, equal counts, and as few as can be."""
    queries, keys = layout.queries, layout.keys
    assert sorted(head for head in queries if head is not None) == list(range(heads))
    assert len(keys) % group_size == 0 and len(queries) % len(keys) == 0
    share = len(queries) // len(keys)
    for place, head in enumerate(queries):
        if head is not None:
            assert keys[place // share] == head // (heads // kv)
    assert {head for head in keys if head is not None} == set(range(kv))
    if heads % group_size == kv % group_size == 0:
        assert (queries, keys) == (tuple(range(heads)), tuple(range(kv)))
    assert len(queries) + len(keys) == fewest(heads, kv, group_size)


REWRITTEN = [
    *("heads_6_1", "bias_of_5_heads", "alibi_5", "cross", "normed_heads_8_2", "gpt2_5"),
    *("turned_gpt2_5", "interleaved_5", "biases"),
]


@pytest.mark.parametrize("mesh", ["tp=4", "ep=2,tp=2"])
@pytest.mark.parametrize("name", REWRITTEN)
def test_attention_stays_sharded_where_heads_do_not_divide(
    name: str, mesh: str, tmp_path: Path
) -> None:
    case = LAYERS[name]
    module = case.module()
    plan = plan_file(tmp_path, *case.plan) if case.plan else ""
    stats = spread(module, drawn(module, fresh(12)), mesh, plan=plan)
    assert stats["heads"] == 1
    gathered = 2 if name == "gpt2_5" else 0  # rows of its tables, and what its last product reads
    assert collectives(module).get("all_gather", 0) == gathered


ATTENTION = """module @m dims(B=1:2:4, S=1:3:8) {
  weight @q_proj.weight : f32[12, 6] = random("q", 1, 0.5)
  weight @k_proj.weight : f32[12, 6] = random("k", 1, 0.5)
  weight @v_proj.weight : f32[12, 6] = random("v", 1, 0.5)
  weight @o_proj.weight : f32[6, 12] = random("o", 1, 0.5)
  weight @n : f32[NORM] = random("n", 1, 0.5)
  weight @n2 : f32[6, 6] = random("n2", 1, 0.5)
  weight @n3 : f32[12, 24] = random("n3", 1, 0.5)
  func @forward(%x: f32[B, S, 6], %p: i32[B, S]) -> RESULTS {
    %q = linear %x, @q_proj.weight : f32[B, S, 12]
    %k = linear %x, @k_proj.weight : f32[B, S, 12]
    %v = linear %x, @v_proj.weight : f32[B, S, 12]
    BETWEEN
    %y = linear %m, @o_proj.weight : f32[B, S, 6]
    return RETURNED
  }
}"""
PLAIN = "%m = attention %q, %k, %v {head_dim=4} : f32[B, S, 12]"


def attention(between: str, norm: str = "4", more: str = "") -> str:
    """The text of attention; `more` is a second result and its type."""
    value, _, type = more.partition(": ")
    text = ATTENTION.replace("BETWEEN", between).replace("NORM", norm)
    text = text.replace("RETURNED", ", ".join(["%y", *([value] if value else [])]))
    return text.replace("RESULTS", f"({', '.join(['f32[B, S, 6]', *([type] if type else [])])})")


PARTED = """%a = reshape %q {shape=[B, S, 6, 2]} : f32[B, S, 6, 2]
    %b = rms_norm %a, @n : f32[B, S, 6, 2]
    %c = reshape %b {shape=[B, S, 12]} : f32[B, S, 12]
    %m = attention %c, %k, %v {head_dim=4} : f32[B, S, 12]"""
LATE = """%a = reshape %q {shape=[B, S, 3, 4]} : f32[B, S, 3, 4]
    %b, %c = split %a {dim=3, sizes=[2, 2]} : f32[B, S, 3, 2], f32[B, S, 3, 2]
    %d = concat %c, %b {dim=3} : f32[B, S, 3, 4]
    %e = reshape %d {shape=[B, S, 12]} : f32[B, S, 12]
    %m = attention %e, %k, %v {head_dim=4} : f32[B, S, 12]"""
ROPE = """%a = rope %q, %p {head_dim=6} : f32[B, S, 12]
    %m = attention %a, %k, %v {head_dim=4} : f32[B, S, 12]"""
ACROSS = """%a = rms_norm %q, @n : f32[B, S, 12]
    %m = attention %a, %k, %v {head_dim=4} : f32[B, S, 12]"""
WIDER = """%0 = linear %x, @n2 : f32[B, S, 6]
    %a = attention %q, %0, %q {head_dim=2} : f32[B, S, 24]
    %m = linear %a, @n3 : f32[B, S, 12]"""
OTHERWISE = {
    "heads of another size": attention(PARTED, "2"),
    "an operation that mixes heads": attention(LATE),
    "a rope of other heads": attention(ROPE),
    "a norm over all heads": attention(ACROSS, "12"),
    "queries that are a result too": attention(PLAIN, more="%q: f32[B, S, 12]"),
    "mixed values that are a result too": attention(PLAIN, more="%m: f32[B, S, 12]"),
    "values wider than queries": attention(WIDER),
    "a projection that something else uses": attention(
        f"%0 = linear %x, @q_proj.weight : f32[B, S, 12]\n    {PLAIN}", more="%0: f32[B, S, 12]"
    ),
    "an output that something else uses": attention(
        f"%0 = reduce_sum @o_proj.weight {{dims=[0]}} : f32[12]\n    {PLAIN}", more="%0: f32[12]"
    ),
}


@pytest.mark.parametrize("text", OTHERWISE.values(), ids=OTHERWISE)
def test_attention_that_cannot_be_rewritten_is_replicated(text: str) -> None:
    module, stats = sharded(text, "tp=2")
    assert str(module.weights["q_proj.weight"].type) == "f32[12@tp, 6]"
    assert any("attention is replicated" in note for note in stats.notes)
    module = irc.parse(text)
    spread(module, drawn(module, fresh(13)), "tp=2")


def test_a_cache_that_is_also_a_result_keeps_its_heads() -> None:
    text = """module @m dims(B=1:2:4, S=1:2:4) {
      weight @q_proj.weight : f32[12, 6] = random("q", 1, 0.5)
      weight @k_proj.weight : f32[12, 6] = random("k", 1, 0.5)
      weight @v_proj.weight : f32[12, 6] = random("v", 1, 0.5)
      weight @o_proj.weight : f32[6, 12] = random("o", 1, 0.5)
      func @forward(
        %x: f32[B, S, 6], %past: i32[B], %k0: f32[B, 3, 8, 4], %v0: f32[B, 3, 8, 4]
      ) -> (y: f32[B, S, 6], k: f32[B, 3, 8, 4], v: f32[B, 3, 8, 4] aliases %v0) {
        %q = linear %x, @q_proj.weight : f32[B, S, 12]
        %k = linear %x, @k_proj.weight : f32[B, S, 12]
        %v = linear %x, @v_proj.weight : f32[B, S, 12]
        %k1 = cache_update %k0, %k, %past : f32[B, 3, 8, 4]
        %v1 = cache_update %v0, %v, %past : f32[B, 3, 8, 4]
        %m = attention %q, %k1, %v1, past=%past {head_dim=4} : f32[B, S, 12]
        %y = linear %m, @o_proj.weight : f32[B, S, 6]
        return %y, %k1, %v1
      } }"""
    module, _ = sharded(text, "tp=2")
    assert str(module.main.args[2].type) == "f32[B, 3, 8, 4]"
    inputs = {
        "x": fresh(14).standard_normal((2, 3, 6), np.float32),
        "past": np.array([0, 4], np.int32),
        "k0": fresh(15).standard_normal((2, 3, 8, 4), np.float32),
        "v0": fresh(16).standard_normal((2, 3, 8, 4), np.float32),
    }
    module = irc.parse(text)
    spread(module, inputs, "tp=2")


def test_caches_are_sharded_over_batch_and_heads() -> None:
    module = MODELS["gqa"]()
    run_pipeline(module, 'shard{mesh="dp=2,tp=3"}')
    caches = [arg for arg in module.main.args if arg.type.ndim == 4]
    assert {str(arg.type) for arg in caches} == {"f32[2*B_dp@dp, 3@tp, C, 4]"}
    uses = {user.opname for arg in caches for user in arg.users}
    assert uses == {"cache_update"}
    assert collectives(module) == {"all_reduce": 7, "all_gather": 1}  # of the logits


def test_a_plan_with_replicated_queries_keeps_the_heads(tmp_path: Path) -> None:
    plan = plan_file(tmp_path, "q_proj.weight replicated", "v_proj.weight 0@tp")
    module = irc.parse(attention(PLAIN))
    stats = spread(module, drawn(module, fresh(17)), "tp=2", plan=plan, after=["localize"])
    assert not stats["heads"]
    assert str(module.weights["q_proj.weight"].type) == "f32[12, 6]"


def test_queries_that_are_keys_are_laid_out_once() -> None:
    module = irc.parse(attention("%m = attention %q, %q, %v {head_dim=4} : f32[B, S, 12]"))
    assert spread(module, drawn(module, fresh(18)), "tp=2")["heads"] == 1
