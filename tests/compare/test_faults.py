"""Faults that `irc compare` has to find: it names the layer, or the component of it, of each.

IRC_TEST_FAULTS is how many a run tries; all take a minute. Of all 30 at least 28 have to be found.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from safetensors.numpy import load_file as load_tensors
from safetensors.numpy import save_file as save_tensors

import irc
from irc.compare import Comparison, compare
from irc.driver.sources import find_source
from irc.ir.mesh import Mesh
from tests.fresh import fresh

from .faults import FAULTS, MODELS, Fault

pytestmark = pytest.mark.oracle
COUNT = int(os.environ.get("IRC_TEST_FAULTS", "6"))
CHOSEN = sorted(fresh(22).permutation(len(FAULTS))[:COUNT].tolist())


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint folder of every family."""
    root = tmp_path_factory.mktemp("families")
    for name, case in MODELS.items():
        case.save(root / name)
    return {name: root / name for name in MODELS}


def found(fault: Fault, good: Path, folder: Path, seed: int = 0) -> Comparison:
    """The comparison of a model with the fault and the good folder, which transformers runs."""
    bad, options = good, dict(fault.options)
    if fault.kind == "checkpoint":
        bad = folder / "bad"
        bad.mkdir()
        (bad / "config.json").write_bytes((good / "config.json").read_bytes())
        tensors = load_tensors(good / "model.safetensors")
        fault.plant(tensors)  # type: ignore[operator]
        save_tensors(tensors, bad / "model.safetensors", {"format": "pt"})
    with fault.planted():
        if fault.kind == "pass":
            module = find_source(bad).module
            module.mesh = Mesh.parse(options.get("mesh", ""))
            irc.run_passes(module, fault.pipeline)
            return compare(module, good, seed=seed)
        if options or fault.kind == "lowering":
            irc.compile(bad, folder / "built", **options)
            return compare(folder / "built", good, seed=seed)
        return compare(bad, good, seed=seed)


def names_it(comparison: Comparison, fault: Fault) -> bool:
    """Whether the first divergence is inside the scope of the fault, or around it in its layer."""
    first = comparison.first
    if first is None:
        return False
    inside = f"{first.scope}.".startswith(f"{fault.scope}.")
    return inside or (f"{fault.scope}.".startswith(f"{first.scope}.") and first.scope[-1].isdigit())


@pytest.mark.parametrize("number", CHOSEN)
def test_the_layer_of_a_fault_is_named(
    number: int, folders: dict[str, Path], tmp_path: Path
) -> None:
    fault = FAULTS[number]
    comparison = found(fault, folders[fault.family], tmp_path)
    assert names_it(comparison, fault), (fault.name, fault.scope, comparison.first)
