"""Properties of every scheme of rewrite-embeddings: rows, index policies, padding, bits."""

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
    GROUP_SIZES,
    PAIRS,
    Array,
    Lab,
    assert_same,
    distinct,
    drawn,
    localized,
    looked_up,
    on_ranks,
)

SHAPES = [  # rows, width, ids: few rows, ranks without rows, odd sizes, one token, none
    (1, 1, (1, 1)),
    (3, 5, (2, 3)),
    (7, 1, (1, 1)),
    (37, 6, (4, 8)),
    (64, 16, (8, 2)),
    (11, 3, (0, 4)),
    (9, 2, (3, 0)),
]


@pytest.mark.parametrize(("wanted", "scheme"), PAIRS)
def test_every_scheme_finds_the_rows_of_the_table(wanted: str, scheme: str, tmp_path: Path) -> None:
    rng = fresh(1)
    shapes = SHAPES + [
        (int(rng.integers(1, 60)), int(rng.integers(1, 20)), tuple(rng.integers(1, 9, 2).tolist()))
        for _ in range(6)
    ]
    for rows, width, shape in shapes:
        for group_size in GROUP_SIZES:
            lab = Lab(tmp_path, distinct(rows, width), shape, wanted, group_size)
            ids = drawn(rng, rows, shape)
            module, _ = lab.rewritten(scheme)
            want = looked_up(lab.table, ids)
            assert_same(evaluate(module, {"ids": ids})["y"], want, (lab, "global"))
            local = localized(module)
            assert_same(evaluate(local, {"ids": ids})["y"], want, lab, scheme)
            same = np.full_like(ids, rows // 2)  # all ids are on one rank
            want = looked_up(lab.table, same)
            assert_same(evaluate(local, {"ids": same})["y"], want, (lab, "same"), scheme)


@pytest.mark.parametrize(("wanted", "scheme"), PAIRS)
def test_hot_rows_are_on_every_rank(wanted: str, scheme: str, tmp_path: Path) -> None:
    rng = fresh(2)
    for rows, hot in ((7, 1), (37, 9), (12, 11), (5, 5), (3, 8)):
        for group_size in GROUP_SIZES:
            lab = Lab(tmp_path, distinct(rows, 3), (4, 8), wanted, group_size, "i64")
            ids = drawn(rng, rows, (4, 8), "i64")
            module, step = lab.rewritten(scheme, f", hot={hot}")
            split = hot < rows and scheme != "R"
            why = f"its first {hot} rows are on every rank" if split else "hot has no effect"
            assert scheme == "R" or why in step.stats.notes[-1]
            assert ("t.hot" in module.weights) == split, "no larger than the table"
            assert not split or module.weights["t.hot"].type.shape == (hot, 3)
            want = looked_up(lab.table, ids)
            assert_same(evaluate(module, {"ids": ids})["y"], want, (lab, "global"))
            assert_same(evaluate(localized(module), {"ids": ids})["y"], want, lab, scheme)
            if split and scheme[0] == "K":
                module = lab.local(scheme, f", hot={hot}, capacity=1")
                found = evaluate(module, {"ids": np.where(ids < hot, ids, -1)})
                assert not found["capacity_overflow"], "hot rows need no slots"


def strange_ids(rows: int, group_size: int, index: str) -> Array:
    part = -(-rows // group_size)
    found = [-1, 0, rows - 1, rows, group_size * part - 1, group_size * part]
    found += [-(2**31), 2**31 - 1, 5, -rows]
    if index == "i64":
        found += [2**31, 2**32 + 3, -(2**63), 2**63 - 1, -(2**32) + 3, 2**32 * rows]
    found += [0] * (-len(found) % 16)
    return np.array(found, np.int64 if index == "i64" else np.int32).reshape(8, -1)


POLICIES: dict[str, Any] = {
    "zero": lambda table, ids: looked_up(table, ids),
    "clamp": lambda table, ids: table[np.clip(ids, 0, len(table) - 1)],
    "row:2": lambda table, ids: table[np.where((ids >= 0) & (ids < len(table)), ids, 2)],
    "error": lambda table, ids: looked_up(table, ids),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("index", ["i32", "i64"])
def test_out_of_range_ids_follow_the_policy_on_any_number_of_ranks(
    policy: str, index: str, tmp_path: Path
) -> None:
    table = distinct(7, 4)
    for group_size in (1, *GROUP_SIZES):
        ids = strange_ids(7, group_size, index)
        outside = int(np.count_nonzero((ids < 0) | (ids >= 7)))
        for wanted, scheme in PAIRS:
            shape = (ids.shape[0], ids.shape[1])
            lab = Lab(tmp_path, table, shape, wanted, group_size, index)
            for sentinel in ("", ", sentinel=false"):
                module = lab.local(scheme, f', policy="{policy}"{sentinel}')
                found = evaluate(module, {"ids": ids})
                assert_same(found["y"], POLICIES[policy](table, ids), (lab, scheme), scheme)
                if policy == "error":
                    assert found["ids_out_of_range"] == outside, (lab, scheme)


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
