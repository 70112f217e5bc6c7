"""Ranks that write to each other's memory: kernels on the host, a rank per thread."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import reduce
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
from irc.backends.cuda.plan import Kernel, Launch, LibraryCall, Plan
from irc.backends.cuda.plan.build import Planner
from irc.backends.cuda.plan.core import PEERS
from irc.backends.ranks.communicator import Communicator, PeerError
from irc.backends.ranks.threads import ThreadWorld
from irc.backends.ranks.watcher import RankProcess
from irc.errors import Error
from irc.ir.core import Module
from irc.ir.dtypes import numpy_dtype
from irc.text import parse_module
from tests.cuda.emulate import Memory, memory_of, prepare, run_kernel
from tests.cuda.fake_cuda import FakeCuda, World
from tests.fresh import fresh
from tests.tensorrt.fake_gpu import SOON, FakeDriver

Array = np.ndarray[Any, Any]
WIDTH = 7


def module_of(ranks: int, kind: str, text: str, results: str = "y") -> Module:
    type = f"{kind}[B, {WIDTH}]"
    own = f"{type}{{varies tp}}"
    given = ", ".join(f"{name}: {type}" for name in results.split())
    body = text.replace(OVER, f'{{axis="tp", group_size={ranks}')
    lines = "\n".join(f"{line.strip()} : {type}" for line in body.splitlines())
    return parse_module(f"""module @m local mesh(tp={ranks}) dims(B=1:2:999999) {{
      func @forward(%x: {own}, %r: {type}) -> ({given}) {{
        {lines}
        return {", ".join(f"%{name}" for name in results.split())} }} }}""")


OVER = "{"  # what module_of completes
ALONE = "%y = all_reduce %x {}"
ADDED = "%a = all_reduce %x {}\n%y = add %r, %a"


class Ranks:
    """The memory of a group of ranks, each with the kernels of its own."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.memory = [
            np.full(buffer_size(count) // 4, 0xFFFFFFFF, np.uint32) for _ in range(count)
        ]
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
        """The result of one rank, whose kernel has variables of its own."""
        (launch,) = plan.steps
        assert isinstance(launch, Launch)
        result = plan.buffers[plan.results[0]]
        memory = [memory_of(each) for each in arrays] + [Memory(result.nbytes), self.tables[rank]]
        numbers = [each for each in launch.arguments if isinstance(each, int)]
        run_kernel(kernel_of(plan, rank), launch.grid, [*memory, *numbers])
        return memory[-2].bytes.view(numpy_dtype(result.dtype)).reshape(result.shape)

    def all(self, module: Module, arrays: Sequence[Sequence[Array]]) -> list[Array]:
        """The results of all ranks."""
        return self.together(Planner(module).plan({"B": len(arrays[0][0])}), arrays)

    def together(self, plan: Plan, arrays: Sequence[Sequence[Array]]) -> list[Array]:
        """The same for a plan of one launch."""
        for rank in range(self.count):  # g++ once, not in every thread
            prepare([kernel_of(plan, rank)])
        with ThreadPoolExecutor(self.count) as pool:
            return list(
                pool.map(lambda rank: self.one(rank, plan, arrays[rank]), range(self.count))
            )


def kernel_of(plan: Plan, rank: int) -> Kernel:
    """The kernel of a plan of one launch."""
    (kernel,) = plan.kernels.values()
    return Kernel(kernel.name, kernel.source, {**kernel.macros, "RANK": str(rank)})


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
        for each in arrays:
            each[1:] = arrays[0][1:]  # one residual
        arrays[-1][0][0, :2] = np.inf, np.nan
        arrays[0][0].view(f"u{dtype.itemsize}")[-1, -3:] = 2 ** (8 * dtype.itemsize) - 1  # NaN
        with np.errstate(invalid="ignore"):
            wanted = reduce(np.add, (each[0].astype("f4") for each in arrays)).astype(dtype)
            if len(arrays[0]) > 1:
                wanted = (wanted.astype("f4") + arrays[0][1].astype("f4")).astype(dtype)
        found = group.all(module_of(ranks, kind, text), arrays)
        for each in found:
            np.testing.assert_array_equal(each.astype("f4"), wanted.astype("f4"))
    for each in group.memory:
        assert (each == 0xFFFFFFFF).all()


