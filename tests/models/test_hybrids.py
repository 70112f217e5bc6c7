"""Generation with fixed states: rows of any lengths, long prompts, beams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irc
from irc.backends.base import ports_of
from irc.frontends import huggingface
from irc.generation.settings import GenerationSettings
from tests.fresh import fresh

from .cases import cases
from .runners import continued
from .test_transformers import greedy_of, logits_of

pytestmark = pytest.mark.oracle
HYBRIDS = ("qwen3_5", "granite_hybrid")
END = 0
# prompts of more than 8 tokens take several calls
DIMS = {"B": (1, 1, 15), "S": (1, 4, 8), "C": (1, 64, 64)}
LENGTHS = (1, 5, 8, 9, 20)


def prompts() -> list[list[int]]:
    return [fresh(n).integers(1, 96, n).tolist() for n in LENGTHS]


@pytest.mark.parametrize("backend", ["onnx", "reference"])
@pytest.mark.parametrize("name", HYBRIDS)
def test_a_batch_continues_each_prompt_as_transformers_does(
    name: str, backend: str, tmp_path: Path
) -> None:
    model = cases("DECODERS")[name].save(tmp_path / "model")
    built = irc.compile(tmp_path / "model", tmp_path / "built", backend=backend, dims=DIMS)
    batch = built.model.completions(prompts(), GenerationSettings(max_new_tokens=8))
    for prompt, (best, *_) in zip(prompts(), batch, strict=True):
        wanted = [*greedy_of(model, np.array([prompt]), 8)[0].tolist(), END]
        wanted = wanted[: wanted.index(END)]
        assert [*best.tokens, END][: len(wanted) + 1] == [*wanted, END]
        assert continued(built, prompt, 8) == wanted


def test_beams_take_the_states_of_their_rows(tmp_path: Path) -> None:
    model = cases("DECODERS")["qwen3_5"].save(tmp_path / "model")
    built = irc.compile(tmp_path / "model", tmp_path / "built", backend="onnx", dims=DIMS)
    settings = GenerationSettings(max_new_tokens=6, num_beams=3, num_return_sequences=3)
    results = built.model.completions(prompts(), settings)
    assert len({tuple(beam.tokens) for beams in results for beam in beams}) == 3 * len(LENGTHS)
    for prompt, beams in zip(prompts(), results, strict=True):
        for beam in beams:
            wanted = log_probs(model, prompt + beam.tokens)[len(prompt) - 1 :]
            np.testing.assert_allclose(beam.log_probs, wanted, atol=1e-3)


def log_probs(model: Any, tokens: list[int]) -> np.ndarray:
    """Those of every token but the first."""
    logits = logits_of(model, np.array([tokens]))[0, :-1].astype(np.float64)
    sums = np.log(np.sum(np.exp(logits), axis=-1))
    return logits[np.arange(len(logits)), tokens[1:]] - sums


def test_which_states_are_fixed_is_known_with_capacities_as_numbers(tmp_path: Path) -> None:
    cases("DECODERS")["granite_hybrid"].save(tmp_path / "model")
    module = huggingface.load(tmp_path / "model")
    stages, ranks = 'expand, shard{mesh="pp=2"}, pipeline', 'shard{mesh="tp=2"}, localize, expand'
    for passes in ("static-capacity", f"static-capacity, {stages}", f"static-capacity, {ranks}"):
        copy = irc.parse(str(module))
        irc.run_passes(copy, passes)
        fixed = {port.name: port.fixed for port in ports_of(copy.main).states}
        assert fixed == {n: n not in ("k1", "v1") for n in fixed} and len(fixed) == 6
