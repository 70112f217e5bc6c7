"""Plans in memory: steps, graphs, addresses, errors. Kernels run on the host."""

from __future__ import annotations

from collections.abc import Callable
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
    places: dict[str, tuple[str, int, Any]] = {
        "%x": ("f32", n, "input"),
        "%s": ("f32", n, "state"),
        "%t": ("f32", n, "arena"),
        "%z": ("i32", 1, "zeros"),
        "@w": ("f32", 1, "weight"),
        "result.y": ("f32", n, "output"),
    }
    buffers = {
        name: Buffer(name, dtype, (size,), place) for name, (dtype, size, place) in places.items()
    }

    def pointers(*names: str) -> tuple[Argument, ...]:
        return tuple(Argument(name) for name in names)

    one = (1, 1, 1)
    steps = (
        Launch("scale", one, 1, (*pointers("%x", "@w", "%t"), n), programmatic=True),
        Launch(
            "add",
            one,
            1,
            (*pointers("%t", "%s", "result.y", "%z"), n),
            programmatic=True,
            operations=("%y", "%s.1"),
            source="model.py:7",
        ),
        *more,
    )
    kernels = {"scale": SCALE, "add": ADD}
    return Plan("f", {"N": n}, buffers, kernels, steps, ("result.y", "%x", "%s"))


class Machine:
    """A GPU with the weight w = 3 and a state."""

    def __init__(self, size: int, **settings: Any) -> None:
        self.driver = FakeDriver()
        self.stream, self.kernels = self.driver.stream(), EmulatedKernels(self.driver)
        self.memory = Memory(self.driver, self.stream)
        self.weights = {"@w": self.placed(np.full(1, 3, np.float32)).address}
        self.state = self.placed(np.zeros(size, np.float32))
        self.settings = settings
        self.steps = self.bound(True)

    def bound(self, early: bool) -> Steps:
        def none(*arguments: Any) -> Any:
            raise AssertionError

        return Steps(self.driver, self.stream, self.kernels, none, none, early)

    def placed(self, array: Array) -> DeviceArray:
        address = self.driver.allocate(array.nbytes)
        self.stream.upload(address, array)
        self.stream.wait()
        return DeviceArray(address, array.shape, "f32")

    def execution(self, plan: Plan) -> PlanExecution:
        self.kernels.load(plan.kernels.values())
        return PlanExecution(
            plan,
            ("y", "x", "s"),
            self.driver,
            self.stream,
            self.memory,
            self.steps,
            self.weights,
            **self.settings,
        )

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


def test_repeated_runs_become_one_graph() -> None:
    machine = Machine(5)
    execution = machine.execution(plan_of(5))
    total = np.zeros(5, np.float32)
    for _ in range(4):
        x = numbers(5)
        total += 3 * x
        y, same = machine.run(execution, x)
        assert np.array_equal(y, total) and np.array_equal(same, x)
    assert (machine.count("capture"), machine.count("launch")) == (1, 3)
    assert machine.count("kernel") == 4  # enqueued once, captured once


def test_without_graphs() -> None:
    machine = Machine(5, graphs=False)
    execution = machine.execution(plan_of(5))
    for _ in range(3):
        machine.run(execution, numbers(5))
    assert (machine.count("capture"), machine.count("kernel")) == (0, 6)


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


def early(machine: Machine) -> list[bool]:
    machine.run(machine.execution(plan_of(4, copying(), *plan_of(4).steps)), numbers(4))
    return [each for _, each in machine.kernels.launches]


def copying() -> LibraryCall:
    pointers = Argument("@w"), Argument("%t", written=True)
    return LibraryCall("memory", "copy", pointers, {"nbytes": 4})


def test_kernels_start_early_behind_kernels_only() -> None:
    assert early(Machine(4)) == [False, True, False, True]


def test_no_kernel_starts_early_without_programmatic_launches() -> None:
    machine = Machine(4)
    machine.steps = machine.bound(False)
    assert not any(early(machine))


def test_copies_within_a_plan() -> None:
    copy = LibraryCall("memory", "copy", (Argument("@w"), Argument("result.y")), {"nbytes": 4})
    machine = Machine(4)
    y, _ = machine.run(machine.execution(plan_of(4, copy)), numbers(4))
    assert y[0] == 3


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
    machine = Machine(4)
    plan = plan_of(4)
    odd = Buffer("%q", "f32", (4,), "input")
    execution = machine.execution(
        Plan("f", {}, {**plan.buffers, "%q": odd}, plan.kernels, plan.steps, plan.results)
    )
    with pytest.raises(Error, match=r"@f has the buffer %q .* not an argument; expected x, s"):
        machine.run(execution, numbers(4))
