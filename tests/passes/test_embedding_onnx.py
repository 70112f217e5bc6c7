"""The schemes on ONNX Runtime, a thread per rank: bit-equal to the reference for all ids."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from irc.backends.reference import evaluate_ranks
from irc.ir.core import Module
from irc.ir.layouts import split_array
from tests.backends.ranks import loaded, rank_results
from tests.fresh import fresh
from tests.passes.embedding_lab import CYCLIC, PAIRS, Array, Lab, bits, distinct, drawn
from tests.passes.test_embedding_properties import strange_ids


def same_bits(module: Module, ids: Array, folder: Path) -> None:
    """Every rank's results on ONNX Runtime are those of the reference."""
    layout = module.main.argument_layout(module.main.args[0])
    ranks = range(module.mesh.ranks)
    given = [split_array(ids, layout.axes, module.mesh, rank) for rank in ranks]
    program = loaded(module, folder)
    found = rank_results(program, {"ids": given}, module.mesh.ranks)
    for got, want in zip(found, evaluate_ranks(module, {"ids": given}), strict=True):
        assert list(got) == list(want)
        for name, array in want.items():
            assert np.array_equal(bits(got[name]), bits(array)), name


@pytest.mark.parametrize("policy", ["zero", "clamp", "row:2", "error"])
@pytest.mark.parametrize(("wanted", "scheme"), PAIRS)
def test_out_of_range_ids(wanted: str, scheme: str, policy: str, tmp_path: Path) -> None:
    ids = strange_ids(7, 3, "i64")
    lab = Lab(tmp_path, distinct(7, 5), (ids.shape[0], ids.shape[1]), wanted, 3, "i64")
    for sentinel in ("", ", sentinel=false"):
        same_bits(lab.local(scheme, f', policy="{policy}"{sentinel}'), ids, tmp_path)


@pytest.mark.parametrize(("wanted", "scheme"), PAIRS)
def test_odd_sizes(wanted: str, scheme: str, tmp_path: Path) -> None:
    rng = fresh(30)
    for rows, width, shape in ((3, 5, (2, 3)), (37, 6, (4, 8)), (1, 1, (1, 1))):
        ids = drawn(rng, rows, shape)
        same_bits(
            Lab(tmp_path, distinct(rows, width), shape, wanted, 4).local(scheme), ids, tmp_path
        )


@pytest.mark.parametrize("once", ["false", "true"])
@pytest.mark.parametrize(("wanted", "scheme"), CYCLIC)
def test_capacity_overflow(wanted: str, scheme: str, once: str, tmp_path: Path) -> None:
    ids = drawn(fresh(31), 13, (4, 6))
    lab = Lab(tmp_path, distinct(13, 3), (4, 6), wanted, 2)
    same_bits(lab.local(scheme, f", capacity=2, distinct={once}"), ids, tmp_path)
