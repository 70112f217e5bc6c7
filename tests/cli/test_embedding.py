"""`--embedding` for a model whose tables have names of its own: numbers of one rank, on several."""

from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest

from tests.cli.runner import refused, run_arrays, works
from tests.fresh import fresh
from tests.layout import ROOT

TOWERS = ROOT / "examples" / "two_tower.py"
SCHEMES = {  # what the pass counts
    "dp=2 --embedding cd": "columns: 1",
    "dp=2 --embedding kd": "cyclic: 1",
    "dp=2 --embedding cyclic": "cyclic: 3",
    "dp=2 --embedding columns": "columns: 3",
    "dp=2 --embedding auto": "nothing",
    "tp=2 --embedding ca": "columns: 4",
    "tp=3 --outside clamp": "clamp: 4",
    "ep=2,tp=2 --embedding rows": "rows: 4",
}


@pytest.fixture(scope="module")
def inputs() -> dict[str, np.ndarray]:
    rng = fresh()
    return {
        "user_ids": rng.integers(0, 1000, 4),
        "history": rng.integers(-1, 5000, (4, 5)),
        "user_features": rng.standard_normal((4, 8)),
        "item_ids": rng.integers(0, 5000, 7),
        "item_categories": rng.integers(0, 40, (7, 3)),
    }


Arrays: TypeAlias = dict[str, np.ndarray]


def scores(inputs: Arrays, folder: Path, *words: str) -> tuple[str, Arrays]:
    """What rewrite-embeddings did, and what the compiled model gives."""
    made = works("compile", TOWERS, "--random-weights", "1", "-o", folder, "--json", *words)
    did = [p["did"] for p in made.json["passes"] if p["pass"].startswith("rewrite-embeddings")]
    return "".join(did), run_arrays(folder, folder.parent, **inputs)


@pytest.mark.parametrize("words", SCHEMES)
def test_a_scheme_is_followed(words: str, inputs: Arrays, tmp_path: Path) -> None:
    mesh, *rest = words.split()
    outside = rest if "--outside" in rest else []
    _, wanted = scores(inputs, tmp_path / "one", *outside)
    did, found = scores(inputs, tmp_path / "many", "--mesh", mesh, *rest)
    assert did == SCHEMES[words]
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-5)


def test_a_scheme_that_no_table_can_have() -> None:
    words = ["compile", TOWERS, "--random-weights", "1", "--dry-run", "--mesh", "dp=2"]
    said = refused(*words, "--embedding", "ra")
    assert "ra was requested, but no lookup can have it: @" in said
    assert "use one of R, RSD, CD, KD" in said
