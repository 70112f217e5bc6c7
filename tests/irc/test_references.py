"""Weight references on every rank: values, extents in files, and shared reads."""

import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from benchmarks.checkpoints import tensors
from irc.frontends.random_weights import random_weights
from irc.ir.core import Module, Weight
from irc.ir.dtypes import dtype as dtype_called
from irc.ir.mesh import Mesh
from irc.ir.types import TensorType
from irc.text import parse_module
from irc.weights import (
    Cast,
    ConcatRef,
    FileRef,
    Pad,
    RandomRef,
    Ref,
    Shard,
    Slice,
    Transpose,
    UnboundRef,
    ZerosRef,
    pinned,
)
from irc.weights.checkpoint import Reader, convert, numbers
from irc.weights.checkpoint import fill as fill_module
from irc.weights.checkpoint import reader as reader_module
from irc.weights.safetensors import lay_out
from tests.fresh import fresh
from tests.irc.references import KINDS, MESHES, Array, References, checkpoint, meaning, reader_of

TP = ("tp",)
COUNT = 150  # references per mesh


def same(reader: Reader, ref: Ref, wanted: list[Array]) -> None:
    """Check all that a reader computes of a reference against one array per rank."""
    ranks = range(len(wanted))
    bits = [np.ascontiguousarray(want).tobytes() for want in wanted]
    streams = [list[bytes]() for _ in ranks]
    for blocks in reader.stream_ranks(ref, ranks):
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
            assert data[extent.offset : extent.offset + extent.nbytes] == bits[rank]
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
        monkeypatch.setattr(fill_module, "GROUP", int(rng.choice([1, 40, 1 << 20])))
        ref = draw.draw()
        wanted = [meaning(ref, arrays, draw.mesh, rank) for rank in range(draw.mesh.ranks)]
        try:
            same(reader, ref, wanted)
            some_region(reader, ref, wanted, rng)
        except AssertionError as error:
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
    }
    save_file(arrays, tmp_path / "m.safetensors")
    return tmp_path


Q, K, V, ODD = (FileRef("f", key) for key in ("q", "k", "v", "odd"))


def rows_of(array: Array) -> list[float]:
    return array[:, 0].astype(np.float64).tolist()


# -- extents


def slices(ref: Ref, size: int, *numbers: int) -> list[Ref]:
    """Heads of `size` rows, by number."""
    return [ref.then(Slice(((n * size, n * size + size), None))) for n in numbers]


def places(folder: Path, mesh: str, ref: Ref) -> list[tuple[int, int] | None]:
    """(offset in the file, bytes) of each rank; None where the bytes are not contiguous."""
    reader = reader_of(folder, mesh)
    found = [reader.extent(ref, rank) for rank in range(Mesh.parse(mesh).ranks)]
    return [None if extent is None else (extent.offset, extent.nbytes) for extent in found]


def test_replicated_heads_stay_in_place(folder: Path) -> None:
    at = reader_of(folder, "").info("f", "k").offset
    heads = ConcatRef(tuple(slices(K, 16, 0, 0, 1, 1)), 0).then(Shard(0, TP))
    assert places(folder, "tp=4", heads) == [(at, 256), (at, 256), (at + 256, 256), (at + 256, 256)]
    pieces = [reader_of(folder, "tp=4").pieces(heads, rank) for rank in range(4)]
    assert pieces[0] == pieces[1] != pieces[2] == pieces[3]
    two = ConcatRef(tuple(slices(K, 8, 0, 1, 2, 3)), 0).then(Shard(0, TP))
    assert places(folder, "tp=2", two) == [(at, 256), (at + 256, 256)]
    mixed = ConcatRef(tuple(slices(K, 8, 1, 0, 2, 3)), 0).then(Shard(0, TP))
    assert places(folder, "tp=2", mixed) == [None, (at + 256, 256)]


def test_only_the_rank_with_padding_has_no_extent(folder: Path) -> None:
    at = reader_of(folder, "").info("f", "odd").offset
    ranks = [(at, 24), (at + 24, 24), (at + 48, 24), None]
    assert places(folder, "tp=4", ODD.then(Shard(0, TP))) == ranks
    padded = ConcatRef((ODD, ZerosRef((2, 4), "bf16")), 0)
    assert places(folder, "tp=4", padded.then(Shard(0, TP))) == ranks
    assert places(folder, "tp=4", ODD.then(Pad(0, 2)).then(Shard(0, TP))) == ranks
    sliced = Q.then(Slice(((3, 67), None))).then(Shard(0, TP)).then(Slice(((1, 9), None)))
    first = reader_of(folder, "").info("f", "q").offset
    assert places(folder, "tp=4", sliced) == [(first + (4 + 16 * r) * 16, 128) for r in range(4)]


def test_segments_of_merged_projections(folder: Path) -> None:
    """A concatenation of shards is in three places of the file."""
    merged = ConcatRef(tuple(ref.then(Shard(0, TP)) for ref in (Q, K, V)), 0)
    reader = reader_of(folder, "tp=2")
    for rank in range(2):
        wanted = [*range(64), *range(1000, 1016), *range(2000, 2016)]
        shift = [64.0] * 64 + [16.0] * 32
        expected = [float(row) + rank * by for row, by in zip(wanted, shift, strict=True)]
        assert rows_of(reader.read(merged, rank)) == expected
        assert reader.extent(merged, rank) is None and len(reader.pieces(merged, rank)) == 3
    whole = ConcatRef((*slices(Q, 64, 0, 1),), 0)
    assert reader.extent(whole) == reader.extent(Q)
    columns = [Q.then(Slice((None, part))) for part in ((0, 1), (1, 4))]
    assert reader.extent(ConcatRef(tuple(columns), 1)) == reader.extent(Q)


def test_slices_of_different_columns_are_not_merged(tmp_path: Path) -> None:
    arrays, reader = checkpoint(tmp_path, fresh(19)), reader_of(tmp_path, "")
    w = FileRef("f", "w")
    ref = ConcatRef((w.then(Slice(((0, 2), (0, 2)))), w.then(Slice(((2, 4), (1, 3))))), 0)
    assert (reader.read(ref) == np.concatenate([arrays["w"][:2, :2], arrays["w"][2:4, 1:3]])).all()


def test_columns_of_one_row_and_transposed_vectors_have_extents(folder: Path) -> None:
    row = Q.then(Slice(((5, 6), None)))
    assert reader_of(folder, "tp=2").extent(row.then(Shard(1, TP)), 1) is not None
    turned = reader_of(folder, "").extent(row.then(Transpose((1, 0))))
    assert turned is not None and turned.shape == (4, 1)
    assert reader_of(folder, "").extent(Q.then(Transpose((1, 0)))) is None


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
    draw = numbers._generate

    def counted(ref: RandomRef, block: int) -> Array:
        made.append(block)
        return draw(ref, block)

    monkeypatch.setattr(numbers, "_generate", counted)
    return made


def test_a_rank_generates_its_own_rows_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = pinned(RandomRef("a", 1, 1.0), (512, 6), "bf16")
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
    for _ in reader.stream_ranks(ref, range(4)):
        pass
    assert sorted(made) == list(range(8))


def test_a_pinned_reference_has_the_shape_of_its_weight() -> None:
    assert pinned(UnboundRef("a"), (7, 6), "f32") == UnboundRef("a", (7, 6))
    random = RandomRef("a", 1, 1.0, (7, 6)).then(Cast("bf16"))
    assert pinned(RandomRef("a", 1, 1.0), (7, 6), "bf16") == random


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
