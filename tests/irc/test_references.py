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
from irc.ir.dtypes import packed
from irc.ir.mesh import Mesh
from irc.ir.types import TensorType
from irc.text import parse_module
from irc.weights import (
    Cast,
    ConcatRef,
    Cyclic,
    FileRef,
    Pad,
    QuantizedRef,
    RandomRef,
    Ref,
    Shard,
    Slice,
    Transpose,
    UnboundRef,
    ZerosRef,
    with_shape,
)
from irc.weights import computed as computed_module
from irc.weights.checkpoint import Reader, convert, random_blocks
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
    ],
)
def test_extents(folder: Path, mesh: str, key: str, ref: Ref, wanted: Places) -> None:
    """(offset in the tensor, bytes) of each rank; None where the bytes are not contiguous."""
    reader = reader_of(folder, mesh)
    at = reader.info("f", key).offset
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
