"""Weights of four bits: two to a byte in files, cut anywhere, read in place, written again."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from irc.bundle import bundled
from irc.checkpoint import Reader, reader
from irc.core import Module, Weight
from irc.dtypes import DTYPES, packed, unpacked
from irc.errors import Error
from irc.mesh import Mesh
from irc.safetensors import Tensor
from irc.types import TensorType
from irc.weights import BytesRef, Cast, ConcatRef, Deal, Ref, Shard, Slice, Transpose
from tests.fresh import fresh

OFFSET = 7


def drawn(kind: str, *shape: int) -> np.ndarray:
    """Random numbers of a dtype, the smallest and the largest among them."""
    low, high = (-8, 8) if kind == "i4" else (0, 16)
    array = fresh(sum(shape)).integers(low, high, shape)
    array.flat[:2] = low, high - 1
    return array.astype(DTYPES[kind].numpy)


def by_hand(array: np.ndarray) -> bytes:
    """The bytes that ONNX has for them: the first of two in the low half."""
    numbers = [int(each) & 15 for each in array.astype(np.int32).flat]
    pairs = zip(numbers[::2], [*numbers[1::2], 0], strict=False)
    return bytes(low + 16 * high for low, high in pairs)


def open_file(folder: Path, array: np.ndarray, mesh: str = "") -> Reader:
    (folder / "data.bin").write_bytes(b"x" * OFFSET + by_hand(array) + b"rest")
    module = Module("m", Mesh.parse(mesh))
    module.files["f"] = "data.bin"
    return Reader(module, folder)


def region(kind: str, *shape: int) -> Ref:
    return BytesRef("f", OFFSET, kind, shape)


@pytest.mark.parametrize("kind", ["i4", "u4"])
def test_bytes_are_those_of_onnx(kind: str) -> None:
    for shape in ((6, 8), (3, 5), (1,)):
        array = drawn(kind, *shape) if shape != (1,) else drawn(kind, 2)[:1]
        assert packed(array).tobytes() == by_hand(array)
    rows = drawn(kind, 4, 6)
    found = unpacked(packed(rows).reshape(4, 3), kind)
    assert found.dtype == rows.dtype
    np.testing.assert_array_equal(found, rows)


@pytest.mark.parametrize("kind", ["i4", "u4"])
def test_any_part_is_read(kind: str, tmp_path: Path) -> None:
    rng = fresh(5)
    array = drawn(kind, 9, 14)
    found, whole = open_file(tmp_path, array), region(kind, 9, 14)
    np.testing.assert_array_equal(found.read(whole), array)
    for _ in range(60):
        rows, columns = (sorted(rng.choice(n + 1, 2, replace=False)) for n in array.shape)
        cut = Slice(((int(rows[0]), int(rows[1])), (int(columns[0]), int(columns[1]))))
        want = array[slice(*rows), slice(*columns)]
        np.testing.assert_array_equal(found.read(whole.then(cut)), want)
        turned = whole.then(cut).then(Transpose((1, 0))).then(Cast("i32"))
        np.testing.assert_array_equal(found.read(turned), want.T.astype(np.int32))
        both = ConcatRef((whole.then(cut), whole.then(cut)), 1)
        np.testing.assert_array_equal(found.read(both), np.concatenate([want, want], 1))
        dealt = np.concatenate([want[:, first::3] for first in range(3)], 1)
        if want.shape[1] % 3 == 0:
            np.testing.assert_array_equal(found.read(whole.then(cut).then(Deal(1, 3))), dealt)
    flat = open_file(tmp_path, array.reshape(-1)).read(region(kind, 126).then(Slice(((5, 92),))))
    np.testing.assert_array_equal(flat, array.reshape(-1)[5:92])


@pytest.mark.parametrize("shape", [(), (3,), (5, 3), (2, 3, 5)])
def test_rows_may_begin_within_a_byte(shape: tuple[int, ...], tmp_path: Path) -> None:
    count = int(np.prod(shape))
    array = drawn("u4", max(count, 2))[:count].reshape(shape)
    found = open_file(tmp_path, array)
    np.testing.assert_array_equal(found.read(region("u4", *shape)), array)
    extent = found.extent(region("u4", *shape))
    assert (extent is None) == bool(count % 2)
    if shape:
        for first in range(shape[0]):
            for step in (1, 2):
                dealt = np.array(array[first::step])
                chosen = found.file("f", checkpoint=False).part(
                    Tensor("u4", shape, OFFSET, -(-count // 2)),
                    (range(first, shape[0], step), *map(range, shape[1:])),
                )
                np.testing.assert_array_equal(chosen, dealt)
        last = region("u4", *shape).then(Slice(((1, shape[0]), *[None] * (len(shape) - 1))))
        np.testing.assert_array_equal(found.read(last), array[1:])


@pytest.mark.parametrize("ways", [1, 2, 3, 4])
def test_parts_of_ranks(ways: int, tmp_path: Path) -> None:
    array = drawn("i4", 7, 10)
    found, whole = open_file(tmp_path, array, f"tp={ways}"), region("i4", 7, 10)
    for dim, size in enumerate(array.shape):
        part = -(-size // ways)
        for rank in range(ways):
            want = np.zeros([part if i == dim else n for i, n in enumerate(array.shape)], "i1")
            mine = np.take(
                array.astype("i1"), range(rank * part, min(size, rank * part + part)), dim
            )
            want[tuple(slice(0, n) for n in mine.shape)] = mine
            got = found.read(whole.then(Shard(dim, ("tp",))), rank)
            assert got.dtype == ml_dtypes.int4
            np.testing.assert_array_equal(got.astype("i1"), want)


def test_what_lies_as_it_is_needed_is_not_copied(tmp_path: Path) -> None:
    found, whole = open_file(tmp_path, drawn("i4", 8, 6)), region("i4", 8, 6)
    rows = found.extent(whole.then(Slice(((3, 7), None))))
    assert rows is not None and (rows.offset, rows.nbytes) == (OFFSET + 9, 12)
    one = found.extent(whole.then(Slice(((2, 3), (2, 6)))))
    assert one is not None and (one.offset, one.nbytes) == (OFFSET + 7, 2)
    for begin, end in ((1, 5), (0, 3), (1, 4)):  # they begin or end within a byte
        assert found.extent(whole.then(Slice(((2, 3), (begin, end))))) is None
    assert found.extent(whole.then(Transpose((1, 0)))) is None


def test_blocks_of_an_odd_count_join_within_a_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "BLOCK", 15)
    array = drawn("u4", 9, 8)
    found = open_file(tmp_path, array)
    odd = region("u4", 9, 8).then(Slice((None, (0, 5))))
    blocks = [block for (block,) in found.stream_bytes(odd, [0])]
    assert len(blocks) > 3
    assert np.concatenate(blocks).tobytes() == by_hand(array[:, :5])


def test_a_bundle_has_no_dtype_of_four_bits(tmp_path: Path) -> None:
    open_file(tmp_path, drawn("i4", 6, 8))
    module = Module("m")
    module.files["f"] = str(tmp_path / "data.bin")
    module.add_weight(Weight(TensorType("i4", (6, 8)), "w", region("i4", 6, 8)))
    with pytest.raises(Error, match="i4"), bundled(module, tmp_path / "all.safetensors"):
        pass
