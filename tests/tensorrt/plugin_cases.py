"""What the plugin IrcCollective is checked on: every collective and dtype against numpy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from irc.backends.cuda.driver import Driver, Stream
from irc.backends.cuda.group import Group
from irc.backends.ranks.combine import perform, reduce_parts
from irc.backends.ranks.communicator import CollectiveCall
from irc.backends.tensorrt.plugins import Instance, TensorDesc, communicators, find
from irc.backends.tensorrt.plugins.collective import FUSED, NAME, OPERATIONS, REDUCING, ROOTED
from irc.ir.dtypes import dtype, numpy_dtype, widened
from tests.tensorrt.plugin_host import PluginHost

DTYPES = ("bf16", "f16", "f32", "i32", "i64")
MORE_DTYPES = ("i8", "bool")
ROWS = (3, 64)  # per rank, with columns beside them: odd, and more than one block of NCCL
COLUMNS = (7, 96)
WIDTHS = (1, 7, 100, 4096, 5120, 8195)  # of the fused operation
# The greatest error of the fused operation, relative to the greatest number: an ulp or two.
TOLERANCE = {"f32": 2e-6, "f16": 2e-3, "bf16": 1.6e-2}


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

    def values(self, label: str, group_size: int) -> dict[str, Any]:
        """The plugin's fields."""
        fields = {
            "operation": self.operation,
            "group": label,
            "group_size": group_size,
            "reduce_op": self.reduce_op,
            "root": self.root,
        }
        return {**fields, "eps": 1e-5} if self.operation == FUSED else fields

    def __str__(self) -> str:
        more = f" {self.reduce_op}" if self.operation in REDUCING else ""
        more += f" root {self.root}" if self.operation in ROOTED else ""
        how = "graph" if self.captured else "stream"
        return f"{self.operation}{more} {self.dtype} [{self.rows}, {self.columns}] {how}"


def cases(group_size: int, dtypes: Sequence[str] = DTYPES) -> Iterator[Case]:
    """Every collective on every dtype; sums, and of all_reduce the other reductions too."""
    for captured in (False, True):
        for operation in OPERATIONS[:-1]:
            reduces = ("sum", "max", "min", "prod") if operation == "all_reduce" else ("sum",)
            reduces = reduces if operation in REDUCING else ("none",)
            root = (group_size - 1) if operation in ROOTED else -1
            for kind in dtypes:
                for reduce_op in reduces:
                    for rows, columns in zip(ROWS, COLUMNS, strict=True):
                        divided = operation in ("reduce_scatter", "scatter", "all_to_all")
                        total = rows * group_size if divided else rows
                        yield Case(operation, kind, total, columns, reduce_op, root, captured)


def fused_cases() -> Iterator[Case]:
    """all_reduce_rms_norm on its dtypes and on odd widths."""
    for captured in (False, True):
        for kind in ("bf16", "f16", "f32"):
            for columns in WIDTHS:
                yield Case(FUSED, kind, 5, columns, "sum", -1, captured, kind)
        yield Case(FUSED, "bf16", 3, 768, "sum", -1, captured, "f32")


def operands(case: Case, group_size: int, seed: int) -> list[list[np.ndarray]]:
    """Every rank's inputs: small integers, whose sums and products are exact in every dtype."""
    generator = np.random.default_rng(seed)
    kind = numpy_dtype(case.dtype)
    low, high = (1, 3) if case.reduce_op == "prod" else (-8, 8)
    if case.dtype == "bool":
        low, high = 0, 2
    shape = (case.rows, case.columns)
    found = [[generator.integers(low, high, shape).astype(kind)] for _ in range(group_size)]
    if case.operation == FUSED:
        residual = generator.integers(-16, 16, shape).astype(kind)
        gain = generator.uniform(0.5, 1.5, case.columns).astype(numpy_dtype(case.weight_dtype))
        found = [[x, residual, gain] for (x,) in found]
    return found


