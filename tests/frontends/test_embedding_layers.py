"""Embeddings of recommenders: slots, frozen keys, the layer and the files of SparseOperationKit."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import irc
from irc.errors import Error
from irc.frontends import Module
from irc.frontends.layers import (
    All2AllDenseEmbedding,
    FrozenIndex,
    SlotEmbedding,
    Table,
    export_table,
    frozen_levels,
    import_table,
)
from tests.fresh import fresh

RESERVED = 2**63 - 1


def results(layer: Module, spec: irc.Spec, ids: Any, weights: dict[str, Any]) -> Any:
    name = "ids" if isinstance(layer, SlotEmbedding) else "keys"
    module = irc.trace(layer, {name: spec})
    return irc.evaluate(module, {name: ids}, weights=weights)["result0"]


def table(rows: int, width: int) -> Any:
    return np.arange(1, rows * width + 1, dtype=np.float32).reshape(rows, width)


def test_slots_share_a_table() -> None:
    weight = table(9, 2)
    ids = np.array([[[0, 1], [3, 4]], [[4, -1], [5, 0]]], np.int64)
    found = results(SlotEmbedding((4, 5), 2), irc.Spec("i64", ("B", 2, 2)), ids, {"weight": weight})
    want = [[weight[[0, 1]], weight[[7, 8]]], [np.zeros((2, 2)), [np.zeros(2), weight[4]]]]
    assert np.array_equal(found, np.array(want, np.float32))


def test_dense_rows_without_a_hashtable() -> None:
    layer = All2AllDenseEmbedding(5, 3, 2, 4, use_hashtable=False, gpu_num=2)
    ids = fresh(1).integers(0, 10, (6, 2, 4)).astype(np.int64)
    found = results(layer, irc.Spec("i64", ("B", 2, 4)), ids, {"weight": table(10, 3)})
    assert np.array_equal(found, table(10, 3)[ids])
    flat = results(layer, irc.Spec("i64", ("B", 8)), ids.reshape(6, 8), {"weight": table(10, 3)})
    assert np.array_equal(flat, found)


def test_keys_of_a_hashtable() -> None:
    keys = fresh(2).choice(10**12, 200, replace=False).astype(np.int64) - 5 * 10**11
    levels = frozen_levels(keys)
    weights = {f"index.levels.{i}.keys": level for i, level in enumerate(levels)}
    weight, order = table(200, 3), np.sort(keys)
    asked = np.append(keys[:30], [keys.max() + 1, RESERVED, -RESERVED])
    spec = irc.Spec("i64", ("N",))
    layer = All2AllDenseEmbedding(100, 3, 1, 1, dynamic_input=True, gpu_num=2)
    found = results(layer, spec, asked, {"weight": weight} | weights)
    assert np.array_equal(found[:30], weight[np.searchsorted(order, keys[:30])])
    assert not found[30:].any()


def test_an_index_takes_narrow_keys() -> None:
    levels = {f"levels.{i}.keys": level for i, level in enumerate(frozen_levels([3, -7, 90], 2))}
    found = results(
        FrozenIndex(3, 2), irc.Spec("i32", ("N",)), np.array([90, -7, 4, 3], np.int32), levels
    )
    assert found.tolist() == [2, 0, -1, 1]


def traced(shape: tuple[object, ...], dtype: str = "i64", **options: Any) -> Any:
    sizes: dict[str, Any] = {"slot_num": 3, "nnz_per_slot": 1} | options
    layer = All2AllDenseEmbedding(4, 2, **sizes)
    return irc.trace(layer, {"keys": irc.Spec(dtype, shape)})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: frozen_levels([1, 1]), "all distinct and below"),
        (lambda: frozen_levels([]), "expected at least one key"),
        (lambda: frozen_levels([RESERVED]), f"below {RESERVED}"),
        (lambda: frozen_levels([1, 2], 2, 1), "expected at most 1 keys, found 2"),
        (lambda: FrozenIndex(0), "an index needs at least 1 key"),
        (lambda: FrozenIndex(4, 1), "a branching of at least 2"),
        (lambda: FrozenIndex(2**31), "expected at most 2147483647 keys of an index"),
        (lambda: made(key_dtype="f32"), "key_dtype is 'f32'"),
        (lambda: made(combiner="max"), "combiner is 'max', but it must be sum or mean"),
        (lambda: made(combiner="sum", dynamic_input=True), "there are no slots to combine"),
        (lambda: made(by_frequency=True, use_hashtable=False), "by_frequency needs use_hashtable"),
        (lambda: made(unseen="clamp"), "unseen is 'clamp', but it must be zero, flag, row:N"),
        (lambda: made(unseen="oov:0"), "unseen is 'oov:0', but it must be"),
        (lambda: made(unseen="row:4"), "unseen is 'row:4', but the table has 4 rows"),
        (lambda: made().arrays(TABLE), "the layer has vectors of 2, the table 3"),
        (lambda: made(3).arrays(TABLE, np.ones(2)), "expected counts for by_frequency"),
        (
            lambda: made(3, use_hashtable=False).arrays(TABLE, np.ones(2)),
            "expected counts for by_frequency",
        ),
        (lambda: made(3, by_frequency=True).arrays(TABLE), "expected counts for by_frequency"),
        (lambda: made(3, unseen="oov:2").arrays(TABLE), "expected `oov` rows for unseen='oov:M'"),
        (lambda: made(3).arrays(TABLE, oov=np.ones(3)), "expected `oov` rows for unseen='oov:M'"),
        (
            lambda: made(3, unseen="oov:2").arrays(TABLE, oov=np.ones(3)),
            "oov is (3,), but it must be (2, 3)",
        ),
        (
            lambda: made(3, by_frequency=True).arrays(TABLE, np.ones(3)),
            "expected a count for each of 2 keys, not (3,)",
        ),
        (
            lambda: irc.trace(
                made(key_dtype="uint32", padding_key=-1), {"keys": irc.Spec("i32", ("B", 1, 1))}
            ),
            "give the number of the same bits, 4294967295",
        ),
        (lambda: made(3, use_hashtable=False).arrays(TABLE), "must be row numbers below 4"),
        (lambda: made(3, use_hashtable=False).arrays(TWICE), "expected distinct keys"),
        (lambda: traced(("B", 2, 1)), "keys are [B, 3, 1], not"),
        (lambda: traced(("B", 3, 1), "f32"), "expected keys of i32 or i64, found f32[B, 3, 1]"),
        (lambda: traced(("B", 3), nnz_per_slot=0), "nnz_per_slot 0; expected at least 1"),
        (lambda: Table(np.array([1.5]), np.ones((1, 3))), "the table has keys of float64"),
        (lambda: Table(np.array([2**63], np.uint64), np.ones((1, 3))), "keys of 2^63 and more"),
        (lambda: traced(("B", 3, 1), dynamic_input=True), "with dynamic_input keys are [N]"),
    ],
)
def test_wrong_arguments(make: Any, message: str) -> None:
    with pytest.raises(Error) as caught:
        make()
    assert message in caught.value.message


TABLE = Table(np.array([-1, 2]), np.ones((2, 3), np.float32))
TWICE = Table(np.array([2, 2]), np.ones((2, 3), np.float32))


def made(width: int = 2, **options: Any) -> All2AllDenseEmbedding:
    return All2AllDenseEmbedding(4, width, 1, 1, **options)


def test_training_is_accepted_and_inserts_no_keys() -> None:
    class Scorer(Module):
        def __init__(self, training: bool) -> None:
            self.layer, self.training = made(use_hashtable=False), training

        def forward(self, keys: Any) -> Any:
            return self.layer(keys, training=self.training)

    keys = {"keys": irc.Spec("i64", ("B", 1, 1))}
    with pytest.warns(UserWarning, match="training=True has no effect: .* inserts no keys"):
        module = irc.trace(Scorer(training=True), keys)
    assert str(module) == str(irc.trace(Scorer(training=False), keys))


@pytest.mark.parametrize(
    "key_dtype", [np.int64, np.dtype("int64"), SimpleNamespace(name="int64")], ids=str
)
def test_dtypes_of_keys(key_dtype: Any) -> None:
    """Names of irc, dtypes of numpy, and TensorFlow's, which have a name."""
    assert made(key_dtype=key_dtype).key_dtype == "int64"


