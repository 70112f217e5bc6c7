"""`Results`: small computed tensors, such as scales, which several regions need."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from concurrent.futures import Future
from threading import Lock

from .files import Array

COUNT = 64  # results that are kept
SMALL = 1 << 18  # elements of a result that is worth keeping


class Results:
    """Keeps the last results. A thread that needs one in work waits for the thread that has it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._kept: dict[Hashable, Future[Array]] = {}

    def get(self, key: Hashable, compute: Callable[[], Array]) -> Array:
        """The result of a key, computed at first use."""
        with self._lock:
            found = self._kept.get(key)
            known = found is not None
            if found is None:
                found = self._kept[key] = Future()
            if len(self._kept) > COUNT:
                self._kept.pop(next(iter(self._kept)))
        if known:
            return found.result()
        try:
            found.set_result(compute())
        except BaseException as error:
            found.set_exception(error)
            raise
        return found.result()
