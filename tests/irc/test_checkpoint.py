"""Checkpoint files: errors, extents, random numbers, and streams of bounded memory."""

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from irc.errors import Error
from irc.ir.core import Module, Weight
from irc.ir.mesh import Mesh
from irc.ir.types import TensorType
from irc.weights import (
    BytesRef,
    Cast,
    ConcatRef,
    Cyclic,
    FileRef,
    LowRankSumRef,
    Pad,
    ProductRef,
    QuantizedRef,
    RandomRef,
    Ref,
    RepeatedRef,
    Shard,
    Slice,
    SortingRef,
    Step,
    StridedRef,
    TakenRef,
    Transpose,
    UnboundRef,
    UnpackedRef,
    Unsqueeze,
    ZerosRef,
)
from irc.weights.checkpoint import Extent, Reader, convert
from irc.weights.safetensors import LONGEST_HEADER, read_header

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


def test_a_missing_or_cut_file_is_refused(tmp_path: Path) -> None:
    assert "cannot read the checkpoint" in refused(tmp_path / "none")
    assert "cannot read the checkpoint" in refused(tmp_path)
    data = written(tmp_path / "a", {"x": F32}).read_bytes()
    path = tmp_path / "cut"
    for size in range(len(data)):
        path.write_bytes(data[:size])
        message = refused(path)
        assert ("truncated" in message) == (size >= 8), message
    path.write_bytes((LONGEST_HEADER + 1).to_bytes(8, "little") + bytes(100))
    assert "not a header length" in refused(path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{", "not JSON"),
        (b"\xff{}", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "not a JSON object"),
        (b'{"x": {}, "x": {}}', "has 'x' twice"),
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


def test_a_tensor_of_another_dtype_is_an_error_only_when_it_is_read(tmp_path: Path) -> None:
    entry = {"dtype": "C64", "shape": [2], "data_offsets": [0, 16]}
    written(tmp_path / "a", {"x": entry})
    reader = reader_of(tmp_path, "a")
    with pytest.raises(Error, match="no dtype called 'c64'"):
        reader.read(FileRef("f", "x"))


# -- reading


def test_numbers_of_four_bits_and_powers_of_two_are_read(tmp_path: Path) -> None:
    """F4 has two elements in a byte, the first in the low half; F8_E8M0 has exponents."""
    header = {
        "codes": {"dtype": "F4", "shape": [3, 2], "data_offsets": [0, 3]},
        "scales": {"dtype": "F8_E8M0", "shape": [3], "data_offsets": [3, 6]},
    }
    written(tmp_path / "a", header, bytes([0x21, 0xF7, 0x80, 126, 127, 130]))
    reader = reader_of(tmp_path, "a")
    codes, scales = (reader.read(FileRef("f", key)).astype(np.float32) for key in header)
    assert codes.tolist() == [[0.5, 1], [6, -6], [0, -0.0]] and scales.tolist() == [0.5, 1, 8]


def reader_of(folder: Path, file: str = "m.safetensors", mesh: str = "tp=4") -> Reader:
    module = Module("m", Mesh.parse(mesh))
    module.files["f"] = file
    return Reader(module, folder)


@pytest.fixture
def arrays(tmp_path: Path) -> None:
    found = {
        "aa": np.arange(3, dtype=np.uint8),  # makes every later offset odd
        "a": np.ones((6, 4), np.float32),
        "b": np.ones((10, 4), ml_dtypes.bfloat16),
        "c": np.ones((2, 3, 4), np.float16),
        "scalar": np.array(3.5, np.float32),
        "empty": np.zeros((0, 4), np.float32),
    }
    save_file(found, tmp_path / "m.safetensors")


# every step on every rank is compared with numpy by test_references.py


def test_an_extent_and_a_view_of_the_mapped_file(tmp_path: Path, arrays: None) -> None:
    reader = reader_of(tmp_path)
    at = reader.info("f", "c").offset
    rows = C.then(Slice(((1, 2), (1, 3), None)))
    path = str(tmp_path / "m.safetensors")
    assert reader.extent(rows) == Extent(path, at + 32, 16, "f16", (1, 2, 4))
    assert reader.extent(FileRef("f", "empty")) is None
    array = reader.read(rows)
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
    assert first[0, 0] == pytest.approx(-0.1286598, rel=1e-6)  # the same in every version


def test_sliced_random_numbers_need_a_shape(tmp_path: Path) -> None:
    sharded = RandomRef("a", 1, 1.0).then(Shard(0, ("tp",)))
    with pytest.raises(Error, match="so it needs a shape"):
        reader_of(tmp_path).read(random_weight(sharded, 75, 40))


# -- errors


A, B, C = (FileRef("f", key) for key in "abc")


@pytest.mark.parametrize(
    ("ref", "message"),
    [
        (FileRef("f", "scalr"), r"m\.safetensors has no tensor called 'scalr'.*'scalar'"),
        (A.then(Unsqueeze(3)), r"\.unsqueeze\(3\) does not fit 2 dimensions"),
        (A.then(Slice(((0, 7), None))), "reaches outside a dimension of 6"),
        (ConcatRef((A, B), 0), "joins bf16 and f32"),
        (ConcatRef((A, C), 0), "joins tensors of shapes"),
        (ConcatRef((ZerosRef((4, 8), "f32"), ZerosRef((4,), "f32")), 1), "joins tensors of shapes"),
        (A, r"@w is f32\[6, 5\], but @f\[\"a\"\] is f32\[6, 4\]"),
        (UnboundRef("x.y"), r"'x\.y' has no values"),
    ],
)
def test_wrong_references_are_named(tmp_path: Path, arrays: None, ref: Ref, message: str) -> None:
    reader, weight = reader_of(tmp_path), random_weight(ref, 6, 5)
    with pytest.raises(Error, match=message):
        reader.check(weight)
        reader.read(weight)


WORDS = ZerosRef((2, 8), "i32")
INDICES = RandomRef("i", 1, 9.0, (8,))


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (UnpackedRef, (WORDS, "gptq", "u4", (16, 8)), "no packing called 'gptq'; there are"),
        (UnpackedRef, (WORDS, "rows", "f16", (16, 8)), r"not f16\[16, 8\]"),
        (UnpackedRef, (WORDS, "rows", "u4", (16,)), r"not u4\[16\]"),
        (UnpackedRef, (WORDS, "rows", "u4", (17, 8)), r"needs words \[3, 8\], but .*\[2, 8\]"),
        (UnpackedRef, (WORDS, "awq", "u4", (16, 8)), r"needs words \[16, 1\], but"),
        (RepeatedRef, (WORDS, (2, 1), (5, 8)), r"does not fit .* has \[2, 8\]"),
        (RepeatedRef, (WORDS, (2,), (4,)), r"does not fit .* has \[2, 8\]"),
        (RepeatedRef, (WORDS, (0, 1), (0, 8)), "does not fit"),
        (SortingRef, (WORDS,), r"has \[2, 8\]; expected a vector"),
        (LowRankSumRef, (WORDS, WORDS, WORDS, 1.0), r"adds \[2, 8\] @ \[2, 8\] to \[2, 8\]"),
        (StridedRef, (WORDS, 2, 0, 1, 1), r"takes slices of \[2, 8\], which it does not"),
        (StridedRef, (WORDS, 1, 3, 9, 2), r"takes slices of \[2, 8\], which it does not"),
        (TakenRef, (WORDS, WORDS, 0), "expected a vector of indices"),
        (TakenRef, (WORDS, SortingRef(INDICES), 2), "expected a vector of indices"),
        (TakenRef, (WORDS, SortingRef(INDICES), 0), "indices 0 to 7; expected 0 to 1"),
    ],
)
def test_layouts_of_other_libraries_are_checked(
    kind: Any, arguments: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(Error, match=message):
        Reader(Module("m")).read(kind(*arguments))


def test_bytes_outside_their_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(131))
    ref = BytesRef("f", 7, "f32", (7, 5))
    with pytest.raises(Error, match=r"ends at byte 147, but .*a has 131: it is truncated"):
        reader_of(tmp_path, "a").read(ref)
    path.write_bytes(b"")
    with pytest.raises(Error, match=r"cannot read the weights in .*: it is empty"):
        reader_of(tmp_path, "a").read(ref)
    path.unlink()
    with pytest.raises(Error, match=r"cannot read the weights in .*: No such file"):
        reader_of(tmp_path, "a").read(ref)


