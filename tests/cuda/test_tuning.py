"""Choices of an artifact: the GPU it is for, the fastest kernels there, and insisting on both."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from safetensors.numpy import save_file

import irc
from irc.artifact.folder import ArtifactFolder
from irc.artifact.manifest import add_facts, silent
from irc.backends.cuda.execute.load import CudaProgram, CudaStream, program_of
from irc.backends.cuda.execute.step_times import StepTimes
from irc.backends.cuda.plan import Launch, LibraryCall
from irc.backends.cuda.plan.build import Planner
from irc.backends.cuda.plan.regime import Device, Target
from irc.backends.cuda.plan_files import write_choices
from irc.backends.cuda.tuning import FILE, TARGETS, Choices, read_choices, shipped
from irc.backends.ranks.communicator import Communicator
from irc.backends.ranks.threads import ThreadWorld
from irc.errors import Error
from irc.generation.random_inputs import complete_inputs
from irc.ir.core import Module
from irc.text import parse_module
from tests.cli.runner import refused, works
from tests.cuda.fake_cuda import FakeCuda, World
from tests.cuda.test_program import compiled
from tests.tensorrt.fake_gpu import STREAMS, FakeEvent
from tests.tensorrt.fake_nccl import FakeNccl

Us: TypeAlias = Callable[[Launch, Launch | None, float], float]

TEXT = """module @m dims(B=1:2:16) {
  weight @gate : bf16[1024, 2048] = random("gate", 1, 0.5)
  weight @up : bf16[1024, 2048] = random("up", 1, 0.5)
  weight @down : bf16[2048, 1024] = random("down", 1, 0.5)
  func @main(%x: bf16[B, 2048]) -> (bf16[B, 2048]) {
    %m = gated_mlp %x, @gate, @up : bf16[B, 1024]
    %y = linear %m, @down : bf16[B, 2048] return %y } }"""
KEYS = ["linear bf16 x bf16 [1024, 2048] gated, 1 rows", "linear bf16 x bf16 [2048, 1024], 1 rows"]
MEASURED = Choices(
    gpu="Fake 9000, sm_89",
    kernels=dict.fromkeys(KEYS, "one_row 6"),
    versions={"irc": "1", "NVRTC": "2"},
)


def module() -> Module:
    return parse_module(TEXT, "m")


def launches(device: Device, rows: int = 1) -> list[tuple[int, int, int]]:
    """Blocks, threads and bytes of shared memory of every launch of the plan for a GPU."""
    return launches_of(Planner(module(), device=device), rows)


def launches_of(planner: Planner, rows: int) -> list[tuple[int, int, int]]:
    steps = planner.plan({"B": rows}).steps
    return [(step.grid[0], step.block, step.shared) for step in steps if isinstance(step, Launch)]


def built(folder: Path, text: str = TEXT, name: str = "artifact", **options: Any) -> irc.Artifact:
    (folder / "m.irc").write_text(text)
    return irc.compile(folder / "m.irc", folder / name, backend="cuda", **options)


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    return built(tmp_path).folder


def test_an_artifact_is_for_its_target(tmp_path: Path, artifact: Path) -> None:
    assert read_choices(artifact) == Choices()
    small = tmp_path / "small"
    works("compile", tmp_path / "m.irc", "--backend", "cuda", "--target", "cuda/sm_89", "-o", small)
    assert read_choices(small).target == TARGETS["sm_89"]
    shown = works("show", small, "--plan", "--dims", "B=1", "--json").json["text"]
    assert shown == (small / "plans" / "main.least.txt").read_text()
    assert " grid 142 " in shown
    assert " grid 132 " in (artifact / "plans" / "main.least.txt").read_text()
    out = works("show", small, "--stats").out
    assert re.search("target +sm_89, 142 multiprocessors, 99 KB", out) and "none measured" in out
    again = tmp_path / "again"
    works("compile", small, "-o", again)
    assert read_choices(again).target == TARGETS["sm_89"]
    with ArtifactFolder.open(again).rewritten((FILE,), {"base": ""}):
        pass  # without choices, as of old
    assert "sm_90" in works("show", again, "--stats").out
    works("compile", again, "-o", tmp_path / "old")
    assert read_choices(tmp_path / "old") == Choices()


@pytest.mark.parametrize("text", ["cuda/sm_91", "sm90", "tensorrt-rtx-1.7/sm_89"])
def test_an_unknown_target(tmp_path: Path, text: str) -> None:
    with pytest.raises(Error, match=r"no target .*there are cuda/sm_80.*cuda/sm_120"):
        irc.compile(module(), tmp_path / "out", backend="cuda", target=text)


def test_programs_for_all_gpus_in_one_process() -> None:
    planners = {name: Planner(module(), device=Device(each)) for name, each in TARGETS.items()}
    for rows in (2, 1):
        together = {name: launches_of(each, rows) for name, each in planners.items()}
        for name, target in TARGETS.items():
            assert together[name] == launches(Device(target), rows)
            for blocks, _, shared in together[name]:
                assert blocks <= target.multiprocessors and shared <= target.shared
        assert together["sm_89"] != together["sm_90"]


def test_a_plan_takes_what_is_chosen_and_says_what_could_be() -> None:
    candidates = Planner(module()).plan({"B": 1}).candidates
    assert {*candidates} == {*KEYS} and "one_row 6" in candidates[KEYS[0]]
    assert [each[:2] for each in launches(MEASURED.device)] == [(132, 192)] * 2
    unknown = Device(choices=dict.fromkeys(KEYS, "one_row 1000"))
    assert launches(unknown) == launches(Device()) != launches(MEASURED.device)


def load(artifact: Path, choices: Choices, locked: bool, target: Target | None = None) -> World:
    def prepare(gpu: FakeCuda) -> None:
        gpu.target = target or gpu.target

    return World(module(), artifact, prepare, choices=choices, fused=True, locked=locked)


class Clock:
    """Lets the kernels of a GPU take `us` of a launch, the one in front of it and `now` (ms), and
    its algorithms `algorithms`; what is infinite cannot run."""

    def __init__(self, gpu: Any, us: Us, algorithms: Sequence[float] = (1, 1)) -> None:
        self.us, self.algorithms, self.products, self.now = us, algorithms, gpu.called, 0.0
        self.before: Launch | None = None
        gpu.kernels.bind = gpu.called.bind = self.bind
        gpu.kernels.compile = gpu.kernels.load = list  # they never run
        gpu.driver.clock = self

    def bind(self, step: Launch | LibraryCall, *_: Any) -> Callable[[int], None]:
        algorithm = 0.0
        if isinstance(step, LibraryCall):
            key, offered = self.products.offered(step)
            chosen = self.products.algorithms.get(key, offered[0])
            algorithm = self.algorithms[offered.index(chosen)]

        def work() -> None:
            launch = step if isinstance(step, Launch) else None
            us = algorithm if launch is None else self.us(launch, self.before, self.now)
            self.before, self.now = launch, self.now + us / 1e3

        def enqueue(stream: int) -> None:
            if inf in (algorithm, isinstance(step, Launch) and self.us(step, None, 0.0)):
                raise Error("too many resources")
            STREAMS[stream].enqueue(work)

        return enqueue


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events have the time of a clock."""

    def reach(event: Any) -> None:
        event.reached, event.at = True, event._stream.driver.clock.now

    monkeypatch.setattr(FakeEvent, "reach", reach)
    monkeypatch.setattr(FakeEvent, "ms_until", lambda event, later: later.at - event.at)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, events: None) -> Callable[..., Clock]:
    """Makes the GPU on which programs are loaded."""

    def make(*arguments: Any) -> Clock:
        gpu = FakeCuda(FakeNccl(), 0)
        monkeypatch.setattr("irc.backends.cuda.execute.load.open_gpu", lambda *_: gpu)
        return Clock(gpu, *arguments)

    return make


