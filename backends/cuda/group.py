"""One rank of a group of GPUs that communicate through NCCL; a lost rank does not block the others.

NCCL does not notice that a peer has died: its kernel spins. So communicators do not block, all
waiting includes the health check of the run and ends once no rank has made progress for some
seconds, and a failure aborts the communicator, which ends kernels that spin. watch.py waits for
streams in the same way.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from threading import Lock, Thread
from typing import Any, TypeAlias

from irc.backends.ranks.communicator import Communicator, PeerError
from irc.errors import Error
from irc.ir.dtypes import DTYPES, numpy_dtype
from irc.ir.dtypes import dtype as dtype_called
from irc.ops.collective_names import REDUCING, ROOTED

from .driver import Array, Driver, Launch
from .runtime import unavailable

Library: TypeAlias = Any  # the module nccl.bindings.nccl, or a test's double of it

SUCCESS, IN_PROGRESS = 0, 7  # ncclResult_t
UINT8 = 1  # ncclDataType_t
_DTYPES = {dtype.name: dtype.nccl for dtype in DTYPES.values() if dtype.nccl is not None}
_REDUCE = {"sum": 0, "prod": 1, "max": 2, "min": 3}
# NCCL has no bool. On bytes that are 0 or 1, max means `or` and min means `and`.
_REDUCE_BOOL = {"sum": 2, "max": 2, "prod": 3, "min": 3}

# Operations that give ranks other than the root zeros, where NCCL writes nothing.
ZERO_ELSEWHERE = ("reduce", "gather")

# A lost rank is an error on the others within 10 seconds.
TIMEOUT = 7.0  # seconds in which some rank must make progress
MEETING = 8.0  # seconds until all ranks have joined a group
_SPIN = 1e-3  # seconds of polling without a pause, within which NCCL accepts a call
_CHECK = 0.05  # seconds between health checks
_LARGE = 1 << 20  # elements of a collective that a mark follows
_GAP = 1.0  # seconds without a look
_ABORTING = 1.5  # seconds to wait for an abort


def nccl_version() -> str:
    """The version of the NCCL library that is loaded, as in 2.28.9."""
    number = int(find_library().get_version())
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def open_group(
    host: Communicator,
    ranks: Sequence[int],
    driver: Driver,
    *,
    library: Library | None = None,
    **options: Any,
) -> Group:
    """The group of these ranks of a run; each of them calls this at the same time.

    The NCCL id travels by `host.broadcast`, and `host.check` is the health check of the group.
    Streams of the driver wait for its collectives. `options` are those of Group.
    """
    own = (library or find_library()).get_unique_id() if host.rank == ranks[0] else b""
    id, position = host.broadcast(bytes(own), ranks[0], ranks), ranks.index(host.rank)
    options |= {"check": host.check, "progress": host.progress, "library": library}
    group = Group(id, position, len(ranks), driver, **options)
    driver.groups.append(group)
    return group


class Deadline:
    """The end of a wait: so many seconds after `progress` last changed.

    Seconds in which this thread did not run do not count.
    """

    def __init__(self, seconds: float, progress: Callable[[], object]) -> None:
        self._seconds, self._progress = seconds, progress
        self._latest, self._looked = progress(), time.monotonic()
        self._end = self._looked + seconds

    def is_over(self) -> bool:
        """Whether the time is up; call it several times a second."""
        now, latest = time.monotonic(), self._progress()
        gap, self._looked = now - self._looked, now
        if latest != self._latest:
            self._latest, self._end = latest, now + self._seconds
        elif gap > _GAP:
            self._end += gap
        return now > self._end


class Group:
    """The NCCL communicator of one GPU, the current one of the thread.

    `rank` is the position among `ranks`, `label` names the group in messages, and the ranks have
    `meeting` seconds to join. `check` raises a PeerError once the run has failed, and what
    `progress` returns changes while some rank gets on; any thread may call both, and
    `start_abort`; all else is for one thread.

    A failure becomes a PeerError from here or from watch.py; after it, only `close` may be called.
    `stops`: memory that is not 0 from then on, for kernels that wait for other ranks.
    """

    def __init__(
        self,
        id: bytes,
        rank: int,
        ranks: int,
        driver: Driver,
        *,
        label: str = "",
        timeout: float = TIMEOUT,
        meeting: float = MEETING,
        check: Callable[[], None] = lambda: None,
        progress: Callable[[], object] = lambda: None,
        library: Library | None = None,
    ) -> None:
        self.rank, self.ranks, self.label, self.timeout = rank, ranks, label, timeout
        self.failure: str | None = None
        self.aborting: Thread | None = None
        self.stops: list[Array] = []
        self.driver, self._lock = driver, Lock()
        self.check_run, self.progress = check, progress
        self._library = library or find_library()
        self.communicator = self._open(id)
        try:
            hint = ": a rank is missing, or has another world size"
            self._settle(f"joining the {ranks} ranks", meeting, hint)
        except BaseException as error:
            abort([self], _text(error))
            raise

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.ranks}" + (f" in {self.label}" if self.label else "")

    def bind(
        self, operation: str, dtype: str, elements: int, reduce_op: str = "none", root: int = -1
    ) -> Launch:
        """A function that enqueues a collective: launch(source address, target address, stream).

        `elements` is the size of one rank's operand; the collective is along dimension 0; `root` is
        a position in the group. Ranks other than the root get zeros from reduce and gather.
        """
        function, numbers = call_of(
            self._library, operation, dtype, elements, self.ranks, reduce_op, root
        )
        if not elements:
            return lambda source, target, stream: None
        communicator, poll = self.communicator, self._library.comm_get_async_error
        arguments = (*numbers, communicator)

        def launch(source: int, target: int, stream: int) -> None:
            if self.failure is not None:
                raise PeerError(self.failure)
            try:
                function(source, target, *arguments, stream)
                busy = poll(communicator)
            except Exception as error:
                raise self._failed(operation, error) from error
            if busy:
                self._settle(operation, self.timeout)
            if elements >= _LARGE and self.driver.marks is not None:
                self.driver.marks.enqueue()

        if operation not in ZERO_ELSEWHERE or root == self.rank:
            return launch
        size = elements * numpy_dtype(dtype).itemsize * (self.ranks if operation == "gather" else 1)
        zero = self.driver.zero

        def launch_and_zero(source: int, target: int, stream: int) -> None:
            launch(source, target, stream)
            zero(target, size, stream)

        return launch_and_zero

    def send(self, address: int, size: int, to: int, stream: int) -> None:
        """Enqueue sending bytes to a rank of the group."""
        self._move(self._library.send, address, size, to, stream)

    def receive(self, address: int, size: int, source: int, stream: int) -> None:
        """Enqueue receiving bytes from a rank of the group."""
        self._move(self._library.recv, address, size, source, stream)

    def _move(self, function: Any, address: int, size: int, other: int, stream: int) -> None:
        self.check()
        if not size:
            return
        what = f"sending to or receiving from rank {other}"
        try:
            function(address, size, UINT8, other, self.communicator, stream)
        except Exception as error:
            raise self._failed(what, error) from error
        self._settle(what, self.timeout)

    def check(self) -> None:
        """Health check: a PeerError where NCCL or the run has failed, or the group was aborted."""
        if self.failure is None:
            status = self._library.comm_get_async_error(self.communicator)
            if status not in (SUCCESS, IN_PROGRESS):
                abort([self], f"NCCL reports: {self._message(status)}")
        if self.failure is not None:
            raise PeerError(self.failure)
        self.check_run()

    def start_abort(self, reason: str) -> None:
        """Start aborting the communicator in a thread, unless it has failed already."""
        with self._lock:
            if self.failure is None:
                self.failure = f"{self}: {reason}"
                for stop in self.stops:
                    stop[...] = 1
                self.aborting = Thread(target=self._abort, daemon=True)
                self.aborting.start()

    def close(self) -> None:
        """Release the communicator; every rank calls it, once no graph uses the group."""
        if self.failure is not None:
            return
        try:
            self._library.comm_finalize(self.communicator)
            self._settle("closing", self.timeout)
        except Exception as error:
            abort([self], f"closing failed: {_text(error)}")
            return
        self.failure = f"{self}: the group is closed"
        destroying = Thread(
            target=self._library.comm_destroy, args=(self.communicator,), daemon=True
        )
        destroying.start()
        destroying.join(self.timeout)

    def _open(self, id: bytes) -> Any:
        library = self._library
        config = library.Config()
        config.blocking = 0
        try:
            return library.comm_init_rank_scalable(
                self.ranks, self.rank, 1, bytearray(id), config.ptr
            )
        except Exception as error:
            raise PeerError(f"{self}: NCCL does not start: {_text(error)}") from error

    def _settle(self, what: str, seconds: float, hint: str = "") -> None:
        """Wait until NCCL has accepted what it was asked to do."""
        begin, pause, checked = time.monotonic(), 0.0, 0.0
        deadline = Deadline(seconds, self.progress)
        while (status := self._library.comm_get_async_error(self.communicator)) == IN_PROGRESS:
            if self.failure is not None:
                raise PeerError(self.failure)
            waited = time.monotonic() - begin
            if deadline.is_over():
                reason = f"{what} took longer than {seconds:.0f} seconds{hint}"
                raise PeerError(abort([self], reason))
            if waited > checked + _CHECK:
                checked = waited
                try:
                    self.check_run()
                except PeerError as error:
                    abort([self], error.message)
                    raise
            time.sleep(pause)
            pause = 0.0 if waited < _SPIN else min(0.01, pause + 1e-4)
        if status != SUCCESS:
            raise PeerError(abort([self], f"{what} failed: {self._message(status)}"))

    def _failed(self, what: str, error: Exception) -> PeerError:
        return PeerError(abort([self], f"{what} failed: {_text(error)}"))

    def _message(self, status: int) -> str:
        """NCCL's text for a status, in one line."""
        library = self._library
        texts = library.get_error_string(status), library.get_last_error(self.communicator)
        parts = [text.decode() if isinstance(text, bytes) else str(text) for text in texts]
        return ": ".join(part.strip().replace("\n", " ") for part in parts if part.strip())

    def _abort(self) -> None:
        try:
            self._library.comm_abort(self.communicator)
        except Exception as error:
            self.failure = f"{self.failure} (and the abort failed: {_text(error)})"


