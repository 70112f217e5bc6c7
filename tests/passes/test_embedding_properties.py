"""Properties of every scheme of rewrite-embeddings, 1 to 8: rows, policies, padding, duplicates."""

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
    SCHEMES,
    WAYS,
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
def test_p01_every_scheme_finds_the_rows_of_the_table(
    wanted: str, scheme: str, tmp_path: Path
) -> None:
    rng = fresh(1)
    shapes = SHAPES + [
        (int(rng.integers(1, 60)), int(rng.integers(1, 20)), tuple(rng.integers(1, 9, 2).tolist()))
        for _ in range(6)
    ]
    for rows, width, shape in shapes:
        for ways in WAYS:
            lab = Lab(tmp_path, distinct(rows, width), shape, wanted, ways)
            ids = drawn(rng, rows, shape)
            module, _ = lab.rewritten(scheme)
            want = looked_up(lab.table, ids)
            assert_same(evaluate(module, {"ids": ids})["y"], want, (lab, "global"))
            assert_same(evaluate(localized(module), {"ids": ids})["y"], want, lab, scheme)


def test_p02_schemes_agree(tmp_path: Path) -> None:
    rng = fresh(2)
    table = rng.standard_normal((41, 10)).astype(np.float32)
    ids = drawn(rng, 41, (6, 5))
    for ways in (1, *WAYS):
        found = [
            (scheme, Lab(tmp_path, table, (6, 5), wanted, ways).rows(scheme, ids))
            for wanted, scheme in PAIRS
        ]
        for scheme, rows in found:
            assert_same(rows, found[0][1], (ways, scheme), scheme)


def test_p03_neither_ranks_nor_the_order_of_rows_matter(tmp_path: Path) -> None:
    rng = fresh(3)
    table = rng.standard_normal((29, 4)).astype(np.float32)
    ids = rng.integers(0, 29, (4, 3)).astype(np.int32)
    place = rng.permutation(29)
    moved = np.empty_like(table)
    moved[place] = table
    for wanted, scheme in PAIRS:
        wanted_rows = Lab(tmp_path, table, (4, 3), wanted, 1).rows(scheme, ids)
        for ways in WAYS:
            lab = Lab(tmp_path, table, (4, 3), wanted, ways)
            assert_same(lab.rows(scheme, ids), wanted_rows, (scheme, ways), scheme)
            again = lab.change(table=moved).rows(scheme, place[ids].astype(np.int32))
            assert_same(again, wanted_rows, (scheme, ways, "moved"), scheme)


