"""cuBLASLt, whose algorithms are timed once per shape and kept, as the products of a rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from irc.backends.cuda.driver import Driver
from irc.backends.cuda.execute.algorithms import Algorithms
from irc.backends.cuda.execute.cublaslt import CublasLt, machine_name
from irc.backends.cuda.execute.fastest import Fastest
from irc.backends.cuda.execute.launch import Enqueue
from irc.backends.cuda.plan import LibraryCall
from irc.backends.cuda.tuning import file_of_user
from irc.backends.ranks.communicator import Communicator


class TimedProducts:
    """See Products. `host`: the ranks that make the same calls, and use the same algorithms."""

    def __init__(self, driver: Driver, stream: Any, host: Communicator | None) -> None:
        algorithms = Algorithms(file_of_user(), machine_name(driver))
        self._library = CublasLt(driver, algorithms)
        self._choose, self._host = Fastest(self._library, driver, stream), host

    def prepare(self, calls: Sequence[LibraryCall]) -> None:
        self._library.prepare(calls, self._choose)
        if self._host is not None:
            self._library.algorithms.agree(self._host)

    def bind(self, call: LibraryCall, addresses: Sequence[int]) -> Enqueue:
        return self._library.bind(call, addresses)

    def close(self) -> None:
        self._library.close()