@pytest.mark.parametrize(("ranks", "kind", "width"), [(2, "i32", 3), (3, "bf16", 2), (2, "u8", 4)])
def test_shards_of_all_ranks(ranks: int, kind: str, width: int) -> None:
    """Any bits, all ones too."""
    group, rng, dtype = Ranks(ranks), fresh(), numpy_dtype(kind)
    module = parse_module(f"""module @m local mesh(tp={ranks}) dims(B=1:2:999999) {{
      func @forward(%x: {kind}[B, {width}]{{varies tp}}) -> (y: {kind}[{ranks}*B, {width}]) {{
        %y = all_gather %x {{axis="tp", dim=0, group_size={ranks}}} : {kind}[{ranks}*B, {width}]
        return %y }} }}""")
    for rows in (1, int(rng.integers(2, 999)), LARGEST // 2 // width // dtype.itemsize, 2):
        bits = rng.integers(0, 256, (ranks, rows, width * dtype.itemsize)).astype(np.uint8)
        bits[0, -1] = 0xFF
        found = group.all(module, [[each.view(dtype)] for each in bits])
        for each in found:
            assert each.tobytes() == bits.tobytes()
    for each in group.memory:
        assert (each == 0xFFFFFFFF).all()


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
    prepare([kernel_of(plan, 0)])
    with ThreadPoolExecutor(1) as pool:
        alone = pool.submit(group.one, 0, plan, [x])
        time.sleep(0.2)
        assert not alone.done()
        group.stop[0] = 1
        alone.result(30)


@pytest.mark.parametrize("rows", [1, 3])
def test_products_are_added_before_they_are_rounded(rows: int) -> None:
    module = parse_module("""module @m local mesh(tp=2) dims(B=1:2:99) {
      func @forward(%x: bf16[B, 256]{varies tp}, %w: bf16[64, 256]{varies tp}, %r: bf16[B, 64])
          -> (y: bf16[B, 64]) {
        %p = linear %x, %w : bf16[B, 64]{varies tp}
        %a = all_reduce %p {axis="tp", group_size=2} : bf16[B, 64]
        %y = add %r, %a : bf16[B, 64]
        return %y } }""")
    plan = Planner(module).plan({"B": rows})
    first, second = plan.steps
    assert isinstance(first, Launch) and isinstance(second, Launch)
    group, rng, dtype = Ranks(2), fresh(), numpy_dtype("bf16")
    sums: list[Array] = []
    for _ in range(2):
        x, w = (rng.standard_normal((n, 256)).astype(dtype) for n in (rows, 64))
        y = Memory(4 * rows * 64)
        numbers = [each for each in first.arguments if isinstance(each, int)]
        kernel = plan.kernels[first.kernel]
        run_kernel(kernel, first.grid, [memory_of(x), memory_of(w), y, *numbers], first.shared)
        sums.append(y.bytes.view(np.float32).reshape(rows, 64))
        np.testing.assert_allclose(sums[-1], x.astype("f8") @ w.astype("f8").T, 1e-4, 1e-4)
    residual = rng.standard_normal((rows, 64)).astype(dtype)
    added = replace(plan, steps=(second,), kernels={second.kernel: plan.kernels[second.kernel]})
    total = (sums[0] + sums[1]).astype(dtype).astype("f4")
    wanted = (residual.astype("f4") + total).astype(dtype)
    for found in group.together(added, [[each, residual] for each in sums]):
        np.testing.assert_array_equal(found, wanted)


def test_nccl_computes_what_the_kernel_does_not() -> None:
    cases = [
        ("f32", ALONE, LARGEST // 4 // WIDTH + 1, "NCCL sends"),
        ("i32", ALONE, 2, "sums of floats"),
        ("f32", ALONE.replace("{", '{, op="max"'), 2, "no max"),
    ]
    for kind, text, rows, why in cases:
        planner = Planner(module_of(2, kind, text))
        (call,) = planner.plan({"B": rows}).steps
        assert isinstance(call, LibraryCall)
        ((_, found),) = planner.launches({"B": rows}).declined
        assert why in found


def test_a_sum_that_is_used_twice_is_kept(tmp_path: Path) -> None:
    planner = Planner(module_of(2, "f32", "%y = all_reduce %x {}\n%z = add %y, %r", "y z"))
    steps = planner.plan({"B": 3}).steps
    assert [type(step) for step in steps] == [Launch, Launch]
    assert [step.operations for step in steps] == [("%y",), ("%z",)]


def test_ranks_that_share_no_memory(tmp_path: Path) -> None:
    module = module_of(2, "f32", ADDED)

    def apart(gpu: FakeCuda) -> None:
        gpu.driver.share = refuse

    def refuse(address: int) -> bytes:
        raise Error("no peer access")

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
    one, every = f"{kind}[B, 4]", f"{kind}[{ranks}*B, 4]"
    module = parse_module(f"""module @m local mesh(tp={ranks}) dims(B=1:2:99) {{
      func @forward(%x: {one}{{varies tp}}, %r: {one}) -> (y: {one}, z: {every}) {{
        %a = all_reduce %x {{axis="tp", group_size={ranks}}} : {one}
        %y = add %a, %r : {one}
        %z = all_gather %y {{axis="tp", dim=0, group_size={ranks}}} : {every}
        return %y, %z }} }}""")
    kernels = Planner(module).plan({"B": 5}).kernels.values()
    assert len(kernels) == 2
    for kernel in kernels:
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
        group: Any = SimpleNamespace(rank=host.rank, stops=[])
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


def test_why_ranks_share_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def elsewhere(driver: FakeDriver) -> None:
        if driver.number:
            driver.open_shared = lambda handle: driver.allocate(buffer_size(2))

    def refuse(driver: FakeDriver) -> None:
        def open_shared(handle: bytes) -> int:
            raise Error("no peer access")

        if not driver.number:
            driver.open_shared = open_shared

    def why(prepare: Any = lambda driver: None) -> str:
        first, second = opened(prepare)
        assert first.peers == second.peers
        return str(first.peers)

    assert "numbers of rank 1 do not arrive" in why(elsewhere)
    assert "rank 0 cannot open that of rank 1: no peer access" in why(refuse)
    hosts = iter("ab")
    monkeypatch.setattr(peers, "own_process", lambda: RankProcess(next(hosts), 1, "k"))
    assert "several hosts" in why()
