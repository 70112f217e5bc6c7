"""Weights from files to the GPU."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from irc.backends.cuda.execute.upload import Range, Uploads
from irc.backends.cuda.execute.weights import DeviceWeights
from irc.errors import Error
from irc.ir.core import Module
from irc.ir.dtypes import numpy_dtype, packed
from irc.text import parse_module
from irc.weights.checkpoint import Reader
from tests.fresh import fresh
from tests.tensorrt.fake_gpu import FakeDriver

TEXT = """module @m local mesh(tp=2) {{
  file @data = "data"
  weight @whole : f32[6, 10] = bytes(@data, 8, f32[6, 10])
  weight @same : f32[6, 10] = bytes(@data, 8, f32[6, 10])
  weight @rows : f32[3, 10]{{varies tp}} = bytes(@data, 8, f32[6, 10]).shard(0, tp)
  weight @columns : f32[6, 5]{{varies tp}} = bytes(@data, 8, f32[6, 10]).shard(1, tp)
  weight @half : bf16[6, 10] = bytes(@data, 8, f32[6, 10]).cast(bf16)
  weight @codes : i4[3, 7] = bytes(@data, 400, i4[3, 7])
  weight @joined : f32[5, 10]{{varies tp}} = concat({first}, {rows}; 0)
  weight @none : f32[0, 4] = zeros([0, 4], f32)
  func @f(%x: f32[2]) -> (f32[2]) {{
    return %x
  }}
}}"""
FIRST, ROWS = "bytes(@data, 88, f32[2, 10])", "bytes(@data, 8, f32[6, 10]).shard(0, tp)"
PIECE = 32  # bytes


@pytest.fixture
def module(tmp_path: Path) -> Module:
    data = fresh().standard_normal(2 + 60 + 60).astype(np.float32)
    (tmp_path / "data").write_bytes(data.tobytes())
    return parse_module(TEXT.format(first=FIRST, rows=ROWS), "m")


@pytest.mark.parametrize("rank", [0, 1])
def test_every_kind_of_weight(rank: int, module: Module, tmp_path: Path) -> None:
    driver, reader = FakeDriver(), Reader(module, tmp_path)
    stream = driver.stream()
    weights = DeviceWeights(driver, stream, reader, rank, PIECE)
    pinned: list[Any] = []  # references
    make = driver.pinned
    driver.pinned = lambda size: pinned.append(weakref.ref(piece := make(size))) or piece
    first = {name: module.weights[name] for name in ("rows", "codes")}
    weights.add(first)
    assert 0 < len(pinned) < 8
    weights.add(module.weights)
    assert [piece().size for piece in pinned] == [PIECE] * 16  # kept from one call to the next
    weights.uploads.free()
    assert {piece() for piece in pinned} == {None}
    assert weights.addresses["whole"] == weights.addresses["same"]
    for name, weight in module.weights.items():
        array = reader.read(weight, rank)
        assert array.dtype == numpy_dtype(weight.type.dtype)
        stored = packed(array) if name == "codes" else array.reshape(-1).view(np.uint8)
        found = driver.memory.view(weights.addresses[name], stored.size) if stored.size else stored
        assert np.array_equal(found, stored), name
    uploads = [call for call in driver.calls if call[0] == "upload"]
    assert max(size for _, _, size in uploads) <= PIECE
    wanted = [240, 120, 120, 120, 11, 200]  # whole, rows, columns, half, codes, joined: each once
    assert sum(size for _, _, size in uploads) == sum(wanted)
    weights.free()
    assert driver.memory.used == 0
    joined = reader.extents(module.weights["joined"], rank)
    assert [extent.nbytes for extent in joined] == [80, 120]  # straight from the file


def test_weights_that_were_not_read_are_read_again(module: Module, tmp_path: Path) -> None:
    driver, reader = FakeDriver(), Reader(module, tmp_path)
    weights = DeviceWeights(driver, driver.stream(), reader, 0)
    rows = {"rows": module.weights["rows"]}
    lost = patch.object(Uploads, "files", side_effect=Error("the file is gone"))
    with lost, pytest.raises(Error, match="the file is gone"):
        weights.add(rows)
    assert (driver.memory.used, weights.addresses) == (0, {})
    weights.add(rows)
    found = driver.memory.view(weights.addresses["rows"], 120).view(np.float32)
    assert np.array_equal(found, reader.read(rows["rows"], 0).reshape(-1))


def test_files_that_are_too_short_or_missing(tmp_path: Path) -> None:
    driver, path = FakeDriver(), tmp_path / "data"
    stream, address = driver.stream(), driver.allocate(100)
    path.write_bytes(bytes(40))
    for wanted, message in (
        (Range(path, 10, 31), "expected weights up to byte 41 of .*, found a file of 40 bytes"),
        (Range(tmp_path / "other", 0, 1), "cannot read the weight file .*other: No such file"),
    ):
        with pytest.raises(Error, match=message), Uploads(driver, stream) as uploads:
            uploads.files([(wanted, address)])
