"""One rank of a group of GPUs that communicate through NCCL, and that no lost rank can hang.

NCCL itself does not notice that a peer has died: its kernel spins. So communicators are made
without blocking, everything that is waited for has a deadline, and when that passes, or a peer's
process is seen to have ended, the communicator is aborted, which ends the kernels that spin.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import time
from collections.abc import Sequence
from threading import Lock, Thread
from typing import Any

from irc.backends.communicator import PeerError
from irc.errors import Error

from . import peers
from .calls import IN_PROGRESS, SUCCESS, ZERO_ELSEWHERE, Launch, Library, call_of, find_library
from .driver import Cuda, Driver

# In all a lost rank is to be an error on the others within 10 seconds.
TIMEOUT = 7.0  # seconds that a rank waits for the others before it gives them up
MEETING = 8.0  # seconds that the ranks may take to meet
_ABSENT = ": one does not come, or counts other ranks"
_SPIN = 1e-3  # seconds of asking without a pause, within which a call is taken
_ENDING = 1.5  # seconds that an aborted communicator has to let go of the GPU


def unique_id() -> bytes:
    """A name for a new group; one rank makes it, and hands it to the others."""
    from nccl import core

    return bytes(core.get_unique_id())


def nccl_version() -> str:
    """The version of the NCCL library that is loaded."""
    from nccl import core

    library = core.get_version().libnccl
    return "unknown" if library is None else str(library.version)


class Group:
    """The communicator of one GPU; every rank of the group makes one, at once.

    `rank` is the position among `ranks`, `label` names the group in messages, and `fact` is what
    all ranks must agree on (as the key of an artifact). The ranks have `meeting` seconds to meet.
    The GPU that is current for the thread is the one that is used.

    A rank that dies, stalls or differs becomes a PeerError, from here, from `wait` or from the next
    launch; the group is then ended, and only `close` makes sense.
    """

    def __init__(
        self,
        name: bytes,
        rank: int,
        ranks: int,
        *,
        label: str = "",
        fact: str = "",
        timeout: float = TIMEOUT,
        meeting: float = MEETING,
        library: Library | None = None,
        driver: Driver | None = None,
    ) -> None:
        self.rank, self.ranks, self.label, self.timeout = rank, ranks, label, timeout
        self.peers: list[peers.Peer] = []
        self.driver = driver or Cuda()
        self.failure: str | None = None
        self._library = library or find_library()
        self.ending: Thread | None = None
        self._lock = Lock()
        self._arrays: Any = None
        self._communicator = self._open(name)
        self._settle(f"meeting the {ranks} ranks", meeting, _ABSENT)
        self._introduce(fact, meeting)

    @property
    def communicator(self) -> Any:
        """NCCL's communicator, as nccl4py's bindings take it."""
        return self._communicator

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.ranks}" + (f" in {self.label}" if self.label else "")

    def bind(
        self, operation: str, dtype: str, elements: int, reduce_op: str = "none", root: int = -1
    ) -> Launch:
        """What puts a collective on a stream: launch(source pointer, target pointer, stream).

        `elements` is the size of one rank's operand, everything along dimension 0; `root` a
        position in the group. Ranks other than the root get zeros from reduce and gather.
        """
        function, numbers = call_of(
            self._library, operation, dtype, elements, self.ranks, reduce_op, root
        )
        if not elements:
            return _nothing
        arguments = (*numbers, self._communicator)
        poll = self._library.comm_get_async_error
        communicator = self._communicator

        def launch(source: int, target: int, stream: int) -> None:
            if self.failure is not None:
                raise PeerError(self.failure)
            try:
                function(source, target, *arguments, stream)
                busy = poll(communicator)
            except Exception as error:
                raise self._refused(operation, error) from error
            if busy:
                self._settle(operation, self.timeout)

        if operation not in ZERO_ELSEWHERE or root == self.rank:
            return launch
        from irc.dtypes import numpy_dtype

        grown = self.ranks if operation == "gather" else 1
        nbytes = elements * grown * numpy_dtype(dtype).itemsize
        zero = self.driver.zero

        def launch_and_zero(source: int, target: int, stream: int) -> None:
            launch(source, target, stream)
            zero(target, nbytes, stream)

        return launch_and_zero

    def bind_add_rms_norm(
        self, dtype: str, weight_dtype: str, rows: int, columns: int, eps: float, offset: float
    ) -> Any:
        """What puts total += residual; normed = rms_norm(total) on a stream.

        launch(total, residual, weight, normed, stream), pointers to [rows, columns], weight
        [columns].
        """
        return self.driver.add_rms_norm(dtype, weight_dtype, rows, columns, eps, offset)

    def enqueue(self, kind: str, source: Any, target: Any, stream: int, root: int = 0) -> None:
        """Enqueue a collective, summing where it reduces; arrays are on this rank's GPU.

        `kind` is one of all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce,
        gather and scatter. `source` and `target` are what this rank gives and gets, along the
        first dimension, as anything that speaks DLPack.
        """
        from nccl import core

        if self.failure is not None:
            raise PeerError(self.failure)
        if self._arrays is None:
            self._arrays = core.Communicator(int(self._communicator.handle))
        group, total = self._arrays, core.SUM
        match kind:
            case "all_reduce":
                group.allreduce(source, target, total, stream=stream)
            case "all_gather":
                group.allgather(source, target, stream=stream)
            case "reduce_scatter":
                group.reduce_scatter(source, target, total, stream=stream)
            case "all_to_all":
                group.alltoall(source, target, stream=stream)
            case "broadcast":
                group.broadcast(source, target, root, stream=stream)
            case "reduce":
                group.reduce(source, target, total, root, stream=stream)
            case "gather":
                group.gather(source, target, root, stream=stream)
            case "scatter":
                group.scatter(source, target, root, stream=stream)
            case _:
                raise ValueError(f"no collective called {kind!r}")
        self._settle(kind, self.timeout)

    def wait(self, stream: int, what: str = "the work") -> None:
        """Wait until the stream is done; a PeerError once that takes longer than the timeout."""
        from .watch import wait

        wait(stream, [self], what)

    def check(self) -> None:
        """A PeerError where NCCL has found an error, or the group was ended."""
        if self.failure is None:
            status = self._library.comm_get_async_error(self._communicator)
            if status not in (SUCCESS, IN_PROGRESS):
                self.end(f"NCCL reports: {self._words(status)}")
        if self.failure is not None:
            raise PeerError(self.failure)

    def lost(self) -> list[peers.Peer]:
        """The ranks whose processes are known to have ended."""
        return peers.lost(self.peers)

    def end(self, reason: str) -> str:
        """Abort the communicator, so that nothing spins any more; returns the whole message.

        The first reason stays. The memory comes back once graphs that hold the group are dropped.
        """
        return end_all([self], reason)[0]

    def begin_to_end(self, reason: str) -> None:
        """Start aborting, the first time; `end_all` waits for it."""
        with self._lock:
            if self.failure is not None:
                return
            gone = ", ".join(map(str, self.lost()))
            ended = f"; {gone} has ended" if gone else ""
            self.failure = f"{self}: {reason}{ended}"
            self.ending = Thread(target=self._abort, daemon=True)
            self.ending.start()

    def close(self) -> None:
        """Give up the communicator; every rank calls it, with no graph left that uses it."""
        if self.failure is not None:
            return
        try:
            self._library.comm_finalize(self._communicator)
            self._settle("taking leave", self.timeout)
        except Exception as error:
            if self.failure is None:
                self.end(f"taking leave failed: {_text(error)}")
            return
        self.failure = f"{self}: the group is closed"
        ending = Thread(target=self._library.comm_destroy, args=(self._communicator,), daemon=True)
        ending.start()
        ending.join(self.timeout)

    def _open(self, name: bytes) -> Any:
        library = self._library
        config = library.Config()
        config.blocking = 0
        try:
            return library.comm_init_rank_scalable(
                self.ranks, self.rank, 1, bytearray(name), config.ptr
            )
        except Exception as error:
            raise PeerError(f"{self}: NCCL does not start: {_text(error)}") from error

    def _introduce(self, fact: str, meeting: float) -> None:
        """Tell the others who this is; a PeerError where they are not what they should be."""
        from .watch import wait

        own, driver = peers.Peer.own(self.rank, self.ranks, fact), self.driver
        stream = driver.open_stream()
        memory = driver.allocate(peers.SIZE * (self.ranks + 1))
        driver.write(memory, own.pack(), stream)
        everybody = memory + peers.SIZE
        self.bind("all_gather", "i64", peers.SIZE // 8)(memory, everybody, stream)
        wait(stream, [self], "meeting the other ranks", meeting)
        found = peers.unpack(driver.read(everybody, peers.SIZE * self.ranks, stream))
        driver.free(memory)
        driver.close_stream(stream)
        self.peers = found
        if problem := peers.disagreement(found, own):
            raise PeerError(self.end(problem))

    def _settle(self, what: str, seconds: float, hint: str = "") -> None:
        """Wait until NCCL has taken what it was asked to do."""
        begin, pause = time.monotonic(), 0.0
        while (status := self._library.comm_get_async_error(self._communicator)) == IN_PROGRESS:
            if self.failure is not None:
                raise PeerError(self.failure)
            waited = time.monotonic() - begin
            if waited > seconds:
                raise PeerError(self.end(f"{what} took longer than {seconds:.0f} seconds{hint}"))
            time.sleep(pause)
            pause = 0.0 if waited < _SPIN else min(0.01, pause + 1e-4)
        if status != SUCCESS:
            raise PeerError(self.end(f"{what} failed: {self._words(status)}"))

    def _refused(self, what: str, error: Exception) -> Error:
        return PeerError(self.end(f"{what} failed: {_text(error)}"))

    def _words(self, status: int) -> str:
        """What NCCL says of a status, in one line."""
        library = self._library
        said = library.get_error_string(status)
        more = library.get_last_error(self._communicator)
        parts = [each.decode() if isinstance(each, bytes) else str(each) for each in (said, more)]
        return ": ".join(part.strip().replace("\n", " ") for part in parts if part.strip())

    def _abort(self) -> None:
        try:
            self._library.comm_abort(self._communicator)
        except Exception as error:
            self.failure = f"{self.failure} (and the abort failed: {_text(error)})"


def _nothing(source: int, target: int, stream: int) -> None:
    """What a collective of no elements does."""


def _text(error: BaseException) -> str:
    return error.message if isinstance(error, Error) else str(error).strip() or repr(error)


def end_all(groups: Sequence[Group], reason: str) -> list[str]:
    """Abort several groups at once; their messages."""
    for group in groups:
        group.begin_to_end(reason)
    deadline = time.monotonic() + _ENDING
    for group in groups:
        if group.ending is not None:
            group.ending.join(max(0.0, deadline - time.monotonic()))
    return [group.failure or reason for group in groups]
