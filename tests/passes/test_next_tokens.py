"""next-tokens: the tokens chosen over ranks are those that numpy chooses from all logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from irc.backends.reference import ReferenceBackend, evaluate
from irc.generation.greedy import greedy
from irc.ir.core import Module
from irc.pipeline import run_pipeline
from irc.pipeline.instruments import VerifyEach
from irc.text import parse_module
from tests.fresh import fresh
from tests.passes.embedding_lab import Array, localized
from tests.sharded.models import tiny_llama

SPLIT = """module @m mesh(tp={group_size}) {{
  func @forward(%x: f32[3, 2, {size}@tp]) -> (logits: f32[3, 2, {size}]) {{
    %y = all_gather %x {{axis="tp", dim=2}} : f32[3, 2, {size}]
    return %y
  }}
}}"""


def chosen(logits: Array, group_size: int, k: int) -> dict[str, Array]:
    module = parse_module(SPLIT.format(group_size=group_size, size=logits.shape[2]))
    run_pipeline(module, f"next-tokens{{k={k}}}", [VerifyEach()])
    return evaluate(localized(module), {"x": logits})


@pytest.mark.parametrize("group_size", [2, 3, 4, 8])
def test_the_largest_of_all_ranks(group_size: int) -> None:
    rng = fresh(40)
    for size in (1, 2, 5, 9, 37):
        for draw in range(6):
            logits = rng.standard_normal((3, 2, size)).astype(np.float32)
            logits -= [0, 100, 0, 0, 0, 0][draw]  # below what padding could hold
            logits = np.round(logits) if draw == 2 else logits  # many equal ones
            logits[0, 0] = [0, 0, 0, -np.inf, np.nan, np.inf][draw] if draw > 2 else logits[0, 0]
            k = min(size, 1 + draw)
            results = chosen(logits, group_size, k)
            want = np.argsort(-np.nan_to_num(logits, nan=np.inf, posinf=np.inf), -1, "stable")
            assert np.array_equal(results["next_tokens"], want[..., 0]), (size, draw)
            assert np.array_equal(results["top_tokens"], want[..., :k]), (size, draw)
            values = np.take_along_axis(logits, want[..., :k], -1)
            assert np.array_equal(results["top_logits"], values, equal_nan=True)
            assert np.array_equal(chosen(logits, group_size, 0)["next_tokens"], want[..., 0])


def text_of(module: Module, folder: Path) -> Any:
    """The tokens that the reference generates after a prompt."""
    backend = ReferenceBackend()
    facts = backend.emit(module, folder).facts
    return greedy(backend.load(folder, facts), [5, 11, 2], 6, dims=module.dims).tokens


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_that_chooses_itself_writes_the_same(tied: bool, tmp_path: Path) -> None:
    plain = tiny_llama(num_hidden_layers=1, tie_word_embeddings=tied)
    run_pipeline(plain, "inline")
    want = text_of(plain, tmp_path)
    for early in (False, True):
        first, late = ("next-tokens, ", "") if early else ("", "next-tokens, ")
        module = tiny_llama(num_hidden_layers=1, tie_word_embeddings=tied)
        text = f'inline, {first}shard{{mesh="tp=3"}}, rewrite-embeddings, {late}localize'
        run_pipeline(module, text, [VerifyEach()])
        assert "f32[B, T, 37]" not in str(module), "the logits are never put together"
        assert text_of(module, tmp_path) == want
