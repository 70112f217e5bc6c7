"""Waiting for GPUs whose work takes long, in seconds that only work spends."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from irc.backends.cuda import group, watch
from irc.backends.cuda.execute import steps
from irc.backends.cuda.execute.memory import Memory
from irc.backends.cuda.watch import Marks, wait
from irc.backends.ranks.communicator import PeerError
from irc.backends.reference.program import ReferenceProgram
from tests.cuda.fake_cuda import World
from tests.cuda.test_program import compiled
from tests.tensorrt import fake_gpu
from tests.tensorrt.fake_gpu import FakeDriver, FakeStream
from tests.tensorrt.fake_nccl import FakeNccl
from tests.tensorrt.test_plugin_collective import group_of
from tests.tensorrt.test_runtime import step_of

STUCK = "the step did not end, and no rank made progress for 7 s"


class Clock:
    """The module time, whose seconds pass where `now` grows, and ten times too slowly else."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        for module in (group, watch):
            monkeypatch.setattr(module, "time", self)

    def monotonic(self) -> float:
        return self.now + time.monotonic() / 10

    def sleep(self, seconds: float) -> None:
        """Nothing to wait for."""


@pytest.mark.parametrize("until", [1e9, 30.0, 0.0])
def test_a_wait_ends_where_no_rank_makes_progress(
    until: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work of 100 seconds with a mark every five seconds, the last one at `until`."""
    nccl, clock = FakeNccl(), Clock(monkeypatch)
    progress: Callable[[], object] = lambda: (0, min(clock.now, until) // 5)  # noqa: E731
    _, own = group_of(nccl, 0, 1, timeout=7.0, progress=progress)

    def is_done() -> bool:
        clock.now += 0.01
        return clock.now > 100

    stream: Any = FakeDriver().stream()
    stream.is_done = is_done
    if until > 100:
        wait(stream, [own], "the step")
        assert clock.now > 100 and not nccl.calls
        return
    with pytest.raises(PeerError, match=STUCK):
        wait(stream, [own], "the step")
    assert 6 < clock.now - until < 7.5
    assert nccl.calls == ["abort 0"]


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("mesh", ["tp=2", "pp=2"])
def test_a_long_run_with_marks(
    mesh: str, marked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every piece of work takes 0.4 seconds; with pp=2 a rank waits for all of another's."""
    module = compiled("gqa", mesh)
    inputs = [step_of(2, turn, 5) for turn in range(4)]  # the second one is captured
    right = ReferenceProgram(compiled("gqa", "")).open({"B": 2, "C": 32})
    wanted = [right.step(each)["logits"] for each in inputs]
    world = World(module, tmp_path)
    if marked:
        monkeypatch.setattr(steps, "LITTLE", -1)
        monkeypatch.setattr(steps, "MARKED", 1)
    monkeypatch.setattr(fake_gpu, "SOON", 7.0)
    clock = Clock(monkeypatch)

    def work_once(stream: FakeStream) -> bool:
        if stream._queue and stream._queue[0]() is not False:
            stream._queue.pop(0)
            clock.now += 0.4
        return not stream._queue

    monkeypatch.setattr(FakeStream, "is_done", work_once)

    def talk(program: Any) -> list[Any]:
        stream = program.open({"B": 2, "C": 32})
        return [stream.step(each)["logits"] for each in inputs]

    if not marked:
        with pytest.raises(PeerError, match="no rank made progress for 7 s"):
            world.of_all(talk)
        return
    for logits in world.of_all(talk):
        np.testing.assert_allclose(logits, wanted, rtol=1e-4, atol=1e-5)
    assert clock.now > 50


@pytest.mark.parametrize("elements", [group._LARGE, 4])
def test_marks_follow_large_collectives(elements: int) -> None:
    driver, own = group_of(FakeNccl(), 0, 1)
    stream, address = driver.stream(), driver.allocate(4 * elements)
    driver.marks = Marks(Memory(driver, stream), stream)
    own.bind("all_reduce", "f32", elements, "sum")(address, address, stream.handle)
    wait(stream, [own])
    assert (driver.marks.passed() > 0) == (elements > 4)


def test_marks_follow_runs_too() -> None:
    driver = FakeDriver()
    stream = driver.stream()
    marks = Marks(Memory(driver, stream), stream)
    numbers: list[int] = []
    for _ in range(40):
        marks.after_run()
        stream.wait()
        numbers.append(marks.passed())
    assert len(set(numbers)) == 40 // watch._RUNS + 1
