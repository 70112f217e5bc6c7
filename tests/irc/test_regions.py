"""Weights that are a run of bytes in any file: read in place, cut, joined, written, refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from irc.bundle import bundled
from irc.checkpoint import Reader
from irc.core import Module, Weight
from irc.errors import Error
from irc.mesh import Mesh
from irc.text import parse_module
from irc.types import TensorType
from irc.weights import BytesRef, Cast, ConcatRef, Ref, Shard, Slice, Transpose
from tests.fresh import fresh

OFFSET = 13  # aligned to nothing


def file(folder: Path) -> np.ndarray:
    """An array of f32 behind a few other bytes; returns it."""
    array = fresh(41).standard_normal((6, 5)).astype(np.float32)
    (folder / "data.bin").write_bytes(b"x" * OFFSET + array.tobytes() + b"rest")
    return array


def reader(folder: Path, mesh: str = "") -> Reader:
    module = Module("m", Mesh.parse(mesh))
    module.files["f"] = "data.bin"
    return Reader(module, folder)


def region(shape: tuple[int, ...] = (6, 5), offset: int = OFFSET) -> Ref:
    return BytesRef("f", offset, "f32", shape)


def test_a_region_is_read_where_it_lies(tmp_path: Path) -> None:
    array = file(tmp_path)
    found = reader(tmp_path)
    np.testing.assert_array_equal(found.read(region()), array)
    assert (found.shape(region()), found.dtype(region())) == ((6, 5), "f32")
    extent = found.extent(region())
    assert extent is not None and (extent.offset, extent.nbytes) == (OFFSET, array.nbytes)
    rows = found.extent(region().then(Slice(((2, 4), None))))
    assert rows is not None and (rows.offset, rows.shape) == (OFFSET + 2 * 20, (2, 5))
    assert found.extent(region().then(Transpose((1, 0)))) is None


def test_steps_follow_a_region(tmp_path: Path) -> None:
    array = file(tmp_path)
    turned = region().then(Transpose((1, 0))).then(Cast("f64"))
    np.testing.assert_array_equal(reader(tmp_path).read(turned), array.T.astype(np.float64))
    both = ConcatRef((region((1, 5)), region()), 0)
    np.testing.assert_array_equal(reader(tmp_path).read(both), np.concatenate([array[:1], array]))
    parts = reader(tmp_path, "tp=4")
    for rank in range(4):
        want = np.zeros((2, 5), np.float32)
        mine = array[2 * rank : 2 * rank + 2]
        want[: len(mine)] = mine
        np.testing.assert_array_equal(parts.read(region().then(Shard(0, ("tp",))), rank), want)


def test_a_region_that_is_not_there(tmp_path: Path) -> None:
    file(tmp_path)
    with pytest.raises(Error, match=r"ends at byte 153, but .*data.bin has 137: it is truncated"):
        reader(tmp_path).read(region((7, 5)))
    (tmp_path / "data.bin").write_bytes(b"")
    with pytest.raises(Error, match=r"cannot read the weights in .*: it is empty"):
        reader(tmp_path).read(region())
    (tmp_path / "data.bin").unlink()
    with pytest.raises(Error, match=r"cannot read the weights in .*: No such file"):
        reader(tmp_path).read(region())


def text(ref: str, type: str = "f32[6, 5]") -> str:
    return f'module @m {{\n  file @f = "data.bin"\n  weight @w : {type} = {ref}\n}}\n'


def test_a_region_in_text(tmp_path: Path) -> None:
    for ref in ("bytes(@f, 13, f32[6, 5])", "bytes(@f, 0, i64[])", "bytes(@f, 0, f32[0, 2])"):
        type = ref.partition(", ")[2].partition(", ")[2][:-1]
        assert str(parse_module(text(ref, type))) == text(ref, type)


@pytest.mark.parametrize(
    ("ref", "message"),
    [
        ("bytes(@g, 13, f32[6, 5])", "there is no file @g"),
        ("bytes(@f, 13, f32[S, 5])", "is no dtype with sizes"),
        ("bytes(@f, 13, f32[6@tp, 5])", "is no dtype with sizes"),
        ("bytes(@f, -1, f32[6, 5])", "begins before its file does"),
        ("bytes(@f, 13)", "expected"),
    ],
)
def test_bad_text(ref: str, message: str) -> None:
    with pytest.raises(Error, match=message):
        parse_module(text(ref))


def test_a_region_is_copied_into_a_bundle(tmp_path: Path) -> None:
    array = file(tmp_path)
    module = Module("m")
    module.files["f"] = str(tmp_path / "data.bin")
    module.add_weight(Weight(TensorType("f32", (6, 5)), "w", region()))
    with bundled(module, tmp_path / "all.safetensors"):
        found = Reader(module, tmp_path).read(module.weights["w"])
        np.testing.assert_array_equal(found, array)
