"""Whole models as programs of plans on fake GPUs, against the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irc.passes
from irc.backends.cuda.backend import backend
from irc.backends.cuda.execute import gpu
from irc.backends.cuda.execute.load import CudaProgram, CudaStream, load, program_of
from irc.backends.reference.program import ReferenceProgram
from irc.errors import Error
from irc.generation.greedy import greedy
from irc.generation.rows import Rows
from irc.ir.core import Module
from irc.ir.mesh import Mesh
from irc.pipeline import run_pipeline
from irc.text import parse_module
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


def test_products_are_chosen_before_they_run(tmp_path: Path) -> None:
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
    assert len(world.gpus[0].called.prepared) == 2
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


def test_weights_are_refused_before_any_is_read(tmp_path: Path) -> None:
    gpus: list[FakeCuda] = []

    def little(gpu: FakeCuda) -> None:
        gpus.append(gpu)
        gpu.driver.memory.total = 20_000

    numbers = r"\(weights 50\.4 kB, activations \S+ \w+, caches 288 B\), found 20\.0 kB of"
    with pytest.raises(Error, match=numbers):
        World(compiled("gqa", ""), tmp_path, little)
    assert not any(call[0] == "upload" for call in gpus[0].calls)


def test_options_are_checked(tmp_path: Path) -> None:
    with pytest.raises(Error, match="no option graph; did you mean 'graphs'"):
        load(tmp_path, {}, graph=False)


@pytest.mark.parametrize(
    ("version", "count", "words"),
    [
        (None, 0, r"found no NVIDIA driver \(libcuda.so.1\); .* --backend onnx runs on CPU"),
        (
            12080,
            8,
            r"for CUDA 13\.0 or newer, found one for CUDA 12\.8: update the NVIDIA driver; ",
        ),
        (13000, 0, r"finds no GPU here; .* --backend onnx runs on CPU"),
        (13010, 3, "local rank 3 needs GPU 3, and this host has 3; start at most 3 ranks per host"),
    ],
)
def test_gpus_that_cannot_be_used(
    version: int | None, count: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "driver_version", lambda: version)
    monkeypatch.setattr(gpu, "device_count", lambda: count)
    module = compiled("gqa", "")
    with pytest.raises(Error, match=words):
        program_of(module, tmp_path, device=3)


def test_an_artifact_runs(tmp_path: Path) -> None:
    module = compiled("tied", "")
    facts = backend.emit(module, tmp_path, base=tmp_path).facts
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


@pytest.mark.parametrize("mesh", ["", "tp=2", "pp=2"])
def test_tokens_are_fed_back_on_the_gpu(mesh: str, tmp_path: Path) -> None:
    module = compiled("gqa", mesh, "next-tokens")
    world, new = World(module, tmp_path), 7
    right = ReferenceProgram(compiled("gqa", "", "next-tokens"))
    prompt = [int(token) for token in fresh().integers(0, 37, 4)]
    wanted = greedy(right, prompt, new, (), module.dims).tokens
    found = world.of_all(lambda p: greedy(p, prompt, new, (), module.dims).tokens)
    assert found == [wanted] * world.ranks
    uploads = [call for call in world.gpus[0].calls if call[0] == "upload" and call[2] == 4]
    inputs = len(world.programs[0].rank.stage.ports.inputs)
    assert len(uploads) < 3 * inputs  # those of the prompt and of the first token
    assert sum(call[0] == "launch" for call in world.gpus[0].calls) == new - 2
    world.close()


def test_the_end_of_a_text_is_seen_a_step_late(tmp_path: Path) -> None:
    module = compiled("gqa", "", "next-tokens")
    world, right = World(module, tmp_path), ReferenceProgram(module)
    free = greedy(right, [3, 5], 8, (), module.dims).tokens
    end = free[4]
    for program in (world.programs[0], right):
        summary = greedy(program, [3, 5], 8, (end,), module.dims)
        assert (summary.tokens, summary.stop) == (free[: free.index(end)], "end")
    world.close()


def test_caches_that_are_full_end_the_steps_ahead(tmp_path: Path) -> None:
    module = compiled("gqa", "", "next-tokens")
    world, right = World(module, tmp_path), ReferenceProgram(module)
    found, wanted = (greedy(p, [3] * 28, 9, (), module.dims) for p in (world.programs[0], right))
    assert (found.tokens, found.stop) == (wanted.tokens, "capacity")
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


def test_kernels_that_cannot_be_loaded_leave_no_weights(tmp_path: Path) -> None:
    gpus: list[FakeCuda] = []

    def refusing(gpu: FakeCuda) -> None:
        def load(kernels: object) -> None:
            assert gpu.driver.memory.used
            raise Error("no kernel image is available")

        gpus.append(gpu)
        gpu.emulated.load = load  # type: ignore[method-assign]

    with pytest.raises(Error, match="no kernel image"):
        World(compiled("gqa", ""), tmp_path, refusing)
    assert gpus[0].driver.memory.used == 0


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
