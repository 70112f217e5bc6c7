"""benchmarks/all_to_all.py with GPUs in numpy: rank programs whose collectives are NCCL's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irc
from benchmarks import all_to_all
from benchmarks.all_to_all import NcclCommunicator, compare
from benchmarks.key_tables import looked_up
from irc.backends.ranks.communicator import Communicator
from irc.backends.ranks.threads import ThreadWorld
from tests.fresh import fresh
from tests.tensorrt.fake_gpu import SOON, FakeDriver
from tests.tensorrt.fake_nccl import FakeNccl


@pytest.mark.parametrize("gpus", [2, 3])
def test_the_programs_of_all_schemes_find_their_rows(gpus: int, tmp_path: Path) -> None:
    table, counts, keys = all_to_all.made(12000, fresh(80))
    for number, options in enumerate(all_to_all.SCHEMES.values()):
        options = options % (9600 // gpus**2) if "%d" in options else options
        module = all_to_all.module(table, counts, gpus, options, tmp_path)
        irc.compile(module, tmp_path / f"{number}")
    wanted = looked_up(table, keys)
    assert wanted.any(-1).any() and not wanted.any(-1).all()
    np.savez(tmp_path / "asked.npz", keys=keys, wanted=wanted)
    nccl = FakeNccl()

    def one(host: Communicator) -> list[list[Any]]:
        driver = FakeDriver(host.rank)
        return compare(NcclCommunicator(host, driver, library=nccl), tmp_path)

    for rows in ThreadWorld(gpus, timeout=SOON).run(one):
        assert [row[0] for row in rows] == ["equal"] * len(all_to_all.SCHEMES)
        kd, *_, hot = (row[1] for row in rows)
        assert kd < hot, "a count of overflow"


def test_different_rows_are_reported() -> None:
    rows = np.zeros((3, 8), np.float32)
    assert all_to_all.same_bits(rows, -rows) == "equal"
    rows[1, 7] = 1
    assert all_to_all.same_bits(rows, np.zeros_like(rows)) == "WRONG: 1 rows differ"
