"""What programs acquire is released: at their end, and where loading fails at any call."""

# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cuda.bindings import driver

from irc.backends.cuda.execute.load import program_of
from irc.backends.ranks.communicator import Communicator
from irc.backends.ranks.threads import ThreadWorld
from irc.errors import Error
from irc.ir.core import Module
from irc.text import parse_module
from tests.cuda.fake_api import FakeApi, Nccl, open_gpu
from tests.cuda.test_program import compiled
from tests.fresh import fresh
from tests.tensorrt.fake_gpu import SOON
from tests.tensorrt.test_runtime import step_of


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeApi]:
    yield FakeApi(monkeypatch)
    gc.collect()  # what a test leaves is not released into the next one's


def load(module: Module, folder: Path, nccl: Nccl, host: Communicator | None) -> Any:
    return program_of(module, folder, communicator=host, gpu=partial(open_gpu, nccl))


def held(api: FakeApi, nccl: Nccl) -> dict[str, int]:
    gc.collect()  # pinned memory and events go with their last user
    return dict(api.held) | ({"communicator": nccl.open} if nccl.open else {})


@pytest.mark.parametrize("mesh", ["", "tp=2"])
def test_programs_hold_nothing_once_they_are_closed(
    mesh: str, api: FakeApi, tmp_path: Path
) -> None:
    module, nccl = compiled("gqa", mesh), Nccl()

    def work(host: Communicator) -> None:
        program = load(module, tmp_path, nccl, host if mesh else None)
        stream = program.open({"B": 2, "C": 32})
        for turn in range(3):  # the second step is captured
            stream.step(step_of(2, turn, 5))
        stream.close()
        program.close()

    for _ in range(3):
        ThreadWorld(module.mesh.ranks, timeout=SOON).run(work)
        assert held(api, nccl) == {}
    assert {"cudaStreamCreate", "cuModuleLoadData", "cudaGraphInstantiate"} <= set(api.calls[0])


def test_another_thread_opens_its_streams_on_the_gpu_of_the_program(
    api: FakeApi, tmp_path: Path
) -> None:
    options = {"gpu": partial(open_gpu, Nccl()), "device": 1}
    program: Any = program_of(compiled("gqa", ""), tmp_path, **options)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(program.open, {"B": 2, "C": 32}).result()
    program.close()
    assert {*api.calls[0]} == {"cudaSetDevice"}


def test_garbage_is_not_closed_while_a_graph_is_captured(
    api: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch, before = driver.cuLaunchKernelEx, gc.get_threshold()

    def littering(*arguments: Any) -> Any:
        gc.set_threshold(1)
        assert [[] for _ in range(99)]
        gc.set_threshold(1 << 30)
        return launch(*arguments)

    monkeypatch.setattr(driver, "cuLaunchKernelEx", littering)
    program = load(compiled("gqa", ""), tmp_path, Nccl(), None)
    stream = program.open({"B": 2, "C": 32})
    try:
        stream.step(step_of(2, 0, 5))
        garbage: list[Any] = [program.open({"B": 1, "C": 32})]
        garbage.append(garbage)
        del garbage
        stream.step(step_of(2, 1, 5))
    finally:
        gc.set_threshold(*before)
    calls = api.calls[0]
    first, last = map(calls.index, ("cudaStreamBeginCapture", "cudaStreamEndCapture"))
    assert last > first and "cudaStreamSynchronize" not in calls[first:last]
    program.close()


SMALL = """module @m {mesh} dims(B=1:2:8) {{
  weight @w : f32[4, 4] = random("w", 0, 1.0)
  func @forward(%x: f32[B, 4]{{varies}}) -> (y: f32[B, 4]) {{
    %h = linear %x, @w : f32[B, 4]{{varies}}
    %y = {sum} : f32[B, 4]
    return %y }} }}"""


def small(ranks: int) -> Module:
    total = f'all_reduce %h {{axis="tp", group_size={ranks}}}' if ranks > 1 else "relu %h"
    text = SMALL.format(mesh=f"local mesh(tp={ranks})" if ranks > 1 else "", sum=total)
    return parse_module(text.replace("{varies}", "{varies tp}" if ranks > 1 else ""))


@pytest.mark.parametrize("ranks", [1, 2])
def test_loading_that_fails_holds_nothing(ranks: int, api: FakeApi, tmp_path: Path) -> None:
    """At every call of one rank; ranks that share no memory are no failure."""
    module, failures = small(ranks), 0
    rank = int(fresh().integers(ranks))
    for number in range(200):
        nccl = Nccl()
        api.calls, api.fail = {}, (rank, number)
        world = ThreadWorld(ranks, timeout=SOON)
        programs: dict[int, Any] = {}

        def work(host: Communicator, nccl: Nccl = nccl, programs: Any = programs) -> None:
            programs[host.rank] = load(module, tmp_path, nccl, host if ranks > 1 else None)
            api.fail = None

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of memory that is not shared
                world.run(work)
        except Error:
            failures += 1
        else:
            world.run(lambda host, programs=programs: programs[host.rank].close())
        programs.clear()
        assert held(api, nccl) == {}, api.calls[rank][: number + 1]
        if len(api.calls[rank]) <= number:
            assert failures > 8
            return
    raise AssertionError("loading makes ever more calls")


NCCL_CALLS = ("get_unique_id", "comm_init_rank_scalable", "comm_get_async_error")


@pytest.mark.parametrize("call", NCCL_CALLS)
def test_nccl_that_fails_leaves_nothing(
    call: str, api: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nccl = Nccl()

    def fail(*arguments: Any) -> None:
        raise RuntimeError("ncclSystemError")

    monkeypatch.setattr(nccl, call, fail)
    with pytest.raises((Error, RuntimeError), match="ncclSystemError"):
        ThreadWorld(2, timeout=SOON).run(lambda host: load(small(2), tmp_path, nccl, host))
    assert held(api, nccl) == {}
