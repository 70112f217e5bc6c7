"""Regions that cover a tensor, tasks that run ahead, and results that threads share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import numpy as np
import pytest

from irc.quantization.formats import tiles
from irc.weights.checkpoint import streams
from irc.weights.checkpoint.read_cache import ReadCache
from irc.weights.checkpoint.streams import ahead, regions
from tests.fresh import fresh


def test_regions_cover_a_tensor_in_order() -> None:
    rng = fresh()
    for _ in range(300):
        shape = tuple(int(n) for n in rng.integers(1, 9, rng.integers(0, 4)))
        limit, array = int(rng.choice([1, 2, 3, 7, 20, 1000])), np.arange(prod(shape))
        for even in (False, True):
            parts = [
                array.reshape(shape)[tuple(slice(*pair) for pair in ranges)].reshape(-1)
                for ranges in regions(shape, limit, even)
            ]
            assert (np.concatenate(parts) == array).all()
            if even:
                assert not any(part.size % 2 for part in parts[:-1])
            else:
                assert max(part.size for part in parts) <= limit


def test_tiles_hold_whole_blocks_or_lie_in_one() -> None:
    rng = fresh(1)
    for _ in range(300):
        grid = tuple(int(n) for n in rng.integers(1, 9, rng.integers(0, 4)))
        sizes = rng.integers(1, 5, len(grid)).tolist()
        seen = np.zeros([count * size for count, size in zip(grid, sizes, strict=True)], int)
        for place, blocks in tiles(seen.shape, sizes, int(rng.choice([1, 2, 3, 7, 20, 1000]))):
            seen[place] += 1
            for part, block, size in zip(place, blocks, sizes, strict=True):
                first, end = block.start * size, block.stop * size
                inside = first <= part.start and part.stop <= end
                assert inside and ((part.start, part.stop) == (first, end) or end - first == size)
        assert (seen == 1).all()


@pytest.fixture(params=[1, 2, 5])
def cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(streams, "_cores", lambda: request.param)
    return request.param


def test_results_come_in_order_and_few_tasks_run_ahead(cores: int) -> None:
    started: list[int] = []

    def task(number: int) -> int:
        started.append(number)
        return number

    for count in (0, 1, 2, 40):
        started.clear()
        found: list[int] = []
        for each in ahead(partial(task, number) for number in range(count)):
            assert len(started) <= len(found) + cores + 1
            found.append(each)
        assert found == list(range(count))


def test_an_error_comes_at_its_place(cores: int) -> None:
    def fail() -> int:
        raise ValueError("here")

    tasks: list[Callable[[], int]] = [lambda: 0, lambda: 1, fail, lambda: 3]
    found: list[int] = []
    with pytest.raises(ValueError, match="here"):
        found += [found.append(each) or each for each in ahead(tasks)]
    assert found == [0, 1]


def test_no_task_starts_after_a_stream_is_closed(cores: int) -> None:
    started: list[int] = []
    stream: Any = ahead(partial(started.append, number) for number in range(1000))
    next(stream)
    stream.close()
    count = len(started)
    assert count <= cores + 2
    assert len(started) == count and threading.active_count() < 50


def test_a_result_is_computed_once_by_all_threads() -> None:
    results, count = ReadCache(1 << 20), [0]
    waits = threading.Barrier(4)

    def compute() -> tuple[np.ndarray, ...]:
        count[0] += 1
        return (np.ones(3),)

    def ask() -> None:
        waits.wait()
        assert results.get("key", compute)[0].sum() == 3

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert count == [1]


def test_old_results_are_forgotten_and_errors_are_not_kept() -> None:
    results, computed = ReadCache(100), list[int]()

    def compute(key: int) -> tuple[np.ndarray, ...]:
        computed.append(key)
        return (np.zeros(40, np.uint8),)

    for key in (0, 1, 0, 2, 0, 1):
        results.get(key, partial(compute, key))
    assert computed == [0, 1, 2, 1]
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            results.get("bad", lambda: (np.zeros(1 // 0),))
    results.clear()
    results.get(0, partial(compute, 0))
    assert computed[-1] == 0 and len(computed) == 5
