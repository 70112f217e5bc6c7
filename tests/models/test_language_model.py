"""The convention of language models: logit positions, rows of different lengths, ranges, names."""

import time

import numpy as np
import pytest

import irc
from irc.frontends import random_weights
from irc.frontends.models import DecoderConfig
from irc.frontends.models.families.llama import LLAMA

CONFIG = DecoderConfig(
    vocab_size=40,
    hidden_size=24,
    intermediate_size=36,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
CAPACITY = 12
CACHES = ("k0", "v0", "k1", "v1")


@pytest.fixture(scope="module")
def model() -> irc.Module:
    return random_weights(LLAMA.trace(CONFIG, "f32"), 5)


def call(
    model: irc.Module,
    ids: np.ndarray,
    past: list[int],
    wanted: list[list[int]],
    caches: dict[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    rows, tokens = ids.shape
    empty = np.zeros((rows, 2, CAPACITY, 6), np.float32)
    lengths = np.array(past, np.int32)
    given = caches or dict.fromkeys(CACHES, empty)
    return irc.evaluate(
        model,
        {
            "input_ids": ids.astype(np.int32),
            "positions": lengths[:, None] + np.arange(tokens, dtype=np.int32),
            "past_lengths": lengths,
            "logit_positions": np.array(wanted, np.int32),
            **{name: given[name] for name in CACHES},
        },
    )


IDS = np.array([[3, 9, 27, 1, 5], [8, 2, 6, 30, 39]])
ALL = [list(range(5))] * 2


def test_logits_are_those_of_the_positions_asked_for(model: irc.Module) -> None:
    whole = call(model, IDS, [0, 0], ALL)["logits"]
    some = call(model, IDS, [0, 0], [[4, 1], [0, 0]])["logits"]
    assert some.shape == (2, 2, 40)
    wanted = np.stack([whole[0, [4, 1]], whole[1, [0, 0]]])
    np.testing.assert_allclose(some, wanted, rtol=1e-5, atol=1e-5)


def test_rows_may_have_different_pasts(model: irc.Module) -> None:
    """Row 0 has 3 tokens in its cache and row 1 has 5; both continue with two more."""
    first = call(model, IDS, [0, 0], ALL)
    more = np.array([[11, 12], [13, 14]])
    both = call(model, more, [3, 5], [[0, 1]] * 2, first)["logits"]
    for row, past in enumerate([3, 5]):
        text = np.concatenate([IDS[row, :past], more[row]])[None]
        alone = call(model, text, [0], [[past, past + 1]])["logits"]
        np.testing.assert_allclose(both[row], alone[0], rtol=1e-4, atol=1e-5)


def test_caches_are_written_after_the_past_only(model: irc.Module) -> None:
    out = call(model, IDS[:, :2], [4, 1], [[0]] * 2)
    for name in CACHES:
        written = np.abs(out[name]).sum(axis=(1, 3)) > 0
        assert np.flatnonzero(written[0]).tolist() == [4, 5]
        assert np.flatnonzero(written[1]).tolist() == [1, 2]


def test_arguments_results_aliases_and_ranges(model: irc.Module) -> None:
    function = model.main
    names = ["input_ids", "positions", "past_lengths", "logit_positions", *CACHES]
    assert [str(arg.name) for arg in function.args] == names
    assert function.result_names() == ("logits", "k0", "v0", "k1", "v1")
    assert function.aliases() == {1: 4, 2: 5, 3: 6, 4: 7}
    assert model.dims == {"B": (1, 1, 8), "S": (1, 64, 64), "T": (1, 1, 64), "C": (1, 64, 64)}


def test_logits_are_f32_and_caches_are_of_the_models_dtype() -> None:
    module = LLAMA.trace(CONFIG, "bf16", {"B": (2, 2, 2)}, "small")
    kinds = [value.type.dtype for value in module.main.returned]
    assert kinds == ["f32", "bf16", "bf16", "bf16", "bf16"]
    assert module.name == "small" and module.dims["B"] == (2, 2, 2)


def test_operations_have_locations_and_names() -> None:
    module = LLAMA.trace(CONFIG, "f32")
    locs = [op.loc for op in module.main if op.opname == "attention"]
    scopes = [f"model.layers.{i}.self_attn" for i in range(2)]
    assert [loc.scope for loc in locs if loc] == scopes
    assert {loc.file for loc in locs if loc} == {"decoder.py"}
    text = str(module)
    for name in ("%q_proj = linear", "%q = rope", "%mixed = attention", "%self_attn = linear"):
        assert name in text
    assert "%k0.1 = cache_update %k0, %k, %past_lengths" in text and "%mlp = linear" in text


def test_a_big_model_is_traced_quickly() -> None:
    """126 layers and 2,300 operations in less than a second."""
    config = DecoderConfig(num_hidden_layers=126)

    def seconds() -> float:
        begin = time.thread_time()
        module = LLAMA.trace(config, "bf16")
        spent = time.thread_time() - begin
        assert sum(1 for _ in module.ops()) > 2000
        return spent

    assert any(seconds() < 1.0 for _ in range(3))
