"""Random lookups in sharded tables: every scheme gives the rows, on the reference and in ONNX."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from irc.backends.reference import evaluate
from irc.ir.core import Module
from irc.ir.layouts import split_array
from irc.ops import ScatterElements
from irc.passes.embeddings import tables
from irc.pipeline import run_pipeline
from tests.backends.ranks import agrees
from tests.fresh import fresh
from tests.passes.embedding_lab import (
    GROUP_SIZES,
    PAIRS,
    Array,
    Lab,
    any_bits,
    assert_same,
    distinct,
    localized,
    looked_up,
    on_ranks,
)

DRAWS = 16
LIMIT = 90  # elements of a piece of a table on a rank, where tables become several
MESHES = ("tp={n}", "tp={n}", "tp={n}, other=2", "other=2, tp={n}")
MOVED: dict[str, Callable[[Array, int], Array]] = {
    "zero": lambda ids, rows: ids,
    "error": lambda ids, rows: ids,
    "clamp": lambda ids, rows: np.clip(ids, 0, rows - 1),
    "row:0": lambda ids, rows: np.where((ids >= 0) & (ids < rows), ids, 0),
}


@dataclass(frozen=True)
class Lookup:
    """One random lookup by a scheme, its ids, and the options of the pass."""

    lab: Lab
    scheme: str
    ids: Array
    policy: str
    sentinel: str
    hot: int
    capacity: int
    pieces: bool

    @property
    def options(self) -> str:
        """The options other than the scheme."""
        capacity = f", capacity={self.capacity}" if self.capacity else ""
        return f', policy="{self.policy}", sentinel={self.sentinel}, hot={self.hot}{capacity}'

    @property
    def rows(self) -> int:
        """The number of rows of the table."""
        return len(self.lab.table)

    def overflow(self) -> tuple[Array, int]:
        """Which ids exceed the capacity, and the capacity that all ids need."""
        ids, size = MOVED[self.policy](self.ids, self.rows), self.lab.group_size
        hot = self.hot if 0 < self.hot < self.rows else 0
        lost, used = np.zeros(ids.shape, bool), dict[tuple[int, int], int]()
        dim = {"replicated": None, "scattered": 1, "sharded": 0}[self.lab.wanted]
        for place, i in np.ndenumerate(ids):
            if hot <= i < self.rows:
                shard = 0 if dim is None else place[dim] // -(-ids.shape[dim] // size)
                queue = shard, (int(i) - hot) % size
                lost[place] = used.setdefault(queue, 0) >= self.capacity
                used[queue] += 1
        return lost, max(used.values(), default=0)

    def check(self, results: dict[str, Array], what: object) -> None:
        """Raise unless these are the rows, and the numbers that report errors."""
        wanted = looked_up(self.lab.table, MOVED[self.policy](self.ids, self.rows))
        if self.capacity:
            lost, needed = self.overflow()
            wanted[lost] = 0
            assert (needed > self.capacity) == lost.any()
            assert results["capacity_overflow"] == (needed if lost.any() else 0), what
        if self.policy == "error":
            outside = np.count_nonzero((self.ids < 0) | (self.ids >= self.rows))
            assert results["ids_out_of_range"] == outside, what
        assert_same(results["y"], wanted, what, self.scheme)

    def check_ranks(self, local: Module, whole: dict[str, Array]) -> None:
        """Raise unless each rank has its shard of the results, whatever is in the padding."""
        change = self.poison if list(local.weights) == ["t"] else None
        types = [value.type.global_type for value in local.main.returned]
        names = local.main.result_names()
        for rank, results in enumerate(on_ranks(local, self.ids, change)):
            for name, type in zip(names, types, strict=True):
                mine, true = (
                    split_array(array, type.axes, local.mesh, rank)
                    for array in (whole[name], np.ones(whole[name].shape, np.bool_))
                )
                assert_same(results[name][true], mine[true], (self, rank), self.scheme)

    def poison(self, rank: int, name: str, array: Array) -> Array:
        """A rank's table, with NaN in all padding except the row of zeros."""
        size, place = self.lab.group_size, self.lab.module().mesh.coordinates(rank)["tp"]
        part = -(-self.rows // size)
        end, mine = (self.rows, self.rows) if self.scheme in ("R", "CA", "CS", "CD") else (part, 0)
        if self.scheme[0] == "K":
            mine = len(range(place, self.rows, size))
        elif not mine:
            mine = min(part, max(0, self.rows - place * part))
        zeros = array[end : end + 1].copy()
        assert not zeros.any(), "the row of zeros is not zero"
        array[mine:] = np.nan
        array[end : end + 1] = zeros
        if self.scheme[0] == "C":
            array[:mine, max(0, self.lab.table.shape[1] - place * array.shape[1]) :] = np.nan
        return array


def draw(rng: np.random.Generator, folder: Path, wanted: str, scheme: str) -> Lookup:
    """A random lookup: odd sizes, perhaps no ids, any bits in the table, some groups."""
    rows, width = int(rng.integers(1, 60)), int(rng.integers(1, 20))
    shape, ranks = (int(rng.integers(0, 9)), int(rng.integers(0, 9))), int(rng.choice(GROUP_SIZES))
    index, dtype = str(rng.choice(["i32", "i64"])), str(rng.choice(["f32", "f32", "f16", "bf16"]))
    mesh = str(rng.choice(MESHES if ranks < 8 else MESHES[:1])).format(n=ranks)
    table = (any_bits if rng.random() < 0.5 else distinct)(rows, width, dtype)
    capacity = int(rng.choice([0, 1, 2, 5, 40])) if scheme[0] == "K" else 0
    return Lookup(
        lab=Lab(folder, table, shape, wanted, ranks, index, mesh=mesh),
        scheme=scheme,
        ids=drawn_ids(rng, rows, shape, index),
        policy=str(rng.choice(list(MOVED))),
        sentinel=str(rng.choice(["true", "false"])),
        hot=int(rng.choice([0, 0, 1, rows // 2, rows, rows + 5])),
        capacity=capacity,
        pieces=not capacity and rng.random() < 1 / 3,
    )


def drawn_ids(rng: np.random.Generator, rows: int, shape: tuple[int, int], index: str) -> Array:
    """Ids around the table and the shards of its rows, the edges of their dtype, or one for all."""
    limits = np.iinfo(np.int64 if index == "i64" else np.int32)
    near = [-rows, *range(-2, rows + 9), limits.min, limits.max]
    near += [2**31, 2**32 + rows // 2, -(2**32)] if index == "i64" else []
    ids = rng.choice(np.array(near, limits.dtype), shape)
    return np.full_like(ids, rows // 2) if rng.random() < 0.2 else ids


@pytest.fixture(autouse=True)
def no_slot_is_written_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runtimes leave open which of two updates of one element wins."""
    plain = ScatterElements.evaluate

    def watched(op: ScatterElements, x: Array, indices: Array, updates: Array) -> Any:
        assert len(np.unique(indices)) == indices.size, indices
        return plain(op, x, indices, updates)

    monkeypatch.setattr(ScatterElements, "evaluate", watched)


@pytest.mark.parametrize(("wanted", "scheme"), PAIRS)
def test_every_scheme_finds_the_rows(
    wanted: str, scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = fresh(crc32(f"{wanted} {scheme}".encode()))
    for number in range(DRAWS):
        drawn = draw(rng, tmp_path, wanted, scheme)
        with monkeypatch.context() as patch:
            if drawn.pieces:
                patch.setattr(tables, "LIMIT", LIMIT)
            module, step = drawn.lab.rewritten(scheme, drawn.options)
        hot = 0 < drawn.hot < drawn.rows and scheme != "R"
        assert ("t.hot" in module.weights) == hot, f"{drawn}: {step.stats.notes}"
        several = drawn.pieces and drawn.lab.table.size > LIMIT * drawn.lab.group_size
        assert not several or len(module.weights) > 1 + hot
        text, whole = str(module), evaluate(module, {"ids": drawn.ids})
        drawn.check(whole, (drawn, "global"))
        if not hot and not drawn.pieces:
            again = f"{{scheme={scheme}{drawn.options}}}" if scheme[0] != "K" else ""
            run_pipeline(module, f"rewrite-embeddings{again}")
            assert str(module) == text, "a second run changes the module"
        local = localized(module)
        drawn.check(evaluate(local, {"ids": drawn.ids}), (drawn, "local"))
        drawn.check_ranks(local, whole)
        if number < 3 and drawn.ids.size and drawn.lab.table.dtype == np.float32:
            axes = local.main.args[0].type.global_type.axes
            shards = [split_array(drawn.ids, axes, local.mesh, r) for r in range(local.mesh.ranks)]
            agrees(local, {"ids": shards}, tmp_path)