def test_an_initializer_is_ignored_with_a_reason() -> None:
    with pytest.warns(UserWarning, match="has no effect: only training inserts keys"):
        made(embedding_initializer="ones")


@pytest.mark.parametrize("hashed", [True, False])
def test_keys_of_32_bits_without_a_sign(hashed: bool) -> None:
    """An i32 has the bits of the key; an i64 the key itself. Without uint32 i32 keeps its sign."""
    keys = np.array([2**32 - 1, 7, 2**31, -1] if hashed else [1, 0, 2, 3])
    pairs = Table(keys, table(4, 3))
    for key_dtype in ("uint32", "int64"):
        layer = All2AllDenseEmbedding(4, 3, 1, 1, True, use_hashtable=hashed, key_dtype=key_dtype)
        arrays = layer.arrays(pairs)
        asked = np.array([2**32 - 1, 7, 2**31, 1], np.uint32)
        wide = results(layer, irc.Spec("i64", ("N",)), asked.astype(np.int64), arrays)
        bits = results(layer, irc.Spec("i32", ("N",)), asked.view(np.int32), arrays)
        rows = dict(zip(keys.tolist(), pairs.rows, strict=True))
        wanted = [rows.get(key, np.zeros(3)) for key in asked.tolist()]
        assert np.array_equal(wide, wanted)
        signed = [rows.get(key, np.zeros(3)) for key in asked.view(np.int32).tolist()]
        assert np.array_equal(bits, wanted if key_dtype == "uint32" else signed)


