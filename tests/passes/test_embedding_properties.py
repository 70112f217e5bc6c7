"""Properties of every scheme of rewrite-embeddings: padding is not read, bits are kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from irc.backends.reference import evaluate
from tests.fresh import fresh
from tests.passes.embedding_lab import (
    PAIRS,
    Array,
    Lab,
    assert_same,
    distinct,
    drawn,
    looked_up,
    on_ranks,
)


def true_rows(scheme: str, rows: int, group_size: int, rank: int) -> int:
    """The number of rows of the table on a rank, without padding."""
    if scheme[0] == "K":
        return len(range(rank, rows, group_size))
    if scheme.startswith("R") and scheme != "R":
        part = -(-rows // group_size)
        return min(part, max(0, rows - rank * part))
    return rows


def poison(
    scheme: str, rows: int, width: int, group_size: int
) -> Callable[[int, str, Array], Array]:
    """A change of weights: NaN in all padding except the row of zeros."""

    def change(rank: int, name: str, array: Array) -> Array:
        end = rows if scheme in ("R", "CA", "CS", "CD") else -(-rows // group_size)
        zeros = array[end:][:1].copy()
        assert not zeros.any(), "the row of zeros is not zero"
        array[true_rows(scheme, rows, group_size, rank) :] = np.nan
        array[end : end + 1] = zeros
        if scheme[0] == "C":
            array[:rows, max(0, width - rank * array.shape[1]) :] = np.nan
        return array

    return change


@pytest.mark.parametrize(("wanted", "scheme"), PAIRS)
def test_padding_is_never_read(wanted: str, scheme: str, tmp_path: Path) -> None:
    rng = fresh(5)
    for rows, group_size in ((7, 4), (3, 8), (10, 3), (1, 2), (16, 4)):
        lab = Lab(tmp_path, distinct(rows, 5), (4, 6), wanted, group_size)
        ids = drawn(rng, group_size * -(-rows // group_size) + 2, (4, 6))
        for options in ("", ", sentinel=false"):
            module = lab.local(scheme, options)
            clean = on_ranks(module, ids)
            poisoned = on_ranks(module, ids, poison(scheme, rows, 5, group_size))
            for found, want in zip(poisoned, clean, strict=True):
                assert_same(found["y"], want["y"], (lab, scheme, options))
            assert_same(lab.rows(scheme, ids, options), looked_up(lab.table, ids), lab, scheme)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_all_bits_are_kept(dtype: str, tmp_path: Path) -> None:
    """A mask by multiplication would make NaN of infinity, and 0.0 of -0.0."""
    rng = fresh(6)
    kind = {"f32": np.uint32}.get(dtype, np.uint16)
    float_kind: Any = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}[dtype]
    table = rng.integers(0, 2 ** (8 * np.dtype(kind).itemsize), (23, 6)).astype(kind)
    table = table.view(float_kind)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 0], float_kind)
    table[5] = special
    table[20, :2] = np.array([1, 0x8001], kind).view(float_kind)  # denormal
    ids = drawn(rng, 23, (4, 6))
    ids[0, :3] = [5, 20, 5]
    for wanted, scheme in PAIRS:
        for group_size in (2, 3):
            lab = Lab(tmp_path, table, (4, 6), wanted, group_size)
            want = evaluate(lab.module(), {"ids": ids})["y"]
            if dtype == "f32":
                assert_same(want, looked_up(table, ids), "the reference itself")
            assert_same(lab.rows(scheme, ids), want, (lab.group_size, scheme), scheme)
