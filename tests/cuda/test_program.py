"""Whole models as programs of plans on fake GPUs, against the reference."""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irc.passes
from irc.backends.cuda.backend import backend
from irc.backends.cuda.execute import gpu
from irc.backends.cuda.execute.load import CudaProgram, CudaStream, load, program_of
from irc.backends.recorder import Recorder
from irc.backends.reference.program import ReferenceProgram
from irc.errors import Error
from irc.generation.greedy import greedy
from irc.generation.rows import Rows
from irc.ir.core import Module
from irc.ir.mesh import Mesh
from irc.pipeline import run_pipeline
from irc.text import parse_module
from irc.text.printer import names_of
from tests.cuda.fake_cuda import FakeCuda, World
from tests.fresh import fresh
from tests.sharded.models import MODELS, mixtral
from tests.tensorrt.fake_nccl import FakeNccl
from tests.tensorrt.test_runtime import step_of

assert irc.passes


def compiled(name: str, mesh: str, first: str = "") -> Module:
    """A model after the passes `first`, then those of the backend."""
    module = mixtral(4) if name == "mixtral" else MODELS[name]()
    if mesh:
        module.mesh = Mesh.parse(mesh)
    pipeline = backend.sharded_pipeline if mesh else backend.default_pipeline
    run_pipeline(module, f"{first}, {pipeline}" if first else pipeline)
    return module


CASES = [
    *(("tied", ""), ("tied", "tp=2"), ("tied", "dp=2"), ("tied", "tp=2,pp=2")),
    *(("gqa", "tp=3"), ("mixtral", "ep=2")),
]


