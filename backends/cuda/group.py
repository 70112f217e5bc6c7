"""One rank of a group of GPUs that communicate through NCCL; a lost rank does not block the others.

NCCL does not notice that a peer has died: its kernel spins. So communicators do not block, all
waiting has a deadline and includes the health check of the run, and a failure aborts the
communicator, which ends kernels that spin. watch.py waits for streams in the same way.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from threading import Lock, Thread
from typing import Any

from irc.backends.ranks.communicator import Communicator, PeerError
from irc.errors import Error
from irc.ir.dtypes import numpy_dtype

from .calls import IN_PROGRESS, SUCCESS, UINT8, ZERO_ELSEWHERE, Library, call_of, find_library
from .driver import Array, Driver, Launch, LaunchNorm

# A lost rank is an error on the others within 10 seconds.
TIMEOUT = 7.0  # seconds that work with collectives may take
MEETING = 8.0  # seconds until all ranks have joined a group
_SPIN = 1e-3  # seconds of polling without a pause, within which NCCL accepts a call
_CHECK = 0.05  # seconds between health checks
_ABORTING = 1.5  # seconds to wait for an abort


def unique_id(library: Library | None = None) -> bytes:
    """A new NCCL id: one rank of a group makes it, all ranks of the group join with it."""
    return bytes((library or find_library()).get_unique_id())


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
    own = unique_id(library) if host.rank == ranks[0] else b""
    id, position = host.broadcast(own, ranks[0], ranks), ranks.index(host.rank)
    group = Group(id, position, len(ranks), driver, check=host.check, library=library, **options)
    driver.groups.append(group)
    return group


class Group:
    """The NCCL communicator of one GPU, the current one of the thread.

    `rank` is the position among `ranks`, `label` names the group in messages, and the ranks have
    `meeting` seconds to join. `check` raises a PeerError once the run has failed; any thread may
    call it, as `check_run`, and `start_abort`; all else is for one thread.

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
        library: Library | None = None,
    ) -> None:
        self.rank, self.ranks, self.label, self.timeout = rank, ranks, label, timeout
        self.failure: str | None = None
        self.aborting: Thread | None = None
        self.stops: list[Array] = []
        self._driver, self.check_run, self._lock = driver, check, Lock()
        self._library = library or find_library()
        self.communicator = self._open(id)
        self._settle(
            f"joining the {ranks} ranks", meeting, ": a rank is missing, or has another world size"
        )

    @property
    def pointer(self) -> int:
        """The address of NCCL's communicator."""
        return int(self.communicator.handle)

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

        if operation not in ZERO_ELSEWHERE or root == self.rank:
            return launch
        size = elements * numpy_dtype(dtype).itemsize * (self.ranks if operation == "gather" else 1)
        zero = self._driver.zero

        def launch_and_zero(source: int, target: int, stream: int) -> None:
            launch(source, target, stream)
            zero(target, size, stream)

        return launch_and_zero

    def bind_add_rms_norm(
        self, dtype: str, weight_dtype: str, rows: int, columns: int, eps: float, offset: float
    ) -> LaunchNorm:
        """launch(total, residual, weight, normed, stream): total += residual; normed = rms_norm.

        The arguments are addresses of arrays [rows, columns] and of the weight [columns].
        """
        return self._driver.add_rms_norm(dtype, weight_dtype, rows, columns, eps, offset)

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
                for each in self.stops:
                    each[...] = 1
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
        while (status := self._library.comm_get_async_error(self.communicator)) == IN_PROGRESS:
            if self.failure is not None:
                raise PeerError(self.failure)
            waited = time.monotonic() - begin
            if waited > seconds:
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
        parts = [each.decode() if isinstance(each, bytes) else str(each) for each in texts]
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
    return groups[0].failure or reason


def _text(error: BaseException) -> str:
    return error.message if isinstance(error, Error) else str(error).strip() or repr(error)
