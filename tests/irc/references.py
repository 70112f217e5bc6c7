"""Random weight references over a small checkpoint, and their values computed by numpy."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from irc.ir.core import Module
from irc.ir.dtypes import DTYPES, dtype_of, numpy_dtype
from irc.ir.mesh import Mesh
from irc.quantization.formats import FORMATS, METHODS, encode
from irc.quantization.packing import PACKINGS
from irc.weights import (
    BytesRef,
    Cast,
    ConcatRef,
    Cyclic,
    FileRef,
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
    TakenRef,
    Transpose,
    UnpackedRef,
    Unsqueeze,
    ZerosRef,
    ref_dtype,
    ref_shape,
)
from irc.weights.checkpoint import Reader, convert
from irc.weights.safetensors import holds

Array = np.ndarray[Any, Any]
Arrays = Mapping[str, Array]
MESHES = ("", "tp=2", "tp=3", "tp=4", "ep=2, tp=2", "dp=1, tp=3")
KINDS = tuple(kind for kind in DTYPES if kind != "f8e8m0")  # which has no 0 to pad with
OFFSET = 7  # aligned to no dtype
STORED = ("i4", "u4", "f4e2m1", "u8", "i16", "i32")  # what random bytes are read as
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
            values, factor = (meaning(each, arrays, mesh, rank) for each in ref.inputs)
            wide = np.moveaxis(
                np.moveaxis(values.astype("f4"), ref.dim, -1) * factor.astype("f4"), -1, ref.dim
            )
            array = wide.astype(values.dtype)
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
            source, indices = (meaning(each, arrays, mesh, rank) for each in ref.inputs)
            array = source.take(indices, ref.dim)
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
        for _ in range(int(self.rng.integers(steps + 1))):
            after = ref.then(self.step(ref))
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
        return self.chosen(
            [TakenRef(ref, order, dim), RepeatedRef(ref, counts, whole), ReciprocalRef(ref)]
        )

    def computed(self, ref: Ref) -> Ref:
        """A part of a quantized reference, also times a vector."""
        for _ in range(int(self.rng.integers(3))):
            after = ref.then(self.step(ref, shards=False))
            ref = after if np.prod(self.shape(after)) < self.bound else ref
        ref = ref.then(Cast(self.chosen(("f32", "bf16", "f16"))))
        shape = self.shape(ref)
        if shape and self.rng.random() < 0.3:
            return self.rearranged(ref, shape)
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
        found = QuantizedRef(ref, part, format.name, block, method, scale)
        return found.then(Cast("f32")) if self.reader.dtype(found) == "f8e8m0" else found

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
            kind = self.rng.random()
            other = self.draw(depth + 1, 2) if kind < 0.2 else first
            if kind > 0.8:
                size = (*shape[:dim], int(self.rng.integers(4)), *shape[dim + 1 :])
                other = ZerosRef(size, dtype)
            elif kind > 0.3 and shape[dim] > 1:
                parts += self.slices(first, shape, dim)
                continue
            if self.fits(other, shape, dim, dtype):
                parts.append(other)
        return ConcatRef(tuple(parts), dim)

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

    def fits(self, ref: Ref, shape: tuple[int, ...], dim: int, dtype: str) -> bool:
        found = self.shape(ref)
        rest = (*found[:dim], *found[dim + 1 :]) == (*shape[:dim], *shape[dim + 1 :])
        alike = len(found) == len(shape) and rest
        return alike and ref_dtype(ref, self.reader.known) == dtype

    def step(self, ref: Ref, shards: bool = True) -> Step:
        shape = self.shape(ref)
        kind = self.rng.random()
        if kind < 0.15:
            return Cast(self.chosen(KINDS))
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
