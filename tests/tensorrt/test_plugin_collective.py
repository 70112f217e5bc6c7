"""IrcCollective driven as TensorRT drives it, on GPUs and an NCCL that numpy plays."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from benchmarks.plugin_cases import MORE_DTYPES, Bench, Case, cases, fused_cases, run_case
from irc.backends.communicator import PeerError
from irc.backends.cuda.group import Group
from irc.backends.cuda.watch import Watchdog, wait
from irc.backends.tensorrt.plugins import communicators, take_failure
from irc.errors import Error
from tests.fresh import fresh
from tests.tensorrt import fake_nccl
from tests.tensorrt.fake_nccl import FakeDriver, FakeGpu

NAME = b"n" * 128
SOON = 120.0  # seconds: what would never happen has not happened by then


class Machine:
    """The Machine of the harness, played."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.driver = FakeDriver(gpu)

    def stream(self) -> int:
        return self.driver.open_stream()

    def graph(self, stream: int, work: Callable[[], None]) -> Any:
        with self.driver.capture(stream) as ops:
            work()
        return ops

    def launch(self, graph: Any, stream: int) -> None:
        self.driver.launch(graph, stream)

    def drop(self, graph: Any) -> None:
        graph.clear()


def on_ranks(ranks: int, work: Callable[[int], Any]) -> list[Any]:
    """What `work` gives or raises on every rank, each a thread."""
    found: list[Any] = [None] * ranks

    def run(rank: int) -> None:
        try:
            with communicators.act_as(rank):
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
def no_communicators() -> Iterator[None]:
    communicators.clear()
    yield
    communicators.clear()
    take_failure()


def group_of(gpu: FakeGpu, rank: int, ranks: int, **options: Any) -> tuple[Machine, Group]:
    machine = Machine(gpu)
    options = {"label": "tp", "timeout": SOON, "meeting": SOON, **options}
    return machine, Group(NAME, rank, ranks, library=gpu, driver=machine.driver, **options)


class Stranger:
    """A communicator that is asked for nothing but its size."""

    def __init__(self, ranks: int) -> None:
        self.rank, self.ranks = 0, ranks

    def bind(
        self, operation: str, dtype: str, elements: int, reduce_op: str = "none", root: int = -1
    ) -> Any:
        raise AssertionError(operation)

    def bind_add_rms_norm(
        self, dtype: str, weight_dtype: str, rows: int, columns: int, eps: float, offset: float
    ) -> Any:
        raise AssertionError(dtype)


def problems(ranks: int, todo: list[Case]) -> list[Any]:
    """What is wrong on each rank."""
    gpu, seed = FakeGpu(), int(fresh().integers(1 << 30))

    def work(rank: int) -> list[str]:
        machine, group = group_of(gpu, rank, ranks)
        communicators.register("tp", rank, group)
        stream = machine.stream()
        found = [run_case(machine, group, "tp", case, stream, seed) for case in todo]
        group.close()
        return [each for each in found if each]

    return on_ranks(ranks, work)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_collective_is_what_numpy_says(ranks: int) -> None:
    todo = [*cases(ranks), *cases(ranks, MORE_DTYPES)]
    assert problems(ranks, todo) == [[]] * ranks


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_fused_operation_is_what_numpy_says(ranks: int) -> None:
    assert problems(ranks, list(fused_cases())) == [[]] * ranks


