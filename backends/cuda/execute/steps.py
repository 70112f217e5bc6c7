"""The steps of a plan as functions that enqueue them, for buffers at known addresses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from irc.backends.cuda.driver import Driver, Stream
from irc.backends.cuda.execute.cublaslt import CublasLt
from irc.backends.cuda.execute.feed import Feed
from irc.backends.cuda.execute.launch import Enqueue, Kernels
from irc.backends.cuda.group import Group
from irc.backends.cuda.plan import Argument, Launch, LibraryCall, Plan, Step
from irc.backends.cuda.watch import Marks
from irc.errors import Error

# axes of the mesh -> the group of this rank along them
GroupOf = Callable[[tuple[str, ...]], Group]
LITTLE = 64 << 20  # bytes of an arena
MARKED = 4  # steps from one mark to the next


class Steps:
    """Binds the steps of plans to addresses, on one stream.

    `early`: let kernels start before the ones in front of them have ended, where they may.
    `products` is asked for the library at the first call of it.
    """

    def __init__(
        self,
        driver: Driver,
        stream: Stream,
        kernels: Kernels,
        group: GroupOf,
        products: Callable[[], CublasLt],
        early: bool,
    ) -> None:
        self._driver, self._stream, self._kernels = driver, stream, kernels
        self._group, self._products, self._early = group, products, early

    def bound(self, plan: Plan, places: Mapping[str, int]) -> list[Enqueue]:
        """A function per step of a plan whose buffers lie at `places`.

        In plans that may take seconds marks follow some steps, see watch.py. A plan of little
        memory reads weights and caches about once: it takes less than that.
        """
        marks = self._driver.marks if plan.arena > LITTLE else None
        enqueues: list[Enqueue] = []
        for i, step in enumerate(plan.steps):
            try:
                enqueue = self._bound(plan, i, step, places, marks is not None)
            except Error as error:
                raise failure(step, error) from error
            is_marked = marks is not None and i % MARKED == MARKED - 1
            enqueues.append(_with_mark(enqueue, marks) if marks and is_marked else enqueue)
        return enqueues

    def bound_feed(self, feed: Feed, plan: Plan | None) -> Enqueue:
        """What enqueues a feed, which may start early right behind the last kernel of a plan."""
        last = plan.steps[-1] if plan is not None and plan.steps else None
        return feed.bound(self._kernels, self._early and isinstance(last, Launch))

    def _bound(
        self, plan: Plan, i: int, step: Step, places: Mapping[str, int], marked: bool
    ) -> Enqueue:
        values = [places[a.buffer] if isinstance(a, Argument) else a for a in step.arguments]
        if isinstance(step, LibraryCall):
            return self._call(step, [int(value) for value in values])
        follows = i > 0 and isinstance(plan.steps[i - 1], Launch)
        follows = follows and not (marked and i % MARKED == 0)
        early = self._early and step.programmatic and follows
        return self._kernels.bind(step, plan.kernels[step.kernel], values, early)

    def _call(self, call: LibraryCall, addresses: Sequence[int]) -> Enqueue:
        if call.library == "cublaslt":
            return self._products().bind(call, addresses)
        if call.library == "nccl":
            return self._collective(call, *addresses)
        if call.library == "memory":
            return self._copy(call, addresses)
        raise Error(f"the library {call.library} is not supported")

    def _collective(self, call: LibraryCall, source: int, target: int) -> Enqueue:
        words = call.settings
        group = self._group(call.axes)
        launch = group.bind(
            call.function,
            str(words["dtype"]),
            int(str(words["elements"])),
            str(words.get("op", "none")),
            int(str(words.get("root", -1))),
        )
        return lambda stream: launch(source, target, stream)

    def _copy(self, call: LibraryCall, addresses: Sequence[int]) -> Enqueue:
        (source, target), size = addresses, int(str(call.settings["nbytes"]))
        return lambda handle: self._stream.copy(target, source, size)


def _with_mark(enqueue: Enqueue, marks: Marks) -> Enqueue:
    def run(stream: int) -> None:
        enqueue(stream)
        marks.enqueue()

    return run


def failure(step: Step, error: Error) -> Error:
    """An Error that names the kernel, its operations and the source line of a step."""
    what = f"the kernel {step.kernel}" if isinstance(step, Launch) else f"{step.library}'s "
    what += "" if isinstance(step, Launch) else step.function
    operations = ", ".join(step.operations)
    where = f"{step.source}: " if step.source else ""
    return type(error)(f"{where}{what} ({operations}) failed: {error.message}")
