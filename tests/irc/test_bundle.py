"""A bundle: one safetensors file with every weight of a module."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from irc import bundle
from irc.bundle import bundled
from irc.checkpoint import Reader
from irc.core import Module, Weight
from irc.errors import Error
from irc.mesh import Mesh
from irc.safetensors import read_header
from irc.text import parse_module
from irc.verify import verify
from tests.backends.decoder import write

RNG = np.random.default_rng(0)
ARRAYS = {
    "a": RNG.standard_normal((5, 4)).astype(np.float32),
    "b": RNG.standard_normal((6, 5)).astype(ml_dtypes.bfloat16),
    "ids": np.arange(7, dtype=np.int8),
    "one": np.array(2.5, np.float32),
    "none": np.zeros((0, 3), np.float32),
}


def module(path: Path, *weights: str) -> Module:
    lines = "\n".join(f"  weight {weight}" for weight in weights)
    text = f'module @m {{\n  file @f = "{path}"\n{lines}\n'
    return parse_module(
        f"{text}  func @forward(%x: f32[2]) -> (f32[2]) {{\n    return %x\n  }}\n}}"
    )


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write(tmp_path / "m.safetensors", ARRAYS)
    return tmp_path / "m.safetensors"


EVERY = (
    '@ids : i8[7] = @f["ids"]',
    '@a : f32[5, 4] = @f["a"]',
    '@b : bf16[6, 5] = @f["b"]',
    '@wide : f32[5, 6] = @f["b"].cast(f32).transpose(1, 0)',
    '@narrow : bf16[2, 4] = @f["a"][1:3, :].cast(bf16)',
    '@joined : f32[10, 4] = concat(@f["a"], @f["a"]; 0)',
    '@random : bf16[3, 3] = random("r", 1, 0.5)',
    '@one : f32[] = @f["one"]',
    '@none : f32[0, 3] = @f["none"]',
)


def values(m: Module, base: Path) -> Mapping[str, np.ndarray]:
    reader = Reader(m, base)
    return {name: np.array(reader.read(weight)) for name, weight in m.weights.items()}


def refuse(*_: object) -> int:
    """copy_file_range between two file systems that cannot."""
    raise OSError(errno.EXDEV, "Invalid cross-device link")


@pytest.mark.parametrize("copying", ["whole", "in pieces", "refused", "absent"])
def test_the_weights_are_the_same(
    source: Path, copying: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "COPY", 1 << 20 if copying == "whole" else 24)
    if copying == "refused":
        monkeypatch.setattr(os, "copy_file_range", refuse, raising=False)
    if copying == "absent":
        monkeypatch.delattr(os, "copy_file_range", raising=False)
    m = module(source, *EVERY)
    before, wanted = str(m), values(m, source.parent)
    told: list[float] = []
    path = source.parent / "bundle.safetensors"
    with bundled(m, path, told.append):
        assert m.files == {"weights": "bundle.safetensors"}
        inside = parse_module(str(m))
    assert str(m) == before
    assert told == sorted(told) and told[-1] == 1
    source.unlink()
    found = values(inside, path.parent)
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array, name)


def test_what_is_widened_is_kept_narrow_and_what_is_narrowed_is_not_kept_wide(
    source: Path,
) -> None:
    m = module(source, *EVERY)
    path = source.parent / "bundle.safetensors"
    with bundled(m, path):
        refs = {name: str(weight.ref) for name, weight in m.weights.items()}
    assert refs["wide"] == '@weights["wide"].cast(f32)' and refs["narrow"] == '@weights["narrow"]'
    kinds = {name: (tensor.dtype, tensor.shape) for name, tensor in read_header(path).items()}
    assert kinds["wide"] == ("bf16", (5, 6)) and kinds["narrow"] == ("bf16", (2, 4))


def test_other_readers_find_the_weights_at_aligned_places(source: Path) -> None:
    library = pytest.importorskip("safetensors", reason="the format's own library is not here")
    m = module(source, *EVERY)
    path = source.parent / "bundle.safetensors"
    with bundled(m, path):
        pass
    tensors = read_header(path)
    with library.safe_open(path, "numpy") as file:
        assert sorted(file.keys()) == sorted(m.weights)
        np.testing.assert_array_equal(file.get_tensor("a"), ARRAYS["a"])
        np.testing.assert_array_equal(file.get_tensor("ids"), ARRAYS["ids"])
    assert min(tensor.offset for tensor in tensors.values()) == 4096
    for tensor in tensors.values():
        assert tensor.offset % (tensor.nbytes & -tensor.nbytes or 1) == 0, tensor


def test_failures_leave_the_module_as_it_was(source: Path) -> None:
    m = module(source, *EVERY)
    before = str(m)
    with pytest.raises(OSError, match="No such file"), bundled(m, source.parent / "no" / "b"):
        pass
    assert str(m) == before
    with pytest.raises(RuntimeError), bundled(m, source.parent / "b.safetensors"):
        raise RuntimeError
    assert str(m) == before
    odd = module(source, '@w : i4[4] = random("r", 1, 4.0)')
    said = "weight @w is i4, which a safetensors file cannot hold; leave out --bundle"
    with pytest.raises(Error, match=said), bundled(odd, source.parent / "b"):
        pass


RANKS = (
    '@ids : i8[7] = @f["ids"]',
    '@columns : f32[5, 1] = @f["a"].shard(1, tp)',
    '@halves : f32[5, 2] = @f["a"].shard(1, pp)',
    '@wide : f32[2, 5] = @f["b"].cast(f32).shard(0, tp)',
    '@stages : bf16[1, 5] = @f["b"].shard(0, pp.tp)',
    '@one_stage : bf16[3, 5] = @f["b"].shard(0, pp)',
    '@heads : f32[5, 4] = concat(@f["a"], @f["a"], @f["a"], @f["a"]; 0).shard(0, tp)',
    '@random : bf16[2, 3] = random("r", 1, 0.5, [8, 3]).shard(0, tp)',
    '@dealt : i8[3] = @f["ids"].deal(0, 4).shard(0, tp).pad(0, 1)',
    '@one : f32[] = @f["one"]',
    '@none : f32[0, 3] = @f["none"].shard(0, tp)',
)


def test_every_rank_finds_its_part_in_one_piece(source: Path) -> None:
    m = module(source, *RANKS)
    m.mesh, m.local = Mesh.parse("pp=2, tp=4"), True
    reader, path = Reader(m, source.parent), source.parent / "bundle.safetensors"
    wanted = {w.name: [np.array(reader.read(w, rank)) for rank in range(8)] for w in weights_of(m)}
    with bundled(m, path):
        inside = parse_module(str(m))
        assert str(inside) == str(m)
    source.unlink()
    verify(inside)
    reader = Reader(inside, path.parent)
    for weight in weights_of(inside):
        for rank, array in enumerate(wanted[weight.name]):
            found = reader.read(weight, rank)
            assert found.dtype == array.dtype
            np.testing.assert_array_equal(found, array, f"{weight.name} on rank {rank}")
            stored = reader.narrowed(weight)
            assert not array.size or reader.extent(stored, rank) is not None
    assert read_header(path)["columns"].shape == (20, 1)
    assert read_header(path)["stages"].shape == (8, 5)
    assert read_header(path)["wide"].dtype == "bf16"


def weights_of(m: Module) -> list[Weight]:
    return list(m.weights.values())


def test_a_module_without_weights_has_no_file(source: Path) -> None:
    m = module(source)
    with bundled(m, source.parent / "b.safetensors"):
        assert m.files
    assert not (source.parent / "b.safetensors").exists()


def test_bundling_takes_no_memory(tmp_path: Path) -> None:
    rows = 60_000  # 240 MB, a hole in the file
    header = {"x": {"dtype": "F32", "shape": [rows, 1000], "data_offsets": [0, rows * 4000]}}
    text = json.dumps(header).encode()
    path = tmp_path / "big.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + rows * 4000)
    turned = '@t : f32[1000, 60000] = @f["x"].transpose(1, 0)'
    m = module(path, f'@w : f32[{rows}, 1000] = @f["x"]', turned)
    before = resident()
    with bundled(m, tmp_path / "b.safetensors"):
        assert resident() - before < 60 << 20
    assert (tmp_path / "b.safetensors").stat().st_size == 4096 + 2 * rows * 4000


def resident() -> int:
    """Bytes of memory of this process, mapped files included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
