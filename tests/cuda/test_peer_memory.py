"""Ranks that write to each other's memory: kernels on the host, a rank per thread."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from threading import Timer
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from irc.backends.cuda.codegen.peer_memory import LARGEST, MOST_BLOCKS, buffer_size
from irc.backends.cuda.execute import peers
from irc.backends.cuda.execute.compile import compile_kernel
from irc.backends.cuda.execute.peers import Peers
from irc.backends.cuda.plan import Argument, Kernel, Launch, LibraryCall, Plan
from irc.backends.cuda.plan.build import Planner
from irc.backends.cuda.plan.core import PEERS
from irc.backends.ranks.communicator import Communicator, PeerError
from irc.backends.ranks.threads import ThreadWorld
from irc.backends.ranks.watcher import RankProcess
from irc.errors import Error
from irc.ir.core import Module
from irc.ir.dtypes import numpy_dtype
from irc.pipeline import run_pipeline
from irc.text import parse_module
from tests.cuda.emulate import Memory, memory_of, prepare, run_kernel
from tests.cuda.fake_cuda import FakeCuda, World
from tests.cuda.run_plan import HostProgram
from tests.cuda.streaming_cases import Case
from tests.fresh import fresh
from tests.tensorrt.fake_gpu import SOON, FakeDriver

Array = np.ndarray[Any, Any]
WIDTH = 7


def parsed(ranks: int, arguments: str, results: str, body: str) -> Module:
    """A module of ranks along tp."""
    module = parse_module(f"""module @m local mesh(tp={ranks}) dims(B=1:2:999999) {{
      func @forward({arguments}) -> ({results}) {{ {body} return %y }} }}""")
    run_pipeline(module, "fuse-linear-epilogue")
    return module


def module_of(ranks: int, kind: str, text: str) -> Module:
    type = f"{kind}[B, {WIDTH}]"
    body = text.replace("{", f'{{axis="tp", group_size={ranks}').replace("\n", f" : {type}\n")
    return parsed(ranks, f"%x: {type}{{varies tp}}, %r: {type}", f"y: {type}", f"{body} : {type}")


def gathered(ranks: int, kind: str, width: int) -> Module:
    every = f"{kind}[{ranks}*B, {width}]"
    body = f'%y = all_gather %x {{axis="tp", dim=0, group_size={ranks}}} : {every}'
    return parsed(ranks, f"%x: {kind}[B, {width}]{{varies tp}}", f"y: {every}", body)


def tree_sum(numbers: Sequence[Array]) -> Array:
    """The sum of pairs, then of pairs of pairs, and so on."""
    if len(numbers) == 1:
        return numbers[0]
    pairs = [numbers[i : i + 2] for i in range(0, len(numbers), 2)]
    return tree_sum([np.add(*pair) if len(pair) == 2 else pair[0] for pair in pairs])


ALONE = "%y = all_reduce %x {}"
ADDED = "%a = all_reduce %x {}\n%y = add %r, %a"


class Ranks:
    """The memory of a group of ranks, each with the kernels of its own."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.memory = list(np.full((count, buffer_size(count) // 4), 0xFFFFFFFF, np.uint32))
        self.stop = np.zeros(1, np.uint32)
        ending = Timer(SOON, self.stop.fill, [1])  # where a rank waits in vain
        ending.daemon = True
        ending.start()
        self.tables: list[Memory] = []
        for rank in range(count):
            words = np.zeros(PEERS // 8, np.int64)
            words[:2] = self.stop.ctypes.data, rank
            words[2 : 2 + count] = [each.ctypes.data for each in self.memory]
            self.tables.append(memory_of(words))

    def one(self, rank: int, plan: Plan, arrays: Sequence[Array]) -> Array:
        """The result of one rank, whose kernels have variables of their own."""
        buffers = plan.buffers
        memory = {name: Memory(buffer.nbytes) for name, buffer in buffers.items()}
        memory |= {name: self.tables[rank] for name in buffers if name.startswith("%peers")}
        inputs = [name for name, buffer in buffers.items() if buffer.place == "input"]
        memory |= dict(zip(inputs, map(memory_of, arrays), strict=False))
        for step in plan.steps:
            assert isinstance(step, Launch)
            arguments = [memory[a.buffer] if isinstance(a, Argument) else a for a in step.arguments]
            run_kernel(kernels_of(plan, rank)[step.kernel], step.grid, arguments, step.shared)
        result = buffers[plan.results[0]]
        found = memory[result.name].bytes[: result.nbytes]
        return found.view(numpy_dtype(result.dtype)).reshape(result.shape)

    def all(self, module: Module, arrays: Sequence[Sequence[Array]]) -> list[Array]:
        """The results of all ranks, which leave the memory as it was."""
        plan = Planner(module).plan({"B": len(arrays[0][0])})
        for rank in range(self.count):  # g++ once, not in every thread
            prepare(kernels_of(plan, rank).values())
        with ThreadPoolExecutor(self.count) as pool:
            found = [*pool.map(self.one, range(self.count), repeat(plan), arrays)]
        assert all((each == 0xFFFFFFFF).all() for each in self.memory)
        return found


def kernels_of(plan: Plan, rank: int) -> dict[str, Kernel]:
    """The kernels of a rank."""
    return {
        name: Kernel(kernel.name, kernel.source, {**kernel.macros, "RANK": str(rank)})
        for name, kernel in plan.kernels.items()
    }


@pytest.mark.parametrize(
    ("ranks", "kind", "text"),
    [(2, "bf16", ADDED), (2, "f16", ALONE), (3, "f32", ADDED), (8, "bf16", ALONE)],
)
def test_sums(ranks: int, kind: str, text: str) -> None:
    """Calls of different sizes one after the other, with NaN and infinity among the numbers."""
    rng, group, dtype = fresh(), Ranks(ranks), numpy_dtype(kind)
    largest = LARGEST // dtype.itemsize // WIDTH
    many = [largest] if ranks == 2 else []
    for rows in (1, *(int(n) for n in rng.integers(1, 6000 // ranks**2, 4)), *many, 2):
        arrays = [
            [rng.standard_normal((rows, WIDTH)).astype(dtype) for _ in range(1 + text.count("%r"))]
            for _ in range(ranks)
        ]
        arrays = [[each[0], *arrays[0][1:]] for each in arrays]  # one residual
        arrays[-1][0][0, :2] = np.inf, np.nan
        arrays[0][0].view(f"u{dtype.itemsize}")[-1, -3:] = 2 ** (8 * dtype.itemsize) - 1  # NaN
        with np.errstate(invalid="ignore"):
            wanted = tree_sum([each[0].astype("f4") for each in arrays]).astype(dtype)
            if len(arrays[0]) > 1:
                wanted = (wanted.astype("f4") + arrays[0][1].astype("f4")).astype(dtype)
        found = group.all(module_of(ranks, kind, text), arrays)
        for each in found:
            np.testing.assert_array_equal(each.astype("f4"), wanted.astype("f4"))


@pytest.mark.parametrize(("ranks", "kind", "width"), [(2, "i32", 3), (3, "bf16", 2), (2, "u8", 4)])
def test_shards_of_all_ranks(ranks: int, kind: str, width: int) -> None:
    """Any bits, all ones too."""
    group, rng, dtype = Ranks(ranks), fresh(), numpy_dtype(kind)
    module = gathered(ranks, kind, width)
    for rows in (1, int(rng.integers(2, 999)), LARGEST // 2 // width // dtype.itemsize, 2):
        bits = rng.integers(0, 256, (ranks, rows, width * dtype.itemsize)).astype(np.uint8)
        bits[0, -1] = 0xFF
        found = group.all(module, [[each.view(dtype)] for each in bits])
        for each in found:
            assert each.tobytes() == bits.tobytes()


def test_a_rank_may_be_a_call_ahead() -> None:
    """What it sends lies beside what the other rank has not read."""
    group, rows = Ranks(2), 5
    plan = Planner(module_of(2, "f32", ALONE)).plan({"B": rows})
    mine, theirs = fresh().standard_normal((2, 2, rows, WIDTH)).astype(np.float32)
    places = [memory.reshape(2, MOST_BLOCKS, 2, -1) for memory in group.memory]
    size = rows * WIDTH
    for call in range(2):
        words = places[0][call, 0, 1]
        words[: size + 1] = 0  # with the end of the last pack
        words[:size] = theirs[call].reshape(-1).view("u4")
        found = group.one(0, plan, [mine[call]])
        np.testing.assert_array_equal(found, mine[call] + theirs[call])
    for call in range(2):
        sent = places[1][call, 0, 0][:size].view("f4")
        np.testing.assert_array_equal(sent.reshape(rows, WIDTH), mine[call])


def test_a_kernel_ends_once_the_run_has_failed() -> None:
    group, x = Ranks(2), np.ones((5, WIDTH), np.float32)
    plan = Planner(module_of(2, "f32", ALONE)).plan({"B": 5})
    prepare(kernels_of(plan, 0).values())
    with ThreadPoolExecutor(1) as pool:
        alone = pool.submit(group.one, 0, plan, [x])
        time.sleep(0.2)
        assert not alone.done()
        group.stop[0] = 1
        alone.result(30)


@pytest.mark.parametrize("rows", [1, 3])
def test_products_are_added_before_they_are_rounded(rows: int) -> None:
    module = parsed(
        2,
        "%x: bf16[B, 256]{varies tp}, %w: bf16[64, 256]{varies tp}, %r: bf16[B, 64]",
        "y: bf16[B, 64]",
        """%p = linear %x, %w : bf16[B, 64]{varies tp}
        %a = all_reduce %p {axis="tp", group_size=2} : bf16[B, 64]
        %y = add %r, %a : bf16[B, 64]""",
    )
    rng, kind = fresh(), numpy_dtype("bf16")
    sizes = ((rows, 256), (64, 256), (rows, 64))
    arrays = [[rng.standard_normal(size).astype(kind) for size in sizes] for _ in range(2)]
    arrays[1][2] = residual = arrays[0][2]
    total = sum(x.astype("f4") @ w.astype("f4").T for x, w, _ in arrays)
    wanted = (residual.astype("f4") + np.asarray(total).astype(kind).astype("f4")).astype(kind)
    for found in Ranks(2).all(module, arrays):
        # a sum in another order is rounded to another neighbour now and then
        assert np.mean(found != wanted) < 0.1
        np.testing.assert_allclose(found.astype("f4"), wanted.astype("f4"), 0.01, 0.2)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_products_of_one_row_have_the_bits_of_one_rank(ranks: int) -> None:
    """Whatever the number of ranks among which the columns of the weights are divided. All products
    occur twice, once with a minus, so that what is left of their sum is what additions round."""
    rng = fresh()
    n, k = int(rng.integers(2, 40)), 64 * int(rng.integers(1, 60))
    case = Case("float", "bf16", "residual", 1, n, k)
    inputs, half, width = case.inputs(rng), rng.permutation(k), k // ranks
    half, other = half[: k // 2], half[k // 2 :]
    inputs["x"][:, other] = -inputs["x"][:, half]
    inputs["wa"][:, other] = inputs["wa"][:, half]
    inputs["r"][:] = 0
    (wanted,) = HostProgram(case.module(), fused=True).run(inputs).values()
    assert 0 < np.abs(wanted.astype("f4")).max() < 1e-4
    result = f"bf16[B, {n}]"
    module = parsed(
        ranks,
        f"%x: bf16[B, {width}]{{varies tp}}, %w: bf16[{n}, {width}]{{varies tp}}, %r: {result}",
        f"y: {result}",
        f"""%p = linear %x, %w : {result}{{varies tp}}
        %a = all_reduce %p {{axis="tp", group_size={ranks}}} : {result}
        %y = add %r, %a : {result}""",
    )
    arrays = [
        [*(inputs[name][:, i * width : (i + 1) * width] for name in ("x", "wa")), inputs["r"]]
        for i in range(ranks)
    ]
    for found in Ranks(ranks).all(module, arrays):
        assert found.tobytes() == wanted.tobytes()


def test_nccl_computes_what_the_kernel_does_not() -> None:
    for kind, text, rows, why in (
        ("f32", ALONE, LARGEST // 4 // WIDTH + 1, "NCCL sends"),
        ("i32", ALONE, 2, "sums of floats"),
        ("f32", ALONE.replace("{", '{, op="max"'), 2, "no max"),
    ):
        planner = Planner(module_of(2, kind, text))
        (call,) = planner.plan({"B": rows}).steps
        assert isinstance(call, LibraryCall)
        ((_, found),) = planner.regime({"B": rows}).launches.declined
        assert why in found


def refuse(*_: Any, **named: Any) -> Any:
    raise Error("no peer access")


def test_ranks_that_share_no_memory(tmp_path: Path) -> None:
    def apart(gpu: FakeCuda) -> None:
        gpu.driver.share = refuse

    module = module_of(2, "f32", ADDED)
    with pytest.warns(UserWarning, match="NCCL adds what ranks along tp have.*no peer access"):
        world = World(module, tmp_path, apart, fused=True)
    x, r = (fresh().standard_normal((3, WIDTH)).astype(np.float32) for _ in range(2))
    for found in world.of_all(lambda program: program.run({"x": x, "r": r})["y"]):
        np.testing.assert_array_equal(found, r + (x + x))
    world.close()
    assert [gpu.driver.memory.used for gpu in world.gpus.values()] == [0, 0]


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120"])
def test_kernels_compile_for_every_gpu(architecture: str) -> None:
    rng = fresh()
    ranks, kind = int(rng.integers(2, 9)), str(rng.choice(["bf16", "f16", "f32"]))
    for module in (module_of(ranks, kind, ADDED), gathered(ranks, kind, 4)):
        (kernel,) = Planner(module).plan({"B": 5}).kernels.values()
        assert compile_kernel(kernel, architecture)


class One(NamedTuple):
    """A rank with the memory of its group."""

    driver: FakeDriver
    group: Any
    peers: Peers | str


def opened(prepare: Any = lambda driver: None) -> list[One]:
    """Two ranks that open their memory."""

    def one(host: Communicator) -> One:
        driver = FakeDriver(host.rank)
        group: Any = SimpleNamespace(rank=host.rank, stops=[], failure=None)
        prepare(driver)
        try:
            found = Peers(host, (0, 1), group, driver, driver.stream())
        except PeerError:
            raise
        except Error as error:
            assert not driver.memory.used
            return One(driver, group, error.message)
        return One(driver, group, found)

    return ThreadWorld(2, timeout=SOON).run(one)


def test_memory_of_a_group() -> None:
    found, blocks = opened(), list[list[Array]]()
    for rank, each in enumerate(found):
        assert isinstance(each.peers, Peers)
        words = each.driver.memory.array(each.peers.table, (PEERS // 8,), "i64")
        (stop,) = each.group.stops
        assert words[0] == stop.ctypes.data and not stop.any() and words[1] == rank
        assert not words[4:].any()
        size = buffer_size(2)
        blocks.append([each.driver.memory.view(int(address), size) for address in words[2:4]])
    assert all((block == 0xFF).all() for each in blocks for block in each)
    for rank in range(2):
        blocks[rank][1 - rank][rank] = 7
        assert blocks[1 - rank][1 - rank][rank] == 7


def test_a_rank_of_a_failed_group_closes_alone() -> None:
    one = opened()[0]
    assert isinstance(one.peers, Peers)
    one.group.failure = "rank 1 was killed"
    one.peers.close()
    assert one.driver.memory.used == 0


def test_why_ranks_share_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def elsewhere(driver: FakeDriver) -> None:
        if driver.number:
            driver.open_shared = lambda handle: driver.allocate(buffer_size(2))

    def apart(driver: FakeDriver) -> None:
        if not driver.number:
            driver.open_shared = refuse

    def why(prepare: Any = lambda driver: None) -> str:
        first, second = opened(prepare)
        assert first.peers == second.peers
        return str(first.peers)

    assert "numbers of rank 1 do not arrive" in why(elsewhere)
    assert "rank 0 cannot open that of rank 1: no peer access" in why(apart)
    hosts = iter("ab")
    monkeypatch.setattr(peers, "own_process", lambda: RankProcess(next(hosts), 1, "k"))
    assert "several hosts" in why()
