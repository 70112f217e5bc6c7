"""The prompts of the self-test of models that return tokens instead of logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from irc.backends.reference import evaluate
from irc.backends.tensorrt import golden
from irc.errors import Error
from irc.frontends import random_weights
from irc.generation.greedy import greedy
from irc.ir.core import Module
from irc.pipeline import run_pipeline
from tests.cli.runner import irc as irc_command
from tests.fresh import fresh
from tests.sharded.models import MODELS
from tests.tensorrt.runtime_world import FakeRank, World, write
from tests.tiny_checkpoint import write_checkpoint

CASES = [
    ("gqa", ""),
    ("gqa", "tp=2"),
    ("tied_prime", "tp=4"),  # of 41 tokens the last rank has 8, and 3 of padding
    ("vocab_5", "tp=4"),  # a rank without tokens
    ("gqa", "dp=2,tp=2"),
    ("tied", "tp=2,pp=2"),
]
SEED = int(fresh(11).integers(1 << 30))


def model(name: str) -> Module:
    module = MODELS[name]()
    random_weights(module, SEED)
    return module


def unsharded(name: str) -> Module:
    """The model that gives logits, on one rank."""
    module = model(name)
    run_pipeline(module, "static-capacity")
    return module


def lead(module: Module, ids: list[int]) -> tuple[int, float, float]:
    """(the likeliest token after the ids, how far its logit leads, the largest magnitude)."""
    inputs = golden._inputs(module, ids)
    last = evaluate(module, inputs)["logits"][0, -1]
    second, first = np.sort(last)[-2:]
    return int(last.argmax()), float(first - second), float(np.abs(last).max())


def written(folder: Path, name: str, mesh: str, **options: Any) -> dict[str, Any]:
    return write(folder, model(name), mesh, first="next-tokens", **options)


@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_tokens_agree_with_the_reference(name: str, mesh: str, tmp_path: Path) -> None:
    facts = written(tmp_path, name, mesh)
    prompts = facts["self_test"]["prompts"]
    assert len(prompts) == 3
    assert len({len(each["ids"]) for each in prompts}) == 3
    reference = unsharded(name)
    for prompt in prompts:
        token, ahead, largest = lead(reference, prompt["ids"])
        assert prompt["token"] == token
        assert ahead > 2e-3 * largest
    world = World(tmp_path, facts)  # it loads
    found = world.of_all(lambda program: greedy(program, prompts[0]["ids"], 2, (), facts["dims"]))
    assert {each.tokens[0] for each in found} == {prompts[0]["token"]}
    world.close()


@pytest.mark.parametrize("mesh", ["", "tp=3"])
def test_only_clear_tokens_are_kept(
    mesh: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt whose token rounding could change is not compared."""
    reference = unsharded("gqa")
    every = list(golden._prompts(reference, 37))
    leads = [lead(reference, ids) for ids in every]
    shares = [ahead / 2 / max(1.0, largest) for _, ahead, largest in leads]
    limit = float(np.sort(shares)[-2:].mean())  # one prompt is clearer than that
    monkeypatch.setitem(golden.TOLERANCE, "f32", limit)
    vocabulary = 37 if not mesh else 12 * 3 + 1
    assert every == list(golden._prompts(reference, vocabulary))
    best = int(np.argmax(shares))
    facts = written(tmp_path, "gqa", mesh)
    assert facts["self_test"] == {"prompts": [{"ids": every[best], "token": leads[best][0]}]}
    monkeypatch.setitem(golden.TOLERANCE, "f32", 10.0)
    assert written(tmp_path, "gqa", mesh)["self_test"] is None
    with pytest.raises(Error, match=r"nothing to test: .* no tokens that are clearly likelier"):
        written(tmp_path, "gqa", mesh, self_test=True)


@pytest.mark.parametrize("mesh", ["tp=2", "tp=2,pp=2"])
def test_wrong_tokens_of_one_rank(mesh: str, tmp_path: Path) -> None:
    facts = written(tmp_path, "gqa", mesh)

    def change(gpu: FakeRank) -> None:
        gpu.trt.skew = float(gpu.rank == 3 % len(facts["ranks"]))

    rank = 3 % len(facts["ranks"])
    message = rf"self-test: the first token of rank {rank} is \d+, and the reference's is \d+; .*"
    with pytest.raises(Error, match=message + "refusing to load"):
        World(tmp_path, facts, change)
    World(tmp_path, facts, change, self_test=False).close()


@pytest.mark.parametrize("number", range(3))
def test_every_prompt_is_compared(number: int, tmp_path: Path) -> None:
    facts = written(tmp_path, "gqa", "")
    facts["self_test"]["prompts"][number]["token"] += 1
    with pytest.raises(Error, match="the first token of rank 0 is"):
        World(tmp_path, facts)


def test_the_command_stores_them(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    words = ["--next-tokens", "--backend", "tensorrt-rtx", "--no-build", "--self-test", "always"]
    irc_command("compile", checkpoint, "-o", tmp_path / "out", *words)
    manifest = json.loads((tmp_path / "out" / "config.json").read_text())
    assert [set(each) for each in manifest["program"]["self_test"]["prompts"]][:1] == (
        [{"ids", "token"}]
    )