def six_warps(launch: Launch, before: Launch | None, now: float) -> float:
    return 10.0 + abs(launch.block - 192) / 10


def test_an_artifact_keeps_the_fastest(clock: Any, artifact: Path) -> None:
    clock(six_warps)
    table = artifact.parent / "sm_90.json"
    table.write_text('{"other": "x"}')
    works("bench", "kernels", artifact, "--dims", "B=1", "-o", table)  # a table of irc grows
    assert json.loads(table.read_text()) == {"other": "x", **MEASURED.kernels}
    assert read_choices(artifact) == Choices()
    rows = works("bench", "kernels", artifact, "--dims", "B=1", "--json").json["choices"]
    assert {row["key"]: row["choice"] for row in rows} == dict.fromkeys(KEYS, "one_row 6")
    assert rows[1]["us"]["one_row 6"] == pytest.approx(20.0)
    choices = read_choices(artifact)
    assert choices == replace(MEASURED, versions={"irc": "1", "NVRTC": "2", "cuBLASLt": "3"})
    assert " block 192 " in (artifact / "plans" / "main.least.txt").read_text()
    out = works("show", artifact, "--stats").out
    assert re.search(r"2 kernels and 0 products on Fake 9000, sm_89 with irc .*\(sha256:", out)
    program: Any = irc.load(artifact, locked=True).program
    assert program.rank.planner.device == choices.device
    works("bench", "kernels", artifact)  # typical and least sizes
    assert len(read_choices(artifact).kernels) == 4
    clock(lambda *_: 10.0)
    works("bench", "kernels", artifact, "--dims", "B=1")  # nothing is faster than what was chosen
    assert read_choices(artifact).kernels.items() >= choices.kernels.items()


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("bench kernels DIR --dims=B=99", "expected one size of B from 1 to 16"),
        ("bench kernels DIR -o=missing/a.json", "expected a folder that can be written, .*missing"),
        ("run DIR --random 1 --locked", "found none in choices.json; irc bench kernels DIR"),
        ("run DIR --random 1 --locked --backend reference", "--locked is for artifacts of cuda"),
    ],
)
def test_commands_refuse(clock: Any, artifact: Path, command: str, words: str) -> None:
    clock(six_warps)
    assert re.search(words, refused(*command.replace("DIR", str(artifact)).split()))


