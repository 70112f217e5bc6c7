"""The runtime on real GPUs, but for TensorRT: memory, streams, NCCL, and engines of numpy."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from irc.backends.cuda.device import CudaDriver
from irc.backends.cuda.execute.upload import Range
from irc.backends.cuda.execute.weights import FileWeights
from irc.backends.tensorrt.runtime import load
from irc.errors import Error
from tests.fresh import fresh
from tests.gpu_ranks import needs_gpus, ran
from tests.sharded.models import MODELS
from tests.tensorrt.gpu_rank import FACTS, half_gpu
from tests.tensorrt.runtime_engine import Artifact
from tests.tensorrt.runtime_world import write
from tests.tensorrt.test_runtime import NEW, continued, reference, step_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("mesh", ["", "tp=2", "pp=2", "dp=2", "tp=2,pp=2", "tp=4"])
def test_generation_with_engines_of_numpy(mesh: str, tmp_path: Path) -> None:
    facts = write(tmp_path, MODELS["tied"](), mesh, weights="outside")
    ranks = len(facts["ranks"])
    needs_gpus(ranks)
    wanted = continued(reference(tmp_path), facts).tokens
    (tmp_path / FACTS).write_text(json.dumps(facts))
    status, err = ran(ranks, "tests.tensorrt.gpu_rank", tmp_path)
    assert status == 0, err
    found = [json.loads((tmp_path / f"tokens{rank}.json").read_text()) for rank in range(ranks)]
    assert found == [list(wanted)] * ranks
    assert len(wanted) == NEW


def test_states_stay_on_the_gpu(tmp_path: Path) -> None:
    needs_gpus(1)
    facts = write(tmp_path, MODELS["gqa"]())
    artifact = Artifact(tmp_path, facts)
    program = load(tmp_path, facts, gpu=lambda rank: half_gpu(artifact, rank))
    right = reference(tmp_path)
    streams = [each.open({"B": 2, "C": 32}) for each in (program, right)]
    for turn in range(3):
        got, wanted = (each.step(step_of(2, turn, 5 + turn)) for each in streams)
        np.testing.assert_allclose(got["logits"], wanted["logits"], rtol=1e-5, atol=1e-6)


@pytest.fixture
def driver() -> CudaDriver:
    needs_gpus(1)
    return CudaDriver(0)


def test_weights_through_small_pieces(driver: CudaDriver, tmp_path: Path) -> None:
    data = fresh().integers(0, 256, 5_000_000).astype(np.uint8)
    path = tmp_path / "weights"
    path.write_bytes(data.tobytes())
    places = [(0, 3_000_000), (3_000_001, 1_999_999), (7, 1), (0, 3_000_000)]
    ranges = {f"w{i}": Range(path, at, size) for i, (at, size) in enumerate(places)}
    stream = driver.stream()
    before = driver.free_memory()
    found = FileWeights(driver, stream, piece=1 << 20)
    found.add_ranges(ranges)
    assert found.addresses["w0"] == found.addresses["w3"]
    for name, each in ranges.items():
        back = np.empty(each.size, np.uint8)
        stream.download(back, found.addresses[name])
        stream.wait()
        assert np.array_equal(back, data[each.offset : each.offset + each.size])
    found.free()
    assert driver.free_memory() >= before - (1 << 20)


def test_a_graph_of_copies(driver: CudaDriver) -> None:
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
    driver.zero(address, 512, stream.handle)
    stream.download(back, address)
    event = stream.event()
    event.wait()
    assert not back[:512].any() and (back[512:] == 2).all()
    driver.free(address)


def test_memory_that_is_not_there(driver: CudaDriver) -> None:
    with pytest.raises(Error, match=r"has no .* GB left"):
        driver.allocate(1 << 45)