class Bench:
    """One case on one rank's GPU: device memory, the plugin in its context, and a stream."""

    def __init__(
        self, driver: Driver, group: Group, label: str, case: Case, stream: Stream
    ) -> None:
        self.driver, self.group, self.case, self.stream = driver, group, case, stream
        self.values, self.groups = case.values(label, group.ranks), {label: group}
        self.host = PluginHost(NAME, Instance(find(NAME), self.values).texts())
        shape = (case.rows, case.columns)
        operands = [TensorDesc(shape, case.dtype)]
        if case.operation == FUSED:
            operands += [operands[0], TensorDesc((case.columns,), case.weight_dtype)]
        self.descs = self.host.shapes(operands)
        self.inputs = [driver.allocate(size_of(each)) for each in operands]
        self.outputs = [driver.allocate(size_of(each)) for each in self.descs]

    def enqueue(self) -> None:
        """As an engine does it."""
        with communicators.use(self.groups):
            self.host.enqueue(self.inputs, self.outputs, self.stream.handle)

    def load(self, seed: int) -> None:
        """Write new inputs, and bytes into the outputs that no result has."""
        own = operands(self.case, self.group.ranks, seed)[self.group.rank]
        wrong = [np.full(size_of(desc), 0x5B, np.uint8) for desc in self.descs]
        self.arrays = [*own, *wrong]  # kept until the copies are done
        for address, array in zip((*self.inputs, *self.outputs), self.arrays, strict=True):
            self.stream.upload(address, array)

    def problem(self, seed: int) -> str:
        """The difference from numpy, once the stream is done; empty where there is none."""
        self.stream.wait(str(self.case))
        arrays = operands(self.case, self.group.ranks, seed)
        wanted = expected(self.values, arrays)[self.group.rank]
        for name, address, desc, want in zip("yz", self.outputs, self.descs, wanted, strict=False):
            found = np.empty(desc.shape, numpy_dtype(desc.dtype))
            self.stream.download(found, address)
            self.stream.wait(str(self.case))
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
        """Free the memory."""
        for address in (*self.inputs, *self.outputs):
            self.driver.free(address)


def expected(values: Mapping[str, Any], arrays: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """The results of IrcCollective on every rank from the operands of all, in numpy."""
    x = [widened(each[0]) for each in arrays]
    kind, ranks = arrays[0][0].dtype, tuple(range(len(arrays)))
    if values["operation"] == FUSED:
        return _fused(values, arrays, x)
    call = CollectiveCall(values["operation"], values["reduce_op"], ranks, values["root"])
    results = [np.zeros(call.result_shape(x[0].shape), x[0].dtype) for _ in ranks]
    for rank in ranks:
        perform(call, rank, x, results)
    return [(each.astype(kind),) for each in results]


def _fused(
    values: Mapping[str, Any], arrays: Sequence[Sequence[Any]], x: list[Any]
) -> list[tuple[Any, ...]]:
    total = np.empty_like(x[0])
    reduce_parts("sum", x, total)
    kind, found = arrays[0][0].dtype, list[tuple[Any, ...]]()
    for _, residual, weight in arrays:
        summed = (widened(total.astype(kind)) + widened(residual)).astype(kind)
        wide = widened(summed)
        scale = np.sqrt(np.mean(wide * wide, axis=-1, keepdims=True) + np.float32(values["eps"]))
        gain = widened(weight) + np.float32(values.get("offset", 0.0))
        found.append(((wide / scale * gain).astype(kind), summed))
    return found


def size_of(desc: TensorDesc) -> int:
    """Bytes of a tensor."""
    return int(np.prod(desc.shape)) * dtype(desc.dtype).numpy.itemsize


def run_case(
    driver: Driver, group: Group, label: str, case: Case, stream: Stream, seed: int
) -> str:
    """What is wrong; empty where nothing is. Raises what a lost rank raises."""
    bench = Bench(driver, group, label, case, stream)
    bench.load(seed)
    bench.enqueue()
    problem = bench.problem(seed)
    if case.captured and not problem:
        graph = stream.capture(bench.enqueue)
        for again in (seed + 1, seed + 2):
            bench.load(again)
            stream.launch(graph)
            problem = problem or bench.problem(again)
        stream.drop(graph)
    bench.close()
    return problem