def test_a_rewritten_artifact_is_complete(tmp_path: Path) -> None:
    save_file({"c": np.ones((4, 4), np.float32)}, tmp_path / "w.safetensors")
    for name, bundle in (("linked", False), ("bundled", True)):
        folder = built(tmp_path, CONSTANT, name, bundle=bundle).folder
        add_facts(folder, {"tool": 1})
        before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
        old = ArtifactFolder.open(folder)
        with pytest.raises(ZeroDivisionError), old.rewritten((FILE,), {}) as part:
            (part / FILE).write_text("1")
            raise ZeroDivisionError
        assert {file: file.read_bytes() for file in before} == before
        write_choices(old, irc.load(folder).module, MEASURED)
        new = ArtifactFolder.open(folder)
        assert not [*new.problems(whole=True)]
        assert new.manifest["files"].keys() == old.manifest["files"].keys()
        assert new.manifest["weights"] == old.manifest["weights"]
        changed = {file.name for file, data in before.items() if file.read_bytes() != data}
        assert changed == {FILE, "config.json"}
        assert json.loads((folder / "config.json").read_text())["tool"] == 1
        assert [*new.problems()] == [] != [*old.problems()]
    assert len([*tmp_path.iterdir()]) == 4


CONSTANT = """module @m { file @w = "w.safetensors" weight @c : f32[4, 4] = @w["c"]
  func @main(%x: f32[4, 4]) -> (f32[4, 4]) { %y = add %x, @c : f32[4, 4] return %y } }"""


def best(launch: Launch | None) -> bool:
    return launch is not None and launch.block == 192


@pytest.mark.parametrize(
    "us",
    [
        # alone, the fastest kernel keeps the next one from starting early
        lambda launch, before, _: 10.0 - 5 * best(launch) + 20 * best(before),
        lambda launch, *_: 10.0 - 0.01 * best(launch),  # not clearly faster
        lambda launch, *_: inf if best(launch) else 10.0,  # it cannot run
        lambda *arguments: 10.0 + 10 / (1 + arguments[2]),  # the GPU becomes faster
    ],
    ids=["next", "about as fast", "cannot run", "warms up"],
)
def test_the_kernels_of_the_rules_stay(clock: Any, artifact: Path, us: Us) -> None:
    clock(us)
    works("bench", "kernels", artifact, "--dims", "B=1")
    choices = read_choices(artifact)
    assert {*choices.kernels} == {*KEYS}
    assert launches(choices.device) == launches(Device())


LINEAR = """module @m dims(B=1:40:99) { weight @w : f32[24, 16] = random("w", 1, 0.5)
  func @forward(%x: f32[B, 16]) -> (f32[B, 24]) { %y = linear %x, @w : f32[B, 24] return %y } }"""


@pytest.mark.parametrize(("us", "chosen"), [((2, 1), "02"), ((2, inf), "01"), ((1, 2), "01")])
def test_algorithms(clock: Any, tmp_path: Path, us: Sequence[float], chosen: str) -> None:
    clock(six_warps, us)
    folder = built(tmp_path, LINEAR).folder
    works("bench", "kernels", folder, "--dims", "B=40")
    assert [*read_choices(folder).products.values()] == [chosen * 64]
    clock(six_warps, us)
    program: Any = irc.load(folder).program
    assert program.rank.products().algorithms == read_choices(folder).products


def test_ranks_have_one_file(tmp_path: Path) -> None:
    nccl, two = FakeNccl(), built(tmp_path, mesh="tp=2")

    def load_rank(host: Communicator) -> CudaProgram:
        choices, gpu = Choices(kernels={"k": str(host.rank)}), FakeCuda(nccl, host.rank)
        return program_of(two.module, two.folder, choices, communicator=host, gpu=lambda _: gpu)

    with pytest.raises(Error, match=r"choices\.json"):
        ThreadWorld(2, timeout=5.0).run(load_rank)


