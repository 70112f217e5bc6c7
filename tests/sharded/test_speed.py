"""Sharding a model of 80 layers takes at most two seconds."""

from __future__ import annotations

import time

import irc.passes
from irc.frontends.models import DecoderConfig
from irc.frontends.models.families.llama import LLAMA
from irc.pipeline import run_pipeline

assert irc.passes  # importing it registers the passes
LIMIT = 2.0  # seconds of processor time; a quiet machine takes a tenth
PASSES = 'inline, canonicalize, cse, shard{mesh="tp=8"}, fuse-gated-mlp, fuse-collectives, localize'
LLAMA_70B = DecoderConfig(
    vocab_size=128256,
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    max_position_embeddings=8192,
)


def seconds() -> float:
    """Processor time from the configuration to one rank's text, verified after every pass."""
    begin = time.process_time()
    module = LLAMA.trace(LLAMA_70B, "bf16", name="llama")
    steps = run_pipeline(module, f"{PASSES}, cse, fold, dce")
    spent = time.process_time() - begin
    assert sum(len(step.stats.notes) for step in steps) < 30
    assert sum(op.opname == "all_reduce" for op in module.ops()) == 161
    return spent


def test_eighty_layers_are_sharded_within_two_seconds() -> None:
    assert any(seconds() < LIMIT for _ in range(3))  # the best: others may use the machine too
