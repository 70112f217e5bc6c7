"""Plans that serve all sizes of a regime are those that would be made for each size alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from irc.backends.cuda.plan import Plan, repeated
from irc.backends.cuda.plan.build import Planner
from irc.backends.cuda.plan.text import print_plan
from irc.ir.core import Module
from irc.ir.dims import symbol
from tests.cuda.regimes import regime_of
from tests.cuda.test_whole_models import decoder_of
from tests.ops.example import dtypes_taken, module_of
from tests.ops.examples import EXAMPLES

SIZES: dict[str, object] = {
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "attention_bias": False,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama w4a16 tp=2": ("LlamaForCausalLM", {"quantize": "w4a16", "mesh": "tp=2"}),
    "qwen3 fp8_rowwise": ("Qwen3ForCausalLM", {"quantize": "fp8_rowwise"}),
    "mixtral": ("MixtralForCausalLM", {}),
}


def decoder(name: str, folder: Path) -> Module:
    family, options = MODELS[name]
    return decoder_of(family, folder, SIZES, next_tokens=True, **options)


def drawn_sizes(rng: np.random.Generator, names: list[str]) -> dict[str, int]:
    """Sizes around the numbers at which kernels change, and any others."""
    near = [0, 1, 2, 4, 16, 17, 32, 64, 65, 128, 200, 777, 2048]
    return {
        name: int(rng.choice(near)) if rng.integers(2) else int(rng.integers(1, 3000))
        for name in names
    }


def text(plan: Plan) -> str:
    """The plan without the ranges of its regime."""
    return print_plan(replace(plan, ranges={}))


def check(module: Module, draws: list[dict[str, int]]) -> int:
    """Compare plans of one planner with those of others; the number of regimes."""
    planner = Planner(module)
    for sizes in draws:
        assert text(planner.plan(sizes)) == text(Planner(module).plan(sizes)), sizes
    return len({id(planner.regime(sizes)) for sizes in draws})


@pytest.mark.parametrize("name", MODELS)
def test_decoders(name: str, rng: np.random.Generator, tmp_path: Path) -> None:
    module = decoder(name, tmp_path)
    draws = [drawn_sizes(rng, ["B", "S", "T"]) for _ in range(6)]
    draws += [{"B": 1, "S": 1, "T": 1}, {"B": 16, "S": 1, "T": 1}, {"B": 1, "S": 700, "T": 1}]
    context = [int(rng.integers(64, 9000)) for _ in draws]
    check(module, [{**d, "T": 1, "C": c} for d, c in zip(draws, context, strict=True)])


def test_operations(rng: np.random.Generator) -> None:
    """Examples that are drawn, in a dtype that is drawn."""
    with_sizes = [
        each for group in EXAMPLES.values() for each in group if each.sizes and not each.mesh
    ]
    for number in rng.choice(len(with_sizes), 60, replace=False):
        example = with_sizes[number]
        module = module_of(example, str(rng.choice(sorted(dtypes_taken(example)))))
        check(module, [drawn_sizes(rng, list(example.sizes)) for _ in range(4)])


def test_new_prompt_lengths_need_no_new_plan(tmp_path: Path) -> None:
    """Makers of kernels are asked once, for all lengths from 700 to 1000."""
    planner = Planner(decoder("llama", tmp_path))
    plans = {id(planner.regime({"B": 1, "S": n, "T": 1, "C": 2048})) for n in range(700, 1001, 7)}
    assert len(plans) == 1


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_kernels_are_made_once_for_layers_that_are_alike(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, sizes = decoder(name, tmp_path), {"B": 2, "S": 3, "T": 1, "C": 64}
    made: list[object] = []
    whole = repeated.Repeated.__call__

    def counted(
        self: repeated.Repeated, about: object, tree: repeated.Tree, make: Callable[[], object]
    ) -> object:
        def noted() -> object:
            made.append(about)
            return make()

        return whole(self, about, tree, noted)  # type: ignore[arg-type]

    def alone(
        self: repeated.Repeated, about: object, tree: object, make: Callable[[], object]
    ) -> object:
        return make()

    monkeypatch.setattr(repeated.Repeated, "__call__", counted)
    plan = Planner(module).plan(sizes)
    monkeypatch.setattr(repeated.Repeated, "__call__", alone)
    assert text(plan) == text(Planner(module).plan(sizes))
    assert len(made) < 0.8 * len(plan.steps) + 24


def test_decisions() -> None:
    b, s = symbol("B"), symbol("S")
    regime = regime_of({"B": 3, "S": 5})
    assert regime.bucket(b * s, (1, 16, 64)) == 16
    assert regime.bucket(b, (2,)) is None
    assert regime.bucket(7, (2, 8)) == 8
    assert regime.ranges() == {b * s: (2, 16), b: (3, None)}
    assert regime.holds({"B": 4, "S": 4}) and not regime.holds({"B": 4, "S": 5})
    assert not regime.holds({"B": 2, "S": 4})
    assert regime["S"] == 5 and not regime.holds({"B": 4, "S": 4})