# -- memory


STEPS = [
    Cast("f32"),
    Transpose((1, 0)),
    Slice((None, (0, 1000))),
    Shard(1, ("tp",)),
    Cyclic(0, 4),
    Pad(0, 7),
]


@pytest.fixture
def large(tmp_path: Path) -> Ref:
    """A tensor of 120 MB."""
    rows, columns = 30_000, 2000
    header = {"x": {"dtype": "BF16", "shape": [rows, columns], "data_offsets": [0, rows * 4000]}}
    path = written(tmp_path / "m.safetensors", header, b"")
    os.truncate(path, path.stat().st_size + rows * 4000)
    return FileRef("f", "x")


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("step", [None, *STEPS], ids=str)
def test_a_stream_holds_a_block_at_a_time(
    tmp_path: Path, large: Ref, step: Step | None, ranks: int
) -> None:
    check_memory(reader_of(tmp_path), large if step is None else large.then(step), ranks)


BLOCKS = [("int4", (1, 100)), ("int4", (0, 0)), ("nvfp4", (1, 0))]
BLOCKS += [("uint8", (0, 1)), ("uint8", (200, 200))]


@pytest.mark.parametrize("part", ["codes", "scales"])
@pytest.mark.parametrize(("format", "block"), BLOCKS, ids=str)
def test_quantized_weights_are_made_a_block_at_a_time(
    tmp_path: Path, large: Ref, part: str, block: tuple[int, int], format: str
) -> None:
    if format == "uint8":
        large = ProductRef(large, ZerosRef((2000,), "f32"), 1)
        part = part.replace("scales", "zeros")
    ref = QuantizedRef(large, part, format, block)
    check_memory(reader_of(tmp_path), ref, 1)
    check_memory(reader_of(tmp_path), ref.then(Shard(0, ("tp",))), 4)