def test_frequent_keys_have_the_first_rows() -> None:
    rng = fresh(3)
    keys, counts = rng.permutation(50) * 10**15, rng.permutation(50)
    layer = All2AllDenseEmbedding(60, 2, 1, 1, dynamic_input=True, by_frequency=True)
    arrays = layer.arrays(Table(keys, table(50, 2)), counts)
    assert np.array_equal(arrays["weight"][:50], table(50, 2)[np.argsort(-counts)])
    found = results(layer, irc.Spec("i64", ("N",)), np.append(keys, 5), arrays)
    assert np.array_equal(found, np.append(table(50, 2), [[0, 0]], 0))


@pytest.mark.parametrize("unseen", ["zero", "flag", "row:2500000000", "oov:7"])
def test_narrow_keys_of_more_rows_than_they_count(unseen: str) -> None:
    """No number of a row overflows i32; only types are looked at."""
    layer = All2AllDenseEmbedding(3 * 10**9, 1, 1, 1, True, use_hashtable=False, unseen=unseen)
    module = irc.trace(layer, {"keys": irc.Spec("i32", ("N",))})
    (lookup,) = [op for op in module.main if op.opname == "embedding"]
    assert lookup.operands[0].type.dtype == "i64"


def random_table(count: int = 37) -> Table:
    rng = fresh(60)
    keys = rng.choice(2**50, count, replace=False) - 2**49
    return Table(keys, rng.standard_normal((count, 5)).astype(np.float32))


def pairs(of: Table) -> dict[int, bytes]:
    return {int(key): row.tobytes() for key, row in zip(of.keys, of.rows, strict=True)}


def test_the_files_of_version_1(tmp_path: Path) -> None:
    """Two GPUs: even keys come first, each GPU's in order; no head, i64 and f32."""
    wide = Table(np.array([5, 2, 1, -4]), np.arange(8.0).reshape(4, 2))
    export_table(wide, tmp_path, "v", "sok1", 2)
    assert np.fromfile(tmp_path / "v_keys.file", "<i8").tolist() == [-4, 2, 1, 5]
    assert np.fromfile(tmp_path / "v_values.file", "<f4").tolist() == [6, 7, 2, 3, 4, 5, 0, 1]


def test_the_files_of_version_2(tmp_path: Path) -> None:
    rows = np.arange(4, dtype=np.float16).reshape(2, 2)
    export_table(Table(np.array([9, 4]), rows), tmp_path, "emb", "sok2", 2)
    key, weight = (tmp_path / "emb-key").read_bytes(), (tmp_path / "emb-weight").read_bytes()
    name, blank = b" " * 253 + b"emb", b" " * 32
    assert key == name + bytes(4) + blank + bytes([0, 0, 0, 1]) + np.array([4, 9], "<i8").tobytes()
    head = name + bytes([0, 0, 0, 1]) + blank + bytes([0, 0, 0, 4])
    assert weight == head + rows[::-1].tobytes()