@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_conversations(name: str, mesh: str, tmp_path: Path) -> None:
    module = compiled(name, mesh)
    world = World(module, tmp_path)
    rng = fresh()
    rows = 2
    steps = [step_of(rows, turn, int(rng.integers(1, 9))) for turn in range(2)]
    right = ReferenceProgram(compiled(name, "")).open({"B": rows, "C": 32})
    wanted = [right.step(step) for step in steps]

    def work(program: Any) -> Any:
        stream = program.open({"B": rows, "B_dp": rows // 2, "C": 32})
        return [stream.step(step) for step in steps]

    for found in world.of_all(work):
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(one["logits"], other["logits"], rtol=1e-4, atol=1e-5)
    world.close()
    assert [gpu.driver.memory.used for gpu in world.gpus.values()] == [0] * world.ranks


def test_products_of_few_sizes(tmp_path: Path) -> None:
    module = parse_module("""module @m dims(B=1:2:99) {
      weight @w : f32[24, 16] = random("w", 1, 0.5)
      func @forward(%x: f32[B, 16]) -> (y: f32[B, 24]) {
        %y = linear %x, @w : f32[B, 24]
        return %y } }""")
    world, rng = World(module, tmp_path, fused=True), fresh()
    program, right = world.programs[0], ReferenceProgram(module)
    for rows in (40, 40, 40, 70):
        x = rng.standard_normal((rows, 16)).astype(np.float32)
        found, wanted = (each.run({"x": x})["y"] for each in (program, right))
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    assert len({call.settings["rows"] for call, _ in world.gpus[0].called.bound}) == 2
    world.close()


def test_caches_are_refused_before_any_is_allocated(tmp_path: Path) -> None:
    world = World(compiled("gqa", ""), tmp_path)
    memory = world.gpus[0].driver.memory
    memory.total, used = memory.used + 100_000, memory.used
    words = r"expected 1\.2 MB of free memory .* at B=4, C=1024 \(caches 1\.2 MB\), found 100\.0 kB"
    with pytest.raises(Error, match=words):
        world.programs[0].open({"B": 4, "C": 1 << 10})
    assert memory.used == used
    world.close()


def test_conversations_share_memory_and_graphs(tmp_path: Path) -> None:
    """One after the other at one address; in turn each with a graph of its own."""
    world = World(compiled("gqa", ""), tmp_path)
    (program,), driver = world.programs, world.gpus[0].driver
    allocated: list[int] = []
    raw = driver._allocate
    driver._allocate = lambda size: allocated.append(size) or raw(size)

    def talk(*streams: Any) -> None:
        for turn in range(3):
            for stream in streams:
                stream.step(step_of(2, turn, 5))

    def captures() -> int:
        return sum(call[0] == "capture" for call in driver.calls)

    for count in range(2):
        before = len(allocated)
        stream = program.open({"B": 2, "C": 32})
        assert len(allocated) - before == 1 - count
        talk(stream)
        stream.close()
        with pytest.raises(Error, match="found a closed one"):  # its memory is the next one's
            talk(stream)
    assert captures() == 1
    streams = [program.open({"B": 2, "C": 32}) for _ in range(9)]
    talk(*streams)
    assert captures() == 9
    talk(*streams)
    assert captures() == 9 and not any(call[0] == "drop" for call in driver.calls)
    for stream in streams:
        stream.close()
    driver.memory.total = driver.memory.used  # what is kept is enough
    program.open({"B": 8, "C": 32}).close()
    world.close()
    assert driver.memory.used == 0


def test_weights_are_refused_before_any_is_read(tmp_path: Path) -> None:
    gpus: list[FakeCuda] = []

    def little(gpu: FakeCuda) -> None:
        gpus.append(gpu)
        gpu.driver.memory.total = 20_000

    numbers = r"\(weights 50\.4 kB, activations \S+ \w+, caches 288 B\), found 20\.0 kB of"
    with pytest.raises(Error, match=numbers):
        World(compiled("gqa", ""), tmp_path, little)
    assert not any(call[0] == "upload" for call in gpus[0].calls)


DRIVERS = [
    (None, 0, r"found no NVIDIA driver \(libcuda.so.1\); .* --backend onnx runs on CPU"),
    (12080, 8, r"for CUDA 13\.0 or newer, found one for CUDA 12\.8: update the NVIDIA driver; "),
    (13000, 0, r"finds no GPU here; .* --backend onnx runs on CPU"),
    (13010, 3, "local rank 3 needs GPU 3, and this host has 3; start at most 3 ranks per host"),
]


@pytest.mark.parametrize(("version", "count", "words"), DRIVERS)
def test_gpus_that_cannot_be_used(
    version: int | None, count: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "driver_version", lambda: version)
    monkeypatch.setattr(gpu, "device_count", lambda: count)
    with pytest.raises(Error, match=words):
        program_of(compiled("gqa", ""), tmp_path, device=3)


def test_an_artifact_runs(tmp_path: Path) -> None:
    module = compiled("tied", "")
    facts = backend.emit(module, tmp_path, base=tmp_path).facts
    with pytest.raises(Error, match="no option graph; did you mean 'graphs'"):
        load(tmp_path, facts, graph=False)
    program = load(tmp_path, facts, gpu=lambda rank: FakeCuda(FakeNccl(), rank), fused=False)
    summary = greedy(program, [3, 5, 7], 6, (), module.dims)
    wanted = greedy(ReferenceProgram(module), [3, 5, 7], 6, (), module.dims)
    assert summary.tokens == wanted.tokens
    program.close()


def test_weights_that_every_load_computes_are_said(tmp_path: Path) -> None:
    module = irc.parse("""module @m dims(B=1:2:4) {
      weight @w.weight : f32[8, 16] = random("w", 0, 0.1)
      func @forward(%x: f32[B, 16]) -> (y: f32[B, 8]) {
        %y = linear %x, @w.weight : f32[B, 8]
        return %y } }""")
    options: dict[str, Any] = {"backend": "cuda", "quantize": "w8a16"}
    notes = "2 weights are computed whenever this is loaded; --bundle stores them"
    assert irc.compile(module, tmp_path / "a", **options).notes == [notes]
    assert irc.compile(module, tmp_path / "b", bundle=True, **options).notes == []


def other_gpu(gpu: FakeCuda) -> None:
    """Let one rank have a GPU of another kind."""
    if gpu.driver.number:
        gpu.driver.gpu = replace(gpu.driver.gpu, name="Fake 8000")


FEEDS = [("", False), ("tp=2", False), ("tp=2", True), ("pp=2", False)]


@pytest.mark.parametrize(("mesh", "differ"), FEEDS)
def test_tokens_are_fed_back_on_the_gpu(mesh: str, differ: bool, tmp_path: Path) -> None:
    """In the graph of the step, unless ranks have to be told the token."""
    module = compiled("gqa", mesh, "next-tokens")
    world, new = World(module, tmp_path, other_gpu if differ else lambda gpu: None), 7
    right = ReferenceProgram(compiled("gqa", "", "next-tokens"))
    prompt = [int(token) for token in fresh().integers(0, 37, 4)]
    wanted = greedy(right, prompt, new, (), module.dims).tokens
    found = world.of_all(lambda p: greedy(p, prompt, new, (), module.dims).tokens)
    assert found == [wanted] * world.ranks
    uploads = [call for call in world.gpus[0].calls if call[0] == "upload" and call[2] == 4]
    inputs = len(world.programs[0].rank.stage.ports.inputs)
    assert len(uploads) < 3 * inputs  # those of the prompt and of the first token
    calls = Counter(call[0] for call in world.gpus[0].calls)
    assert calls["launch"] == new - 2
    told = differ or mesh == "pp=2"
    assert calls["broadcast"] == (new if told else 0)
    names = Counter(call[1] for call in world.gpus[0].calls if call[0] == "kernel")
    assert names["feed"] == (new - 1 if told else 2)  # the second one is captured
    world.close()


def test_conversations_that_feed_share_a_graph(tmp_path: Path) -> None:
    """Over inputs that never change, but for what is fed back."""
    module = compiled("gqa", "", "next-tokens")
    world, step = World(module, tmp_path), step_of(1, 0, 1)
    for array in step.values():
        array.flags.writeable = False
    program: Any = world.programs[0]
    tokens: list[Any] = []
    for _ in range(3):
        stream = program.open({"B": 1, "C": 32})
        fed, advanced = {"input_ids": "next_tokens"}, ("positions", "past_lengths")
        tokens.append([s["next_tokens"].item() for s in stream.follow(step, fed, advanced, 5)])
        stream.close()
    assert tokens[0] == tokens[1] == tokens[2]
    assert sum(call[0] == "capture" for call in world.gpus[0].calls) == 1
    world.close()


def test_steps_ahead_hold_their_caches(tmp_path: Path) -> None:
    module = compiled("gqa", "", "next-tokens")
    world, step = World(module, tmp_path), step_of(1, 0, 1)
    program: Any = world.programs[0]
    kept: list[int] = []
    driver = world.gpus[0].driver
    driver.keep = lambda address, size: kept.append(address)
    steps = program.open({"B": 1, "C": 32}).follow(step, {}, (), 4)
    next(steps)
    assert not kept
    steps.close()
    del steps
    gc.collect()
    assert kept


@pytest.mark.parametrize(("prompt", "stop"), [([3, 5], "end"), ([3] * 28, "capacity")])
def test_steps_ahead_end_with_the_text(prompt: list[int], stop: str, tmp_path: Path) -> None:
    """A step behind the end token, and where the caches are full."""
    module = compiled("gqa", "", "next-tokens")
    world, right = World(module, tmp_path), ReferenceProgram(module)
    wanted = greedy(right, prompt, 9, (), module.dims).tokens
    ends = (wanted[4],) if stop == "end" else ()
    for program in (world.programs[0], right):
        summary = greedy(program, prompt, 9, ends, module.dims)
        text = wanted[: wanted.index(ends[0])] if ends else wanted
        assert (summary.tokens, summary.stop) == (text, stop)
    world.close()


def test_steps_ahead_say_what_is_wrong(tmp_path: Path) -> None:
    """Of inputs that another stream has overwritten, and of a GPU that fails."""
    module = compiled("gqa", "", "next-tokens")
    world = World(module, tmp_path)
    for words in ("found one of another stream between them", "the GPU failed; .*STEPWISE=1"):
        one, other = (Rows(world.programs[0], module.dims, [[3, 5]], 16) for _ in range(2))
        (token,) = one.next_tokens([[3, 5]])
        tokens = one.ahead(int(token), 6)
        assert tokens is not None
        next(tokens)
        if "another" in words:
            other.next_tokens([[3, 5]])
        else:
            world.gpus[0].driver.broken = "the GPU failed"
        with pytest.raises(Error, match=words):
            list(tokens)


def test_a_gpu_that_fails_ends_all_ranks(tmp_path: Path) -> None:
    module = compiled("tied", "tp=2")
    world = World(module, tmp_path)
    world.gpus[1].driver.broken = "the GPU failed: an illegal memory access"
    step, failures = step_of(1, 0, 3), dict[int, str]()

    def work(program: CudaProgram) -> None:
        try:
            program.open({"B": 1, "C": 32}).step(step)
        except Error as error:
            failures[program.rank.rank] = error.message
            raise

    with pytest.raises(Error):
        world.of_all(work)
    assert "illegal memory access" in failures[1]
    assert set(failures) == {0, 1}


def test_an_error_of_nccl_names_operations_and_line(tmp_path: Path) -> None:
    def refusing(gpu: FakeCuda) -> None:
        assert isinstance(gpu._nccl, FakeNccl)
        gpu._nccl.refuse["all_reduce"] = "out of memory"

    world = World(compiled("tied", "tp=2"), tmp_path, refusing)
    words = r"decoder\.py:\d+ in \S+: nccl's all_reduce \(%\w+\) failed: .*out of memory"
    with pytest.raises(Error, match=words):
        world.of_all(lambda program: program.open({"B": 1, "C": 32}).step(step_of(1, 0, 3)))


def test_times_of_steps(tmp_path: Path) -> None:
    world = World(compiled("tied", ""), tmp_path)
    stream = world.programs[0].open({"B": 1, "C": 32})
    assert isinstance(stream, CudaStream)
    assert stream.times(step_of(1, 0, 3), 3) == [1.0] * 3  # of the fake events
    assert sum(call[0] == "launch" for call in world.gpus[0].calls) == 4
    stream.close()
    world.close()


@pytest.mark.parametrize("mesh", ["", "tp=2"])
def test_a_recorder_gets_the_steps_of_graphs(mesh: str, tmp_path: Path) -> None:
    module, recorder = compiled("gqa", mesh), Recorder()
    world = World(module, tmp_path, recorder=recorder)

    def work(program: Any) -> None:
        stream = program.open({"B": 2, "C": 32})
        for turn in range(4):  # the second one is captured
            stream.step(step_of(2, turn, 5))

    world.of_all(work)
    events = recorder.finish()
    assert {event.rank for event in events} == {*range(module.mesh.ranks)}
    assert {event.value for event in events if event.value} <= {*names_of(module.main).values()}
    assert {event.us for event in events} <= {1000.0, 2000.0}  # of each GPU
    assert any(event.kernel.startswith("linear") for event in events)
    assert ("nccl.all_reduce" in {event.kernel for event in events}) == bool(mesh)
    world.close()
