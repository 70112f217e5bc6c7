"""What the plugin IrcCollective is checked on: every collective and dtype against numpy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from benchmarks.plays_tensorrt import Player
from irc.backends.cuda.group import Group
from irc.backends.cuda.watch import wait
from irc.backends.tensorrt.plugins import Instance, TensorDesc, evaluate, find
from irc.backends.tensorrt.plugins.collective import FUSED, NAME, OPERATIONS, REDUCING, ROOTED
from irc.dtypes import dtype, numpy_dtype

DTYPES = ("bf16", "f16", "f32", "i32", "i64")
MORE_DTYPES = ("i8", "bool")
ROWS = (3, 64)  # per rank, with columns beside them: odd, and more than one block of NCCL
COLUMNS = (7, 96)
WIDTHS = (1, 7, 100, 4096, 5120, 8195)  # of the fused operation
# The greatest error of the fused operation, relative to the greatest number: an ulp or two.
TOLERANCE = {"f32": 2e-6, "f16": 2e-3, "bf16": 1.6e-2}


class Machine(Protocol):
    """A rank's GPU: its driver, and streams with graphs."""

    driver: Any

    def stream(self) -> int:
        """A new stream."""
        ...

    def graph(self, stream: int, work: Callable[[], None]) -> Any:
        """What `work` puts on the stream, as a graph."""
        ...

    def launch(self, graph: Any, stream: int) -> None:
        """Put a graph on a stream."""
        ...

    def drop(self, graph: Any) -> None:
        """Give a graph up."""
        ...


@dataclass(frozen=True)
class Case:
    """One plugin on one shape; `captured`: in a CUDA graph, which is replayed on other data."""

    operation: str
    dtype: str
    rows: int
    columns: int
    reduce_op: str
    root: int
    captured: bool
    weight_dtype: str = ""

    def values(self, label: str, ways: int) -> dict[str, Any]:
        """The plugin's fields."""
        fields = {
            "operation": self.operation,
            "group": label,
            "ways": ways,
            "reduce_op": self.reduce_op,
            "root": self.root,
        }
        return {**fields, "eps": 1e-5} if self.operation == FUSED else fields

    def __str__(self) -> str:
        more = f" {self.reduce_op}" if self.operation in REDUCING else ""
        more += f" root {self.root}" if self.operation in ROOTED else ""
        how = "graph" if self.captured else "stream"
        return f"{self.operation}{more} {self.dtype} [{self.rows}, {self.columns}] {how}"


def cases(ways: int, dtypes: Sequence[str] = DTYPES) -> Iterator[Case]:
    """Every collective on every dtype; sums, and of all_reduce the other reductions too."""
    for captured in (False, True):
        for operation in OPERATIONS[:-1]:
            reduces = ("sum", "max", "min", "prod") if operation == "all_reduce" else ("sum",)
            reduces = reduces if operation in REDUCING else ("none",)
            root = (ways - 1) if operation in ROOTED else -1
            for kind in dtypes:
                for reduce_op in reduces:
                    for rows, columns in zip(ROWS, COLUMNS, strict=True):
                        whole = operation in ("reduce_scatter", "scatter", "all_to_all")
                        given = rows * ways if whole else rows
                        yield Case(operation, kind, given, columns, reduce_op, root, captured)


def fused_cases() -> Iterator[Case]:
    """all_reduce_rms_norm on its dtypes and on odd widths."""
    for captured in (False, True):
        for kind in ("bf16", "f16", "f32"):
            for columns in WIDTHS:
                yield Case(FUSED, kind, 5, columns, "sum", -1, captured, kind)
        yield Case(FUSED, "bf16", 3, 768, "sum", -1, captured, "f32")


def operands(case: Case, ways: int, seed: int) -> list[list[np.ndarray]]:
    """Every rank's inputs: small integers, whose sums and products are exact in every dtype."""
    generator = np.random.default_rng(seed)
    kind = numpy_dtype(case.dtype)
    low, high = (1, 3) if case.reduce_op == "prod" else (-8, 8)
    if case.dtype == "bool":
        low, high = 0, 2
    shape = (case.rows, case.columns)
    given = [[generator.integers(low, high, shape).astype(kind)] for _ in range(ways)]
    if case.operation == FUSED:
        residual = generator.integers(-16, 16, shape).astype(kind)
        gain = generator.uniform(0.5, 1.5, case.columns).astype(numpy_dtype(case.weight_dtype))
        given = [[x, residual, gain] for (x,) in given]
    return given