def strange_ids(rows: int, ways: int, index: str) -> Array:
    part = -(-rows // ways)
    found = [-1, 0, rows - 1, rows, ways * part - 1, ways * part, -(2**31), 2**31 - 1, 5, -rows]
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
def test_p04_ids_outside_find_the_same_however_many_ranks(
    policy: str, index: str, tmp_path: Path
) -> None:
    table = distinct(7, 4)
    for ways in (1, *WAYS):
        ids = strange_ids(7, ways, index)
        outside = int(np.count_nonzero((ids < 0) | (ids >= 7)))
        for wanted, scheme in PAIRS:
            shape = (ids.shape[0], ids.shape[1])
            lab = Lab(tmp_path, table, shape, wanted, ways, index)
            for sentinel in ("", ", sentinel=false"):
                module = lab.local(scheme, f', policy="{policy}"{sentinel}')
                found = evaluate(module, {"ids": ids})
                assert_same(found["y"], POLICIES[policy](table, ids), (lab, scheme), scheme)
                if policy == "error":
                    assert found["ids_outside"] == outside, (lab, scheme)


def true_rows(scheme: str, rows: int, ways: int, rank: int) -> int:
    """How many rows of the table a rank holds."""
    if scheme[0] == "K":
        return len(range(rank, rows, ways))
    if scheme.startswith("R") and scheme != "R":
        part = -(-rows // ways)
        return min(part, max(0, rows - rank * part))
    return rows


def poison(scheme: str, rows: int, width: int, ways: int) -> Callable[[int, str, Array], Array]:
    """NaN wherever a rank's table holds neither rows of the table nor the row of zeros."""

    def change(rank: int, name: str, array: Array) -> Array:
        end = rows if scheme in ("R", "CA", "CS", "CD") else -(-rows // ways)
        zeros = array[end:][:1].copy()
        assert not zeros.any(), "the row of zeros is none"
        array[true_rows(scheme, rows, ways, rank) :] = np.nan
        array[end : end + 1] = zeros
        if scheme[0] == "C":
            array[:rows, max(0, width - rank * array.shape[1]) :] = np.nan
        return array

    return change


@pytest.mark.parametrize(("wanted", "scheme"), PAIRS)
def test_p05_padding_is_never_looked_at(wanted: str, scheme: str, tmp_path: Path) -> None:
    rng = fresh(5)
    for rows, ways in ((7, 4), (3, 8), (10, 3), (1, 2), (16, 4)):
        lab = Lab(tmp_path, distinct(rows, 5), (4, 6), wanted, ways)
        ids = drawn(rng, ways * -(-rows // ways) + 2, (4, 6))
        for options in ("", ", sentinel=false"):
            module = lab.local(scheme, options)
            clean = on_ranks(module, ids)
            poisoned = on_ranks(module, ids, poison(scheme, rows, 5, ways))
            for found, want in zip(poisoned, clean, strict=True):
                assert_same(found["y"], want["y"], (lab, scheme, options))
            assert_same(lab.rows(scheme, ids, options), looked_up(lab.table, ids), lab, scheme)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_p06_any_bits_arrive(dtype: str, tmp_path: Path) -> None:
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
        for ways in (2, 3):
            lab = Lab(tmp_path, table, (4, 6), wanted, ways)
            want = evaluate(lab.module(), {"ids": ids})["y"]
            if dtype == "f32":
                assert_same(want, looked_up(table, ids), "the reference itself")
            assert_same(lab.rows(scheme, ids), want, (lab.ways, scheme), scheme)


@pytest.mark.parametrize(("wanted", "scheme"), PAIRS)
def test_p07_ids_may_repeat_and_stand_in_any_order(
    wanted: str, scheme: str, tmp_path: Path
) -> None:
    table = distinct(24, 3)
    for ways in WAYS:
        lab = Lab(tmp_path, table, (8, 3), wanted, ways)
        module = lab.local(scheme)
        rising = np.arange(24, dtype=np.int32)
        for row in (
            np.full(24, 7),
            rising,
            rising[::-1],
            rising * ways % 24,
            rising // 4,
            np.where(rising % 2, 3, 20),
        ):
            ids = row.astype(np.int32).reshape(8, 3)
            assert_same(evaluate(module, {"ids": ids})["y"], table[ids], (ways, scheme), scheme)


@pytest.mark.parametrize(("wanted", "scheme"), PAIRS)
def test_p08_ids_in_another_order_give_rows_in_that_order(
    wanted: str, scheme: str, tmp_path: Path
) -> None:
    rng = fresh(8)
    for ways in WAYS:
        lab = Lab(tmp_path, distinct(19, 4), (5, 4), wanted, ways)
        module = lab.local(scheme)
        ids, order = drawn(rng, 19, (5, 4)), rng.permutation(20)
        rows = evaluate(module, {"ids": ids})["y"].reshape(20, 4)
        moved = ids.reshape(-1)[order].reshape(5, 4)
        again = evaluate(module, {"ids": moved})["y"].reshape(20, 4)
        assert_same(again, rows[order], (ways, scheme), scheme)


def test_every_scheme_is_there() -> None:
    assert {scheme for names in SCHEMES.values() for scheme in names} == {
        *("R", "RA", "RS", "RSD", "CA", "CS", "CD", "KA", "KS", "KD")
    }