def test_groups_side_by_side_do_not_mix() -> None:
    gpu, case = FakeGpu(), Case("all_reduce", "f32", 3, 5, "sum", -1, True)

    def work(rank: int) -> str:
        machine = Machine(gpu)
        pair = bytes([rank % 2]) * 128
        driver = machine.driver
        group = Group(pair, rank // 2, 2, label="tp", library=gpu, driver=driver, meeting=SOON)
        communicators.register("tp", rank, group)
        return run_case(machine, group, "tp", case, machine.stream(), 10 * (rank % 2))

    assert on_ranks(4, work) == [""] * 4


def test_a_wrong_result_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = fake_nccl.results_of

    def wrong(call: Any, x: Any, ways: int) -> Any:
        found = right(call, x, ways)
        return found if call.kind != "all_reduce" else [found[0], None]

    monkeypatch.setattr(fake_nccl, "results_of", wrong)
    found = problems(2, [Case("all_reduce", "f32", 3, 5, "sum", -1, False)])
    assert found[0] == []
    assert "all_reduce sum f32 [3, 5] stream: output y differs in 15 of 15" in found[1][0]


def test_a_rank_that_leaves_is_an_error_on_the_others() -> None:
    gpu = FakeGpu()
    case = Case("all_reduce", "f32", 3, 5, "sum", -1, False)

    def work(rank: int) -> None:
        machine, group = group_of(gpu, rank, 3, timeout=0.5)
        communicators.register("tp", rank, group)
        bench = Bench(machine, group, "tp", case, machine.stream())
        graph = machine.graph(bench.stream, bench.enqueue)
        if rank == 2:
            return
        machine.launch(graph, bench.stream)
        with pytest.raises(PeerError, match=r"rank \d of 3 in tp: the step did not end within"):
            group.wait(bench.stream, "the step")
        assert machine.driver.ready(bench.stream), "the abort lets the stream go on"
        with pytest.raises(PeerError, match="the step did not end"):
            bench.enqueue()
        assert isinstance(take_failure(), PeerError)
        group.close()

    assert on_ranks(3, work) == [None] * 3
    assert {"abort 0", "abort 1"} <= set(gpu.calls)
    assert "finalize 0" not in gpu.calls


def test_a_watchdog_frees_a_call_that_blocks() -> None:
    gpu = FakeGpu()

    def work(rank: int) -> Any:
        machine, group = group_of(gpu, rank, 2)
        if rank == 1:
            return None
        dog, stream = Watchdog([group]), machine.stream()
        memory = machine.driver.allocate(64)
        with dog.during("nothing"):
            pass
        dog.seconds = 0.5
        with (
            pytest.raises(PeerError, match="the prefill did not end within"),
            dog.during("the prefill"),
        ):
            group.bind("all_reduce", "f32", 4, "sum")(memory, memory, stream)
            machine.driver.read(memory, 16, stream)
        dog.close()
        return None

    assert on_ranks(2, work) == [None, None]


def test_ranks_that_never_meet() -> None:
    found = on_ranks(1, lambda rank: group_of(FakeGpu(), rank, 2, meeting=0.3))
    assert "rank 0 of 2 in tp: meeting the 2 ranks took longer than" in str(found[0])


def test_worlds_of_other_sizes_never_meet() -> None:
    gpu = FakeGpu()
    found = on_ranks(2, lambda rank: group_of(gpu, rank, 2 + rank, meeting=0.3))
    assert all(isinstance(each, PeerError) for each in found)


def test_another_artifact_is_named() -> None:
    gpu = FakeGpu()
    found = on_ranks(3, lambda rank: group_of(gpu, rank, 3, fact=str(rank == 1)))
    assert "rank 1 (process" in str(found[0]) and "runs something else" in str(found[0])
    assert "rank 0 (process" in str(found[1])


def test_a_process_that_has_ended_is_named_before_the_time_is_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = FakeGpu()

    def work(rank: int) -> None:
        machine, group = group_of(gpu, rank, 2, timeout=1e6)
        if rank == 1:
            return
        monkeypatch.setattr("irc.backends.cuda.peers.Peer.gone", lambda peer: peer.rank == 1)
        memory, stream = machine.driver.allocate(64), machine.stream()
        group.bind("broadcast", "f32", 4, root=1)(memory, memory, stream)
        with pytest.raises(PeerError, match=r"step cannot end; rank 1 \(process \d+\) has ended"):
            wait(stream, [group], "step")

    assert on_ranks(2, work) == [None, None]


def test_what_nccl_reports_ends_the_wait() -> None:
    gpu = FakeGpu()

    def work(rank: int) -> None:
        machine, group = group_of(gpu, rank, 2)
        if rank == 1:
            return
        memory, stream = machine.driver.allocate(64), machine.stream()
        group.bind("all_reduce", "f32", 4, "sum")(memory, memory, stream)
        gpu.worlds[NAME][0].state = 6
        with pytest.raises(PeerError, match="NCCL reports: result 6: the fake says so"):
            wait(stream, [group], "step")

    assert on_ranks(2, work) == [None, None]


def test_a_refused_call_and_a_broken_gpu_are_errors() -> None:
    gpu = FakeGpu()

    def work(rank: int) -> None:
        machine, group = group_of(gpu, rank, 1)
        stream = machine.stream()
        machine.driver.broken = "the GPU failed: cudaErrorIllegalAddress"
        with pytest.raises(PeerError, match="step failed: the GPU failed: cudaErrorIllegal"):
            wait(stream, [group], "step")
        _, other = group_of(gpu, rank, 1)
        gpu.refuse["all_reduce"] = "ncclInvalidUsage"
        with pytest.raises(PeerError, match="all_reduce failed: ncclInvalidUsage"):
            other.bind("all_reduce", "f32", 4, "sum")(1, 2, stream)

    assert on_ranks(1, work) == [None]


def test_what_nccl_cannot_do() -> None:
    _, group = group_of(FakeGpu(), 0, 1)
    with pytest.raises(Error, match="cannot reduce i16"):
        group.bind("all_reduce", "i16", 4, "sum")
    with pytest.raises(Error, match="needs sum, max, min or prod"):
        group.bind("all_reduce", "f32", 4)
    with pytest.raises(Error, match="no collective called 'all_greet'"):
        group.bind("all_greet", "f32", 4)
    group.bind("all_gather", "f8e4m3", 4)  # without arithmetic it travels as bytes


def test_an_empty_operand_calls_nothing() -> None:
    gpu = FakeGpu()
    _, group = group_of(gpu, 0, 1)
    gpu.refuse["all_reduce"] = "it was called"
    group.bind("all_reduce", "f32", 0, "sum")(1, 2, 3)


def test_communicators_are_found_by_group_and_rank() -> None:
    a, b = Stranger(1), Stranger(2)
    communicators.register("tp", 3, a)
    assert communicators.find("tp", 3) is a and communicators.here("tp") is a
    with pytest.raises(Error, match="rank 3 has a communicator for the group 'tp' already"):
        communicators.register("tp", 3, b)
    with pytest.raises(Error, match=r"no communicator for the group 'dp' in this process, .* tp"):
        communicators.here("dp")
    communicators.register("tp", 4, b)
    with pytest.raises(Error, match="several ranks of the group 'tp'"):
        communicators.here("tp")
    with communicators.act_as(4):
        assert communicators.here("tp") is b
    with pytest.raises(Error, match=r"group 'tp' on rank 5; .* tp of rank 3, tp of rank 4"):
        communicators.find("tp", 5)


def test_an_engine_for_another_mesh_and_a_communicator_that_changed() -> None:
    gpu = FakeGpu()
    machine, group = group_of(gpu, 0, 1)
    communicators.register("tp", 0, group)
    bench = Bench(machine, group, "tp", Case("all_reduce", "f32", 3, 5, "sum", -1, False), 0)
    bench.stream = machine.stream()
    bench.load(1)
    bench.enqueue()
    communicators.clear()
    communicators.register("tp", 0, Stranger(2))
    with pytest.raises(Error, match="wants 1 ranks in the group 'tp', and its communicator has 2"):
        bench.enqueue()
