"""Reading damaged, encrypted and huge .npz files, and writing arrays of any name."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from irc import npz
from irc.errors import Error
from irc.npz import read_npz, write_npz
from irc.quantization.batches import npz_batches

NUMBERS = np.arange(4000.0).reshape(40, 100)
NO_ARCHIVE = "is not an .npz archive of plain arrays"


def archive(**members: bytes) -> bytes:
    """An .npz file with the given bytes in its members."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as zipped:
        for name, data in members.items():
            zipped.writestr(f"{name}.npy", data)
    return file.getvalue()


def plain(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


GOOD = archive(x=plain(NUMBERS))


def changed(at: int, new: bytes, data: bytes = GOOD) -> bytes:
    """A file with other bytes at an offset, counted from the end where it is negative."""
    at %= len(data)
    return data[:at] + new + data[at + len(new) :]


def flagged(field: int, value: int) -> bytes:
    """A file with a number in a field of both headers of its member."""
    central = GOOD.rindex(b"PK\1\2")
    both = changed(central + field + 2, bytes([value]))
    return changed(field, bytes([value]), both)


def claiming(shape: str) -> bytes:
    """A member whose header states a shape of more elements than it has."""
    header = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}".encode()
    header = header.ljust(117) + b"\n"
    return archive(x=b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header + b"\0" * 80)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (changed(200, b"\xff" * 200), NO_ARCHIVE),  # the deflate stream
        (changed(14, b"\1\2\3\4", changed(GOOD.rindex(b"PK\1\2") + 16, b"\1\2\3\4")), NO_ARCHIVE),
        (flagged(6, 1), "encrypted"),
        (flagged(8, 97), NO_ARCHIVE),  # an unknown compression
        (claiming("(1099511627776,)"), "has less"),
        (claiming("(-1, 3)"), "has less"),
        (claiming("(2, 'a')"), NO_ARCHIVE),
        (claiming("(" * 5000), NO_ARCHIVE),
        (GOOD[:300], NO_ARCHIVE),
        (archive(x=b"no array"), NO_ARCHIVE),
        (archive(x=plain(np.array(["a", "b"]))), "x is an array of <U1; expected numbers"),
        (archive(x=plain(np.array([{}], object))), "x is an array of object; expected numbers"),
        (archive(x=plain(np.array([1j]))), "x is an array of complex128; expected numbers"),
        (plain(NUMBERS), "holds one array without a name"),
    ],
)
def test_what_is_no_archive_of_numbers(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "in.npz"
    path.write_bytes(data)
    readers: list[Callable[[], object]] = [
        lambda: read_npz(path),
        lambda: list(npz_batches(path, {"x": (40, 100)}, 8)),
    ]
    for read in readers:
        with pytest.raises(Error) as caught:
            read()
        assert str(path) in caught.value.message
        assert message in caught.value.message


def test_arrays_beyond_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "in.npz"
    np.savez_compressed(path, x=np.zeros((1 << 20, 8)), y=np.zeros(3))
    monkeypatch.setattr(npz, "_free_memory", lambda: 63 << 20)
    with pytest.raises(Error, match=r"of 64 MiB, and 63 MiB .* x \[1048576, 8\]"):
        read_npz(path)


def test_any_name_and_order(tmp_path: Path) -> None:
    names = ("file", "allow_pickle", "args", "arr_0", "x.npy", "é")
    arrays = {name: np.arange(6.0).reshape(2, 3) + i for i, name in enumerate(names)}
    arrays |= {"order": np.asfortranarray(NUMBERS), "scalar": np.array(2), "none": np.zeros((0, 3))}
    write_npz(tmp_path / "out.npz", arrays)
    loaded = read_npz(tmp_path / "out.npz")
    assert list(loaded) == list(arrays)
    with np.load(tmp_path / "out.npz") as same:
        for name, array in arrays.items():
            np.testing.assert_array_equal(loaded[name], array)
            if name != "x.npy":
                np.testing.assert_array_equal(same[name], array)
    loaded["file"][0] = 1  # arrays may be written to