@pytest.mark.parametrize("form", ["sok1", "sok2", "numpy"])
def test_tables_survive_files_of_any_number_of_gpus(form: Any, tmp_path: Path) -> None:
    wanted = random_table()
    read = wanted
    for number, gpus in enumerate((1, 4, 3, 8, 1)):
        export_table(read, tmp_path / str(number), "t", form, gpus)
        read = import_table(tmp_path / str(number), "t")
        assert read.keys.dtype == np.int64 and pairs(read) == pairs(wanted)


@pytest.mark.parametrize("kind", ["<i4", "<u4", "<i8", "<u8"])
def test_version_2_has_keys_of_several_dtypes(kind: str, tmp_path: Path) -> None:
    wanted = Table(np.arange(7) * 3, random_table(7).rows)
    export_table(wanted, tmp_path, "t", "sok2")
    number = ["<i4", "<i8", "<u4", "<u8"].index(kind)
    head = bytearray((tmp_path / "t-key").read_bytes()[:296])
    head[-1] = number
    (tmp_path / "t-key").write_bytes(head + wanted.keys.astype(kind).tobytes())
    assert pairs(import_table(tmp_path)) == pairs(wanted)


def test_rows_alone_are_those_of_the_first_keys(tmp_path: Path) -> None:
    rows = random_table().rows
    np.save(tmp_path / "rows.npy", rows)
    read = import_table(tmp_path / "rows.npy")
    assert read.keys.tolist() == list(range(37)) and np.array_equal(read.rows, rows)


def damaged(folder: Path, name: str, change: Any) -> None:
    path = folder / name
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    ("form", "name", "change", "message"),
    [
        ("sok1", "t_keys.file", lambda data: data[:-3], "which is not an array of <i8"),
        (
            "sok1",
            "t_keys.file",
            lambda data: b"",
            "has 0 keys, which do not divide the 185 numbers of",
        ),
        (
            "sok1",
            "t_values.file",
            lambda data: data[:-4],
            "has 37 keys, which do not divide the 184 numbers of",
        ),
        ("sok2", "t-key", lambda data: data[:200], "is not a key file of SparseOperationKit 2"),
        ("sok2", "t-weight", lambda data: data[:295] + b"\x09", "is not a weight file of"),
        ("numpy", "t_values.npy", lambda data: data[:20], "is not an array of numpy"),
        ("numpy", "t_keys.npy", lambda data: data.replace(b"<i8", b"<f8"), "has keys of float64"),
        ("numpy", "t_keys.npy", lambda data: data.replace(b"<i8", b"<u8"), "keys of 2^63 and more"),
        (
            "sok2",
            "t-key",
            lambda data: data[:295] + b"\x03" + b"\xff" * 8 + data[304:],
            "keys of 2^63 and more",
        ),
    ],
)
def test_damaged_files(form: Any, name: str, change: Any, message: str, tmp_path: Path) -> None:
    export_table(random_table(), tmp_path, "t", form)
    damaged(tmp_path, name, change)
    with pytest.raises(Error) as caught:
        import_table(tmp_path)
    assert message in caught.value.message and name in caught.value.message


@pytest.mark.parametrize(("form", "gpus"), [("sok3", 1), ("sok1", 0)])
def test_files_that_nobody_reads(form: Any, gpus: int, tmp_path: Path) -> None:
    with pytest.raises(Error, match=f"sok2, numpy and at least 1 GPU, found '{form}' and {gpus}"):
        export_table(random_table(), tmp_path, "t", form, gpus)


def test_missing_tables(tmp_path: Path) -> None:
    export_table(random_table(), tmp_path / "two", "user", "sok1")
    export_table(random_table(), tmp_path / "two", "item", "sok2")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "item_keys.file").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    for folder, name, message in (
        ("none", None, "there is no folder or .npy file"),
        ("empty", None, "its tables: none"),
        ("two", "usr", "has no table usr; did you mean 'user'?; its tables: user, item"),
        ("two", None, "has several tables; name one of user, item"),
        ("half", None, "has no file item_values.file beside it"),
    ):
        with pytest.raises(Error) as caught:
            import_table(tmp_path / folder, name)
        assert message in caught.value.message
