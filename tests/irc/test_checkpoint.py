"""Checkpoint files: what is refused, what is read, and that streams hold a block at a time."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from irc.checkpoint import Extent, Reader, convert
from irc.checkpoint import reader as reader_module
from irc.core import Module, Weight
from irc.errors import Error
from irc.mesh import Mesh
from irc.safetensors import LONGEST_HEADER, read_header
from irc.text import parse_module
from irc.types import TensorType
from irc.weights import (
    Cast,
    ConcatRef,
    Deal,
    FileRef,
    Pad,
    RandomRef,
    Ref,
    Shard,
    Slice,
    Step,
    Transpose,
    Unsqueeze,
    ZerosRef,
    pinned,
)

F32 = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


def written(path: Path, header: Any, data: bytes = bytes(16)) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def refused(path: Path) -> str:
    with pytest.raises(Error) as caught:
        read_header(path)
    message = str(caught.value)
    assert str(path) in message
    return message


def test_header_is_read(tmp_path: Path) -> None:
    path = written(tmp_path / "a", {"__metadata__": {"format": "pt"}, "x": F32})
    (tensor,) = read_header(path).values()
    assert (tensor.dtype, tensor.shape, tensor.nbytes) == ("f32", (2, 2), 16)
    assert tensor.offset == path.stat().st_size - 16


def test_missing_file(tmp_path: Path) -> None:
    assert "cannot read the checkpoint" in refused(tmp_path / "none")
    assert "cannot read the checkpoint" in refused(tmp_path)


def test_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = written(tmp_path / "a", {"x": F32}).read_bytes()
    for size in range(len(whole)):
        path = tmp_path / "cut"
        path.write_bytes(whole[:size])
        message = refused(path)
        assert ("truncated" in message) == (size >= 8), message


def test_absurd_header_length(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes((LONGEST_HEADER + 1).to_bytes(8, "little") + bytes(100))
    assert "no header length" in refused(path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{", "no JSON"),
        (b"\xff{}", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b"[]", "no JSON object"),
        (b'{"x": {}, "x": {}}', "names 'x' twice"),
        ({"x": 1}, "'x' has no dtype"),
        ({"x": F32 | {"dtype": "F31"}}, "'x' has the unknown dtype 'F31'; did you mean 'F32'"),
        ({"x": F32 | {"dtype": 3}}, "'x' has the unknown dtype 3"),
        ({"x": F32 | {"shape": [2, -2]}}, "'x' has no valid shape: [2, -2]"),
        ({"x": F32 | {"shape": None}}, "'x' has no valid shape"),
        ({"x": F32 | {"shape": [2, 2.0]}}, "'x' has no valid shape"),
        ({"x": F32 | {"data_offsets": [0]}}, "'x' has no valid data_offsets"),
        ({"x": F32 | {"data_offsets": [True, 16]}}, "'x' has no valid data_offsets"),
        ({"x": F32 | {"data_offsets": [0, 12]}}, "takes 16 bytes, but its offsets 0 to 12 hold 12"),
        ({"x": F32 | {"data_offsets": [16, 0]}}, "takes 16 bytes"),
        ({"x": F32, "y": F32}, "'y' overlaps the tensor 'x'"),
        ({"x": F32 | {"shape": [2], "data_offsets": [8, 16]}}, "between the header and the tensor"),
        ({"x": F32 | {"shape": [2], "data_offsets": [0, 8]}}, "8 bytes after the tensor 'x'"),
        ({"x": F32 | {"data_offsets": [4, 20]}}, "it is truncated"),
        ({}, "16 bytes after the header"),
    ],
)
def test_bad_header_is_refused(tmp_path: Path, header: Any, message: str) -> None:
    assert message in refused(written(tmp_path / "a", header))


def test_dtype_that_irc_lacks_may_lie_in_the_file_but_not_be_read(tmp_path: Path) -> None:
    entry = {"dtype": "U32", "shape": [4], "data_offsets": [0, 16]}
    written(tmp_path / "a", {"x": entry})
    reader = reader_of(tmp_path, "a")
    with pytest.raises(Error, match="no dtype called 'u32'"):
        reader.read(FileRef("f", "x"))


# -- reading


def reader_of(folder: Path, file: str = "m.safetensors", mesh: str = "tp=4") -> Reader:
    module = Module("m", Mesh.parse(mesh))
    module.files["f"] = file
    return Reader(module, folder)


@pytest.fixture
def arrays(tmp_path: Path) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    found = {
        "aa": np.arange(3, dtype=np.uint8),  # makes every later offset odd
        "a": rng.standard_normal((6, 4)).astype(np.float32),
        "b": rng.standard_normal((10, 4)).astype(ml_dtypes.bfloat16),
        "c": rng.standard_normal((2, 3, 4)).astype(np.float16),
        "i": rng.integers(-5, 5, (4, 2)).astype(np.int64),
        "scalar": np.array(3.5, np.float32),
        "empty": np.zeros((0, 4), np.float32),
    }
    save_file(found, tmp_path / "m.safetensors")
    return found


def same(reader: Reader, ref: Weight | Ref, want: np.ndarray, rank: int = 0) -> None:
    """`read`, `stream`, `extent`, `shape` and `dtype` agree with the wanted array."""
    got = reader.read(ref, rank)
    assert got.dtype == want.dtype and got.shape == want.shape == reader.shape(ref)
    assert got.tobytes() == np.ascontiguousarray(want).tobytes()
    streamed = b"".join(block.tobytes() for block in reader.stream(ref, rank))
    assert streamed == np.ascontiguousarray(want).tobytes()
    extent = reader.extent(ref, rank)
    if extent is not None:
        data = Path(extent.path).read_bytes()[extent.offset : extent.offset + extent.nbytes]
        assert data == np.ascontiguousarray(want).tobytes()


@pytest.mark.parametrize("block", [1, 8, 40, 1 << 20])
def test_every_step_against_numpy(
    tmp_path: Path, arrays: dict[str, np.ndarray], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "BLOCK", block)
    reader = reader_of(tmp_path)
    for key, array in arrays.items():
        same(reader, FileRef("f", key), array)
    a, b, c = (FileRef("f", key) for key in "abc")
    same(reader, a.then(Slice(((1, 5), None))), arrays["a"][1:5])
    same(reader, a.then(Slice((None, (1, 3)))), arrays["a"][:, 1:3])
    same(reader, a.then(Transpose((1, 0))), arrays["a"].T)
    same(
        reader,
        c.then(Transpose((2, 0, 1))).then(Slice(((1, 3), None, None))),
        arrays["c"].transpose(2, 0, 1)[1:3],
    )
    same(reader, b.then(Cast("f32")), arrays["b"].astype(np.float32))
    same(reader, a.then(Cast("bf16")), arrays["a"].astype(ml_dtypes.bfloat16))
    same(
        reader,
        b.then(Slice(((2, 9), (1, 3)))).then(Cast("f32")).then(Transpose((1, 0))),
        arrays["b"][2:9, 1:3].astype(np.float32).T,
    )
    both = ConcatRef((a.then(Slice(((0, 2), None))), a), 0)
    same(reader, both, np.concatenate([arrays["a"][:2], arrays["a"]]))
    same(
        reader,
        both.then(Slice(((1, 4), None))),
        np.concatenate([arrays["a"][:2], arrays["a"]])[1:4],
    )
    same(
        reader,
        ConcatRef((a, a), 1).then(Cast("f16")),
        np.concatenate([arrays["a"]] * 2, 1).astype(np.float16),
    )


def test_references_are_stacked_along_a_new_dimension(
    tmp_path: Path, arrays: dict[str, np.ndarray]
) -> None:
    reader, a = reader_of(tmp_path), FileRef("f", "a")
    stacked = np.stack([arrays["a"]] * 3)
    ref = ConcatRef((a.then(Unsqueeze(0)),) * 3, 0)
    same(reader, ref, stacked)
    same(reader, ref.then(Slice(((1, 3), None, (1, 3)))), stacked[1:3, :, 1:3])
    same(reader, a.then(Unsqueeze(2)).then(Transpose((2, 0, 1))), stacked[:1])
    middle = ConcatRef((a.then(Cast("f16")).then(Unsqueeze(1)),) * 3, 1)
    same(reader, middle, stacked.transpose(1, 0, 2).astype(np.float16))
    padded = np.concatenate([stacked, np.zeros((1, 6, 4), np.float32)])
    for rank in range(4):  # the last rank has nothing but padding
        same(reader, ref.then(Shard(0, ("tp",))), padded[rank : rank + 1], rank)
        one = a.then(Unsqueeze(0)).then(Shard(0, ("tp",)))
        same(reader, one, padded[3 * (rank > 0) :][:1], rank)
    with pytest.raises(Error, match=r"\.unsqueeze\(3\) names a dimension"):
        reader.shape(a.then(Unsqueeze(3)))


def test_shards_are_ceil_sized_and_padded(tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    reader = reader_of(tmp_path)
    padded = np.concatenate([arrays["b"], np.zeros((2, 4), ml_dtypes.bfloat16)])
    ref = FileRef("f", "b").then(Shard(0, ("tp",)))
    for rank in range(4):
        same(reader, ref, padded[rank * 3 : rank * 3 + 3], rank)
    assert [reader.extent(ref, rank) is None for rank in range(4)] == [False, False, False, True]
    columns = FileRef("f", "a").then(Transpose((1, 0))).then(Shard(0, ("tp",)))
    for rank in range(4):
        same(reader, columns, arrays["a"].T[rank : rank + 1], rank)
        assert reader.extent(columns, rank) is None


def test_extents(tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    reader = reader_of(tmp_path)
    c = FileRef("f", "c")
    at = reader.info("f", "c").offset
    whole = reader.extent(c)
    assert whole == Extent(str(tmp_path / "m.safetensors"), at, 48, "f16", (2, 3, 4))
    rows = reader.extent(c.then(Slice(((1, 2), (1, 3), None))))
    assert rows is not None and (rows.offset, rows.nbytes, rows.shape) == (at + 32, 16, (1, 2, 4))
    assert reader.extent(c.then(Slice(((0, 2), (1, 3), None)))) is None
    assert reader.extent(c.then(Slice(((1, 2), (1, 2), (1, 3))))) is not None
    assert reader.extent(c.then(Cast("f16"))) == whole
    assert reader.extent(c.then(Cast("f32"))) is None
    assert reader.extent(c.then(Cast("f32")).then(Cast("f16"))) is None
    parts = tuple(c.then(Slice(((i, i + 1), None, None))) for i in (0, 1))
    assert reader.extent(ConcatRef(parts, 0)) == whole
    assert reader.extent(ConcatRef(parts[::-1], 0)) is None
    joined = reader.extent(ConcatRef(parts, 1))
    assert joined is not None and joined.shape == (1, 6, 4)
    assert reader.extent(ConcatRef((c, c), 1)) is None
    assert reader.extent(FileRef("f", "empty")) is None


def test_where_nothing_is_converted_the_file_is_mapped(
    tmp_path: Path, arrays: dict[str, np.ndarray]
) -> None:
    array = reader_of(tmp_path).read(FileRef("f", "a").then(Slice(((2, 4), None))))
    assert not array.flags.owndata and not array.flags.writeable


def test_wide_bf16_keeps_every_bit() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    wide = convert(bits, "f32")
    assert (wide.view(np.uint32) == np.arange(1 << 16, dtype=np.uint32) << 16).all()


# -- random numbers


def random_weight(ref: Ref, *shape: int, dtype: str = "f32") -> Weight:
    return Weight(TensorType(dtype, shape), "w", ref)


def test_random_numbers_depend_on_key_and_seed_only(tmp_path: Path) -> None:
    reader = reader_of(tmp_path)
    first = reader.read(random_weight(RandomRef("a", 1, 0.5), 300, 40))
    assert abs(first.std() - 0.5) < 0.02 and abs(first.mean()) < 0.02
    assert (first == reader.read(random_weight(RandomRef("a", 1, 0.5), 300, 40))).all()
    for other in (RandomRef("b", 1, 0.5), RandomRef("a", 2, 0.5)):
        assert not np.allclose(first, reader.read(random_weight(other, 300, 40)))
    narrow = reader.read(random_weight(RandomRef("a", 1, 0.5), 300, 40, dtype="bf16"))
    assert (narrow == first.astype(ml_dtypes.bfloat16)).all()
    assert first[0, 0] == pytest.approx(-0.1286598, rel=1e-6)  # stays the same in every version


def test_random_numbers_are_cut_and_joined_where_they_say_their_shape(tmp_path: Path) -> None:
    reader = reader_of(tmp_path)
    whole = reader.read(random_weight(RandomRef("a", 1, 1.0), 300, 40))
    ref = pinned(RandomRef("a", 1, 1.0), (300, 40), "f32")
    for rank in range(4):
        want = whole[rank * 75 : rank * 75 + 75]
        same(reader, random_weight(ref.then(Shard(0, ("tp",))), 75, 40), want, rank)
    same(reader, ref.then(Transpose((1, 0))).then(Slice(((3, 9), (60, 70)))), whole.T[3:9, 60:70])
    same(reader, ConcatRef((ref, ref), 0), np.concatenate([whole, whole]))
    with pytest.raises(Error, match="has to say its shape"):
        reader.read(random_weight(RandomRef("a", 1, 1.0).then(Shard(0, ("tp",))), 75, 40))


def test_casts_between_the_four_bit_types(tmp_path: Path) -> None:
    ref = RandomRef("a", 1, 4.0, (8, 8)).then(Cast("i4"))
    signed = reader_of(tmp_path).read(ref).astype(np.int64)
    unsigned = reader_of(tmp_path).read(ref.then(Cast("u4"))).astype(np.int64)
    assert (unsigned == signed % 16).all() and signed.min() < 0


def test_random_reference_with_a_shape_in_text() -> None:
    text = (
        "module @m {\n"
        '  weight @w : f32[4, 8] = random("k", 7, 0.02, [8, 8])[0:4, :]\n'
        "  func @forward() -> (f32[4, 8]) {\n    return @w\n  }\n}\n"
    )
    assert str(parse_module(text)) == text


# -- errors


def test_wrong_references_are_named(tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    reader = reader_of(tmp_path)
    with pytest.raises(Error, match=r"m\.safetensors has no tensor called 'scalr'.*'scalar'"):
        reader.read(FileRef("f", "scalr"))
    with pytest.raises(Error, match="reaches outside a dimension of 6"):
        reader.read(FileRef("f", "a").then(Slice(((0, 7), None))))
    with pytest.raises(Error, match="joins bf16 and f32"):
        reader.dtype(ConcatRef((FileRef("f", "a"), FileRef("f", "b")), 0))
    with pytest.raises(Error, match="joins tensors of shapes"):
        reader.shape(ConcatRef((FileRef("f", "a"), FileRef("f", "c")), 0))
    with pytest.raises(Error, match="joins tensors of shapes"):
        reader.shape(ConcatRef((ZerosRef((4, 8), "f32"), ZerosRef((4,), "f32")), 1))
    with pytest.raises(Error, match=r"@w is f32\[6, 5\], but @f\[\"a\"\] is f32\[6, 4\]"):
        reader.check(random_weight(FileRef("f", "a"), 6, 5))
    module = parse_module(
        'module @m {\n weight @w : f32[4] = unbound("x.y")\n'
        " func @forward() -> (f32[4]) {\n return @w\n }\n}"
    )
    with pytest.raises(Error, match=r"'x\.y' has no values"):
        Reader(module).read(module.weights["w"])


# -- memory


STEPS: list[Step] = [
    Cast("f32"),
    Transpose((1, 0)),
    Slice((None, (0, 1000))),
    Shard(1, ("tp",)),
    Deal(0, 4),
    Pad(0, 7),
]


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("step", [None, *STEPS], ids=str)
def test_a_stream_holds_a_block_at_a_time(tmp_path: Path, step: Step | None, ranks: int) -> None:
    rows, columns = 30_000, 2000  # 120 MB
    header = {"x": {"dtype": "BF16", "shape": [rows, columns], "data_offsets": [0, rows * 4000]}}
    path = written(tmp_path / "m.safetensors", header, b"")
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size + rows * 4000)
    reader = reader_of(tmp_path)
    ref = FileRef("f", "x")
    check_flat(reader, ref.then(step) if step is not None else ref, ranks)


def test_random_numbers_are_made_a_block_at_a_time(tmp_path: Path) -> None:
    ref = RandomRef("a", 1, 1.0, (20_000, 2000)).then(Cast("bf16")).then(Shard(1, ("tp",)))
    check_flat(reader_of(tmp_path), ref, 4)


def check_flat(reader: Reader, ref: Ref, ranks: int) -> None:
    """A stream for so many ranks makes all elements and takes less than 60 MiB."""
    tracemalloc.start()
    before = most = resident()
    count = 0
    for blocks in reader.stream_ranks(ref, range(ranks)):
        count += blocks[0].size
        most = max(most, resident())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == np.prod(reader.shape(ref))
    assert peak < 60 << 20
    assert most - before < 100 << 20  # mapped pages are given back


def resident() -> int:
    """Bytes of memory of this process, mapped files included."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096
