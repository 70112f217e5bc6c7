"""The runtime on real GPUs, but for TensorRT: memory, streams, NCCL, and engines of numpy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from irc.backends.cuda.runtime import device_count
from irc.backends.tensorrt.runtime import gpu, load, weights
from irc.backends.tensorrt.runtime.gpu import GpuDriver
from irc.errors import Error
from tests.fresh import fresh
from tests.layout import ROOT
from tests.ports import HOST, held_port
from tests.sharded.models import MODELS
from tests.tensorrt.gpu_rank import FACTS, HalfDriver
from tests.tensorrt.runtime_engine import Library
from tests.tensorrt.runtime_world import write
from tests.tensorrt.test_runtime import NEW, continued, reference, step_of

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorRT need not be installed."""
    library = SimpleNamespace(version="1.7.1.116")
    monkeypatch.setattr(gpu, "find", lambda flavour: library)


def needs_gpus(count: int) -> None:
    if device_count() < count:
        pytest.skip(f"needs {count} GPUs")


@pytest.mark.parametrize("mesh", ["", "tp=2", "pp=2", "dp=2", "tp=2,pp=2", "tp=4"])
def test_generation_with_engines_of_numpy(mesh: str, tmp_path: Path) -> None:
    facts = write(tmp_path, MODELS["tied"](), mesh, weights="outside")
    ranks = len(facts["ranks"])
    needs_gpus(ranks)
    wanted = continued(reference(tmp_path), facts).tokens
    (tmp_path / FACTS).write_text(json.dumps(facts))
    with held_port() as port:
        place = {"MASTER_ADDR": HOST, "MASTER_PORT": str(port)}
        started = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.tensorrt.gpu_rank", str(tmp_path), str(rank)],
                env={**os.environ, **place},
                stderr=subprocess.PIPE,
                cwd=ROOT,
            )
            for rank in range(ranks)
        ]
        try:
            ended = [each.communicate(timeout=240)[1].decode()[-900:] for each in started]
        finally:
            for each in started:
                each.kill()
    assert [each.returncode for each in started] == [0] * ranks, ended
    found = [json.loads((tmp_path / f"tokens{rank}.json").read_text()) for rank in range(ranks)]
    assert found == [list(wanted)] * ranks
    assert len(wanted) == NEW


def test_states_stay_on_the_gpu(tmp_path: Path) -> None:
    needs_gpus(1)
    facts = write(tmp_path, MODELS["gqa"]())
    library = Library(tmp_path, facts)
    program = load(tmp_path, facts, driver=lambda number: HalfDriver(library, number))
    right = reference(tmp_path)
    streams = [each.open({"B": 2, "C": 32}) for each in (program, right)]
    for turn in range(3):
        got, wanted = (each.step(step_of(2, turn, 5 + turn)) for each in streams)
        np.testing.assert_allclose(got["logits"], wanted["logits"], rtol=1e-5, atol=1e-6)
    library.close()


@pytest.fixture
def driver() -> Iterator[GpuDriver]:
    needs_gpus(1)
    made = GpuDriver("tensorrt-rtx", 0, 10.0)
    yield made
    made.close()


def test_weights_through_small_pieces(driver: GpuDriver, tmp_path: Path) -> None:
    from irc.backends.tensorrt.runtime.plan import Binding

    data = fresh().integers(0, 256, 5_000_000).astype(np.uint8)
    path = tmp_path / "weights"
    path.write_bytes(data.tobytes())
    places = [(0, 3_000_000), (3_000_001, 1_999_999), (7, 1), (0, 3_000_000)]
    bindings = [
        Binding(f"w{i}", "u8", (size,), path, at, size) for i, (at, size) in enumerate(places)
    ]
    stream = driver.stream()
    before = driver.free_memory()
    found = weights.Weights(driver, stream, bindings, piece=1 << 20)
    assert found.addresses["w0"] == found.addresses["w3"]
    for each in bindings:
        back = np.empty(each.size, np.uint8)
        stream.download(back, found.addresses[each.name])
        stream.wait()
        assert np.array_equal(back, data[each.offset : each.offset + each.size])
    found.free()
    assert driver.free_memory() >= before - (1 << 20)


def test_a_graph_of_copies(driver: GpuDriver) -> None:
    stream, host = driver.stream(), driver.pinned(1024)
    address, back = driver.allocate(1024), driver.pinned(1024)

    def work() -> None:
        stream.upload(address, host)
        stream.download(back, address)

    graph = stream.capture(work)
    for value in (1, 2):
        host[...] = value
        stream.launch(graph)
        stream.wait()
        assert (back == value).all()
    stream.drop(graph)
    stream.zero(address, 512)
    stream.download(back, address)
    event = stream.event()
    event.wait()
    assert not back[:512].any() and (back[512:] == 2).all()
    driver.free(address)


def test_memory_that_is_not_there(driver: GpuDriver) -> None:
    with pytest.raises(Error, match=r"has no .* GB left"):
        driver.allocate(1 << 45)
