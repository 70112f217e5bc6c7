"""LLaMA of both dialects, on every number of ranks, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irc
from tests.fresh import fresh

from .llamas import (
    LLAMA,
    MIXTRAL,
    ROWS,
    VOCAB,
    made,
    of_hugging_face,
    of_keywords,
    of_ranks,
    steps_of,
)
from .rank_folders import Conversion

pytestmark = pytest.mark.oracle
SOURCES = {"A": of_keywords, "ranks": of_ranks, "Hugging Face": of_hugging_face}

LINEAR = {"rope_type": "linear", "factor": 3.0, "rope_theta": 5e3}
BIASES = LLAMA | {"attention_bias": True, "mlp_bias": True}
CASES: dict[str, tuple[dict[str, Any], Conversion]] = {
    "one rank": (LLAMA, Conversion()),
    "fused": (BIASES, Conversion(tp=2, fused=True)),
    "shared key heads": (LLAMA | {"rope_parameters": LINEAR}, Conversion(tp=4)),
    "uneven stages": (BIASES, Conversion(tp=2, pp=2)),
    "rows of the table": (LLAMA, Conversion(tp=4, table_dim=0)),
    "columns of the table": (LLAMA, Conversion(tp=2, table_dim=1, pp=3)),
    "qwen2": (LLAMA | {"model_type": "qwen2"}, Conversion(tp=2)),
    "tied": (LLAMA | {"tie_word_embeddings": True}, Conversion(tp=2, table_dim=0)),
    "experts": (MIXTRAL, Conversion(tp=2)),
    "experts by rank": (MIXTRAL, Conversion(tp=2, moe_ep=2, pp=2)),
}


def drawn(count: int, stream: int = 0) -> np.ndarray[Any, Any]:
    """Token ids [ROWS, count]."""
    return fresh(stream).integers(0, VOCAB, (ROWS, count))


def close(found: Any, wanted: Any) -> None:
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4 * np.abs(wanted).max())


# Dialect A has one switch for all biases of attention; experts of Hugging Face are irc's own.
SKIPPED = {("A", "qwen2"), ("Hugging Face", "experts"), ("Hugging Face", "experts by rank")}


@pytest.mark.parametrize(
    ("source", "name"), [(s, n) for s in SOURCES for n in CASES if (s, n) not in SKIPPED]
)
def test_logits_of_a_prompt_and_of_single_tokens(source: str, name: str, tmp_path: Path) -> None:
    (config, how), ids = CASES[name], drawn(7)
    model = made(tmp_path, config)
    more: dict[str, Any] = {}
    if source == "A" and how.fused:
        how, more = Conversion(tp=how.tp), {"use_fused_mlp": True}
    if source == "ranks" and how.fused:
        more = {"use_fused_mlp": True}
    plugin = (list(CASES).index(name) + list(SOURCES).index(source)) % 2 == 0
    dialect = "A" if source == "A" else "B"
    run = steps_of(SOURCES[source](model, how, **more), how, plugin, dialect)
    wanted = model.states(ids)[-1]
    for begin, end in ((0, 5), (5, 6), (6, 7)):
        found = run(ids[:, begin:end])["logits"]
        close(found[:, :VOCAB], wanted[:, end - 1])


def test_experts_of_hugging_face_are_compiled_by_irc(tmp_path: Path) -> None:
    model = made(tmp_path, MIXTRAL)
    with pytest.raises(irc.Error, match="compile the folder itself"):
        steps_of(of_hugging_face(model, Conversion()), Conversion())
