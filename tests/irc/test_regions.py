"""Weights that are bytes at an offset of a file, of f32 and of four bits (two to a byte)."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from irc.artifact.bundle import bundled
from irc.errors import Error
from irc.ir.core import Module, Weight
from irc.ir.dtypes import DTYPES, packed, unpacked
from irc.ir.mesh import Mesh
from irc.ir.types import TensorType
from irc.text import parse_module
from irc.weights import BytesRef, Cast, ConcatRef, Cyclic, Ref, Shard, Slice, Transpose
from irc.weights.checkpoint import Reader, reader
from irc.weights.safetensors import Tensor
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


@pytest.mark.parametrize("kind", ["i4", "u4", "f4e2m1"])
def test_any_region_is_read(kind: str, tmp_path: Path) -> None:
    rng = fresh(5)
    array = drawn(kind, 9, 14)
    found, whole = open_file(tmp_path, array), region(kind, 9, 14)
    assert_equal(found.read(whole), array)
    for _ in range(60):
        rows, columns = (sorted(rng.choice(n + 1, 2, replace=False)) for n in array.shape)
        cut = whole.then(Slice(((int(rows[0]), int(rows[1])), (int(columns[0]), int(columns[1])))))
        want = array[slice(*rows), slice(*columns)]
        assert_equal(found.read(cut), want)
        assert_equal(found.read(cut.then(Transpose((1, 0))).then(Cast("f32"))), want.T)
        assert_equal(found.read(ConcatRef((cut, cut), 1)), np.concatenate([want, want], 1))
        if want.shape[1] % 3 == 0:
            cyclic = np.concatenate([want[:, first::3] for first in range(3)], 1)
            assert_equal(found.read(cut.then(Cyclic(1, 3))), cyclic)
    flat = open_file(tmp_path, array.reshape(-1)).read(region(kind, 126).then(Slice(((5, 92),))))
    assert_equal(flat, array.reshape(-1)[5:92])


@pytest.mark.parametrize("shape", [(), (3,), (5, 3), (2, 3, 5)])
def test_rows_may_begin_within_a_byte(shape: tuple[int, ...], tmp_path: Path) -> None:
    count = int(np.prod(shape))
    array = drawn("u4", max(count, 2))[:count].reshape(shape)
    found, whole = open_file(tmp_path, array), region("u4", *shape)
    assert_equal(found.read(whole), array)
    assert (found.extent(whole) is None) == bool(count % 2)
    if not shape:
        return
    tensor = Tensor("u4", shape, OFFSET, -(-count // 2))
    for first in range(shape[0]):
        for step in (1, 2):
            ranges = (range(first, shape[0], step), *map(range, shape[1:]))
            chosen = found.file("f", checkpoint=False).part(tensor, ranges)
            assert_equal(chosen, np.array(array[first::step]))
    last = whole.then(Slice(((1, shape[0]), *[None] * (len(shape) - 1))))
    assert_equal(found.read(last), array[1:])


@pytest.mark.parametrize("group_size", [1, 2, 3, 4])
def test_shards_of_ranks(group_size: int, tmp_path: Path) -> None:
    array = drawn("i4", 7, 10)
    found, whole = open_file(tmp_path, array, f"tp={group_size}"), region("i4", 7, 10)
    for dim, size in enumerate(array.shape):
        padding = [(0, -size % group_size if i == dim else 0) for i in range(2)]
        shards = np.split(np.pad(array.astype("i1"), padding), group_size, dim)
        for rank, want in enumerate(shards):
            got = found.read(whole.then(Shard(dim, ("tp",))), rank)
            assert got.dtype == ml_dtypes.int4
            assert_equal(got.astype("i1"), want)


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


def test_a_region_of_floats_is_read_in_place(tmp_path: Path) -> None:
    array = floats(tmp_path)
    found = open_file(tmp_path, array, "tp=4")
    assert_equal(found.read(FLOATS), array)
    assert (found.shape(FLOATS), found.dtype(FLOATS)) == ((6, 5), "f32")
    extent = found.extent(FLOATS)
    assert extent is not None and (extent.offset, extent.nbytes) == (OFFSET, array.nbytes)
    rows = found.extent(FLOATS.then(Slice(((2, 4), None))))
    assert rows is not None and (rows.offset, rows.shape) == (OFFSET + 2 * 20, (2, 5))
    turned = FLOATS.then(Transpose((1, 0)))
    assert found.extent(turned) is None
    assert_equal(found.read(turned.then(Cast("f64"))), array.T)
    both = ConcatRef((BytesRef("f", OFFSET, "f32", (1, 5)), FLOATS), 0)
    assert_equal(found.read(both), np.concatenate([array[:1], array]))
    for rank, want in enumerate(np.split(np.pad(array, [(0, 2), (0, 0)]), 4)):
        assert_equal(found.read(FLOATS.then(Shard(0, ("tp",))), rank), want)


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


def text(ref: str, type: str = "f32[6, 5]") -> str:
    return f'module @m {{\n  file @f = "data.bin"\n  weight @w : {type} = {ref}\n}}\n'


@pytest.mark.parametrize("type", ["f32[6, 5]", "i64[]", "f32[0, 2]"])
def test_a_region_in_text(type: str) -> None:
    found = text(f"bytes(@f, 13, {type})", type)
    assert str(parse_module(found)) == found


@pytest.mark.parametrize(
    ("ref", "message"),
    [
        ("bytes(@g, 13, f32[6, 5])", "there is no file @g"),
        ("bytes(@f, 13, f32[S, 5])", "is no dtype with sizes"),
        ("bytes(@f, 13, f32[6@tp, 5])", "is no dtype with sizes"),
        ("bytes(@f, -1, f32[6, 5])", "the offset must be at least 0"),
        ("bytes(@f, 13)", "expected"),
    ],
)
def test_wrong_text(ref: str, message: str) -> None:
    with pytest.raises(Error, match=message):
        parse_module(text(ref))
