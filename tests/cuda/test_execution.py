"""Plans in memory: steps, graphs, addresses, errors. Kernels run on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from irc.backends.cuda.driver import Array
from irc.backends.cuda.execute.execution import GRAPHS, PlanExecution
from irc.backends.cuda.execute.memory import DeviceArray, Memory
from irc.backends.cuda.execute.steps import Steps
from irc.backends.cuda.plan import Argument, Buffer, Kernel, Launch, LibraryCall, Plan, Step
from irc.errors import Error
from tests.cuda.fake_cuda import EmulatedKernels
from tests.fresh import fresh
from tests.tensorrt.fake_gpu import FakeDriver

HEAD = 'extern "C" __global__ void'
SCALE = Kernel(
    "scale",
    f"{HEAD} scale(const f32* x, const f32* w, f32* t, int n) "
    "{ for (int i = 0; i < n; ++i) store<f32>(t, i, load<f32>(x, i) * load<f32>(w, 0)); }",
)
# The state is the sum of all t so far; `z` is zero, or the result is wrong, and stays zero.
ADD = Kernel(
    "add",
    f"{HEAD} add(const f32* t, f32* s, f32* y, i32* z, int n) {{ "
    "for (int i = 0; i < n; ++i) { "
    "store<f32>(s, i, load<f32>(s, i) + load<f32>(t, i)); "
    "store<f32>(y, i, load<f32>(s, i) + load<i32>(z, 0)); } }",
)


def plan_of(n: int, *more: Step) -> Plan:
    """t = x * w; s += t; y = s, then `more`; the second result is the argument x."""
    one = (1, 1, 1)
    buffers = [
        Buffer("%x", "f32", (n,), "input"),
        Buffer("%s", "f32", (n,), "state"),
        Buffer("%t", "f32", (n,), "arena"),
        Buffer("%z", "i32", (1,), "zeros"),
        Buffer("@w", "f32", (1,), "weight"),
        Buffer("result.y", "f32", (n,), "output"),
    ]
    x, s, t, z, w, y = (Argument(buffer.name) for buffer in buffers)
    facts: Any = {"operations": ("%y", "%s.1"), "source": "model.py:7"}
    steps = (
        Launch("scale", one, 1, (x, w, t, n), programmatic=True),
        Launch("add", one, 1, (t, s, y, z, n), programmatic=True, **facts),
        *more,
    )
    by_name = {buffer.name: buffer for buffer in buffers}
    kernels = {"scale": SCALE, "add": ADD}
    return Plan("f", {"N": n}, by_name, kernels, steps, ("result.y", "%x", "%s"))


class Machine:
    """A GPU with the weight w = 3 and a state."""

    def __init__(self, size: int, early: bool = True, **settings: Any) -> None:
        def none(*arguments: Any) -> Any:
            raise AssertionError

        self.driver = FakeDriver()
        self.stream, self.kernels = self.driver.stream(), EmulatedKernels(self.driver)
        self.memory = Memory(self.driver, self.stream)
        self.weights = {"@w": self.placed(np.full(1, 3, np.float32)).address}
        self.state = self.placed(np.zeros(size, np.float32))
        self.settings = settings
        self.steps = Steps(self.driver, self.stream, self.kernels, none, none, early)

    def placed(self, array: Array) -> DeviceArray:
        address = self.driver.allocate(array.nbytes)
        self.stream.upload(address, array)
        self.stream.wait()
        return DeviceArray(address, array.shape, "f32")

    def execution(self, plan: Plan) -> PlanExecution:
        self.kernels.load(plan.kernels.values())
        parts = self.driver, self.stream, self.memory, self.steps, self.weights
        return PlanExecution(plan, ("y", "x", "s"), *parts, **self.settings)

    def run(self, execution: PlanExecution, x: Array) -> tuple[Array, Array]:
        """The results y and x."""
        values = {"x": DeviceArray(self.memory.upload("x", x), x.shape, "f32"), "s": self.state}
        results = {"s": self.state}
        for name in ("y", "x"):
            address = self.memory.device(f"result {name}", x.nbytes)
            results[name] = DeviceArray(address, x.shape, "f32")
        execution.prepared(values, results)()
        y, same = np.empty_like(x), np.empty_like(x)
        self.stream.download(y, results["y"].address)
        self.stream.download(same, results["x"].address)
        self.stream.wait()
        return y, same

    def count(self, call: str) -> int:
        return sum(each[0] == call for each in self.driver.calls)


def numbers(n: int) -> Array:
    return fresh().integers(-9, 9, n).astype(np.float32)


@pytest.mark.parametrize("graphs", [True, False])
def test_repeated_runs_become_one_graph(graphs: bool) -> None:
    machine = Machine(5, graphs=graphs)
    execution = machine.execution(plan_of(5))
    total = np.zeros(5, np.float32)
    for _ in range(4):
        x = numbers(5)
        total += 3 * x
        y, same = machine.run(execution, x)
        assert np.array_equal(y, total) and np.array_equal(same, x)
    counts = [machine.count(call) for call in ("capture", "launch", "kernel")]
    assert counts == ([1, 3, 4] if graphs else [0, 0, 8])  # enqueued once, captured once


def test_memory_that_grows_gives_new_addresses() -> None:
    machine = Machine(900)
    small, large = machine.execution(plan_of(3)), machine.execution(plan_of(900))
    total = np.zeros(900, np.float32)
    for n in (3, 3, 900, 3, 3, 900, 3):
        x = numbers(n)
        total[:n] += 3 * x
        y, _ = machine.run(small if n == 3 else large, x)
        assert np.array_equal(y, total[:n])


def test_only_some_graphs_are_kept() -> None:
    machine = Machine(4)
    execution = machine.execution(plan_of(4))
    states = [machine.placed(np.zeros(4, np.float32)) for _ in range(GRAPHS + 1)]
    for machine.state in [each for each in states for _ in range(2)]:
        machine.run(execution, numbers(4))
    assert (machine.count("capture"), machine.count("drop")) == (GRAPHS + 1, 1)
    used = machine.driver.memory.used
    execution.free()
    assert machine.count("drop") == GRAPHS + 1
    assert machine.driver.memory.used == used - 256  # the memory that has to be zero


@pytest.mark.parametrize("early", [True, False])
def test_kernels_start_early_behind_kernels_only(early: bool) -> None:
    """Not behind copies, nor without programmatic launches."""
    machine = Machine(4, early)
    pointers = Argument("@w"), Argument("result.y", written=True)
    copy = LibraryCall("memory", "copy", pointers, {"nbytes": 4})
    plan = plan_of(4, copy, *plan_of(4, copy).steps)
    y, _ = machine.run(machine.execution(plan), numbers(4))
    assert y[0] == 3
    assert [started for _, started in machine.kernels.launches] == [False, early] * 2


@pytest.mark.parametrize("stepwise", [False, True])
def test_an_error_names_the_kernel(stepwise: bool) -> None:
    machine = Machine(4, stepwise=stepwise)
    execution = machine.execution(plan_of(4))
    bind: Callable[..., Any] = machine.kernels.bind

    def broken(launch: Launch, *rest: Any) -> Any:
        enqueue = bind(launch, *rest)

        def run(stream: int) -> None:
            enqueue(stream)
            if launch.kernel == "add":
                machine.driver.broken = "an illegal memory access was encountered"

        return run

    machine.kernels.bind = broken  # type: ignore[method-assign]
    known = r"model.py:7: the kernel add \(%y, %s.1\) failed: an illegal memory access"
    with pytest.raises(Error, match=known if stepwise else "^an illegal memory access"):
        machine.run(execution, numbers(4))


def test_a_buffer_that_is_no_argument() -> None:
    machine, plan = Machine(4), plan_of(4)
    buffers = {**plan.buffers, "%q": Buffer("%q", "f32", (4,), "input")}
    with pytest.raises(Error, match=r"@f has the buffer %q .* not an argument; expected x, s"):
        machine.run(machine.execution(replace(plan, buffers=buffers)), numbers(4))
