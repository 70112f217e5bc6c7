"""The runtime on real GPUs, but for TensorRT: memory, streams, graphs, NCCL, and engines of numpy.

Ranks are threads, each with a GPU of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from irc.backends.cuda.runtime import device_count, use_device
from irc.backends.tensorrt.runtime import gpu, weights
from irc.backends.tensorrt.runtime.gpu import GpuDriver, GpuGroup, GpuStream
from irc.dtypes import numpy_dtype
from irc.errors import Error
from tests.fresh import fresh
from tests.sharded.models import MODELS
from tests.tensorrt.runtime_engine import Context, Engine, Library
from tests.tensorrt.runtime_gpu import Array
from tests.tensorrt.runtime_world import World, write
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


class Memory:
    """A GPU's memory for an engine of numpy, which waits for every copy."""

    def __init__(self, stream: GpuStream) -> None:
        self._stream = stream

    def read(self, address: int, shape: Sequence[int], dtype: str) -> Array:
        array = np.empty(tuple(shape), numpy_dtype(dtype))
        self._stream.download(array, address)
        self._stream.wait()
        return array

    def write(self, address: int, array: Array, dtype: str) -> None:
        host = np.ascontiguousarray(array.astype(numpy_dtype(dtype), copy=False))
        self._stream.upload(address, host)
        self._stream.wait()


class Meeting:
    """A group in which numpy arrays are gathered over NCCL."""

    def __init__(self, driver: HalfDriver, group: GpuGroup) -> None:
        self._driver, self._group = driver, group
        self.rank, self.ranks = group.rank, group.ranks

    def meet(self, item: Array) -> list[Array]:
        array = np.ascontiguousarray(item)
        driver, stream = self._driver, self._driver.own
        source = driver.allocate(max(1, array.nbytes))
        target = driver.allocate(max(1, array.nbytes * self.ranks))
        every = np.empty((self.ranks, *array.shape), array.dtype)
        stream.upload(source, array)
        self._group.bind("all_gather", "u8", array.nbytes)(source, target, stream.handle)
        stream.download(every, target)
        stream.wait()
        for address in (source, target):
            driver.free(address)
        return list(every)


class HalfDriver(GpuDriver):
    """A real GPU, whose engines numpy computes."""

    def __init__(self, library: Library, number: int) -> None:
        super().__init__("tensorrt-rtx", number, 10.0)
        self._artifact, self.number = library, number
        self.gpu = gpu.Gpu(self.gpu.name, 89, self.gpu.identity, self.gpu.memory)
        self.own = self.stream()
        self.memory = Memory(self.own)
        self.registered: dict[str, Meeting] = {}
        self.contexts: list[Context] = []
        self.can_capture, self.can_bind, self.skew = False, True, 0.0

    def engine(self, path: Path) -> Any:
        import json

        from tests.tensorrt.runtime_engine import MARK

        own = json.loads(path.read_bytes().partition(MARK)[2])
        names = {entry["engine"]: entry["stage"] for entry in self._artifact.facts["ranks"]}
        engine: Any = HalfEngine(self, self._artifact, names[path.name], own)  # type: ignore[arg-type]
        return engine

    def register(self, key: str, rank: int, group: Any) -> None:
        self.registered[key] = Meeting(self, group)


class HalfEngine(Engine):
    """Its context runs at once, where the GPU has come to it."""

    def context(self, profile: int, stream: Any) -> Any:
        return HalfContext(self, profile)


class HalfContext(Context):
    """See HalfEngine."""

    def enqueue(self, stream: Any) -> None:
        def now(work: Callable[[], None]) -> None:
            stream.wait()
            work()

        super().enqueue(SimpleNamespace(calls=[], enqueue=now))  # type: ignore[arg-type]


class HalfWorld(World):
    """Threads on a GPU each."""

    def driver(self, number: int) -> Any:
        return HalfDriver(self.library, number)

    @contextmanager
    def entered(self, rank: int) -> Iterator[None]:
        use_device(rank)
        yield


@pytest.mark.parametrize("mesh", ["", "tp=2", "pp=2", "dp=2", "tp=2,pp=2", "tp=4"])
def test_generation_with_engines_of_numpy(mesh: str, tmp_path: Path) -> None:
    facts = write(tmp_path, MODELS["tied"](), mesh, weights="outside")
    needs_gpus(len(facts["ranks"]))
    wanted = continued(reference(tmp_path), facts).tokens
    world = HalfWorld(tmp_path, facts)
    found = world.of_all(lambda p: continued(p, facts).tokens)
    assert found == [wanted] * world.ranks
    assert len(wanted) == NEW
    world.close()


def test_states_stay_on_the_gpu(tmp_path: Path) -> None:
    needs_gpus(1)
    facts = write(tmp_path, MODELS["gqa"]())
    world = HalfWorld(tmp_path, facts)
    program, right = world.programs[0], reference(tmp_path)
    streams = [each.open({"B": 2, "C": 32}) for each in (program, right)]
    for turn in range(3):
        got, wanted = (each.step(step_of(2, turn, 5 + turn)) for each in streams)
        np.testing.assert_allclose(got["logits"], wanted["logits"], rtol=1e-5, atol=1e-6)
    world.close()


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
