"""Weight references on every rank: values, extents in files, and shared reads.

Random references over a small checkpoint are compared with what numpy computes of whole arrays.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from benchmarks.checkpoints import tensors
from irc.errors import Error
from irc.frontends.random_weights import random_weights
from irc.ir.core import Module, Weight
from irc.ir.dtypes import DTYPES, dtype_of, is_float, numpy_dtype, packed
from irc.ir.dtypes import dtype as dtype_called
from irc.ir.mesh import Mesh
from irc.ir.types import TensorType
from irc.quantization.formats import FORMATS, METHODS, encode
from irc.quantization.packing import PACKINGS
from irc.text import parse_module
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
    ReciprocalRef,
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
    ref_dtype,
    ref_shape,
    with_shape,
)  # fmt: skip
from irc.weights import computed as computed_module
from irc.weights.checkpoint import Reader, convert, random_blocks
from irc.weights.checkpoint import fill as fill_module
from irc.weights.checkpoint import reader as reader_module
from irc.weights.safetensors import holds, lay_out
from tests.fresh import fresh

Array = np.ndarray[Any, Any]
Arrays = Mapping[str, Array]
MESHES = ("", "tp=2", "tp=3", "tp=4", "ep=2, tp=2", "dp=1, tp=3")
KINDS = tuple(kind for kind in DTYPES if kind != "f8e8m0")  # which has no 0 to pad with
OFFSET = 7  # aligned to no dtype
STORED = ("i4", "u4", "f4e2m1", "u8", "i16", "i32")  # what random bytes are read as
FLOAT_KINDS = tuple(kind for kind in KINDS if is_float(kind))
FILE_KINDS = tuple(kind for kind in KINDS if holds(kind))


def checkpoint(folder: Path, rng: np.random.Generator) -> dict[str, Array]:
    """A safetensors file `m.safetensors` of odd shapes and all dtypes, at odd offsets.

    The file `data.bin` has the bytes of the tensor `words` at OFFSET.
    """
    arrays: dict[str, Array] = {"odd": np.arange(3, dtype=np.uint8)}
    shapes = [(7,), (6, 4), (5, 3), (2, 3, 5), (0, 4), (), (1, 9), (12, 2)]
    for kind in FILE_KINDS:
        for i, shape in enumerate(shapes):
            if rng.random() < 0.5:
                numbers = rng.integers(-5 if kind[0] != "u" else 0, 6, shape)
                arrays[f"{kind}.{i}"] = numbers.astype(numpy_dtype(kind))
    arrays["words"] = rng.integers(-(2**31), 2**31, (5, 3)).astype(np.int32)
    arrays["w"] = rng.standard_normal((7, 6)).astype(ml_dtypes.bfloat16)
    save_file(arrays, folder / "m.safetensors")
    (folder / "data.bin").write_bytes(b"x" * OFFSET + arrays["words"].tobytes())
    return arrays


def reader_of(folder: Path, mesh: str) -> Reader:
    """A reader of these files, called @f and @data, on a mesh."""
    module = Module("m", Mesh.parse(mesh))
    module.files |= {"f": "m.safetensors", "data": "data.bin"}
    return Reader(module, folder)


def meaning(ref: Ref, arrays: Arrays, mesh: Mesh, rank: int) -> Array:
    """The value of a reference on one rank; each step is applied to a complete array."""
    match ref:
        case FileRef():
            array = arrays[ref.key]
        case BytesRef():
            array = _stored(arrays["words"].tobytes()[ref.offset - OFFSET :], ref)
        case ConcatRef():
            array = np.concatenate([meaning(p, arrays, mesh, rank) for p in ref.parts], ref.dim)
        case QuantizedRef():
            values = meaning(ref.source, arrays, mesh, rank)
            kind = ref.scale_dtype or dtype_of(values)
            encoded = encode(values, ref.format, ref.block, kind, ref.method)
            array = getattr(encoded, ref.part)
        case ProductRef():
            values, factor = (meaning(part, arrays, mesh, rank) for part in ref.inputs)
            wide = np.moveaxis(
                np.moveaxis(values.astype("f4"), ref.dim, -1) * factor.astype("f4"), -1, ref.dim
            )
            with np.errstate(over="ignore"):
                array = wide.astype(values.dtype)
        case LowRankSumRef():
            source, left, right = (meaning(part, arrays, mesh, rank) for part in ref.inputs)
            added = np.einsum("ir,rj->ij", left.astype("f8"), right.astype("f8"))
            array = (source.astype("f4") + ref.scale * added).astype("f4").astype(source.dtype)
        case UnpackedRef():
            array = _unpacked(meaning(ref.source, arrays, mesh, rank), ref)
        case RepeatedRef():
            array = meaning(ref.source, arrays, mesh, rank)
            for dim, count in enumerate(ref.counts):
                array = np.repeat(array, count, dim)
            array = array[tuple(map(slice, ref.shape))]
        case ReciprocalRef():
            values = meaning(ref.source, arrays, mesh, rank)
            with np.errstate(divide="ignore"):
                array = (np.float32(1) / values.astype("f4")).astype(values.dtype)
        case SortingRef():
            keys = meaning(ref.source, arrays, mesh, rank).tolist()
            array = np.array(sorted(range(len(keys)), key=keys.__getitem__), np.int32)
        case TakenRef():
            source, indices = (meaning(part, arrays, mesh, rank) for part in ref.inputs)
            array = source.take(indices, ref.dim)
        case StridedRef():
            source = meaning(ref.source, arrays, mesh, rank)
            array = source.take(np.arange(ref.start, ref.stop, ref.step), ref.dim)
        case ZerosRef():
            array = np.zeros(ref.shape, numpy_dtype(ref.dtype))
        case _:
            array = Reader(Module("m")).read(type(ref)(**{**vars(ref), "steps": ()}))
    for step in ref.steps:
        array = _stepped(array, step, mesh, rank)
    return array


def _stored(data: bytes, ref: BytesRef) -> Array:
    """The elements of bytes, of which one holds two of four bits, the first in its low half."""
    kind, count = DTYPES[ref.dtype], int(np.prod(ref.shape))
    if kind.bits == 8 * kind.numpy.itemsize:
        return np.frombuffer(data, kind.numpy, count).reshape(ref.shape)
    halves = [half for byte in data for half in (byte % 16, byte // 16)][:count]
    codes = np.array(halves, np.uint8)
    if ref.dtype == "f4e2m1":
        return codes.view(kind.numpy).reshape(ref.shape)
    signed = codes.astype(np.int8) - 16 * (codes > 7) if ref.dtype == "i4" else codes
    return signed.astype(kind.numpy).reshape(ref.shape)


def _unpacked(words: Array, ref: UnpackedRef) -> Array:
    """The elements of words, one by one."""
    bits, along = DTYPES[ref.dtype].bits, ref.packing == "rows"
    middle = 1 << (bits - 1) if ref.dtype[0] == "i" else 0
    array = np.empty(ref.shape, np.int64)
    for place in np.ndindex(*ref.shape):
        at, index = list(place), place[0] if along else place[1]
        word, i = divmod(index, 32 // bits)
        at[0 if along else 1] = word
        i = [0, 4, 1, 5, 2, 6, 3, 7][i] if ref.packing == "awq" else i
        code = int(words[tuple(at)]) % 2**32 // 2 ** (bits * i)
        array[place] = (code + (ref.packing == "columns-less-1")) % 2**bits - middle
    return array.astype(numpy_dtype(ref.dtype))


def _stepped(array: Array, step: Step, mesh: Mesh, rank: int) -> Array:
    match step:
        case Cast(dtype):
            return convert(array, dtype)
        case Transpose(order):
            return array.transpose(order)
        case Unsqueeze(dim):
            return np.expand_dims(array, dim)
        case Slice(ranges):
            return array[tuple(slice(*r) if r else slice(None) for r in ranges)]
        case Pad(dim, count):
            return _padded(array, dim, count)
        case Shard(dim, axes):
            group_size, size = mesh.group_size(axes), array.shape[dim]
            part = (size + group_size - 1) // group_size
            whole = _padded(array, dim, part * group_size - size)
            return np.split(whole, group_size, dim)[mesh.index(rank, axes)]
        case Cyclic(dim, group_size):
            size = array.shape[dim]
            rows = (size + group_size - 1) // group_size
            whole = _padded(array, dim, rows * group_size - size)
            return whole.take(
                [q * group_size + r for r in range(group_size) for q in range(rows)], dim
            )


def _padded(array: Array, dim: int, count: int) -> Array:
    shape = [count if i == dim else size for i, size in enumerate(array.shape)]
    return np.concatenate([array, np.zeros(shape, array.dtype)], dim)


class References:
    """Draws valid references of fewer than `bound` elements."""

    def __init__(self, rng: np.random.Generator, arrays: Arrays, reader: Reader, mesh: Mesh):
        self.rng, self.reader, self.mesh = rng, reader, mesh
        self.keys = [key for key in arrays if key != "words"]  # which f16 cannot represent
        self.bound = 3000

    def chosen(self, many: Any) -> Any:
        return many[int(self.rng.integers(len(many)))]

    def draw(self, depth: int = 0, steps: int = 6) -> Ref:
        """A source with a few steps, or a concatenation of others."""
        ref = self.source()
        if depth < 3 and self.rng.random() < 0.3:
            ref = self.computed(ref)
        if depth < 3 and self.rng.random() < 0.5:
            ref = self.concat(depth)
        return self.stepped(ref, steps)

    def stepped(self, ref: Ref, most: int, shards: bool = True) -> Ref:
        """The reference with some of up to `most` steps, those that keep it small."""
        for _ in range(int(self.rng.integers(most + 1))):
            after = ref.then(self.step(ref, shards))
            ref = after if np.prod(self.shape(after)) < self.bound else ref
        return ref

    def shape(self, ref: Ref) -> tuple[int, ...]:
        shape = ref_shape(ref, self.mesh, self.reader.known)
        assert shape is not None
        return shape

    def source(self) -> Ref:
        kind = self.rng.random()
        shape = tuple(int(n) for n in self.rng.integers(0, 9, self.rng.integers(4)))
        if kind < 0.2:
            return ZerosRef(shape, self.chosen(KINDS))
        if kind < 0.4:
            return RandomRef("k", int(self.rng.integers(9)), 3.0, shape)
        if kind < 0.5:
            return self.unpacked()
        if kind < 0.6:
            return self.stored()
        return FileRef("f", self.chosen(self.keys))

    def stored(self) -> Ref:
        """Bytes of `data.bin`, as a tensor of 0 to 3 dimensions."""
        dtype, first = self.chosen(STORED), int(self.rng.integers(9))
        count = (60 - first) * 8 // DTYPES[dtype].bits
        shape: list[int] = []
        for _ in range(int(self.rng.integers(4))):
            shape.append(int(self.rng.integers(1, min(count, 12) + 1)))
            count //= shape[-1]
        return BytesRef("data", OFFSET + first, dtype, tuple(shape))

    def unpacked(self) -> Ref:
        """Elements of all the words, of the last ones not all."""
        packing = self.chosen(list(PACKINGS))
        dtype = self.chosen(("i4", "u4") if packing == "awq" else ("i4", "u4", "i8", "u8"))
        count, shape = 32 // DTYPES[dtype].bits, [5, 3]
        shape[PACKINGS[packing].dim] *= count
        shape[PACKINGS[packing].dim] -= int(self.rng.integers(count))
        return UnpackedRef(FileRef("f", "words"), packing, dtype, (shape[0], shape[1]))

    def rearranged(self, ref: Ref, shape: tuple[int, ...]) -> Ref:
        """Repeated, reciprocal, or in the order of random numbers."""
        dim = int(self.rng.integers(len(shape)))
        order = SortingRef(RandomRef("o", int(self.rng.integers(9)), 1.0, (shape[dim],)))
        counts = tuple(self.rng.integers(1, 4, len(shape)).tolist())
        pairs = zip(shape, counts, strict=True)
        whole = tuple(
            size and size * count - int(self.rng.integers(count)) for size, count in pairs
        )
        kinds = [TakenRef(ref, order, dim), RepeatedRef(ref, counts, whole), ReciprocalRef(ref)]
        if shape[dim]:
            start, step = int(self.rng.integers(shape[dim])), int(self.rng.integers(1, 4))
            kinds.append(StridedRef(ref, dim, start, shape[dim], step))
        return self.chosen(kinds)

    def computed(self, ref: Ref) -> Ref:
        """A part of a quantized reference, also times a vector."""
        ref = self.stepped(ref, 2, shards=False)
        ref = ref.then(Cast(self.chosen(("f32", "bf16", "f16"))))
        shape = self.shape(ref)
        if shape and self.rng.random() < 0.3:
            return self.rearranged(ref, shape)
        if len(shape) == 2 and self.rng.random() < 0.4:
            inner = int(self.rng.integers(1, 4))
            sides = (shape[0], inner), (inner, shape[1])
            left, right = (RandomRef(f"side{i}", 5, 1.0, side) for i, side in enumerate(sides))
            return LowRankSumRef(ref, left.then(Cast("bf16")), right, 0.75)
        if shape and self.rng.random() < 0.3:
            dim = int(self.rng.integers(len(shape)))
            ref = ProductRef(ref, RandomRef("s", 1, 2.0, (shape[dim],)), dim)
            if self.rng.random() < 0.5:
                return ref
        if not shape or not np.isfinite(self.reader.read(ref, 0).astype("f4")).all():
            return ref  # no scale represents infinities, such as large numbers of u64 in f16
        block = tuple(self.chosen([0, *(n for n in range(1, s + 1) if s % n == 0)]) for s in shape)
        format = FORMATS[self.chosen(list(FORMATS))]
        parts = ["codes", "codes", "scales"]
        parts += ["zeros"] * bool(format.zeros) + ["tensor_scale"] * format.tensor_scale
        scale = self.chosen(("", "", "f32", "bf16"))
        part, method = self.chosen(parts), self.chosen(METHODS)
        quantized = QuantizedRef(ref, part, format.name, block, method, scale)
        powers = self.reader.dtype(quantized) == "f8e8m0"
        return quantized.then(Cast("f32")) if powers else quantized

    def concat(self, depth: int) -> Ref:
        """A concatenation of slices of one reference, zeros and other references."""
        first = self.draw(depth + 1, 2)
        shape = self.shape(first)
        if not shape:
            return first
        dim, dtype = int(self.rng.integers(len(shape))), ref_dtype(first, self.reader.known)
        assert dtype is not None
        parts: list[Ref] = []
        while len(parts) < self.rng.integers(1, 5):
            kind, others = self.rng.random(), [first]
            if kind < 0.2:
                others = [self.draw(depth + 1, 2)]
            elif kind > 0.8:
                size = (*shape[:dim], int(self.rng.integers(4)), *shape[dim + 1 :])
                others = [ZerosRef(size, dtype)]
            elif kind > 0.3 and shape[dim] > 1:
                others = self.slices(first, shape, dim)
            parts += others if self.joins(ConcatRef((first, *others), dim)) else []
        return ConcatRef(tuple(parts), dim)

    def joins(self, ref: ConcatRef) -> bool:
        """Whether the parts of a concatenation fit each other."""
        try:
            return bool(self.shape(ref) and ref_dtype(ref, self.reader.known))
        except Error:
            return False

    def slices(self, ref: Ref, shape: tuple[int, ...], dim: int) -> list[Ref]:
        """Adjacent slices, or the same one several times, like replicated heads."""
        if self.rng.random() < 0.5:
            cut = int(self.rng.integers(1, shape[dim]))
            pairs = [(0, cut), (cut, shape[dim])]
        else:
            size = int(self.rng.integers(1, shape[dim] + 1))
            starts = range(0, shape[dim] - size + 1, size)
            times = int(self.rng.integers(1, 3))
            pairs = [(at, at + size) for at in starts for _ in range(times)]
        cuts = [tuple(p if i == dim else None for i in range(len(shape))) for p in pairs]
        return [ref.then(Slice(cut)) for cut in cuts]

    def step(self, ref: Ref, shards: bool = True) -> Step:
        shape = self.shape(ref)
        kind = self.rng.random()
        if kind < 0.15:
            dtype = ref_dtype(ref, self.reader.known)
            of_floats = dtype is None or is_float(dtype)  # large ones are no defined integers
            return Cast(self.chosen(FLOAT_KINDS if of_floats else KINDS))
        if not shape or (kind > 0.93 and len(shape) < 5):
            return Unsqueeze(int(self.rng.integers(len(shape) + 1)))
        if kind < 0.3:
            return Transpose(tuple(int(i) for i in self.rng.permutation(len(shape))))
        dim = int(self.rng.integers(len(shape)))
        if kind < 0.45:
            return Pad(dim, int(self.rng.integers(4)))
        if kind < 0.55:
            return Cyclic(dim, int(self.rng.integers(1, 5)))
        if kind < 0.75 and self.mesh.names and shards:
            axes = list(self.mesh.names)
            self.rng.shuffle(axes)
            return Shard(dim, tuple(axes[: int(self.rng.integers(1, len(axes) + 1))]))
        ranges: list[tuple[int, int] | None] = []
        for size in shape:
            begin, end = sorted(int(n) for n in self.rng.integers(0, size + 1, 2))
            ranges.append((begin, end) if begin < end and self.rng.random() < 0.6 else None)
        return Slice(tuple(ranges))


# -- random references

TP = ("tp",)
COUNT = 150  # references per mesh


def same(reader: Reader, ref: Ref, wanted: list[Array]) -> None:
    """Check all that a reader computes of a reference against one array per rank."""
    ranks = range(len(wanted))
    bits = [np.ascontiguousarray(want).tobytes() for want in wanted]
    streams = [list[bytes]() for _ in ranks]
    for _, blocks in reader.stream([(ref, ranks)]):
        for stream, block in zip(streams, blocks, strict=True):
            stream.append(block.tobytes())
    for rank, want in enumerate(wanted):
        got = reader.read(ref, rank)
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        assert got.shape == reader.shape(ref)
        assert reader.dtype(ref) == dtype_called(reader.dtype(ref)).name
        assert got.tobytes() == bits[rank]
        assert b"".join(streams[rank]) == bits[rank]
        extent = reader.extent(ref, rank)
        if extent is not None:
            data = Path(extent.path).read_bytes()
            four = dtype_called(extent.dtype).bits < 8
            stored = packed(want).tobytes() if four else bits[rank]
            assert data[extent.offset : extent.offset + extent.nbytes] == stored
    known = {reader.pieces(ref, rank): bits[rank] for rank in ranks}
    assert all(known[reader.pieces(ref, rank)] == bits[rank] for rank in ranks)


def some_region(reader: Reader, ref: Ref, wanted: list[Array], rng: np.random.Generator) -> None:
    shape = reader.shape(ref)
    ranges = [
        (int(min(pair)), int(max(pair))) for pair in (rng.integers(0, n + 1, 2) for n in shape)
    ]
    for rank, want in enumerate(wanted):
        part = want[tuple(slice(*pair) for pair in ranges)]
        got = reader.region(ref, ranges, rank)
        assert got.shape == part.shape and got.tobytes() == np.ascontiguousarray(part).tobytes()


@pytest.mark.parametrize("mesh", MESHES)
def test_any_reference_on_every_rank(
    tmp_path: Path, mesh: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = fresh(MESHES.index(mesh))
    arrays, reader = checkpoint(tmp_path, rng), reader_of(tmp_path, mesh)
    draw = References(rng, arrays, reader, Mesh.parse(mesh))
    for _ in range(COUNT):
        monkeypatch.setattr(reader_module, "BLOCK", int(rng.choice([1, 40, 300, 1 << 20])))
        monkeypatch.setattr(reader_module, "SMALL", int(rng.choice([0, 10, 1 << 20])))
        monkeypatch.setattr(computed_module, "AT_ONCE", int(rng.choice([1, 30, 1 << 20])))
        monkeypatch.setattr(fill_module, "GROUP", int(rng.choice([1, 40, 1 << 20])))
        ref = draw.draw()
        wanted = [meaning(ref, arrays, draw.mesh, rank) for rank in range(draw.mesh.ranks)]
        try:
            same(reader, ref, wanted)
            some_region(reader, ref, wanted, rng)
        except Exception as error:
            error.add_note(f"{ref} on the mesh ({mesh})")
            raise


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One file with matrices of which each row has its own value."""
    rows = np.arange(128, dtype=np.float32)[:, None]
    arrays = {
        "q": np.repeat(rows, 4, 1),
        "k": np.repeat(rows[:32] + 1000, 4, 1),
        "v": np.repeat(rows[:32] + 2000, 4, 1),
        "odd": np.repeat(rows[:10] + 3000, 4, 1).astype(ml_dtypes.bfloat16),
        "c": np.ones((2, 3, 4), np.float16),
    }
    save_file(arrays, tmp_path / "m.safetensors")
    (tmp_path / "data.bin").write_bytes(bytes(31))
    return tmp_path


