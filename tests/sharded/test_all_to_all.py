"""All2AllDenseEmbedding over ranks against a plain dictionary: keys, policies, capacity, slots."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irc
from benchmarks.key_tables import Array, asked, bound, drawn, layer_for, looked_up, spread
from irc.errors import Error
from irc.frontends.layers import All2AllDenseEmbedding, Table, export_table, import_table
from irc.passes.embeddings.tables import table_shape
from irc.pipeline import run_pipeline
from tests.fresh import fresh


def same(got: Array, wanted: Array, what: object) -> None:
    """Raise unless all bits agree."""
    assert got.dtype == wanted.dtype and got.shape == wanted.shape, what
    assert np.array_equal(got.view(np.uint32), wanted.view(np.uint32)), what


def run(
    layer: Any, arrays: dict[str, Array], keys: Array, ranks: int, folder: Path, *options: str
) -> dict[str, Array]:
    """The results of a layer for some keys on several ranks."""
    spec = irc.Spec("i64", ("B", *keys.shape[1:]))
    module = spread(bound(layer, arrays, folder, spec), ranks, ", ".join(options or ["scheme=kd"]))
    return irc.evaluate(module, {"keys": keys})


@pytest.mark.parametrize("scheme", ["kd", "cd", "rsd", "r"])
def test_keys_find_their_rows_on_any_number_of_ranks(scheme: str, tmp_path: Path) -> None:
    rng = fresh(40)
    table = drawn(rng, 700, 8)
    for ranks in range(1, 9):
        layer, keys = layer_for(table, ranks), asked(rng, table, 840)
        wanted = looked_up(table, keys)
        assert not wanted.all() and wanted.any(), "both unseen keys and others"
        rows = run(layer, layer.arrays(table), keys, ranks, tmp_path, f"scheme={scheme}")["result0"]
        if scheme == "rsd":  # sums, and -0.0 + 0.0 is 0.0
            rows, wanted = rows + np.float32(0), wanted + np.float32(0)
        same(rows, wanted, ranks)


@pytest.mark.parametrize("ranks", [1, 3])
def test_onnx_runtime_finds_the_same_rows(ranks: int, tmp_path: Path) -> None:
    rng = fresh(41)
    table = drawn(rng, 300, 5)
    layer = layer_for(table, ranks, unseen="row:7", by_frequency=True)
    counts = rng.integers(0, 1000, len(table.keys))
    arrays = layer.arrays(table, counts)
    module = spread(bound(layer, arrays, tmp_path), ranks)
    irc.compile(module, tmp_path / "out")
    keys = asked(rng, table, 120)
    found = irc.load(tmp_path / "out").run({"keys": keys})["result0"]
    same(found, looked_up(table, keys, arrays["weight"][7]), ranks)


def unseen_rows(policy: str, arrays: dict[str, Array], rows: int) -> Any:
    """What a dictionary gives for unseen keys."""
    kind, _, number = policy.partition(":")
    if kind == "row":
        return arrays["weight"][int(number)]
    if kind == "oov":
        return lambda key: arrays["weight"][rows + key % int(number)]
    return 0.0


@pytest.mark.parametrize("unseen", ["zero", "flag", "row:3", "oov:11"])
@pytest.mark.parametrize("hashed", [True, False])
def test_unseen_keys_follow_the_policy_on_any_number_of_ranks(
    unseen: str, hashed: bool, tmp_path: Path
) -> None:
    rng = fresh(42)
    table = drawn(rng, 90, 4)
    if not hashed:
        table = Table(rng.permutation(90), table.rows)
    for ranks in (1, 2, 5):
        layer = layer_for(table, ranks, unseen=unseen, use_hashtable=hashed)
        oov = rng.standard_normal((11, 4)).astype(np.float32) if "oov" in unseen else None
        arrays = layer.arrays(table, oov=oov)
        keys = asked(rng, table, 120)
        keys[:5] = (-1, layer.rows, -(2**63), 2**32 + 5, 2**63 - 1)
        results = run(layer, arrays, keys, ranks, tmp_path)
        # without a hashtable every row number of the table is a key
        full = table if hashed else Table(np.arange(layer.rows), arrays["weight"][: layer.rows])
        wanted = looked_up(full, keys, unseen_rows(unseen, arrays, layer.rows))
        same(results["result0"], wanted, ranks)
        if unseen == "flag":
            assert np.array_equal(results["result1"], np.isin(keys, full.keys))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_policy_of_the_pass_is_for_unseen_keys(ranks: int, tmp_path: Path) -> None:
    """`error` counts them; `row:N` gives a row, but padding keys stay zeros."""
    rng = fresh(50)
    table = drawn(rng, 70, 4)
    keys = asked(rng, table, 60).reshape(12, 1, 5)
    keys[:, :, 0] = -7
    for policy in ("error", "row:4"):
        layer = layer_for(table, ranks, (1, 5), padding_key=-7)
        arrays = layer.arrays(table)
        module = bound(layer, arrays, tmp_path, irc.Spec("i64", ("B", 1, 5)))
        if ranks == 1:
            run_pipeline(module, f'rewrite-embeddings{{policy="{policy}"}}')
        found = irc.evaluate(spread(module, ranks, f'scheme=kd, policy="{policy}"'), {"keys": keys})
        otherwise = arrays["weight"][4] if policy == "row:4" else 0.0
        wanted = np.where((keys == -7)[..., None], 0, looked_up(table, keys, otherwise))
        same(found["result0"], wanted.astype(np.float32), policy)
        if policy == "error":
            unseen = np.count_nonzero((keys == -7) | ~np.isin(keys, table.keys))
            assert found["keys_out_of_range"] == unseen, "padding has no row either"


def combined(rows: Array, present: Array, combiner: str | None) -> Array:
    """The rows [B, slots, nnz, D] of each slot, their sum, or their mean over present keys."""
    rows = np.where(present[..., None], rows, 0)
    if combiner is None:
        return rows
    count = np.maximum(present.sum(-1), 1) if combiner == "mean" else np.ones(present.shape[:-1])
    return rows.astype(np.float64).sum(2) / count[..., None]


@pytest.mark.parametrize("combiner", [None, "sum", "mean"])
@pytest.mark.parametrize("padding", [None, 2**40])
def test_slots_are_combined(combiner: Any, padding: int | None, tmp_path: Path) -> None:
    rng = fresh(43)
    table = drawn(rng, 60, 4)
    keys = asked(rng, table, 12 * 3 * 5).reshape(12, 3, 5)
    present = np.ones(keys.shape, bool)
    if padding is not None:
        table.keys[0] = padding  # a key that pads has no row, though the table has one
        present = rng.random(keys.shape) < 0.6
        present[0, 0] = False
        keys[~present] = padding
        present = keys != padding
    for ranks, unseen in ((1, "zero"), (2, "row:2"), (3, "zero"), (1, "row:2")):
        options = {"combiner": combiner, "padding_key": padding, "unseen": unseen}
        layer = layer_for(table, ranks, (3, 5), **options)
        arrays = layer.arrays(table)
        rows = looked_up(table, keys, unseen_rows(unseen, arrays, layer.rows))
        wanted = combined(rows, present, combiner)
        got = run(layer, arrays, keys, ranks, tmp_path)["result0"]
        np.testing.assert_allclose(got, wanted, rtol=1e-6, err_msg=f"{ranks} {unseen}")


def test_narrow_floats_are_averaged_in_f32(tmp_path: Path) -> None:
    """The sum of the rows is above the largest f16."""
    table = Table(np.arange(3), np.array([[60000], [50016], [40000]], np.float16))
    layer = All2AllDenseEmbedding(3, 1, 1, 3, use_hashtable=False, combiner="mean", dtype="f16")
    keys = np.array([[[0, 1, 2]]])
    assert run(layer, layer.arrays(table), keys, 1, tmp_path)["result0"].item() == 50016


@pytest.mark.parametrize("ranks", [2])
def test_keys_beyond_the_capacity_are_an_error_that_names_it(ranks: int, tmp_path: Path) -> None:
    rng = fresh(44)
    table = drawn(rng, 200, 4)
    layer = layer_for(table, ranks)
    few, keys = table.keys[: 6 * ranks], asked(rng, table, 120 * ranks)

    def compiled(capacity: int) -> irc.Artifact:
        module = bound(layer, layer.arrays(table), tmp_path)
        spread(module, ranks, f"scheme=kd, capacity={capacity}")
        irc.compile(module, tmp_path / str(capacity))
        return irc.load(tmp_path / str(capacity))

    small = compiled(20)
    same(small.run({"keys": few})["result0"], looked_up(table, few), ranks)
    with pytest.raises(Error, match=r"need a capacity of \d+; compile with capacity=") as caught:
        small.run({"keys": keys})
    needed = int(re.findall(r"capacity=(\d+)", str(caught.value))[0])
    same(compiled(needed).run({"keys": keys})["result0"], looked_up(table, keys), ranks)


@pytest.mark.parametrize("ranks", [2, 8])
def test_hot_rows_need_no_capacity(ranks: int, tmp_path: Path) -> None:
    """The ten keys of most lookups have the first rows, which every rank has."""
    rng = fresh(46)
    table = drawn(rng, 400, 4)
    layer = layer_for(table, ranks, by_frequency=True)
    counts = rng.permutation(len(table.keys))
    arrays = layer.arrays(table, counts)
    keys = rng.choice(table.keys[counts >= len(counts) - 10], 840)
    keys[:: 840 // 8] = rng.choice(table.keys, 8)
    for hot, options in ((10, "scheme=kd, capacity=8, hot=10"), (0, "scheme=kd, capacity=8")):
        results = run(layer, arrays, keys, ranks, tmp_path, options)
        assert bool(results["capacity_overflow"]) == (hot == 0)
        if hot:
            same(results["result0"], looked_up(table, keys), ranks)


def test_padding_needs_no_capacity(tmp_path: Path) -> None:
    """Even where the key that pads has a row."""
    table = drawn(fresh(51), 50, 4)
    padding = int(table.keys[9])
    keys = np.full((12, 2, 5), padding)
    keys[:, 0, 3] = table.keys[:12]
    layer = layer_for(table, 2, (2, 5), padding_key=padding)
    results = run(layer, layer.arrays(table), keys, 2, tmp_path, "scheme=kd", "capacity=6")
    assert results["capacity_overflow"] == 0
    wanted = np.where((keys == padding)[..., None], 0, looked_up(table, keys))
    same(results["result0"], wanted.astype(np.float32), "padding")


@pytest.mark.parametrize("form", ["sok1", "sok2", "numpy"])
@pytest.mark.parametrize("hashed", [True, False])
def test_a_dump_of_some_gpus_runs_on_other_ranks(form: Any, hashed: bool, tmp_path: Path) -> None:
    rng = fresh(45)
    table = drawn(rng, 101, 3)
    if not hashed:
        table = Table(rng.permutation(101), table.rows)
    for gpus, ranks in ((1, 3), (4, 1), (5, 8)):
        export_table(table, tmp_path / f"{gpus}", "emb", form, gpus)
        read = import_table(tmp_path / f"{gpus}")
        layer = layer_for(table, ranks, use_hashtable=hashed)
        arrays = layer.arrays(read)
        keys = asked(rng, table, 840)
        rows = run(layer, arrays, keys, ranks, tmp_path)["result0"]
        same(rows, looked_up(table, keys), gpus)
        export_table(layer.table(arrays), tmp_path / "again", "emb", form, gpus)
        again = layer.arrays(import_table(tmp_path / "again"))
        assert all(np.array_equal(again[name], array) for name, array in arrays.items())


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("rows", "width", "hashed"), [(10**8, 128, True), (3 * 10**9, 16, False)])
def test_tables_beyond_32_bits_are_split(ranks: int, rows: int, width: int, hashed: bool) -> None:
    """Types and numbers of rows only: nothing is allocated."""
    layer = All2AllDenseEmbedding(
        rows // ranks, width, 1, 1, dynamic_input=True, use_hashtable=hashed, gpu_num=ranks
    )
    module = irc.trace(layer, {"keys": irc.Spec("i64", ("N",))}, {"N": (1, 840, 8400)})
    spread(module, ranks)
    held = [table_shape(weight) for weight in module.weights.values()]
    assert all(rows * width < 2**31 for rows, width in held)
    pieces, least = sum(n == width for _, n in held), layer.rows * width / ranks / 2**31
    assert least < pieces < least + 1, held


def test_an_index_of_more_than_31_bits_is_refused() -> None:
    with pytest.raises(Error) as caught:
        All2AllDenseEmbedding(2**30, 1, 1, 1, gpu_num=2)
    assert "expected at most 2147483647 keys of an index" in caught.value.message
