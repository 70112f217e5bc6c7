"""Bugs that embedding code had elsewhere, seeded into ours: a property test must fail for each.

The seeds are those of a table of known mistakes: a wrong owner, rows put one place off, no mask,
blocks of an exchange swapped, an offset of one row too many per rank, columns merged without a
transpose. `<=` for `<` in the bound is no bug here: the row behind the last is the row of zeros.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from irc.backends.reference import evaluate
from irc.errors import Error
from irc.ops import Le
from irc.ops.collective import AllGather, AllToAll
from irc.passes.localize import cyclic, forms, lookups
from tests.passes.embedding_lab import Array, Lab, assert_same, distinct
from tests.passes.test_embedding_properties import (
    test_p01_every_scheme_finds_the_rows_of_the_table as p01,
)
from tests.passes.test_embedding_properties import (
    test_p04_ids_outside_find_the_same_however_many_ranks as p04,
)
from tests.passes.test_embedding_properties import (
    test_p05_padding_is_never_looked_at as p05,
)
from tests.passes.test_embedding_properties_of_graphs import (
    test_p09_what_overflows_is_counted_and_the_rest_is_right as p09,
)
from tests.passes.test_embedding_properties_of_graphs import (
    test_p15_a_tied_table_serves_both_ends_and_padding_never_wins as p15,
)

Patch = pytest.MonkeyPatch
Seed = Callable[[Patch], None]


def edited(module: ModuleType, name: str, old: str, new: str, **names: Any) -> Seed:
    """A seed that changes one place in the source of a function, in which it uses more names."""
    source = textwrap.dedent(inspect.getsource(getattr(module, name)))
    assert source.count(old) == 1, f"{old!r} is not, or not once, in {name}"

    def seed(patch: Patch) -> None:
        scope: dict[str, Any] = dict(vars(module)) | names
        exec(compile(source.replace(old, new), f"<mutant of {name}>", "exec"), scope)
        patch.setattr(module, name, scope[name])

    return seed


def swapped_blocks(patch: Patch) -> None:
    """What arrives is joined in the wrong order."""
    right = AllToAll.combine

    def combine(op: AllToAll, shards: list[Array]) -> list[Array]:
        joined = right(op, shards)
        parts = [np.split(array, len(shards), axis=op.concat) for array in joined]
        return [np.concatenate(each[::-1], axis=op.concat) for each in parts]

    patch.setattr(AllToAll, "combine", combine)


def untransposed(patch: Patch) -> None:
    """Parts of columns are laid one behind the other, and called a matrix."""
    right_gather, right_exchange = AllGather.combine, AllToAll.combine

    def gather(op: AllGather, shards: list[Array]) -> list[Array]:
        shape = right_gather(op, shards)[0].shape
        return [np.concatenate(shards, axis=0).reshape(shape)] * len(shards)

    def exchange(op: AllToAll, shards: list[Array]) -> list[Array]:
        parts = [np.split(shard, len(shards), axis=op.split) for shard in shards]
        shapes = [array.shape for array in right_exchange(op, shards)]
        arrived = zip(*parts, strict=True)
        return [np.concatenate(a, axis=0).reshape(s) for a, s in zip(arrived, shapes, strict=True)]

    patch.setattr(AllGather, "combine", gather)
    patch.setattr(AllToAll, "combine", exchange)


WRONG_OWNER = edited(
    cyclic,
    "_queued",
    "Queued(known, row, owner, slot, fits)",
    "Queued(known, owner, row, slot, fits)",
)
ONE_OFF = edited(
    cyclic, "_picked", "Where(fits, place,", 'Where(fits, Add(place, builder.constant(1, "i32")),'
)
NO_MASK = edited(
    lookups, "own_rows", "Where(_between(builder, ids, start, end), ids, none)", "Add(ids, none)"
)
LONG_PARTS = edited(
    lookups, "own_rows", "builder.start(axes, part, kind)", "builder.start(axes, part + 1, kind)"
)
BOUND = edited(lookups, "_between", "Lt(ids, high)", "Le(ids, high)", Le=Le)
NO_END = edited(lookups, "own_rows", "if rows % ways:", "if False:")
NO_COUNT = edited(cyclic, "_overflow", "if ways == 1:", "if True:")
NO_TAIL = edited(forms, "_sharded_topk", "if size % ways:", "if False:")

KILLED: list[tuple[str, Seed, str, str]] = [
    ("owner_is_key_div_n", WRONG_OWNER, "split", "KD"),
    ("owner_is_key_div_n", WRONG_OWNER, "scattered", "KS"),
    ("owner_is_key_div_n", WRONG_OWNER, "whole", "KA"),
    ("rows_one_place_off", ONE_OFF, "split", "KD"),
    ("rows_one_place_off", ONE_OFF, "scattered", "KS"),
    ("no_mask", NO_MASK, "whole", "RA"),
    ("no_mask", NO_MASK, "scattered", "RS"),
    ("blocks_swapped", swapped_blocks, "scattered", "CS"),
    ("blocks_swapped", swapped_blocks, "split", "CD"),
    ("blocks_swapped", swapped_blocks, "split", "KD"),
    ("offset_of_one_row_more", LONG_PARTS, "whole", "RA"),
    ("offset_of_one_row_more", LONG_PARTS, "split", "RSD"),
    ("columns_without_transpose", untransposed, "whole", "CA"),
    ("columns_without_transpose", untransposed, "scattered", "CS"),
]


@pytest.mark.parametrize(
    ("seed", "wanted", "scheme"), [pytest.param(*k[1:], id=f"{k[0]}-{k[3]}") for k in KILLED]
)
def test_p01_fails_with(
    seed: Seed, wanted: str, scheme: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    _link(monkeypatch, seed)
    with pytest.raises((AssertionError, Error)):
        p01(wanted, scheme, tmp_path)


def _link(patch: Patch, seed: Seed) -> None:
    """Plant a seed; the forms are found in a table, which has to hold the mutant."""
    seed(patch)
    for name, module, function in (
        ("embedding", lookups, "embedding"),
        ("cyclic_embedding", cyclic, "cyclic_embedding"),
        ("sharded_topk", forms, "_sharded_topk"),
    ):
        patch.setitem(forms.FORMS, name, getattr(module, function))


@pytest.mark.parametrize("seed", [NO_MASK, LONG_PARTS])
def test_p04_fails_with(seed: Seed, tmp_path: Path, monkeypatch: Patch) -> None:
    _link(monkeypatch, seed)
    with pytest.raises((AssertionError, Error)):
        p04("zero", "i64", tmp_path)


@pytest.mark.parametrize(("wanted", "scheme"), [("whole", "RA"), ("split", "RSD")])
def test_p05_fails_where_the_last_ranks_have_no_end(
    wanted: str, scheme: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    _link(monkeypatch, NO_END)
    with pytest.raises(AssertionError):
        p05(wanted, scheme, tmp_path)


def test_p09_fails_where_ranks_count_for_themselves(tmp_path: Path, monkeypatch: Patch) -> None:
    _link(monkeypatch, NO_COUNT)
    with pytest.raises((AssertionError, Error)):
        p09("split", "KD", tmp_path)


def test_p15_fails_without_the_mask_of_the_tail(tmp_path: Path, monkeypatch: Patch) -> None:
    _link(monkeypatch, NO_TAIL)
    with pytest.raises(AssertionError):
        p15(tmp_path)


def test_a_bound_of_less_or_equal_changes_nothing(tmp_path: Path, monkeypatch: Patch) -> None:
    """An equivalent mutant: one row too far lies the row of zeros, or padding of zeros."""
    _link(monkeypatch, BOUND)
    for wanted, scheme in (("whole", "RA"), ("scattered", "RS"), ("whole", "CA")):
        for rows, ways in ((12, 4), (7, 4), (9, 2)):
            lab = Lab(tmp_path, distinct(rows, 4), (4, 6), wanted, ways)
            ids = np.arange(-4, 20, dtype=np.int32).reshape(4, 6)
            want = evaluate(lab.module(), {"ids": ids})["y"]
            assert_same(lab.rows(scheme, ids), want, (lab, scheme), scheme)