Q, K, V, ODD, C = (FileRef("f", key) for key in ("q", "k", "v", "odd", "c"))


# -- extents


def slices(ref: Ref, size: int, *numbers: int) -> list[Ref]:
    """Heads of `size` rows, by number."""
    return [ref.then(Slice(((n * size, n * size + size), None))) for n in numbers]


def heads(ref: Ref, size: int, *numbers: int) -> Ref:
    """Heads of `size` rows by number, joined."""
    return ConcatRef(tuple(slices(ref, size, *numbers)), 0)


SHARD = Shard(0, TP)
FIRST, SECOND = (C.then(Slice(((i, i + 1), None, None))) for i in (0, 1))
Q_ROW = Q.then(Slice(((5, 6), None)))
Q_COLUMNS = tuple(Q.then(Slice((None, part))) for part in ((0, 1), (1, 4)))
ROWS_OF_ODD = [(0, 24), (24, 24), (48, 24), None]  # the last rank has padding
REPLICATED = heads(K, 16, 0, 0, 1, 1).then(SHARD)
CODES = BytesRef("data", 7, "i4", (8, 6))
MERGED = ConcatRef((Q.then(SHARD), K.then(SHARD), V.then(SHARD)), 0)
Places = list[tuple[int, int] | None]


@pytest.mark.parametrize(
    ("mesh", "key", "ref", "wanted"),
    [
        ("tp=4", "k", REPLICATED, [(0, 256), (0, 256), (256, 256), (256, 256)]),
        ("tp=2", "k", heads(K, 8, 0, 1, 2, 3).then(SHARD), [(0, 256), (256, 256)]),
        ("tp=2", "k", heads(K, 8, 1, 0, 2, 3).then(SHARD), [None, (256, 256)]),
        ("tp=4", "odd", ODD.then(SHARD), ROWS_OF_ODD),
        ("tp=4", "odd", ConcatRef((ODD, ZerosRef((2, 4), "bf16")), 0).then(SHARD), ROWS_OF_ODD),
        ("tp=4", "odd", ODD.then(Pad(0, 2)).then(SHARD), ROWS_OF_ODD),
        (
            "tp=4",
            "q",
            Q.then(Slice(((3, 67), None))).then(SHARD).then(Slice(((1, 9), None))),
            [((4 + 16 * rank) * 16, 128) for rank in range(4)],
        ),
        ("tp=2", "q", MERGED, [None, None]),
        ("", "q", heads(Q, 64, 0, 1), [(0, 2048)]),
        ("", "q", ConcatRef(Q_COLUMNS, 1), [(0, 2048)]),
        ("tp=2", "q", Q_ROW.then(Shard(1, TP)), [(80, 8), (88, 8)]),
        ("", "q", Q_ROW.then(Transpose((1, 0))), [(80, 16)]),
        ("", "q", Q.then(Transpose((1, 0))), [None]),
        ("", "c", C.then(Slice(((1, 2), (1, 3), None))), [(32, 16)]),
        ("", "c", C.then(Slice(((1, 2), (1, 2), (1, 3)))), [(34, 4)]),
        ("", "c", C.then(Slice(((0, 2), (1, 3), None))), [None]),
        ("", "c", C.then(Cast("f16")), [(0, 48)]),
        ("", "c", C.then(Cast("f32")).then(Cast("f16")), [None]),
        ("", "c", ConcatRef((FIRST, SECOND), 1), [(0, 48)]),
        ("", "c", ConcatRef((SECOND, FIRST), 0), [None]),
        ("", "", CODES.then(Slice(((3, 7), None))), [(16, 12)]),
        ("", "", CODES.then(Slice(((2, 3), (2, 6)))), [(14, 2)]),
        ("", "", CODES.then(Slice(((2, 3), (1, 5)))), [None]),  # they begin or end within a byte
        ("", "", CODES.then(Slice(((2, 3), (0, 3)))), [None]),
        ("", "", CODES.then(Slice(((2, 3), (1, 4)))), [None]),
        ("", "", CODES.then(Transpose((1, 0))), [None]),
    ],
)
def test_extents(folder: Path, mesh: str, key: str, ref: Ref, wanted: Places) -> None:
    """(offset in the tensor, bytes) of each rank; None where the bytes are not contiguous."""
    reader = reader_of(folder, mesh)
    at = reader.info("f", key).offset if key else 0
    found = [reader.extent(ref, rank) for rank in range(Mesh.parse(mesh).ranks)]
    assert [None if e is None else (e.offset - at, e.nbytes) for e in found] == wanted


