"""GroupQueryAttention in place of Attention over caches: when, and that it gives the same."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from irc.backends.onnxruntime.grouped import with_grouped_attention
from irc.backends.onnxruntime.session import session_options
from irc.text import parse_module
from tests.backends.ranks import loaded
from tests.fresh import fresh

LAYER = """module @m dims(B=1:2:4, S=1:1:64, C=1:64:512) {
  func @forward(%q: f32[B, S, 32], %n: f32[B, S, 16], %m: f32[B, S, 16], %past: i32[B], %l: i32[B],
      %k: f32[B, 2, C, 8], %v: f32[B, 2, C, 8])
      -> (y: f32[B, S, 32], k: f32[B, 2, C, 8] aliases %k, v: f32[B, 2, C, 8] aliases %v) {
    %ku = cache_update %k, %n, %past : f32[B, 2, C, 8]
    %vu = cache_update %v, %m, %past : f32[B, 2, C, 8]
    %y = attention %q, %ku, %vu, OPTIONS : f32[B, S, 32]
    return %y, %ku, %vu
  }
}"""
SHAPES = {"q": 32, "n": 16, "m": 16}


@pytest.mark.parametrize(
    ("options", "grouped"),
    [
        ("past=%past {head_dim=8, causal}", True),
        ("past=%past {head_dim=8, causal, softcap=2.5, scale=0.7}", True),
        ("past=%past {head_dim=8, causal, window=3}", False),
        ("past=%past, lengths=%l {head_dim=8, causal}", False),
        ("lengths=%l {head_dim=8}", False),
        ("past=%past {head_dim=8, causal}; %z = neg %ku : f32[B, 2, C, 8]", False),
    ],
)
def test_rows_of_any_lengths(options: str, grouped: bool, tmp_path: Path) -> None:
    """Results and caches, what is behind their tokens too, are those of the file as it is.

    Only the update of a cache that nothing else reads is replaced.
    """
    options, _, more = options.partition("; ")
    text = LAYER.replace("OPTIONS", options)
    if more:
        text = text.replace("return %y", f"{more}\n    return %z, %y")
        text = text.replace("-> (", "-> (z: f32[B, 2, C, 8], ")
    program = loaded(parse_module(text), tmp_path)
    data = (tmp_path / "out" / "rank0.onnx").read_bytes()
    graph = onnx.load_from_string(with_grouped_attention(data)).graph
    kinds = Counter(node.op_type for node in graph.node)
    assert kinds["GroupQueryAttention"] == grouped and kinds["Attention"] == 1 - grouped
    assert (kinds["TensorScatter"] + kinds["Transpose"] == 0) == grouped
    plain = onnxruntime.InferenceSession(data, session_options(1, False))
    rng = fresh()
    for rows, tokens, capacity in ((1, 1, 9), (3, 1, 20), (4, 6, 20), (2, 70, 70)):
        past = rng.integers(0, capacity - tokens + 1, rows)
        inputs = {
            name: rng.standard_normal((rows, tokens, width)).astype(np.float32)
            for name, width in SHAPES.items()
        } | {name: rng.standard_normal((rows, 2, capacity, 8)).astype(np.float32) for name in "kv"}
        inputs |= {"past": past.astype(np.int32), "l": (past + 1).astype(np.int32)}
        want: Any = plain.run(["y", "k.out", "v.out"], inputs)
        got = program.run(inputs)
        for name, array in zip("ykv", want, strict=True):
            np.testing.assert_allclose(got[name], array, rtol=1e-4, atol=1e-5)
