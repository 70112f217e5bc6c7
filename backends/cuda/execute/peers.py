"""Memory of the GPUs of one host that the ranks of a group write to (CUDA IPC).

Once the run has failed, `Group.stops` lets kernels that wait for other ranks go on, with whatever
lies in the memory of the group: all that the steps compute from then on, caches too, is wrong.
Nobody reads it, since every wait for the stream raises a PeerError, and the program only closes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress

import numpy as np

from irc.backends.cuda.codegen.peer_memory import buffer_size
from irc.backends.cuda.driver import Array, Driver, Stream
from irc.backends.cuda.execute.gpu import gathered
from irc.backends.cuda.group import Group
from irc.backends.cuda.plan.core import PEERS
from irc.backends.ranks.communicator import Communicator, PeerError
from irc.backends.ranks.watcher import own_process
from irc.errors import Error


class Peers:
    """What one rank knows of the memory of its group.

    All ranks of the group make it at once. An Error, the same on all of them, says why they cannot
    write to each other's memory. `table` is the address of `Peers` of peer_memory.cuh. A failure of
    the group ends kernels that wait for other ranks.
    """

    def __init__(
        self, host: Communicator, ranks: Sequence[int], group: Group, driver: Driver, stream: Stream
    ) -> None:
        self._host, self._ranks, self._group = host, ranks, group
        self._driver, self._stream = driver, stream
        self._size, self._opened = buffer_size(len(ranks)), dict[int, int]()
        self._held: list[int] = []  # addresses of own memory
        try:
            self._open()
            for work in (self._write, self._check, self._make_table):
                self._agree(work)
        except Error:
            with suppress(PeerError):  # it is the one that is raised
                self.close()
            raise

    def _agree(self, work: Callable[[], None]) -> None:
        """Do work of all ranks; an Error, the same on all of them, where it fails on one."""
        problem = ""
        try:
            work()
        except PeerError:
            raise
        except Error as error:
            problem = error.message
        _check(gathered(self._host, problem, self._ranks))

    def _open(self) -> None:
        """Open the memory of all other ranks."""
        process, own = own_process(), self._host.rank
        place = f"{process.host} {process.kernel}"
        handle, problem = "", ""
        try:
            self._held.append(self._driver.allocate(self._size))
            handle = self._driver.share(self._held[0]).hex()
        except Error as error:
            problem = error.message
        offers = gathered(self._host, json.dumps((place, handle, problem)), self._ranks)
        places, handles, problems = zip(*map(json.loads, offers), strict=True)
        if len(set(places)) > 1:
            problems = ("they are on several hosts, or see different processes",)
        _check(problems)

        def open_all() -> None:
            for rank, each in zip(self._ranks, handles, strict=True):
                if rank != own:
                    self._open_one(rank, bytes.fromhex(each))

        self._agree(open_all)

    def _open_one(self, rank: int, handle: bytes) -> None:
        try:
            self._opened[rank] = self._driver.open_shared(handle)
        except Error as error:
            message = f"rank {self._host.rank} cannot open that of rank {rank}: {error.message}"
            raise Error(message) from error

    def _write(self) -> None:
        """Write a number to every other rank."""
        own = self._group.rank
        for address in self._opened.values():
            self._upload(address + 4 * own, np.array([own + 1], np.int32))

    def _check(self) -> None:
        """Compare what the others wrote, then make the memory ones, as the kernel expects."""
        numbers = np.zeros(len(self._ranks), np.int32)
        self._stream.download(numbers, self._held[0])
        self._stream.wait("reading what other ranks wrote")
        numbers[self._group.rank] = self._group.rank + 1
        wrong = [str(self._ranks[i]) for i, number in enumerate(numbers) if number != i + 1]
        if wrong:
            raise Error(f"numbers of rank {', '.join(wrong)} do not arrive")
        self._upload(self._held[0], np.full(self._size, 0xFF, np.uint8))

    def _make_table(self) -> None:
        stop = self._driver.pinned(4).view(np.uint32)
        stop[0] = 0
        self._group.stops.append(stop)
        words = np.zeros(PEERS // 8, np.uint64)
        words[:2] = stop.ctypes.data, self._group.rank
        memory = [self._opened.get(rank, self._held[0]) for rank in self._ranks]
        words[2 : 2 + len(memory)] = memory
        self.table = self._driver.allocate(PEERS)
        self._held.append(self.table)
        self._upload(self.table, words)

    def _upload(self, address: int, array: Array) -> None:
        self._stream.upload(address, array)
        self._stream.wait("the memory of a group")

    def close(self) -> None:
        """Release the memory, once no rank runs a kernel that uses it; every rank calls it.

        Where the group has failed, it does not wait for the other ranks.
        """
        with ExitStack() as memory:
            for address in self._held:
                memory.callback(self._driver.free, address)
            for address in self._opened.values():
                self._driver.close_shared(address)
            if self._group.failure is None:
                gathered(self._host, "closed", self._ranks)


def _check(problems: Sequence[str]) -> None:
    """Raise the first problem, if there is one."""
    for problem in filter(None, problems):
        raise Error(f"ranks cannot write to each other's memory: {problem}")
