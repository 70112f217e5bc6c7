"""Calibrations of small models against numpy on all data at once; resumed, killed, regrouped."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irc
from irc.backends.base import ports_of
from irc.driver.calibration import calibrate
from irc.driver.sources import find_source
from irc.errors import Error
from irc.generation.inputs import complete
from irc.generation.tokenizer import Tokenizer
from irc.ir.core import Module, Result, Weight
from irc.passes.shared.edit import set_results
from irc.quantization.calibration import find_targets, groups
from irc.quantization.statistics import Statistics
from irc.text import parse_module, print_module
from tests.choices import settled
from tests.fresh import fresh
from tests.layout import ROOT
from tests.sharded.models import mixtral, tiny_llama

TWO = """\
module @two dims(B=1:2:512) {
  weight @a.weight : f32[6, 4] = random("a", 1, 0.5)
  weight @b.weight : f32[3, 6] = random("b", 1, 0.5)
  func @forward(%x: f32[B, 4], %shift: f32[4]) -> (y: f32[B, 3], a: f32[B, 4], b: f32[B, 6]) {
    %s = add %x, %shift : f32[B, 4]
    %h = linear %s, @a.weight : f32[B, 6]
    %r = relu %h : f32[B, 6]
    %y = linear %r, @b.weight : f32[B, 3]
    return %y, %s, %r
  }
}
"""
MASKED = """\
module @masked dims(B=1:2:8, S=1:4:16) {
  weight @table : f32[9, 4] = random("t", 1, 1.0)
  weight @a.weight : f32[6, 4] = random("a", 1, 0.5)
  func @forward(%input_ids: i32[B, S], %attention_mask: i32[B, S]) -> (y: f32[B, S, 6]) {
    %e = embedding %input_ids, @table : f32[B, S, 4]
    %y = linear %e, @a.weight : f32[B, S, 6]
    return %y
  }
}
"""


def products(module: Module, arrays: Mapping[str, Any], op: str = "linear") -> dict[str, Any]:
    """By site, the first operand of every operation `op`, and new caches: in numpy."""
    copy = parse_module(print_module(module))
    irc.run_passes(copy, "inline, canonicalize, cse")
    found = {
        weights[0].name.removesuffix(".weight"): each.operands[0]
        for each in copy.ops()
        if each.opname == op and (weights := [w for v in each.operands[1:] for w in behind(v)])
    }
    full = complete(ports_of(copy.main), arrays)
    results = irc.evaluate(copy, full)
    set_results(copy.main, [*found.values()], [Result(name) for name in found])
    caches = {
        name: array.swapaxes(1, 2).reshape(-1, array.shape[1] * array.shape[3])
        for name, array in results.items()
        if name in full
    }
    return {**irc.evaluate(copy, full), **caches}


def behind(value: Any) -> list[Weight]:
    """The weight that an operand is, or a transpose of."""
    value = value.producer.operands[0] if value.producer is not None else value
    return [value] if isinstance(value, Weight) else []


def check(found: Statistics, wanted: Mapping[str, Any], gram: bool = True) -> None:
    """All statistics of sites against those of arrays [..., K]; of caches the largest only."""
    assert set(found.sites()) == set(wanted)
    for site, array in wanted.items():
        rows = np.asarray(array, np.float64).reshape(-1, array.shape[-1])
        np.testing.assert_allclose(found.largest(site), np.abs(rows).max(0), 1e-4, 1e-6)
        if site[1:].isdecimal():
            continue
        np.testing.assert_allclose(found.mean(site), np.abs(rows).mean(0), 1e-4, 1e-6)
        counts = found.histogram(site).counts
        assert counts.sum() == rows.size
        edges = np.arange(1, counts.size + 1) * found.histogram(site).width
        below = np.searchsorted(np.sort(np.abs(rows).ravel()), edges)
        assert np.abs(np.cumsum(counts) - below).max() <= 2 + rows.size // 100
        if gram:
            wide = rows.T @ rows / len(rows)
            np.testing.assert_allclose(found.gram(site), wide, 1e-3, 1e-5 * np.abs(wide).max())


def ids(rows: int, tokens: int, vocabulary: int = 37) -> np.ndarray:
    return fresh(rows).integers(0, vocabulary, (rows, tokens))


def saved(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("build", [tiny_llama, mixtral])
def test_a_language_model_equals_numpy_on_all_data(build: Any, tmp_path: Path) -> None:
    module, random = build(), fresh(5)
    before = print_module(module)
    tokens = settled(
        lambda: random.integers(0, 37, (5, 12)),
        module,
        lambda drawn: products(module, {"input_ids": drawn}),
    )
    data = saved(tmp_path / "data.npz", input_ids=tokens)
    found = calibrate(module, data, tmp_path / "out", gram=True, batch_size=2)
    wanted = products(module, {"input_ids": tokens})
    experts = {  # rows of zeros are empty slots
        name: (rows := array.reshape(-1, array.shape[-1]))[rows.any(axis=1)]
        for name, array in products(module, {"input_ids": tokens}, "matmul").items()
        if "experts" in name
    }
    check(found, {**wanted, **experts})
    assert (found.facts.tokens, found.facts.batches) == (60, 3)
    assert print_module(module) == before
    assert len(files(tmp_path / "out")) == 2


def test_tiny_llama_on_text(tmp_path: Path) -> None:
    folder = ROOT / "examples" / "tiny_llama"
    text = (ROOT / "README.md").read_text(encoding="utf-8")[:3000]
    (tmp_path / "data.txt").write_text(text, encoding="utf-8")
    options: dict[str, Any] = {"length": 32, "batch_size": 4, "dtype": "f32"}
    found = irc.calibrate(folder, tmp_path / "data.txt", tmp_path / "out", **options)
    module = find_source(folder, dtype="f32").module
    tokenizer = Tokenizer(folder)
    tokens, begin = tokenizer.encode(text, special=False), tokenizer.begin()
    room = 32 - len(begin)
    windows = [begin + tokens[at : at + room] for at in range(0, len(tokens), room)]
    parts = [products(module, {"input_ids": [window]}) for window in windows]
    flat = {
        name: [part[name].reshape(-1, part[name].shape[-1]) for part in parts] for name in parts[0]
    }
    check(found, {name: np.concatenate(arrays) for name, arrays in flat.items()}, gram=False)
    assert found.facts.tokens == sum(map(len, windows))
    assert not found.has_gram(found.sites()[0])


@pytest.mark.parametrize("layout", ["rows", "files", "fixed"])
def test_any_model_takes_arrays_by_name(layout: str, tmp_path: Path) -> None:
    random = fresh(7)
    x, shift = random.standard_normal((24, 4)), random.standard_normal(4)
    data = tmp_path / "data"
    data.mkdir()
    for i in range(6 if layout == "files" else 1):
        part = x[i::6] if layout == "files" else x
        saved(data / f"{i}.npz", x=part, shift=shift)
    text = TWO.replace("[B,", "[3,").replace(" dims(B=1:2:512)", "") if layout == "fixed" else TWO
    (tmp_path / "m.irc").write_text(text)
    found = irc.calibrate(tmp_path / "m.irc", data, tmp_path / "out", gram=True, batch_size=5)
    results = irc.evaluate(irc.parse(TWO), {"x": x.astype("f4"), "shift": shift.astype("f4")})
    check(found, {"a": results["a"], "b": results["b"]})
    assert found.facts.batches == {"rows": 5, "files": 6, "fixed": 8}[layout]


@pytest.mark.parametrize("side", ["left", "right", "left, taken by the model"])
def test_padding_does_not_count(side: str, tmp_path: Path) -> None:
    tokens, lengths = ids(5, 9, 9), [9, 3, 1, 3, 9]
    mask = np.arange(9) < np.array(lengths)[:, None]
    mask = mask[:, ::-1] if side.startswith("left") else mask
    data = saved(tmp_path / "data.npz", input_ids=tokens, attention_mask=mask.astype(int))
    if "taken" in side:
        module = irc.parse(MASKED)
        full = {"input_ids": tokens.astype("i4"), "attention_mask": mask.astype("i4")}
        wanted = {name: array[mask] for name, array in products(module, full).items()}
    else:
        module = tiny_llama()
        parts = [
            products(module, {"input_ids": [row[seen]]})
            for row, seen in zip(tokens, mask, strict=True)
        ]
        wanted = {
            name: np.concatenate([p[name].reshape(-1, p[name].shape[-1]) for p in parts])
            for name in parts[0]
        }
    found = calibrate(module, data, tmp_path / "out", gram=True, batch_size=5)
    check(found, wanted)
    assert found.facts.tokens == sum(lengths)


class Interrupt:
    """A progress that raises KeyboardInterrupt before the batch of this number."""

    def __init__(self, at: int = 0) -> None:
        self.at, self.count = at, 0

    def __call__(self, stage: str, fraction: float) -> None:
        assert 0 <= fraction <= 1
        self.count += stage.startswith("calibrating")
        if self.at and self.count == self.at:
            raise KeyboardInterrupt


def test_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    data = saved(tmp_path / "data.npz", input_ids=ids(21, 9))
    options: dict[str, Any] = {"gram": True, "batch_size": 1}
    calibrate(tiny_llama(), data, tmp_path / "whole", **options)
    interrupted = 0
    for at in (11, 11, 0):  # saved after 8 and 16 batches
        progress = Interrupt(at)
        try:
            calibrate(tiny_llama(), data, tmp_path / "out", **options, progress=progress)
        except KeyboardInterrupt:
            interrupted += 1
    assert interrupted == 2
    assert progress.count == 21 - 16
    assert files(tmp_path / "out") == files(tmp_path / "whole")


@pytest.mark.parametrize("size", [0, 9, 400])
def test_a_cut_file_begins_anew(size: int, tmp_path: Path) -> None:
    """As after a crash of the system."""
    data = saved(tmp_path / "data.npz", input_ids=ids(10, 9))
    with pytest.raises(KeyboardInterrupt):
        calibrate(tiny_llama(), data, tmp_path / "out", batch_size=1, progress=Interrupt(10))
    (path,) = (tmp_path / "out").glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:size])
    progress = Interrupt()
    calibrate(tiny_llama(), data, tmp_path / "out", batch_size=1, progress=progress)
    assert progress.count == 10


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, arrays: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("irc.quantization.calibration.write_tensors", full)
    data = saved(tmp_path / "data.npz", input_ids=ids(2, 9))
    with pytest.raises(Error, match=r"cannot write the calibration .*out: No space left .* kept"):
        calibrate(tiny_llama(), data, tmp_path / "out")
    assert os.listdir(tmp_path / "out") == []


def test_killed_in_the_middle(tmp_path: Path) -> None:
    (tmp_path / "m.irc").write_text(TWO)
    x = fresh(8).standard_normal((4000, 4))
    data = saved(tmp_path / "data.npz", x=x, shift=np.zeros(4))
    words = [tmp_path / "m.irc", "--data", data, "--batch-size", "2", "--gram", "-o"]
    command = [sys.executable, "-m", "irc", "calibrate", *map(str, words)]
    with subprocess.Popen([*command, str(tmp_path / "out")], cwd=ROOT) as process:
        end = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < end:
            if any((tmp_path / "out").glob("*.safetensors")):
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(0.002)
    (
        tmp_path / "out" / ".0123456789abcdef-0.safetensors.1a2b.part"
    ).touch()  # as if killed while it writes
    for name in ("out", "whole"):
        subprocess.run([*command, str(tmp_path / name)], cwd=ROOT, check=True, capture_output=True)
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def test_groups_within_memory_see_the_same(tmp_path: Path) -> None:
    module, tokens = tiny_llama(), ids(8, 32)
    data = saved(tmp_path / "data.npz", input_ids=tokens)
    passes = Interrupt()
    found = calibrate(module, data, tmp_path / "out", gram=True, memory=1, progress=passes)
    assert passes.count > 1  # the one batch was read for several groups
    check(found, products(module, {"input_ids": tokens}))


def test_groups_are_filled_in_order() -> None:
    every = find_targets(tiny_llama(), gram=True)
    need = [each.needed({"B": 4, "S": 16}) for each in every]
    for memory in (1, max(need), sum(need) // 3, sum(need)):
        found = groups(every, {"B": 4, "S": 16}, memory)
        assert [i for group in found for i in group] == list(range(len(every)))
        assert all(len(g) == 1 or sum(need[i] for i in g) <= memory for g in found)
    assert len(found) == 1


def test_memory_does_not_grow_with_the_batches(tmp_path: Path) -> None:
    wide = TWO.replace("4]", "512]").replace("512:512", "512")
    peaks: list[int] = []
    for i, rows in enumerate((2_000, 20_000)):
        x = np.zeros((rows, 512), np.float32)
        data = saved(tmp_path / f"{i}.npz", x=x, shift=np.zeros(512))
        del x
        tracemalloc.start()
        calibrate(irc.parse(wide), data, tmp_path / f"out{i}", batch_size=200)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0] + (1 << 20)


def test_a_complete_calibration_is_used_again(tmp_path: Path) -> None:
    data = saved(tmp_path / "data.npz", x=fresh(9).standard_normal((9, 4)), shift=np.zeros(4))

    def runs(text: str = TWO, **options: Any) -> int:
        progress = Interrupt()
        calibrate(irc.parse(text), data, tmp_path / "out", progress=progress, **options)
        return progress.count

    assert [runs(), runs()] == [2, 0]
    assert [runs(gram=True), runs(), runs(gram=True)] == [2, 0, 0]
    assert [runs(batch_size=3), runs(batches=1), runs(memory=1, batches=1)] == [3, 1, 0]
    assert runs(TWO.replace('"a", 1', '"a", 2')) == 2
    assert runs() == 2
    saved(data, x=fresh(10).standard_normal((9, 4)), shift=np.zeros(4))
    assert runs() == 2


@pytest.mark.parametrize("name", ["my_finetune.safetensors", "program/src/main.py", "adapter.npz"])
def test_files_of_others_are_left_alone(name: str, tmp_path: Path) -> None:
    data = saved(tmp_path / "data.npz", x=fresh(9).standard_normal((9, 4)), shift=np.zeros(4))
    own = tmp_path / "out" / name
    own.parent.mkdir(parents=True)
    own.write_text("my own")
    with pytest.raises(irc.Error, match=r"holds .* and no calibration, so it is left alone"):
        calibrate(irc.parse(TWO), data, tmp_path / "out")
    shutil.rmtree(tmp_path / "out")
    calibrate(irc.parse(TWO), data, tmp_path / "out")
    own.parent.mkdir(parents=True, exist_ok=True)
    own.write_text("my own")
    calibrate(irc.parse(TWO), data, tmp_path / "out", batch_size=3)  # another calibration
    assert own.read_text() == "my own"
