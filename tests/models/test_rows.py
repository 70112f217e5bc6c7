"""Rows of every kind of state, moved, cleared and fed in pieces, against transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import irc
from irc.generation.rows import Rows

from .cases import cases
from .runners import relative, talks
from .test_transformers import logits_of, tokens

pytestmark = pytest.mark.oracle
# caches: whole, with windows, chunks and sinks, latent, of int8; and states of a fixed size
NAMES = ("llama", "phi3", "llama4", "gpt_oss", "deepseek_v3", "opt", "granite_hybrid", "qwen3_5")
# calls of at most 8 tokens
DIMS = {"B": (1, 1, 4), "S": (1, 4, 8), "C": (1, 64, 64)}


@pytest.mark.parametrize("mesh", ["", "tp=2", "pp=2"])
@pytest.mark.parametrize("name", NAMES)
def test_rows_are_as_alone(
    name: str, mesh: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("irc.backends.onnxruntime.stream.SMALLEST", 8)  # caches grow on the way
    case, int8 = cases("DECODERS")[name], name == "opt"
    model = case.save(tmp_path / "model")
    np.savez(tmp_path / "data.npz", input_ids=tokens(8, 3))
    more = {"kv_cache": "int8", "calibration": tmp_path / "data.npz"} if int8 else {}
    built = irc.compile(tmp_path / "model", tmp_path / "built", mesh=mesh, dims=DIMS, **more)
    for logits, texts in talks(Rows.empty(built.program, DIMS, 4, 64), 89):
        wanted = np.stack([logits_of(model, np.array([text]))[0, -1] for text in texts])
        assert relative(logits, wanted) < (5e-2 if int8 else case.limit)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in NAMES if name != "opt"])
def test_rows_on_a_gpu(name: str, tmp_path: Path) -> None:
    """As the reference computes them: GPU machines may have another transformers."""
    cases("DECODERS")[name].save(tmp_path / "model")
    runs: list[Iterator[tuple[np.ndarray, list[list[int]]]]] = []
    for backend in ("cuda", "reference"):
        built = irc.compile(tmp_path / "model", tmp_path / backend, backend=backend, dims=DIMS)
        runs.append(talks(Rows.empty(built.program, DIMS, 4, 64), 89))
    for (logits, texts), (wanted, same) in zip(*runs, strict=True):
        assert texts == same
        assert relative(logits, wanted) < 1e-5
