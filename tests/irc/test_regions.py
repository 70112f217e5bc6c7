"""Weights that are bytes at an offset of a file, of f32 and of four bits (two to a byte)."""

from pathlib import Path

import numpy as np
import pytest

from irc.artifact.bundle import bundled
from irc.errors import Error
from irc.ir.core import Module, Weight
from irc.ir.dtypes import DTYPES, packed, unpacked
from irc.ir.mesh import Mesh
from irc.ir.types import TensorType
from irc.weights import BytesRef, Ref, Shard, Slice, Transpose
from irc.weights.checkpoint import Reader, reader
from tests.fresh import fresh

OFFSET = 7  # aligned to no dtype
assert_equal = np.testing.assert_array_equal


def drawn(kind: str, *shape: int) -> np.ndarray:
    """Random numbers of a dtype, integers with the smallest and the largest."""
    if kind == "f4e2m1":
        return fresh(sum(shape)).standard_normal(shape).astype(DTYPES[kind].numpy)
    low, high = (-8, 8) if kind == "i4" else (0, 16)
    array = fresh(sum(shape)).integers(low, high, shape)
    array.flat[:2] = low, high - 1
    return array.astype(DTYPES[kind].numpy)


def by_hand(array: np.ndarray) -> bytes:
    """The bytes of four-bit numbers in ONNX: the first of two in the low half."""
    bits = array.view(np.uint8) if array.dtype == DTYPES["f4e2m1"].numpy else array.astype(np.int32)
    numbers = [int(each) & 15 for each in bits.flat]
    pairs = zip(numbers[::2], [*numbers[1::2], 0], strict=False)
    return bytes(low + 16 * high for low, high in pairs)


def open_file(folder: Path, array: np.ndarray, mesh: str = "") -> Reader:
    """A reader of `data.bin`, called @f, that has the array at OFFSET."""
    data = array.tobytes() if array.itemsize == 4 else by_hand(array)
    (folder / "data.bin").write_bytes(b"x" * OFFSET + data + b"rest")
    return open_reader(folder, mesh)


def open_reader(folder: Path, mesh: str = "") -> Reader:
    module = Module("m", Mesh.parse(mesh))
    module.files["f"] = "data.bin"
    return Reader(module, folder)


def region(kind: str, *shape: int) -> Ref:
    return BytesRef("f", OFFSET, kind, shape)


@pytest.mark.parametrize("kind", ["i4", "u4", "f4e2m1"])
def test_bytes_are_those_of_onnx(kind: str) -> None:
    for shape in ((6, 8), (3, 5), (1,)):
        array = drawn(kind, *shape) if shape != (1,) else drawn(kind, 2)[:1]
        assert packed(array).tobytes() == by_hand(array)
    rows = drawn(kind, 4, 6)
    found = unpacked(packed(rows).reshape(4, 3), kind)
    assert found.dtype == rows.dtype
    assert_equal(found, rows)


def test_contiguous_regions_of_whole_bytes_are_extents(tmp_path: Path) -> None:
    found, whole = open_file(tmp_path, drawn("i4", 8, 6)), region("i4", 8, 6)
    rows = found.extent(whole.then(Slice(((3, 7), None))))
    assert rows is not None and (rows.offset, rows.nbytes) == (OFFSET + 9, 12)
    one = found.extent(whole.then(Slice(((2, 3), (2, 6)))))
    assert one is not None and (one.offset, one.nbytes) == (OFFSET + 7, 2)
    for begin, end in ((1, 5), (0, 3), (1, 4)):  # they begin or end within a byte
        assert found.extent(whole.then(Slice(((2, 3), (begin, end))))) is None
    assert found.extent(whole.then(Transpose((1, 0)))) is None


def test_blocks_of_odd_rows_end_at_whole_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "BLOCK", 15)
    array = drawn("u4", 9, 8)
    found = open_file(tmp_path, array)
    odd = region("u4", 9, 8).then(Slice((None, (0, 5))))
    blocks = [block for _, (block,) in found.stream([(odd, [0])], as_bytes=True)]
    assert len(blocks) == 3
    assert np.concatenate(blocks).tobytes() == by_hand(array[:, :5])


def test_a_bundle_has_regions_and_packed_integers(tmp_path: Path) -> None:
    array = floats(tmp_path)
    module = Module("m", Mesh.parse("tp=2"))
    module.files["f"] = str(tmp_path / "data.bin")
    module.add_weight(Weight(TensorType("f32", (6, 5)), "w", FLOATS))
    with bundled(module, tmp_path / "all.safetensors"):
        assert_equal(Reader(module, tmp_path).read(module.weights["w"]), array)
    del module.weights["w"]
    array = drawn("i4", 6, 7)
    open_file(tmp_path, array)
    module.add_weight(Weight(TensorType("i4", (6, 7)), "v", region("i4", 6, 7)))
    cut = region("i4", 6, 7).then(Slice((None, (0, 4)))).then(Shard(0, ("tp",)))
    module.add_weight(Weight(TensorType("i4", (3, 4)), "cut", cut))
    with bundled(module, tmp_path / "all.safetensors"):
        reader = Reader(module, tmp_path)
        assert_equal(reader.read(module.weights["v"]), array)
        for rank in range(2):
            assert_equal(reader.read(module.weights["cut"], rank), array[3 * rank :][:3, :4])
    odd = region("i4", 6, 7).then(Shard(0, ("tp",)))
    module.weights["cut"].ref, module.weights["cut"].type = odd, TensorType("i4", (3, 7))
    with (
        pytest.raises(Error, match="end within a byte"),
        bundled(module, tmp_path / "all.safetensors"),
    ):
        pass


FLOATS = BytesRef("f", OFFSET, "f32", (6, 5))


def floats(folder: Path) -> np.ndarray:
    """Write f32 [6, 5] to the file."""
    array = fresh(41).standard_normal((6, 5)).astype(np.float32)
    open_file(folder, array)
    return array


def test_a_region_outside_its_file(tmp_path: Path) -> None:
    reader, path = open_file(tmp_path, floats(tmp_path)), tmp_path / "data.bin"
    with pytest.raises(Error, match=r"ends at byte 147, but .*data.bin has 131: it is truncated"):
        reader.read(region("f32", 7, 5))
    path.write_bytes(b"")
    with pytest.raises(Error, match=r"cannot read the weights in .*: it is empty"):
        open_reader(tmp_path).read(FLOATS)
    path.unlink()
    with pytest.raises(Error, match=r"cannot read the weights in .*: No such file"):
        open_reader(tmp_path).read(FLOATS)
