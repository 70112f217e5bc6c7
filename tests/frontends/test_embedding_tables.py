"""Files of embedding tables: those of SparseOperationKit 1 and 2, byte by byte, and numpy's."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from irc.errors import Error
from irc.frontends.layers import Table, export_table, import_table
from tests.fresh import fresh


def table(count: int = 37) -> Table:
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
    wanted = table()
    read = wanted
    for number, gpus in enumerate((1, 4, 3, 8, 1)):
        export_table(read, tmp_path / str(number), "t", form, gpus)
        read = import_table(tmp_path / str(number), "t")
        assert read.keys.dtype == np.int64 and pairs(read) == pairs(wanted)


@pytest.mark.parametrize("kind", ["<i4", "<u4", "<i8", "<u8"])
def test_version_2_has_keys_of_several_dtypes(kind: str, tmp_path: Path) -> None:
    wanted = Table(np.arange(7) * 3, table(7).rows)
    export_table(wanted, tmp_path, "t", "sok2")
    number = ["<i4", "<i8", "<u4", "<u8"].index(kind)
    head = bytearray((tmp_path / "t-key").read_bytes()[:296])
    head[-1] = number
    (tmp_path / "t-key").write_bytes(head + wanted.keys.astype(kind).tobytes())
    assert pairs(import_table(tmp_path)) == pairs(wanted)


def test_rows_alone_are_those_of_the_first_keys(tmp_path: Path) -> None:
    rows = table().rows
    np.save(tmp_path / "rows.npy", rows)
    read = import_table(tmp_path / "rows.npy")
    assert read.keys.tolist() == list(range(37)) and np.array_equal(read.rows, rows)


def damaged(folder: Path, name: str, change: Any) -> None:
    path = folder / name
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    ("form", "name", "change", "message"),
    [
        ("sok1", "t_keys.file", lambda data: data[:-3], "which is no array of <i8"),
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
        ("sok2", "t-key", lambda data: data[:200], "is no key file of SparseOperationKit 2"),
        ("sok2", "t-weight", lambda data: data[:295] + b"\x09", "is no weight file of"),
        ("numpy", "t_values.npy", lambda data: data[:20], "is no array of numpy"),
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
    export_table(table(), tmp_path, "t", form)
    damaged(tmp_path, name, change)
    with pytest.raises(Error) as caught:
        import_table(tmp_path)
    assert message in caught.value.message and name in caught.value.message


@pytest.mark.parametrize(("form", "gpus"), [("sok3", 1), ("sok1", 0)])
def test_files_that_nobody_reads(form: Any, gpus: int, tmp_path: Path) -> None:
    with pytest.raises(Error, match=f"sok2, numpy and at least 1 GPU, found '{form}' and {gpus}"):
        export_table(table(), tmp_path, "t", form, gpus)


def test_missing_tables(tmp_path: Path) -> None:
    export_table(table(), tmp_path / "two", "user", "sok1")
    export_table(table(), tmp_path / "two", "item", "sok2")
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
