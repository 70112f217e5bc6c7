"""A bundle: one safetensors file with every weight of a module."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from irc.artifact import bundle
from irc.artifact.bundle import bundled
from irc.errors import Error
from irc.ir.core import Module, Weight
from irc.ir.mesh import Mesh
from irc.ir.verify import verify
from irc.ir.weight_parts import weight_part
from irc.text import parse_module
from irc.weights.checkpoint import Reader
from irc.weights.safetensors import read_header
from tests.backends.decoder import write
from tests.irc.test_checkpoint import resident, written

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

BYTES = (
    "@floats : f32[3, 5] = bytes(@f, 7, f32[3, 5])",
    "@codes : i4[6, 7] = bytes(@f, 7, i4[6, 7])",
)


def values(m: Module, base: Path) -> Mapping[str, np.ndarray]:
    reader = Reader(m, base)
    return {name: np.array(reader.read(weight)) for name, weight in m.weights.items()}


def hash_of(path: Path) -> str:
    return f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"


@pytest.mark.parametrize("block", [1 << 20, 24])
def test_the_weights_are_the_same(
    source: Path, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "COPY", block)
    m = module(source, *EVERY, *BYTES)
    before, wanted = str(m), values(m, source.parent)
    told: list[float] = []
    path = source.parent / "bundle.safetensors"
    with bundled(m, path, told.append) as hash:
        assert hash == hash_of(path)
        assert m.files == {"weights": "bundle.safetensors"}
        inside = parse_module(str(m))
    assert str(m) == before
    assert told == sorted(told) and told[-1] == 1
    source.unlink()
    found = values(inside, path.parent)
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array, name)


def test_the_file(source: Path) -> None:
    """The narrower dtype of a cast is stored; tensors are aligned; other readers read them."""
    library = pytest.importorskip("safetensors", reason="safetensors is not installed")
    m = module(source, *EVERY)
    path = source.parent / "bundle.safetensors"
    with bundled(m, path):
        refs = {name: str(weight.ref) for name, weight in m.weights.items()}
    assert refs["wide"] == '@weights["wide"].cast(f32)' and refs["narrow"] == '@weights["narrow"]'
    tensors = read_header(path)
    kinds = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    assert kinds["wide"] == ("bf16", (5, 6)) and kinds["narrow"] == ("bf16", (2, 4))
    with library.safe_open(path, "numpy") as file:
        assert sorted(file.keys()) == sorted(m.weights)
        for name in ("a", "ids"):
            np.testing.assert_array_equal(file.get_tensor(name), ARRAYS[name])
    assert min(tensor.offset for tensor in tensors.values()) == 4096
    for tensor in tensors.values():
        assert tensor.offset % (tensor.nbytes & -tensor.nbytes or 1) == 0, tensor


def test_failures_do_not_change_the_module(source: Path) -> None:
    m = module(source, *EVERY)
    before = str(m)
    with pytest.raises(OSError, match="No such file"), bundled(m, source.parent / "no" / "b"):
        pass
    assert str(m) == before
    with pytest.raises(RuntimeError), bundled(m, source.parent / "b.safetensors"):
        raise RuntimeError
    assert str(m) == before


RANKS = (
    '@ids : i8[7] = @f["ids"]',
    '@columns : f32[5, 1] = @f["a"].shard(1, tp)',
    '@halves : f32[5, 2] = @f["a"].shard(1, pp)',
    '@wide : f32[2, 5] = @f["b"].cast(f32).shard(0, tp)',
    '@stages : bf16[1, 5] = @f["b"].shard(0, pp.tp)',
    '@one_stage : bf16[3, 5] = @f["b"].shard(0, pp)',
    '@heads : f32[5, 4] = concat(@f["a"], @f["a"], @f["a"], @f["a"]; 0).shard(0, tp)',
    '@random : bf16[2, 3] = random("r", 1, 0.5, [8, 3]).shard(0, tp)',
    '@cyclic : i8[3] = @f["ids"].cyclic(0, 4).shard(0, tp).pad(0, 1)',
    '@one : f32[] = @f["one"]',
    '@none : f32[0, 3] = @f["none"].shard(0, tp)',
    "@codes : i4[6, 7] = bytes(@f, 7, i4[6, 7])",
    "@cut : i4[3, 4] = bytes(@f, 7, i4[6, 7])[:, 0:4].shard(0, pp)",
)


def test_every_shard_is_contiguous(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    m = module(source, *RANKS)
    m.mesh, m.local = Mesh.parse("pp=2, tp=4"), True
    for weight in weights_of(m):
        weight.type = weight_part(weight.ref, weight.type, m.mesh)
    reader, path = Reader(m, source.parent), source.parent / "bundle.safetensors"
    wanted = {w.name: [np.array(reader.read(w, rank)) for rank in range(8)] for w in weights_of(m)}
    monkeypatch.setattr(bundle, "COPY", 24)
    with bundled(m, path) as hash:
        assert hash == hash_of(path)
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


def test_shards_that_end_within_a_byte_are_refused(source: Path) -> None:
    m = module(source, "@odd : i4[3, 7] = bytes(@f, 7, i4[6, 7]).shard(0, pp)")
    m.mesh, m.local = Mesh.parse("pp=2"), True
    with pytest.raises(Error, match="end within a byte"), bundled(m, source.parent / "b"):
        pass


def test_a_module_without_weights_has_no_file(source: Path) -> None:
    m = module(source)
    with bundled(m, source.parent / "b.safetensors") as hash:
        assert hash == "" and m.files
    assert not (source.parent / "b.safetensors").exists()


def test_bundling_needs_little_memory(tmp_path: Path) -> None:
    rows = 60_000  # 240 MB of a sparse file
    header = {"x": {"dtype": "F32", "shape": [rows, 1000], "data_offsets": [0, rows * 4000]}}
    path = written(tmp_path / "big.safetensors", header, b"")
    os.truncate(path, path.stat().st_size + rows * 4000)
    turned = '@t : f32[1000, 60000] = @f["x"].transpose(1, 0)'
    m = module(path, f'@w : f32[{rows}, 1000] = @f["x"]', turned)
    before = resident()
    with bundled(m, tmp_path / "b.safetensors"):
        assert resident() - before < 60 << 20
    assert (tmp_path / "b.safetensors").stat().st_size == 4096 + 2 * rows * 4000