class Bench:
    """One case on one rank's GPU: device memory, the plugin in its context, and a stream."""

    def __init__(self, machine: Machine, group: Group, label: str, case: Case, stream: int) -> None:
        self.machine, self.group, self.case, self.stream = machine, group, case, stream
        self.values = case.values(label, group.ranks)
        texts = Instance(find(NAME), self.values).texts()
        self.player = Player(NAME, texts)
        shape = (case.rows, case.columns)
        given = [TensorDesc(shape, case.dtype)]
        if case.operation == FUSED:
            given += [given[0], TensorDesc((case.columns,), case.weight_dtype)]
        self.descs = self.player.shapes(given)
        self.inputs = [machine.driver.allocate(size_of(each)) for each in given]
        self.outputs = [machine.driver.allocate(size_of(each)) for each in self.descs]

    def enqueue(self) -> None:
        """As an engine does it."""
        self.player.enqueue(self.inputs, self.outputs, self.stream)

    def load(self, seed: int) -> None:
        """Write new inputs, and bytes into the outputs that no result has."""
        driver = self.machine.driver
        own = operands(self.case, self.group.ranks, seed)[self.group.rank]
        for pointer, array in zip(self.inputs, own, strict=True):
            driver.write(pointer, array.tobytes(), self.stream)
        for pointer, desc in zip(self.outputs, self.descs, strict=True):
            driver.write(pointer, b"\x5b" * size_of(desc), self.stream)

    def problem(self, seed: int) -> str:
        """What differs from numpy, once the stream is done; empty where nothing does."""
        wait(self.stream, [self.group], str(self.case))
        given = operands(self.case, self.group.ranks, seed)
        wanted = evaluate(find(NAME), self.values, given)[self.group.rank]
        for name, pointer, desc, want in zip("yz", self.outputs, self.descs, wanted, strict=False):
            data = self.machine.driver.read(pointer, size_of(desc), self.stream)
            found = np.frombuffer(data, numpy_dtype(desc.dtype)).reshape(desc.shape)
            if difference := self._difference(found, want):
                return f"{self.case}: output {name} {difference}"
        return ""

    def _difference(self, found: np.ndarray, want: np.ndarray) -> str:
        if self.case.dtype == "bool":  # a byte of 2 is true too, and wrong
            found, want = found.view(np.uint8), want.view(np.uint8)
        if self.case.operation != FUSED:
            if np.array_equal(found, want):
                return ""
            wrong = np.argwhere(found != want)
            at = tuple(int(i) for i in wrong[0])
            return f"differs in {len(wrong)} of {found.size}: {found[at]} at {at}, not {want[at]}"
        wide, right = found.astype("f8"), want.astype("f8")
        error = np.abs(wide - right).max() / max(1e-30, np.abs(right).max())
        return "" if error <= TOLERANCE[self.case.dtype] else f"differs by {error:.2e}"

    def close(self) -> None:
        """Give the memory back."""
        for pointer in (*self.inputs, *self.outputs):
            self.machine.driver.free(pointer)


def size_of(desc: TensorDesc) -> int:
    """Bytes of a tensor."""
    return int(np.prod(desc.shape)) * dtype(desc.dtype).numpy.itemsize


def run_case(machine: Machine, group: Group, label: str, case: Case, stream: int, seed: int) -> str:
    """What is wrong; empty where nothing is. Raises what a lost rank raises."""
    bench = Bench(machine, group, label, case, stream)
    bench.load(seed)
    bench.enqueue()
    problem = bench.problem(seed)
    if case.captured and not problem:
        graph = machine.graph(stream, bench.enqueue)
        for again in (seed + 1, seed + 2):
            bench.load(again)
            machine.launch(graph, stream)
            problem = problem or bench.problem(again)
        machine.drop(graph)
    bench.close()
    return problem


def run_softcap(machine: Machine, kind: str, size: int, stream: int, seed: int) -> str:
    """What is wrong with the plugin of examples/custom_plugin.py, in a graph; empty if nothing."""
    softcap = find("SoftCap", namespace="example")
    values = {"cap": 30.0}
    player = Player(softcap.name, Instance(softcap, values).texts(), softcap.namespace)
    (desc,) = player.shapes([TensorDesc((size,), kind)])
    driver = machine.driver
    source, target = driver.allocate(size_of(desc)), driver.allocate(size_of(desc))
    x = (np.random.default_rng(seed).standard_normal(size) * 50).astype(numpy_dtype(kind))
    player.enqueue([source], [target], stream)
    graph = machine.graph(stream, lambda: player.enqueue([source], [target], stream))
    driver.write(source, x.tobytes(), stream)
    machine.launch(graph, stream)
    y = np.frombuffer(driver.read(target, size_of(desc), stream), numpy_dtype(kind))
    ((want,),) = evaluate(softcap, values, [(x,)])
    machine.drop(graph)
    driver.free(source)
    driver.free(target)
    error = float(np.abs(y.astype("f8") - want.astype("f8")).max()) / 30
    return "" if error <= TOLERANCE[kind] else f"SoftCap {kind} [{size}] differs by {error:.2e}"