def abort(groups: Iterable[Group], reason: str) -> str:
    """Abort several groups at once, so that no kernel spins any more; the message of the first.

    The first reason is kept. NCCL's memory is freed once graphs that use the groups are destroyed.
    """
    groups = list(groups)
    for group in groups:
        group.start_abort(reason)
    deadline = time.monotonic() + _ABORTING
    for group in groups:
        if group.aborting is not None:
            group.aborting.join(max(0.0, deadline - time.monotonic()))
    return next((group.failure for group in groups if group.failure), reason)


def _text(error: BaseException) -> str:
    return error.message if isinstance(error, Error) else str(error).strip() or repr(error)


def find_library() -> Library:
    """The bindings of nccl4py; an Error names the extra to install where NCCL is not available."""
    try:
        from nccl.bindings import nccl

        nccl.get_version()
    except (ImportError, RuntimeError, OSError) as error:
        raise unavailable("NCCL", error) from error
    return nccl


def call_of(
    library: Library,
    operation: str,
    dtype: str,
    elements: int,
    ranks: int,
    reduce_op: str = "none",
    root: int = -1,
) -> tuple[Any, tuple[int, ...]]:
    """(function, numbers), for function(source, target, *numbers, communicator, stream).

    `elements` is the size of one rank's operand. A dtype that NCCL lacks is sent as bytes, unless
    the operation reduces.
    """
    shard = elements // ranks
    calls = {
        "all_reduce": ("all_reduce", elements),
        "reduce_scatter": ("reduce_scatter", shard),
        "reduce": ("reduce", elements),
        "all_gather": ("all_gather", elements),
        "gather": ("gather", elements),
        "broadcast": ("broadcast", elements),
        "all_to_all": ("allto_all", shard),
        "scatter": ("scatter", shard),
    }
    if operation not in calls:
        raise Error(f"NCCL has no collective called {operation!r}")
    function, count = calls[operation]
    if operation in REDUCING:
        numbers = (count, *_reduced(dtype, reduce_op))
    elif dtype in _DTYPES:
        numbers = (count, _DTYPES[dtype])
    else:
        numbers = (count * dtype_called(dtype).numpy.itemsize, UINT8)
    return getattr(library, function), (*numbers, root) if operation in ROOTED else numbers


def _reduced(dtype: str, reduce_op: str) -> tuple[int, int]:
    if reduce_op not in _REDUCE:
        raise Error(f"expected the reduction sum, max, min or prod, found {reduce_op!r}")
    if dtype == "bool":
        return UINT8, _REDUCE_BOOL[reduce_op]
    if dtype not in _DTYPES:
        raise Error(f"NCCL cannot reduce {dtype}; cast it first, or gather it")
    return _DTYPES[dtype], _REDUCE[reduce_op]
