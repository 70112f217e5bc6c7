"""Attention over a cache: every head size and number of heads builds, in the right form."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import irc
from irc.backends.reference import evaluate
from irc.backends.tensorrt.lowering import lower_attention
from irc.frontends.onnx import import_onnx
from irc.ir.core import Module
from irc.text import parse_module
from tests.fresh import fresh
from tests.tensorrt.emission import emitted, problem

CAPACITY = 24
RNG = fresh(71)


def decoder(size: int, heads: int, key_heads: int, dtype: str, seen: str = "causal") -> Module:
    """Attention of S new tokens over a cache that they are written into."""
    query, new = (f"{dtype}[B, S, {count * size}]" for count in (heads, key_heads))
    cache = f"{dtype}[B, {key_heads}, {CAPACITY}, {size}]"
    inputs = f"%q: {query}, %n: {new}, %c: {cache}, %past: i32[B]"
    return parse_module(f"""module @m {{
      func @forward({inputs}) -> (y: {query}, c: {cache} aliases %c) {{
        %u = cache_update %c, %n, %past : {cache}
        %y = attention %q, %u, %u, past=%past {{head_dim={size}, {seen}}} : {query}
        return %y, %u }} }}""")


@pytest.mark.needs_rtx
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize(
    ("size", "heads", "key_heads"),
    [(9, 4, 4), (12, 4, 2), (28, 1, 1), (100, 3, 3), (252, 2, 1), (260, 4, 2), (16, 1, 1)],
)
def test_every_shape_builds(size: int, heads: int, key_heads: int, dtype: str) -> None:
    for seen in ("causal", "causal, window=5"):
        assert not (why := problem(decoder(size, heads, key_heads, dtype, seen))), why


@pytest.mark.parametrize(
    ("size", "dtype", "kind"),
    [
        (64, "f16", "TRT_Attention"),
        (20, "f16", "Softmax"),
        (20, "bf16", "Softmax"),
        (20, "f32", "TRT_Attention"),  # TensorRT writes the products itself
        (4, "f16", "TRT_Attention"),
        (260, "f16", "TRT_Attention"),
    ],
)
def test_the_form_is_chosen_by_rule(size: int, dtype: str, kind: str) -> None:
    kinds = {node.op_type for node in emitted(decoder(size, 2, 2, dtype)).graph.node}
    assert {"TRT_Attention", "Softmax"} & kinds == {kind}


@pytest.mark.parametrize("seen", ["causal", "causal, window=3", "causal, scale=0.3"])
def test_plainer_forms_compute_the_same(seen: str, tmp_path: Path) -> None:
    module = decoder(12, 4, 2, "f32", seen)
    avoided = "TRT_Attention", "TensorScatter"
    model = emitted(module, avoided=avoided)
    assert not {*avoided} & {node.op_type for node in model.graph.node}
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    again = import_onnx(tmp_path / "m.onnx", use_text=False)
    shapes = {"q": (2, 3, 48), "n": (2, 3, 24), "c": (2, 2, CAPACITY, 12)}
    inputs = {name: RNG.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    inputs["past"] = RNG.integers(0, CAPACITY - 3, 2).astype(np.int32)
    results = (evaluate(m, inputs, tmp_path).values() for m in (again, module))
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, 1e-4, 1e-4)


@pytest.mark.needs_rtx
def test_a_compiler_that_fails_is_given_a_plainer_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lower_attention, "_is_taken", lambda op: True)
    dims = {"B": (1, 2, 4), "S": (1, 4, 8)}
    options = {"caching": False, "weights": "outside"}
    artifact = irc.compile(
        decoder(12, 2, 2, "f16"), tmp_path / "out", backend="tensorrt-rtx", dims=dims,
        engine=options,
    )  # fmt: skip
    (note,) = [note for note in artifact.notes if "in place of" in note]
    assert "cannot build" in note and "Myelin" in note
    assert note.endswith("built with MatMul and Softmax in place of TRT_Attention")
    (rank,) = artifact.manifest["program"]["ranks"]
    assert (artifact.folder / rank["engine"]).stat().st_size