def test_ranks_choose_what_is_the_fastest_on_the_slowest(events: None, tmp_path: Path) -> None:
    two = built(tmp_path, mesh="tp=2")

    def prepare(gpu: FakeCuda) -> None:
        slow, best = ((0, 192), (50, 320))[gpu.driver.number]
        Clock(gpu, lambda launch, *_: 10.0 + slow + abs(launch.block - best))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # memory of peers needs kernels that run
        world = World(two.module, two.folder, prepare, fused=True)

    def chosen(program: CudaProgram) -> dict[str, str]:
        times = StepTimes(program, Choices())
        assert [*times.tune({"B": 1}, complete_inputs(two.module, 0, {"B": 1}), silent)]
        return times.kernels

    found = world.of_all(chosen)
    assert found[0] == found[1]
    assert {*found[0].values()} == {"one_row 10"}  # 320 threads


def test_steps_that_are_timed_fill_the_caches(
    events: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen, times = list[Any](), CudaStream.times

    def recorded(stream: CudaStream, inputs: Any, count: int) -> list[float]:
        seen.append(inputs["past_lengths"].tolist())
        return times(stream, inputs, count)

    monkeypatch.setattr(CudaStream, "times", recorded)
    lm, sizes = compiled("gqa", ""), {"B": 2, "S": 3, "T": 1, "C": 32}
    world = World(lm, tmp_path, lambda gpu: Clock(gpu, six_warps, (2, 1)) and None, fused=True)
    found = StepTimes(world.programs[0], Choices())
    assert {row.choice for row in found.tune(sizes, complete_inputs(lm, 0, sizes), silent)}
    assert {*found.products.values()} == {"02" * 64}
    assert seen and all(past == [29, 29] for past in seen)


def test_locked_programs_have_everything_chosen(artifact: Path) -> None:
    world = load(artifact, MEASURED, locked=True)
    planner = world.programs[0].rank.planner
    assert isinstance(planner, Planner) and planner.device == MEASURED.device
    with pytest.raises(Error, match=r"no kernel for linear .*, 2 rows, .*DIR --dims B=2 chooses"):
        planner.plan({"B": 2})
    world.close()


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        (replace(MEASURED, gpu="B200, sm_100"), "for B200, .* this GPU is Fake 9000.* irc bench"),
        (replace(MEASURED, target=TARGETS["sm_89"]), "142 mult.* this GPU is .*132 mult"),
        (replace(MEASURED, versions={"NVRTC": "9"}), "NVRTC 9, and here is 2; install 9, or"),
    ],
)
def test_locked_programs_refuse(artifact: Path, choices: Choices, words: str) -> None:
    with pytest.raises(Error, match=words):
        load(artifact, choices, locked=True)


def test_on_another_gpu_its_own_plans_are_made(artifact: Path) -> None:
    with pytest.warns(UserWarning, match=r"this GPU is Fake 9000.*142.*: plans are made for this"):
        world = load(artifact, MEASURED, locked=False, target=TARGETS["sm_89"])
    planner = world.programs[0].rank.planner
    assert isinstance(planner, Planner) and planner.device == Device(TARGETS["sm_89"])
    world.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(artifact, MEASURED, locked=False).close()


@pytest.mark.parametrize(
    "text", ["", "[]", '{"kernels": {"k": 3}}', '{"products": {"p": "00"}}', '{"target": "sm_90"}']
)
def test_a_damaged_file(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(Error, match=r"choices.json is damaged.*compile again"):
        read_choices(tmp_path)


def asking(key: str) -> tuple[str, str, str] | None:
    """The arguments, call and type of what asks for a choice of 16-bit floats."""
    numbers = re.findall(r"\b\d+", key)
    if key.startswith("linear bf16 x bf16 ["):
        n, k, rows = numbers
        call = "gated_mlp %x, %v, %w" if "gated" in key else "linear %x, %w"
        weights = f"%v: bf16[{n}, {k}], %w: bf16[{n}, {k}]"
        return f"%x: bf16[{rows}, {k}], {weights}", call, f"bf16[{rows}, {n}]"
    if not key.startswith("decode attention bf16"):
        return None
    features, heads, dim, rows, keys = numbers
    q, cache = f"bf16[{rows}, 1, {features}]", f"bf16[{rows}, {heads}, {keys}, {dim}]"
    call = f"attention %q, %k, %v, past=%past {{head_dim={dim}, causal}}"
    return f"%q: {q}, %k: {cache}, %v: {cache}, %past: i32[{rows}]", call, q


def test_plans_ask_for_the_shipped_choices() -> None:
    keys = [(key, parts) for key in shipped(90) if (parts := asking(key))]
    assert len(keys) > 40
    for key, (inputs, call, type) in keys:
        body = f"%y = {call} : {type} return %y"
        module = parse_module(f"module @m {{ func @main({inputs}) -> ({type}) {{ {body} }} }}")
        assert shipped(90)[key] in Planner(module).plan({}).candidates[key], key