def test_pieces_are_merged_and_equal_on_ranks_with_equal_shards(folder: Path) -> None:
    pieces = [reader_of(folder, "tp=4").pieces(REPLICATED, rank) for rank in range(4)]
    assert pieces[0] == pieces[1] != pieces[2] == pieces[3]
    assert len(reader_of(folder, "tp=2").pieces(MERGED, 1)) == 3


def test_slices_of_different_columns_are_not_merged(tmp_path: Path) -> None:
    arrays, reader = checkpoint(tmp_path, fresh(19)), reader_of(tmp_path, "")
    w = FileRef("f", "w")
    ref = ConcatRef((w.then(Slice(((0, 2), (0, 2)))), w.then(Slice(((2, 4), (1, 3))))), 0)
    assert (reader.read(ref) == np.concatenate([arrays["w"][:2, :2], arrays["w"][2:4, 1:3]])).all()


@pytest.mark.parametrize("rows", [3, 4, 7])
def test_codes_of_rows_apart_in_columns_that_divide_blocks(tmp_path: Path, rows: int) -> None:
    reader = reader_of(tmp_path, "")
    source = QuantizedRef(RandomRef("k", 1, 3.0, (rows, 20)), "codes", "int4", (1, 5))
    ref = source.then(Cyclic(0, 2)).then(Slice((None, (3, 14))))
    same(reader, ref, [meaning(ref, {}, Mesh(), 0)])


