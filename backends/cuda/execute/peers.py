"""Memory of the GPUs of one host that the ranks of a group write to (CUDA IPC)."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from irc.backends.cuda.codegen.peer_memory import buffer_size
from irc.backends.cuda.driver import Array, Driver, Stream
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
        self._host, self._ranks, self._driver, self._stream = host, ranks, driver, stream
        self._size, self._opened = buffer_size(len(ranks)), dict[int, int]()
        self._held: list[int] = []  # addresses of own memory
        try:
            self._open()
            self._try()
        except PeerError:
            raise
        except Error:
            self.close()
            raise
        self._stop = driver.pinned(4).view(np.uint32)
        self._stop[0] = 0
        group.stops.append(self._stop)
        words = np.zeros(PEERS // 8, np.uint64)
        words[:2] = self._stop.ctypes.data, group.rank
        words[2 : 2 + len(ranks)] = [self._opened.get(rank, self._held[0]) for rank in ranks]
        self.table = driver.allocate(PEERS)
        self._held.append(self.table)
        self._upload(self.table, words)

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
        offers = self._gathered(json.dumps((place, handle, problem)))
        places, handles, problems = zip(*map(json.loads, offers), strict=True)
        if len(set(places)) > 1:
            problems = ("they are on several hosts, or see different processes",)
        _check(problems)
        for rank, each in zip(self._ranks, handles, strict=True):
            if rank == own or problem:
                continue
            try:
                self._opened[rank] = self._driver.open_shared(bytes.fromhex(each))
            except Error as error:
                problem = f"rank {own} cannot open that of rank {rank}: {error.message}"
        _check(self._gathered(problem))

    def _try(self) -> None:
        """Write a number to every other rank, then make the memory ones, as the kernel expects."""
        count, own = len(self._ranks), self._ranks.index(self._host.rank)
        for number in self._ranks:
            if number != self._host.rank:
                self._upload(self._opened[number] + 4 * own, np.array([own + 1], np.int32))
        self._gathered("written")
        found = np.zeros(count, np.int32)
        self._stream.download(found, self._held[0])
        self._stream.wait("reading what other ranks wrote")
        found[own] = own + 1
        wrong = [str(self._ranks[i]) for i in range(count) if found[i] != i + 1]
        self._upload(self._held[0], np.full(self._size, 0xFF, np.uint8))
        _check(self._gathered(f"numbers of rank {', '.join(wrong)} do not arrive" if wrong else ""))

    def _upload(self, address: int, array: Array) -> None:
        self._stream.upload(address, array)
        self._stream.wait("the memory of a group")

    def _gathered(self, text: str) -> list[str]:
        """The texts of all ranks of the group, in order."""
        data = text.encode()
        return [self._host.broadcast(data, root, self._ranks).decode() for root in self._ranks]

    def close(self) -> None:
        """Release the memory, once no rank runs a kernel that uses it; every rank calls it."""
        for address in self._opened.values():
            self._driver.close_shared(address)
        self._gathered("closed")
        for address in self._held:
            self._driver.free(address)


def _check(problems: Sequence[str]) -> None:
    """Raise the first problem, if there is one."""
    for problem in filter(None, problems):
        raise Error(f"ranks cannot write to each other's memory: {problem}")
