"""`simplified`: the same bytes on every rank, and the forms that passes and readers rely on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from irc.core import Module
from irc.errors import Error
from irc.mesh import Mesh
from irc.text import parse_module
from irc.weights import FileRef, Known, Ref, ZerosRef, simplified, sources_of
from irc.weights.shapes import nothing
from tests.fresh import fresh
from tests.irc.references import MESHES, References, checkpoint, meaning, reader_of

COUNT = 250  # references per mesh


@pytest.mark.parametrize("mesh", MESHES)
def test_any_reference_reads_the_same_on_every_rank(tmp_path: Path, mesh: str) -> None:
    rng = fresh(40 + MESHES.index(mesh))
    arrays, reader = checkpoint(tmp_path, rng), reader_of(tmp_path, mesh)
    draw = References(rng, arrays, reader, Mesh.parse(mesh))
    changed = 0
    for _ in range(COUNT):
        ref = draw.draw()
        forms = [simplified(ref, draw.mesh), simplified(ref, draw.mesh, reader.known)]
        for form, known in zip(forms, (nothing, reader.known), strict=True):
            assert simplified(form, draw.mesh, known) == form, f"{ref} becomes {form}"
            assert sources(form) <= sources(ref), f"{ref} becomes {form}"
            changed += form != ref
        for rank in range(draw.mesh.ranks):
            wanted = meaning(ref, arrays, draw.mesh, rank)
            for form in forms:
                found = reader.read(form, rank)
                assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), f"{ref}: {form}"
                assert found.tobytes() == wanted.tobytes(), f"{ref} becomes {form}"
            first, second = (reader.extent(form, rank) for form in (ref, forms[1]))
            assert first in (None, second), f"{ref} becomes {forms[1]}"
    assert changed > COUNT // 2


def sources(ref: Ref) -> int:
    """How many sources there are to read in a reference."""
    return sum(1 for _ in ref.sources())


SHAPES = {"a": (10, 6), "k": (128, 64), "v": (7,)}

# mesh; before; after, if nothing is known of the files; after, with their shapes (bf16)
CASES = [
    ("", "A[0:9, :][2:5, 1:3]", "A[2:5, 1:3]", None),
    ("", "A[0:10, :][:, 0:6]", "A[0:10, 0:6]", "A"),
    ("", "A.transpose(1, 0)[1:2, :].transpose(1, 0)", "A[:, 1:2]", None),
    ("", "A.cast(f32).cast(f32)", "A.cast(f32)", None),
    ("", "A.cast(bf16).cast(f32).cast(f16)", "A.cast(bf16).cast(f16)", "A.cast(f16)"),
    ("", "A.cast(f16).cast(f32)", "A.cast(f16).cast(f32)", None),
    ("", "A.pad(0, 1).pad(0, 2).pad(1, 0)", "A.pad(0, 3)", None),
    ("", "A.pad(0, 2)[0:11, :]", None, "A.pad(0, 1)"),
    ("", "A.pad(0, 2)[10:12, :]", None, "zeros([2, 6], bf16)"),
    ("", "V.deal(0, 1)", "V", None),
    ("", "V.deal(0, 9)", None, "V.pad(0, 2)"),
    ("", "V.unsqueeze(0).transpose(1, 0)", "V.unsqueeze(1)", None),
    ("", "V.unsqueeze(0).pad(0, 0)", None, "V.unsqueeze(0)"),
    ("", "zeros([4, 6], f32).pad(0, 1).transpose(1, 0).cast(i8)", "zeros([6, 5], i8)", None),
    ("tp=1", "A.shard(0, tp)", "A", None),
    ("tp=4", "A.pad(0, 2).shard(0, tp)", None, "A.shard(0, tp)"),
    ("tp=4", "A.pad(0, 3).shard(0, tp)", None, None),
    ("tp=4", "A.pad(0, 2).deal(0, 4)", None, "A.deal(0, 4)"),
    ("ep=2, tp=2", "K.shard(0, ep).shard(0, tp)", None, "K.shard(0, ep.tp)"),
    ("ep=2, tp=2", "V.shard(0, ep).shard(0, tp)", None, "V.shard(0, ep.tp)"),
    ("ep=2, tp=2", "A.shard(0, ep).shard(0, tp)", None, None),  # five rows are not split evenly
    # concatenations
    ("", "concat(A; 0)", "A", None),
    ("", "concat(A[0:2, :], A[2:10, :]; 0)", "A[0:10, :]", "A"),
    ("", "concat(A[:, 0:2], A[:, 2:3]; 1)", "A[:, 0:3]", None),
    ("", "concat(A[0:2, :], A[3:5, :]; 0)", None, None),
    ("", "concat(A[0:2, 0:2], A[2:4, 1:3]; 0)", None, None),
    ("", "concat(A[0:2, :], A.cast(f16).cast(bf16)[2:4, :]; 0)", None, None),
    ("", "concat(L, R.transpose(1, 0); 0)", None, None),
    ("", "concat(concat(A, K; 0), A; 0)", "concat(A, K, A; 0)", None),
    ("", "concat(A[0:4, :], K[4:8, :]; 0)[2:6, :]", "concat(A[2:4, :], K[4:6, :]; 0)", None),
    ("", "concat(A[0:4, :], K[4:8, :]; 0)[4:6, :]", "K[4:6, :]", None),
    ("", "concat(A.cast(f32), A.cast(f32); 1)", None, "concat(A, A; 1).cast(f32)"),
    ("", "concat(A, zeros([2, 6], bf16), zeros([1, 6], bf16); 0)", "A.pad(0, 3)", None),
    ("", "concat(A, K, zeros([2, 6], bf16); 0)", "concat(A, K; 0).pad(0, 2)", None),
    ("tp=4", "concat(A, zeros([2, 6], bf16); 0).shard(0, tp)",
     "A.pad(0, 2).shard(0, tp)", "A.shard(0, tp)"),
    # heads that several ranks have
    ("tp=2", "concat(K, K; 0).shard(0, tp)", None, "K"),
    ("tp=4", "concat(K, K; 0).shard(0, tp)", None, None),
    ("ep=2, tp=2", "concat(K, K; 0).shard(0, ep.tp)", None, "K.shard(0, tp)"),
    ("tp=4", "concat(L, L, R, R; 0).shard(0, tp)", None, None),
    ("ep=2, tp=2", "concat(L, L, R, R; 0).shard(0, ep.tp)",
     "K[0:128, :].shard(0, ep)", "K.shard(0, ep)"),
    ("tp=2", "concat(L, L; 0)[0:128, :].shard(0, tp).pad(0, 1)", "L.pad(0, 1)", None),
]  # fmt: skip


def spelled(text: str) -> str:
    """A short text of the table as a reference: A, K and V are tensors, L and R halves of K."""
    text = re.sub("[LR]", lambda half: {"L": "K[0:64, :]", "R": "K[64:128, :]"}[half[0]], text)
    return re.sub("[AKV]", lambda key: f'@f["{key[0].lower()}"]', text)


def module_of(ref: str, mesh: str) -> Module:
    return parse_module(
        f'module @m mesh({mesh}) {{\n file @f = "m.safetensors"\n weight @w : f32[1] = {ref}\n'
        " func @forward() -> () {\n return\n }\n}"
    )


def bf16(source: Ref) -> tuple[tuple[int, ...] | None, str | None]:
    return (SHAPES[source.key], "bf16") if isinstance(source, FileRef) else nothing(source)


@pytest.mark.parametrize(("mesh", "before", "after", "known"), CASES)
def test_form(mesh: str, before: str, after: str | None, known: str | None) -> None:
    module = module_of(spelled(before), mesh)
    ref = module.weights["w"].ref
    assert str(ref) == spelled(before)
    assert str(simplified(ref, module.mesh)) == spelled(after or before)
    assert str(simplified(ref, module.mesh, bf16)) == spelled(known or after or before)


@pytest.mark.parametrize(
    "ref",
    [
        '@f["a"].transpose(1, 0)[0:1]',
        '@f["a"].transpose(0, 0)',
        '@f["a"][0:1].shard(1, tp)',
        '@f["a"][0:1].unsqueeze(2)',
        '@f["a"][0:1].pad(-1, 1)',
        'concat(@f["a"][0:1], @f["a"][0:1]; 1)',
        'concat(@f["a"][0:1], @f["a"][0:1, :]; 0)',
        'concat(@f["a"][0:1], @f["a"][0:1]; -1)',
        "zeros([4], f32)[0:5]",
        "zeros([4], f32).shard(0, tp)",
    ],
)
@pytest.mark.parametrize("known", [nothing, bf16])
def test_what_does_not_fit_is_an_error(ref: str, known: Known) -> None:
    module = module_of(ref, "ep=2")
    with pytest.raises(Error):
        simplified(module.weights["w"].ref, module.mesh, known)


def test_weights_that_are_not_cut_tell_the_shapes_of_their_sources() -> None:
    module = parse_module(
        'module @m {\n file @f = "m.safetensors"\n'
        ' weight @a : f32[6, 10] = @f["a"].transpose(1, 0).cast(f32)\n'
        ' weight @b : f32[10, 6] = @f["b"]\n'
        ' weight @c : f32[2] = @f["c"][0:2]\n'
        ' weight @d : f32[N] = @f["d"]\n'
        " func @forward() -> () {\n return\n }\n}"
    )
    known = sources_of(module)
    module.weights["a"].ref = ZerosRef((1,), "f32")
    assert known(FileRef("f", "a")) == ((10, 6), None)
    assert known(FileRef("f", "b")) == ((10, 6), "f32")
    assert known(FileRef("f", "c")) == known(FileRef("f", "d")) == (None, None)
    assert known(ZerosRef((3,), "i8")) == ((3,), "i8")
