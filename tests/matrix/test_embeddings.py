"""Random lookups in sharded tables: every scheme gives the rows, on the reference and in ONNX."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from irc.backends.reference import evaluate
from irc.ir.layouts import split_array
from tests.backends.ranks import agrees
from tests.fresh import fresh
from tests.passes.embedding_lab import (
    GROUP_SIZES,
    PAIRS,
    Array,
    Lab,
    assert_same,
    distinct,
    localized,
    looked_up,
)

DRAWS = 12
POLICIES: dict[str, Any] = {
    "zero": lambda table, ids: looked_up(table, ids),
    "clamp": lambda table, ids: table[np.clip(ids, 0, len(table) - 1)],
    "row:0": lambda table, ids: table[np.where((ids >= 0) & (ids < len(table)), ids, 0)],
    "error": lambda table, ids: looked_up(table, ids),
}


def drawn_ids(rng: np.random.Generator, rows: int, shape: tuple[int, int], index: str) -> Array:
    """Ids around the table and the shards of its rows, the edges of their dtype, or one for all."""
    limits = np.iinfo(np.int64 if index == "i64" else np.int32)
    near = [-rows, *range(-2, rows + 9), limits.min, limits.max]
    near += [2**31, 2**32 + rows // 2, -(2**32)] if index == "i64" else []
    ids = rng.choice(np.array(near, limits.dtype), shape)
    return np.full_like(ids, rows // 2) if rng.random() < 0.2 else ids


@pytest.mark.parametrize(("wanted", "scheme"), PAIRS)
def test_every_scheme_finds_the_rows(wanted: str, scheme: str, tmp_path: Path) -> None:
    rng = fresh(crc32(f"{wanted} {scheme}".encode()))
    for number in range(DRAWS):
        rows, width = int(rng.integers(1, 60)), int(rng.integers(1, 20))
        shape = int(rng.integers(0, 9)), int(rng.integers(0, 9))
        index, policy = str(rng.choice(["i32", "i64"])), str(rng.choice(list(POLICIES)))
        hot = int(rng.choice([0, 0, 1, rows // 2, rows, rows + 5]))
        sentinel = str(rng.choice(["true", "false"]))
        options = f', policy="{policy}", sentinel={sentinel}, hot={hot}'
        ranks = int(rng.choice(GROUP_SIZES))
        lab = Lab(tmp_path, distinct(rows, width), shape, wanted, ranks, index)
        ids = drawn_ids(rng, rows, shape, index)
        module, step = lab.rewritten(scheme, options)
        split = 0 < hot < rows and scheme != "R"
        assert ("t.hot" in module.weights) == split, f"{lab} {options}: {step.stats.notes}"
        results = evaluate(module, {"ids": ids}), evaluate(localized(module), {"ids": ids})
        for result, what in zip(results, ("global", "local"), strict=True):
            where = (lab, options, what)
            assert_same(result["y"], POLICIES[policy](lab.table, ids), where, scheme)
            if policy == "error":
                outside = int(np.count_nonzero((ids < 0) | (ids >= rows)))
                assert result["ids_out_of_range"] == outside, where
        if number < 3 and ids.size:
            axes = module.main.args[0].type.global_type.axes
            parts = [split_array(ids, axes, module.mesh, rank) for rank in range(ranks)]
            agrees(module, {"ids": parts}, tmp_path)