def test_blocks_of_odd_rows_end_at_whole_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "BLOCK", 15)
    data = fresh(3).bytes(36)
    (tmp_path / "data.bin").write_bytes(data)
    odd = BytesRef("data", 0, "u4", (9, 8)).then(Slice((None, (0, 5))))
    stream = reader_of(tmp_path, "").stream([(odd, [0])], as_bytes=True)
    blocks = [block for _, (block,) in stream]
    halves = np.frombuffer(data, np.uint8).repeat(2) // np.array([1, 16] * 36) % 16
    wanted = np.append(halves.reshape(9, 8)[:, :5], 0).reshape(-1, 2) @ [1, 16]
    assert len(blocks) == 3
    assert np.concatenate(blocks).tobytes() == bytes(wanted.tolist())


# -- narrowed references


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_before_widening_casts_has_the_same_values(tmp_path: Path, kind: str) -> None:
    rng = fresh(20 + KINDS.index(kind))
    arrays, reader = checkpoint(tmp_path, rng), reader_of(tmp_path, "tp=2")
    draw = References(rng, arrays, reader, Mesh.parse("tp=2"))
    for _ in range(COUNT // 3):
        ref = draw.draw().then(Cast(kind))
        narrow = reader.narrowed(ref)
        assert dtype_called(reader.dtype(narrow)).bits <= dtype_called(kind).bits
        for rank in range(2):
            found = convert(np.ascontiguousarray(reader.read(narrow, rank)), kind)
            assert found.tobytes() == reader.read(ref, rank).tobytes(), f"{ref} as {narrow}"


def test_casts_inside_a_concatenation_are_removed_too(folder: Path) -> None:
    reader = reader_of(folder, "tp=2")
    wide = ODD.then(Cast("f32"))
    ref = ConcatRef((wide, wide, ZerosRef((4, 4), "f32")), 0).then(Shard(0, TP))
    narrow = 'concat(@f["odd"], @f["odd"], zeros([4, 4], bf16); 0).shard(0, tp)'
    assert str(reader.narrowed(ref)) == narrow
    assert reader.narrowed(wide.then(Cast("f16")).then(Cast("f64"))) == wide.then(Cast("f16"))
    assert reader.narrowed(ConcatRef((wide, Q), 0)) == ConcatRef((wide, Q), 0)


# -- random numbers


def drawn_blocks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list to which every block of rows is added when it is generated."""
    made: list[int] = []
    draw = random_blocks._generate

    def counted(ref: RandomRef, block: int) -> Array:
        made.append(block)
        return draw(ref, block)

    monkeypatch.setattr(random_blocks, "_generate", counted)
    return made


def test_a_rank_generates_its_own_rows_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = with_shape(RandomRef("a", 1, 1.0), (512, 6), "bf16")
    reader, ref = reader_of(folder, "tp=4"), whole.then(Shard(0, TP))
    expected = reader.read(whole)
    weight = Weight(TensorType("bf16", (128, 6)), "w", ref)
    made = drawn_blocks(monkeypatch)
    for rank in range(4):
        made.clear()
        assert (reader.read(weight, rank) == expected[rank * 128 : rank * 128 + 128]).all()
        assert made == [2 * rank, 2 * rank + 1]


def test_ranks_with_columns_share_generated_rows(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "BLOCK", 4096)
    reader, ref = reader_of(folder, "tp=4"), RandomRef("a", 1, 1.0, (512, 8)).then(Shard(1, TP))
    made = drawn_blocks(monkeypatch)
    for _ in reader.stream([(ref, range(4))]):
        pass
    assert sorted(made) == list(range(8))


def test_a_reference_gets_the_shape_of_its_weight() -> None:
    assert with_shape(UnboundRef("a"), (7, 6), "f32") == UnboundRef("a", (7, 6))
    random = RandomRef("a", 1, 1.0, (7, 6)).then(Cast("bf16"))
    assert with_shape(RandomRef("a", 1, 1.0), (7, 6), "bf16") == random


def test_random_weights_of_a_local_module_are_shards(folder: Path) -> None:
    def filled(*weights: str) -> Module:
        lines = "\n".join(f" weight {weight}" for weight in weights)
        body = " func @forward() -> () {\n return\n }\n}"
        return random_weights(parse_module(f"module @m mesh(tp=4) {{\n{lines}\n{body}"), 7)

    whole = filled('@w : f32[8, 12] = unbound("k")')
    local = filled(
        '@rows : f32[2, 12] = unbound("k", [8, 12]).shard(0, tp)',
        '@columns : f32[8, 3] = unbound("k", [8, 12]).shard(1, tp)',
    )
    array = Reader(whole).read(whole.weights["w"])
    for rank in range(4):
        rows, columns = (Reader(local).read(w, rank) for w in local.weights.values())
        assert (rows == array[rank * 2 : rank * 2 + 2]).all()
        assert (columns == array[:, rank * 3 : rank * 3 + 3]).all()


def test_only_column_slices_of_a_large_model_are_written(tmp_path: Path) -> None:
    shapes = tensors("8b")
    header, placed = lay_out({name: ("bf16", shape) for name, shape in shapes.items()})
    path = tmp_path / "m.safetensors"
    path.write_bytes(header)
    total = sum(tensor.nbytes for tensor in placed.values())
    os.truncate(path, len(header) + total)  # sparse
    reader = reader_of(tmp_path, "tp=4")
    written = 0
    for name, shape in shapes.items():
        columns = name.endswith(("o_proj.weight", "down_proj.weight"))
        ref: Ref = FileRef("f", name)
        ref = ref.then(Shard(int(columns), TP)) if len(shape) > 1 else ref
        apart = [rank for rank in range(4) if reader.extent(ref, rank) is None]
        assert apart == ([0, 1, 2, 3] if columns else [])
        written += len(apart) * placed[name].nbytes // 4
    assert 0.25 * total < written < 0.4 * total
