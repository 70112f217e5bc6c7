"""IrcCollective driven as TensorRT drives it, on GPUs and an NCCL in numpy."""

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from irc.backends.cuda.group import Group
from irc.backends.cuda.norm import add_rms_norm
from irc.backends.cuda.watch import wait, watched
from irc.backends.ranks.communicator import PeerError
from irc.backends.tensorrt.plugins import take_failure
from irc.errors import Error
from irc.ir.dtypes import numpy_dtype
from tests.cuda.fake_cuda import EmulatedKernels
from tests.fresh import fresh
from tests.tensorrt import fake_nccl
from tests.tensorrt.fake_gpu import SOON, FakeDriver
from tests.tensorrt.fake_nccl import FakeNccl
from tests.tensorrt.plugin_cases import MORE_DTYPES, Bench, Case, cases, fused_cases, run_case

NAME = b"n" * 128


def on_ranks(ranks: int, work: Callable[[int], Any]) -> list[Any]:
    """The results or exceptions of `work` on every rank, each a thread."""
    found: list[Any] = [None] * ranks

    def run(rank: int) -> None:
        try:
            found[rank] = work(rank)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(SOON)
    return found


@pytest.fixture(autouse=True)
def no_failure() -> Iterator[None]:
    yield
    take_failure()


def group_of(
    nccl: FakeNccl, rank: int, ranks: int, name: bytes = NAME, **options: Any
) -> tuple[FakeDriver, Group]:
    driver = FakeDriver(rank)
    options = {"label": "tp", "timeout": SOON, "meeting": SOON, **options}
    group = Group(name, rank, ranks, driver, library=nccl, **options)
    driver.groups.append(group)
    return driver, group


def problems(ranks: int, todo: list[Case]) -> list[Any]:
    """The wrong results on each rank, in words."""
    nccl, seed = FakeNccl(), int(fresh().integers(1 << 30))

    def work(rank: int) -> list[str]:
        driver, group = group_of(nccl, rank, ranks)
        stream = driver.stream()
        found = [run_case(driver, group, "tp", case, stream, seed) for case in todo]
        group.close()
        return [each for each in found if each]

    return on_ranks(ranks, work)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_collective_agrees_with_numpy(ranks: int) -> None:
    todo = [*cases(ranks), *cases(ranks, MORE_DTYPES)]
    assert problems(ranks, todo) == [[]] * ranks


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_fused_operation_agrees_with_numpy(ranks: int) -> None:
    assert problems(ranks, list(fused_cases())) == [[]] * ranks


def test_groups_are_independent() -> None:
    nccl, case = FakeNccl(), Case("all_reduce", "f32", 3, 5, "sum", -1, True)

    def work(rank: int) -> str:
        driver, group = group_of(nccl, rank // 2, 2, bytes([rank % 2]) * 128)
        return run_case(driver, group, "tp", case, driver.stream(), 10 * (rank % 2))

    assert on_ranks(4, work) == [""] * 4


def test_a_wrong_result_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = fake_nccl.result_of

    def wrong(items: Any, position: int, fault: str) -> Any:
        return right(items, position) if not position else None

    monkeypatch.setattr(fake_nccl, "result_of", wrong)
    found = problems(2, [Case("all_reduce", "f32", 3, 5, "sum", -1, False)])
    assert found[0] == []
    assert "all_reduce sum f32 [3, 5] stream: output y differs in 15 of 15" in found[1][0]


def test_a_rank_that_ends_is_an_error_on_the_others() -> None:
    nccl = FakeNccl()
    case = Case("all_reduce", "f32", 3, 5, "sum", -1, False)

    def work(rank: int) -> None:
        driver, group = group_of(nccl, rank, 3, timeout=0.5)
        stream = driver.stream()
        bench = Bench(driver, group, "tp", case, stream)
        graph = stream.capture(bench.enqueue)
        if rank == 2:
            return
        stream.launch(graph)
        with pytest.raises(PeerError, match=r"rank \d of 3 in tp: the step did not end, and"):
            wait(stream, [group], "the step")
        assert stream.is_done(), "the abort lets the stream go on"
        with pytest.raises(PeerError, match="the step did not end"):
            bench.enqueue()
        assert isinstance(take_failure(), PeerError)
        group.close()

    assert on_ranks(3, work) == [None] * 3
    assert {"abort 0", "abort 1"} <= set(nccl.calls)
    assert "finalize 0" not in nccl.calls


@pytest.mark.parametrize("worlds", [[2], [2, 3]])
def test_missing_ranks_are_an_error(worlds: list[int]) -> None:
    nccl = FakeNccl()
    found = on_ranks(len(worlds), lambda r: group_of(nccl, r, worlds[r], meeting=0.3))
    assert "rank 0 of 2 in tp: joining the 2 ranks took longer than" in str(found[0])
    assert all(isinstance(each, PeerError) for each in found)


class Run:
    """The health check of a run, which fails when a test sets it."""

    failure = ""

    def check(self) -> None:
        if self.failure:
            raise PeerError(self.failure)


@pytest.mark.parametrize(
    ("where", "cause", "message"),
    [
        *[(each, "run", "rank 1 was killed") for each in ("joining", "wait", "watched", "send")],
        ("wait", "nccl", "NCCL reports: result 6: the fake fails"),
        ("watched", "time", "the step did not end, and no rank made progress for 1 s"),
    ],
)
def test_a_failure_ends_every_wait(where: str, cause: str, message: str) -> None:
    """Of the run or of NCCL, before the timeout; of a rank, at the timeout."""
    nccl, run = FakeNccl(), Run()
    timeout = 0.6 if cause == "time" else 1e6

    def fail() -> None:
        run.failure = message if cause == "run" else ""
        nccl.worlds[NAME][0].state = 6 if cause == "nccl" else 0

    def work(rank: int) -> None:
        if where == "joining":
            run.failure = message
        options: Any = {"meeting": SOON, "timeout": timeout, "check": run.check}
        driver, group = group_of(nccl, rank, 2, **options)
        if rank == 1:
            return
        memory, stream = driver.allocate(64), driver.stream()
        with watched(driver.groups, "nothing"):
            group.bind("broadcast", "f32", 4, root=1)(memory, memory, stream.handle)
        fail()
        if where == "wait":
            wait(stream, [group], "step")
        if where == "send":
            group.send(memory, 4, 1, stream.handle)
        with watched(driver.groups, "the step"):
            while not stream.is_done():
                time.sleep(1e-3)

    found = on_ranks(1 if where == "joining" else 2, work)
    assert isinstance(found[0], PeerError) and str(found[0]).endswith(message)
    assert ("abort 0" in nccl.calls) == (where != "send")


def test_a_refused_call_and_a_broken_gpu_are_errors() -> None:
    nccl = FakeNccl()
    driver, group = group_of(nccl, 0, 1)
    stream = driver.stream()
    driver.broken = "the GPU failed: cudaErrorIllegalAddress"
    with pytest.raises(PeerError, match="step failed: the GPU failed: cudaErrorIllegal"):
        wait(stream, [group], "step")
    _, other = group_of(nccl, 0, 1)
    nccl.refuse["all_reduce"] = "ncclInvalidUsage"
    with pytest.raises(PeerError, match="all_reduce failed: ncclInvalidUsage"):
        other.bind("all_reduce", "f32", 4, "sum")(1, 2, stream.handle)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("all_reduce", "i16", 4, "sum"), "cannot reduce i16"),
        (("all_reduce", "f32", 4), "expected the reduction sum, max, min or prod"),
        (("all_greet", "f32", 4), "no collective called 'all_greet'"),
    ],
)
def test_calls_that_nccl_lacks(arguments: Any, message: str) -> None:
    nccl = FakeNccl()
    _, group = group_of(nccl, 0, 1)
    with pytest.raises(Error, match=message):
        group.bind(*arguments)
    group.bind("all_gather", "f8e4m3", 4)  # without arithmetic it is sent as bytes
    nccl.refuse["all_reduce"] = "it was called"
    group.bind("all_reduce", "f32", 0, "sum")(1, 2, 3)  # nothing to send


