"""A plan in device memory, run step by step, or as a CUDA graph where it repeats."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

from irc.backends.cuda.driver import Driver, Event, Stream
from irc.backends.cuda.execute.feed import Feed
from irc.backends.cuda.execute.launch import Enqueue
from irc.backends.cuda.execute.memory import DeviceArray, Memory, packed_offsets
from irc.backends.cuda.execute.steps import Steps, failure
from irc.backends.cuda.plan import Plan
from irc.errors import Error

GRAPHS = 64  # that one plan keeps: one per conversation that takes turns with others

# a plan, when the run of its graph began (ns of time.time_ns), and microseconds by step
Record: TypeAlias = Callable[[Plan, int, Sequence[float]], None]
_Key: TypeAlias = "tuple[int | Feed | None, ...]"  # addresses, and what follows the steps


class PlanExecution:
    """See Execution. `memory` is shared by the plans of a rank, the arena and all inputs too.

    `weights` are addresses by buffer, of the memory of groups too; `results` the names of the
    function's results, in order. The second run in a row over the same addresses becomes a graph,
    if `graphs`. `stepwise`: wait after every step, so that an error names its kernel. `record`: is
    called after every run of a graph with the microseconds of its steps.
    """

    def __init__(
        self,
        plan: Plan,
        results: Sequence[str],
        driver: Driver,
        stream: Stream,
        memory: Memory,
        steps: Steps,
        weights: Mapping[str, int],
        *,
        graphs: bool = True,
        stepwise: bool = False,
        record: Record | None = None,
    ) -> None:
        self._record = record
        self.plan, self.memory, self._arena = plan, memory, plan.arena
        self._results, self._driver, self._stream = results, driver, stream
        self._steps, self._weights = steps, weights
        self._graphs, self._stepwise = graphs and not stepwise, stepwise
        self._runs: OrderedDict[_Key, _Run] = OrderedDict()
        self._zeros = self._zeroed()

    def _zeroed(self) -> dict[str, int]:
        """The addresses of memory that is zero before the first step, in one allocation."""
        zeros = {n: b.nbytes for n, b in self.plan.buffers.items() if b.place == "zeros"}
        offsets, size = packed_offsets(zeros)
        if not size:
            return {}
        self._zeros_at = self._driver.allocate(size)
        self._driver.zero(self._zeros_at, size, self._stream.handle)
        return {name: self._zeros_at + offset for name, offset in offsets.items()}

    def prepared(
        self,
        values: Mapping[str, DeviceArray],
        results: Mapping[str, DeviceArray],
        feed: Feed | None = None,
    ) -> Callable[[], bool]:
        """A function that enqueues a run; ranks need not meet after it."""
        arena = self.memory.device("arena", self._arena) if self._arena else 0
        key = (arena, *(v.address for v in (*values.values(), *results.values())), feed)
        run = self._runs.get(key)
        if run is None:
            run = self._runs[key] = _Run(self._enqueued(arena, values, results, feed))
            if len(self._runs) > GRAPHS:
                self._forget(next(iter(self._runs)))
        self._runs.move_to_end(key)
        return lambda: self._run(run)

    def _enqueued(
        self,
        arena: int,
        values: Mapping[str, DeviceArray],
        results: Mapping[str, DeviceArray],
        feed: Feed | None,
    ) -> list[Enqueue]:
        """What enqueues the steps, then copies of results that lie elsewhere, then `feed`."""
        places, copied = dict[str, int](), list[tuple[str, DeviceArray]]()
        for name, buffer in zip(self._results, self.plan.results, strict=True):
            if self.plan.buffers[buffer].place == "output" and buffer not in places:
                places[buffer] = results[name].address
            else:
                copied.append((buffer, results[name]))
        arguments = {f"%{name}": value.address for name, value in values.items()}
        others = {**self._weights, **self._zeros, **arguments}
        for name, buffer in self.plan.buffers.items():
            if buffer.place == "arena":
                places[name] = arena + buffer.offset
            elif name not in places:
                if name not in others:
                    raise Error(
                        f"the plan of @{self.plan.function} has the buffer {name} "
                        f"({buffer.place}), which is not an argument; expected {', '.join(values)}"
                    )
                places[name] = others[name]
        enqueues, stream = self._steps.bound(self.plan, places), self._stream
        copies = [(places[b], r) for b, r in copied if places[b] != r.address and r.size]
        for source, target in copies:
            enqueues.append(lambda handle, s=source, t=target: stream.copy(t.address, s, t.size))
        if feed is not None:
            enqueues.append(self._steps.bound_feed(feed, None if copies else self.plan))
        return enqueues

    def _run(self, run: _Run) -> bool:
        if run.graph is not None:
            self._stream.launch(run.graph)
        elif self._graphs and run.count:
            run.graph = self._stream.capture(partial(self._enqueue, run, timed=True))
            self._stream.launch(run.graph)
        else:
            self._enqueue(run)
        run.count += 1
        if self._driver.marks is not None:
            self._driver.marks.after_run()
        if self._record is not None and run.graph is not None:
            began = time.time_ns()
            self._stream.wait("a run whose steps are timed")
            us = [1e3 * a.ms_until(b) for a, b in pairwise(run.events)]
            self._record(self.plan, began, us[: len(self.plan.steps)])
        return False

    def _enqueue(self, run: _Run, timed: bool = False) -> None:
        """Enqueue the steps; `timed`: with events around them, which only a graph can repeat."""
        handle = self._stream.handle
        timed = timed and self._record is not None
        run.events = [self._stream.event(inside=True)] if timed else []
        for i, enqueue in enumerate(run.steps):
            try:
                enqueue(handle)
                run.events += [self._stream.event(inside=True)] if timed else []
                if self._stepwise:
                    self._stream.wait()
            except Error as error:
                if i < len(self.plan.steps):
                    raise failure(self.plan.steps[i], error) from error
                raise

    @property
    def latest(self) -> list[Enqueue]:
        """What enqueues the steps of the plan one by one, as the latest run did."""
        return next(reversed(self._runs.values())).steps[: len(self.plan.steps)]

    def _forget(self, key: _Key) -> None:
        run = self._runs.pop(key)
        if run.graph is not None:
            self._stream.drop(run.graph)

    def free(self) -> None:
        """Drop the graphs; no run follows."""
        for key in list(self._runs):
            self._forget(key)
        if self._zeros:
            self._driver.free(self._zeros_at)
            self._zeros = {}


class _Run:
    """The steps of a plan at fixed addresses: how often they ran, and their graph."""

    def __init__(self, steps: list[Enqueue]) -> None:
        self.steps, self.count = steps, 0
        self.events: list[Event] = []  # before the first step and after each, if they are timed
        self.graph: Any = None
