"""`ReadCache`: arrays that several regions need, such as scales, each computed once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from concurrent.futures import Future
from threading import Lock

from .files import Array


class ReadCache:
    """Keeps the last `limit` bytes of results. A thread that needs one in work waits for it."""

    def __init__(self, limit: int) -> None:
        self._limit, self._nbytes = limit, 0
        self._lock = Lock()
        self._kept: dict[Hashable, Future[tuple[Array, ...]]] = {}

    def get(self, key: Hashable, compute: Callable[[], tuple[Array, ...]]) -> tuple[Array, ...]:
        """The result of a key, computed at first use."""
        with self._lock:
            result = self._kept.pop(key, None)
            is_kept = result is not None
            self._kept[key] = result = result or Future()
        if is_kept:
            return result.result()
        try:
            result.set_result(compute())
        except BaseException as error:
            result.set_exception(error)
            self._drop(key)
            raise
        self._keep(key, result)
        return result.result()

    def clear(self) -> None:
        """Forget all results."""
        with self._lock:
            self._kept.clear()
            self._nbytes = 0

    def _drop(self, key: Hashable) -> None:
        with self._lock:
            self._kept.pop(key, None)

    def _keep(self, key: Hashable, result: Future[tuple[Array, ...]]) -> None:
        """Count a result, and forget the oldest ones beyond the limit."""
        with self._lock:
            if self._kept.get(key) is not result:
                return
            self._nbytes += _nbytes(result)
            for old in [old for old in self._kept if old != key]:
                if self._nbytes <= self._limit:
                    break
                if self._kept[old].done():
                    self._nbytes -= _nbytes(self._kept.pop(old))


def _nbytes(result: Future[tuple[Array, ...]]) -> int:
    return sum(array.nbytes for array in result.result())