def test_an_engine_for_another_mesh_and_a_group_that_is_missing() -> None:
    driver, group = group_of(FakeNccl(), 0, 1)
    bench = Bench(
        driver, group, "tp", Case("all_reduce", "f32", 3, 5, "sum", -1, False), driver.stream()
    )
    bench.load(1)
    bench.enqueue()
    other: Any = SimpleNamespace(ranks=2)
    for groups, message in (
        ({"tp": other}, r"expects 1 ranks in the group 'tp', and .* has 2"),
        ({"dp": other, "a": other}, "no communicator for the group 'tp' .*, found a, dp;"),
    ):
        bench.groups = groups
        with pytest.raises(Error, match=message):
            bench.enqueue()


@pytest.mark.parametrize(
    ("dtype", "weight", "columns"),
    [("bf16", "bf16", 4096), ("bf16", "f32", 768), ("f16", "f16", 7), ("f32", "f32", 20000)],
)
def test_the_norm_over_its_operand(dtype: str, weight: str, columns: int) -> None:
    """The kernel of a plan on the host, whose norm lies where x does."""
    driver, rng = FakeDriver(), fresh()
    stream, kernels = driver.stream(), EmulatedKernels(driver)
    kinds = dtype, dtype, weight, dtype
    shapes = (3, columns), (3, columns), (columns,), (3, columns)
    arrays = [
        rng.standard_normal(shape).astype(numpy_dtype(kind))
        for shape, kind in zip(shapes, kinds, strict=True)
    ]
    x, residual, gain, total = (driver.allocate(each.nbytes) for each in arrays)
    for address, array in zip((x, residual, gain, total), arrays, strict=True):
        stream.upload(address, array)
    launch = add_rms_norm(kernels, dtype, weight, 3, columns, 1e-5, 0.5)
    launch(x, residual, gain, x, total, stream.handle)
    wanted = driver.add_rms_norm(dtype, weight, 3, columns, 1e-5, 0.5)
    others = [driver.allocate(arrays[0].nbytes) for _ in range(3)]
    stream.upload(others[0], arrays[0])
    wanted(others[0], residual, gain, *others[1:], stream.handle)
    stream.wait()
    for address, other in ((x, others[1]), (total, others[2])):
        found, right = (driver.memory.array(a, (3, columns), dtype) for a in (address, other))
        np.testing.assert_allclose(
            found.astype("f4"), right.astype("f4"), rtol=1e-2 if dtype == "bf16" else 2e-3
        )
    with pytest.raises(Error, match="multiples of 16 bytes"):
        launch(x + 2, residual, gain, x, total, stream.handle)