@pytest.mark.parametrize("step", [None, Shard(0, ("tp",)), Shard(1, ("tp",))], ids=str)
def test_low_rank_sums_are_made_a_block_at_a_time(
    tmp_path: Path, large: Ref, step: Step | None
) -> None:
    sides = ZerosRef((30_000, 4), "f32"), ZerosRef((4, 2000), "bf16")
    ref = LowRankSumRef(large, *sides, 2.0)
    check_memory(reader_of(tmp_path), ref if step is None else ref.then(step), 4)


def test_random_numbers_are_made_a_block_at_a_time(tmp_path: Path) -> None:
    ref = RandomRef("a", 1, 1.0, (20_000, 2000)).then(Cast("bf16")).then(Shard(1, ("tp",)))
    check_memory(reader_of(tmp_path), ref, 4)


def check_memory(reader: Reader, ref: Ref, ranks: int) -> None:
    """Check that a stream for `ranks` ranks has all elements and allocates less than 60 MiB."""
    tracemalloc.start()
    before = most = resident()
    count = 0
    for _, blocks in reader.stream([(ref, range(ranks))]):
        count += blocks[0].size
        most = max(most, resident())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == np.prod(reader.shape(ref))
    assert peak < 60 << 20
    assert most - before < 100 << 20  # mapped pages are released


def resident() -> int:
    """Bytes of memory of this process, mapped files included."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096
